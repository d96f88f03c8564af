#!/usr/bin/env python3
#: test stall priority=5 timeout=300 args={source}
"""tests/support/stall with each version of cgroups that has a freezer here, on programs of its own.

usage: stall_test.py SOURCE_ROOT"""
import collections
import importlib.machinery
import importlib.util
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

STALL = f"{sys.argv[1]}/tests/support/stall"
MODES = ("together", "one")
LIMIT_S = 60  # of one program; a stop may come late on a busy machine
PAUSE_S = 0.25  # of the processes below; a stop lasts 0.3 s at least
MARGIN_S = 0.1  # how much later than another one a process may go on

# Two processes in two sessions print their numbers and the time again and again, until the input ends. The status is 9 when the first one
# has ever seen that the second one was stopped or continued.
TICKS = """
import os, select, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
child = os.fork()
if child == 0:
    os.setsid()
changes = []
while not select.select([0], [], [], 0.005)[0]:
    os.write(1, f"{os.getpid()} {time.monotonic()}\\n".encode())
    if child:
        changes.append(os.waitpid(child, os.WNOHANG | os.WUNTRACED | os.WCONTINUED))
if child:
    os.waitpid(child, 0)
    sys.exit(9 if any(number for number, _ in changes) else 0)
"""

sys.dont_write_bytecode = True
spec = importlib.util.spec_from_loader("stall", importlib.machinery.SourceFileLoader("stall", STALL))
stall = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stall)


def first_moments(seed, command, count):
    return list(itertools.islice(stall.plan(seed, command), count))


def find_seed(command, value):
    """The seed for which value(the first two moments) is the largest."""
    return max(range(500), key=lambda seed: value(*first_moments(seed, command, 2)))


class Plan(unittest.TestCase):
    def test_depends_on_seed_and_command(self):
        plan = first_moments(7, ["build/program", "--cases", "3"], 50)
        self.assertEqual(first_moments(7, ["elsewhere/program", "--cases", "3"], 50), plan)
        self.assertNotEqual(first_moments(8, ["build/program", "--cases", "3"], 50), plan)
        self.assertNotEqual(first_moments(7, ["build/program", "--cases", "4"], 50), plan)
        for wait_s, stop_s, choice in plan:
            self.assertTrue(0.2 <= wait_s <= 3 and 0.3 <= stop_s <= 3 and 0 <= choice < 1, (wait_s, stop_s, choice))


class Skipped(unittest.TestCase):
    def check(self, mounts, reason):
        with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
            file.write(mounts)
            file.flush()
            command = [STALL, "--mode", "together", "--mounts", file.name, "echo", "runs"]
            ended = subprocess.run(command, check=False, capture_output=True, text=True)
        self.assertEqual((ended.returncode, ended.stdout), (77, ""))
        self.assertRegex(ended.stderr, rf"^stall: skipped: {reason}")

    def test_no_freezer_is_mounted(self):
        self.check("31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n32 31 0:29 / /cpu rw - cgroup cgroup rw,cpu\n", "no cgroup ")

    def test_group_cannot_be_made(self):
        self.check("32 31 0:29 / /proc rw - cgroup2 cgroup2 rw\n33 31 0:30 / /proc rw - cgroup cgroup rw,freezer\n", "/proc/.*: ")


