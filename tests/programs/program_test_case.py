"""Runs unmodified programs through tools/softverbs: one process, or a server and a client.

Each test file is called with LAUNCHER LIBRARY_DIRECTORY before unittest's own arguments.
"""

import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import unittest

LAUNCHER, LIBRARY = (os.path.abspath(path) for path in sys.argv[1:3])
BUILD = os.path.normpath(os.path.join(LIBRARY, "../../.."))
NAMESPACE = f"programs-{os.getpid()}"
ALL_REQUIRED = os.environ.get("PROGRAMS_REQUIRED") == "1"
SKIPPED = 77  # Meson's exit status for a skipped test
TIMEOUT_S = 60  # on an idle machine the programs take less than a second
ROCE = ("-x", "3")  # RoCE v2 with an IPv4 address, as perftest calls it


class Finished:
    """A program that has ended: its exit status, its output, and the counters of its devices."""

    def __init__(self, arguments, status, output, stats_file):
        self.arguments, self.status, self.output = arguments, status, output
        self.stats = None
        if os.path.exists(stats_file):
            with open(stats_file, encoding="utf-8") as file:
                self.stats = json.load(file)

    def __str__(self):
        return f"{' '.join(self.arguments)}: exit status {self.status}\n{self.output}"


def free_port():
    """A port outside the ephemeral range, from which the kernel could give it to another program before it is used."""
    while True:
        port = random.randrange(10000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue


def is_listening(port):
    """Reads /proc instead of connecting, because each program serves only one client."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as lines:
                if any(re.match(rf"\s*\d+: \w+:{port:04X} \w+:\w+ 0A", line) for line in lines):
                    return True
        except FileNotFoundError:
            continue
    return False


class ProgramTest(unittest.TestCase):
    options = ()  # of the launcher
    timeout_s = TIMEOUT_S

    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)
        self.started = 0

    def miss(self, reason):
        """What the test needs is not installed."""
        if ALL_REQUIRED:
            self.fail(reason)
        self.skipTest(reason)

    def start(self, arguments, settings, stdin=subprocess.DEVNULL):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SOFTVERBS_")}
        self.started += 1
        base = os.path.join(self.directory.name, str(self.started))
        environment = {
            **kept,
            "SOFTVERBS_NAMESPACE": NAMESPACE,
            "SOFTVERBS_BUILD_DIR": BUILD,
            "SOFTVERBS_LOCK_LIMIT": "none",
            "SOFTVERBS_STATS": base + ".json",
            **settings,
        }
        with open(base + ".out", "w", encoding="utf-8") as output:
            child = subprocess.Popen(
                [LAUNCHER, *self.options, "--", *arguments],
                env=environment,
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.directory.name,
            )
        self.addCleanup(child.wait)
        self.addCleanup(child.kill)
        return child, base

    def finish(self, arguments, child, base):
        try:
            status = child.wait(self.timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            status = f"none after {self.timeout_s} s"
        with open(base + ".out", encoding="utf-8", errors="replace") as output:
            return Finished(arguments, status, output.read(), base + ".json")

    def run_alone(self, *arguments, **settings):
        return self.finish(arguments, *self.start(arguments, settings))

    def run_pair(self, *arguments, **settings):
        """Runs the program as a server and as its client; both must succeed. Returns (server, client)."""
        server, client = self.run_both(*arguments, **settings)
        self.assertEqual((server.status, client.status), (0, 0), f"{server}\n{client}")
        return server, client

    def run_both(self, *arguments, **settings):
        port = free_port()
        arguments = [*arguments, "-p", str(port)]
        server = self.start(arguments, settings)
        deadline = time.monotonic() + TIMEOUT_S
        while not is_listening(port) and server[0].poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        to_server = [*arguments, "localhost"]
        client = self.start(to_server, settings)
        finished = self.finish(to_server, *client)
        if finished.status != 0 and server[0].poll() is None:
            try:
                server[0].wait(10)  # it may still print its error
            except subprocess.TimeoutExpired:
                server[0].kill()
        return self.finish(arguments, *server), finished


def main():
    """Exits with SKIPPED when each test was skipped."""
    result = unittest.main(argv=[sys.argv[0], *sys.argv[3:]], exit=False).result
    if not result.wasSuccessful():
        sys.exit(1)
    sys.exit(SKIPPED if 0 < result.testsRun == len(result.skipped) else 0)