class Version:
    """The cases of one version of cgroups."""

    KIND = None

    @classmethod
    def setUpClass(cls):
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            if "/stall-" in file.read():
                raise unittest.SkipTest("stall stops this test itself, and moves its processes to another group meanwhile")
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.mounts = f"{directory.name}/mounts"
        cls.ticks = [sys.executable, f"{directory.name}/ticks.py"]
        with open(cls.ticks[1], "w", encoding="utf-8") as file:
            file.write(TICKS)
        with open("/proc/self/mountinfo", encoding="utf-8") as lines, open(cls.mounts, "w", encoding="utf-8") as file:
            file.writelines(line for line in lines if f" - {cls.KIND} " in line)
        groups = stall.own_groups(cls.mounts)
        if not groups:
            raise unittest.SkipTest(f"no freezer of {cls.KIND} is mounted")
        cls.own = groups[0][1]
        trial = f"{cls.own}/stall-test-{os.getpid()}"
        try:
            os.mkdir(trial)
        except OSError as error:
            raise unittest.SkipTest(f"{trial}: {error.strerror}") from error
        has_freezer = os.path.exists(f"{trial}/{stall.FREEZERS[cls.KIND][0]}")
        os.rmdir(trial)
        if not has_freezer:
            raise unittest.SkipTest(f"{cls.own}: groups have no freezer")

    def setUp(self):
        signal.signal(signal.SIGALRM, self.fail_late)
        self.addCleanup(signal.alarm, 0)

    def fail_late(self, *_):
        self.fail(f"has not ended after {LIMIT_S} s")

    def start(self, mode, seed, command):
        signal.alarm(LIMIT_S)
        stall_command = [STALL, "--mode", mode, "--seed", str(seed), "--mounts", self.mounts, *command]
        process = subprocess.Popen(stall_command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.__exit__, None, None, None)
        self.addCleanup(process.kill)
        return process

    def group(self, process):
        return f"{self.own}/stall-{process.pid}"

    def run_stall(self, mode, command, seed=7):
        """Exit status, stdout, stderr without the first and the last line, those two lines."""
        process = self.start(mode, seed, command)
        stdout, stderr = process.communicate()
        self.assertFalse(os.path.exists(self.group(process)))
        lines = stderr.splitlines()
        return process.returncode, stdout, lines[1:-1], lines[0], lines[-1]

    def test_output_and_status_are_those_of_the_test(self):
        ends = {"exit 0": 0, "exit 3": 3, "exit 77": 77, "kill -KILL $$": -signal.SIGKILL, "kill -SEGV $$": -signal.SIGSEGV}
        for mode, (end, status) in itertools.product(MODES, ends.items()):
            with self.subTest(mode=mode, end=end):
                *result, first, last = self.run_stall(mode, ["sh", "-c", f"echo out; echo error >&2; {end}"])
                self.assertEqual(result, [status, "out\n", ["error"]])
                self.assertRegex(first, f"^stall: mode {mode}, seed 7, again: {re.escape(STALL)} --mode {mode} --seed 7 sh -c ")
                self.assertEqual(last, "stall: stops: 0, 0.00 s together, the longest 0.00 s")

    def test_signals_of_the_test_are_as_without(self):
        command = ["grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status"]
        without = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        self.assertEqual(self.run_stall("together", command)[1], without)

    def test_daemon_ends_with_the_test(self):
        status, stdout, *_ = self.run_stall("together", ["sh", "-c", "setsid sleep 1000 & exit 5"])  # it has the output open
        self.assertEqual((status, stdout), (5, ""))

    def pauses(self, process):
        """Yields for each pause of a process: its number, begin and end, and when the other one went on meanwhile."""
        times = collections.defaultdict(list)
        for line in process.stdout:
            number, now = int(line.split()[0]), float(line.split()[1])
            before = times[number][-1:]
            if before and now - before[0] >= PAUSE_S:
                others = [when for other, ticks in times.items() if other != number for when in ticks if before[0] < when < now]
                yield number, before[0], now, others
            times[number].append(now)

    def end_ticks(self, process, seed):
        stderr = process.communicate()[1]
        self.assertEqual(process.returncode, 0, "a stopped or continued child was seen")
        stops, together, longest = re.search(r"^stall: stops: (\d+), ([\d.]+) s together, the longest ([\d.]+) s$", stderr, re.M).groups()
        # The end of the test may have cut the last one short.
        planned = [stop_s for _, stop_s, _ in first_moments(seed, self.ticks, int(stops))][:-1]
        self.assertGreaterEqual(float(together), sum(planned) - 0.01)
        self.assertGreaterEqual(float(longest), max(planned) - 0.01)
        self.assertFalse(os.path.exists(self.group(process)))

    def test_together_stops_all_processes(self):
        seed = find_seed(self.ticks, lambda first, second: first[1] + second[1] - first[0] - second[0])
        process = self.start("together", seed, self.ticks)
        stops, last = 0, {}
        for number, begin, end, _ in self.pauses(process):
            last[number] = (begin, end)
            if len(last) == 2 and min(end for _, end in last.values()) - max(begin for begin, _ in last.values()) >= PAUSE_S:
                stops, last = stops + 1, {}
            if stops == 2:
                break
        self.assertEqual(stops, 2)
        self.end_ticks(process, seed)

    def test_one_stops_while_the_other_goes_on(self):
        def value(first, second):  # different processes, when both exist
            return first[1] + second[1] - second[0] if first[0] > 1 and (first[2] < 0.5) != (second[2] < 0.5) else 0

        seed = find_seed(self.ticks, value)
        process = self.start("one", seed, self.ticks)
        stopped = set()
        for number, begin, end, others in self.pauses(process):
            if sum(begin + MARGIN_S < when < end - MARGIN_S for when in others) >= 3:
                stopped.add(number)
            if len(stopped) == 2:
                break
        self.assertEqual(len(stopped), 2)
        self.end_ticks(process, seed)

    def is_stopped(self, mode, process):
        group = self.group(process) + ("/one" if mode == "one" else "")
        name, stopped = {"cgroup2": ("cgroup.events", "frozen 1"), "cgroup": ("freezer.state", "FROZEN")}[self.KIND]
        try:
            with open(f"{group}/{name}", encoding="ascii") as file:
                return stopped in file.read().splitlines()
        except OSError:
            return False

    def test_signal_while_processes_are_stopped_ends_all(self):
        seed = find_seed(self.ticks, lambda first, _: first[1] - first[0])
        for mode, number in itertools.product(MODES, (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)):
            with self.subTest(mode=mode, signal=number):
                process = self.start(mode, seed, self.ticks)
                ticking = set()
                while len(ticking) < 2:
                    ticking.add(process.stdout.readline().split()[0])
                while not self.is_stopped(mode, process):
                    time.sleep(0.01)
                process.send_signal(number)
                self.assertEqual(process.wait(), -number)
                while number == signal.SIGKILL and os.path.exists(self.group(process)):
                    time.sleep(0.01)
                self.assertFalse(os.path.exists(self.group(process)))
                process.communicate()  # the output ends when no process is left that has it open


class Version1(Version, unittest.TestCase):
    KIND = "cgroup"


class Version2(Version, unittest.TestCase):
    KIND = "cgroup2"


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
