#!/usr/bin/env python3
"""Programs of other projects that look for the files of a device: UCX and Gloo (Debian), Mooncake's transfer engine (PyPI).

GLOO_RANKS names the program made of gloo_ranks.cc. Mooncake is installed into the build directory. Each test checks with the
counters of softverbs that RDMA has carried the data, because these programs fall back to TCP without an error.
"""

import os
import re
import shutil
import subprocess
import sys
import time

from program_test_case import BUILD, TIMEOUT_S, ProgramTest, free_port, is_listening, main

MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
MOONCAKE_ENVIRONMENT = os.path.join(BUILD, "mooncake")
# pip prints this warning for each failed connection, before it says that it has found no version.
NO_NETWORK = re.compile(r"connection broken by|Could not connect|Connection refused|Temporary failure in name resolution")


class Ucx(ProgramTest):
    ITERATIONS, WARMUP = 200, 20

    def setUp(self):
        super().setUp()
        for program in ("ucx_info", "ucx_perftest"):
            if shutil.which(program) is None:
                self.miss(f"{program} is not installed (Debian's package ucx-utils)")

    def test_info_lists_the_device(self):
        for layer in ("roce", "ib"):
            result = self.run_alone("ucx_info", "-d", SOFTVERBS_LINK_LAYER=layer, SOFTVERBS_DEVICES="2")
            self.assertEqual(result.status, 0, result)
            for device in ("softverbs0:1", "softverbs1:1"):
                self.assertRegex(result.output, rf"Transport: rc_verbs\n#\s+Device: {device}\n", result)
            # UCX finds the PCI device.
            self.assertNotRegex(result.output, r"Device: softverbs\d:1\n#\s+Type: network\n#\s+System device: <unknown>")

    def measure(self, test, layout, size, opcode, layer="roce"):
        port = str(free_port())
        settings = {"SOFTVERBS_LINK_LAYER": layer}
        server = self.start(["ucx_perftest", "-p", port], settings)
        deadline = time.monotonic() + TIMEOUT_S
        while not is_listening(int(port)) and server[0].poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        arguments = ["ucx_perftest", "localhost", "-p", port, "-t", test, "-D", layout, "-s", str(size)]
        arguments += ["-x", "rc_verbs", "-d", "softverbs0:1", "-n", str(self.ITERATIONS), "-w", str(self.WARMUP)]
        client = self.finish(arguments, *self.start(arguments, settings))
        if client.status != 0:
            server[0].kill()
        finished = self.finish(["ucx_perftest"], *server)
        self.assertEqual((finished.status, client.status), (0, 0), f"{finished}\n{client}")
        self.assertRegex(client.output, rf"\nFinal: +{self.ITERATIONS} ")
        self.assertNotIn("ERROR", client.output)
        self.assertGreaterEqual(client.stats["work_requests"][opcode], self.ITERATIONS, client)

    def measure_all(self, cases, opcode):
        for test, layout, size in cases:
            for layer in ("roce", "ib"):
                with self.subTest(test=test, layout=layout, layer=layer):
                    self.measure(test, layout, size, opcode, layer)

    def test_active_messages(self):
        cases = [("am_lat", "short", 8), ("am_lat", "bcopy", 4096), ("am_bw", "short", 32), ("am_bw", "zcopy", 8000)]
        self.measure_all(cases, "send")

    def test_put(self):
        cases = [("put_lat", "short", 8), ("put_lat", "bcopy", 4096), ("put_bw", "short", 8), ("put_bw", "zcopy", 1 << 20)]
        self.measure_all(cases, "rdma_write")

    def test_get(self):
        self.measure_all([("get", "bcopy", 256), ("get", "zcopy", 1 << 20)], "rdma_read")

    # "swap" is no atomic of the verbs.
    def test_atomics(self):
        self.measure_all([("add_lat", "short", 8), ("add_mr", "short", 8), ("fadd", "short", 8)], "atomic_fetch_and_add")
        self.measure_all([("cswap", "short", 8)], "atomic_cmp_and_swp")


class Gloo(ProgramTest):
    RANKS = 4

    def test_collectives_of_four_ranks(self):
        program = os.environ.get("GLOO_RANKS", "")
        if not program:
            self.miss("Gloo is not installed (Debian's package libgloo-dev)")
        for layer, gid in (("roce", "3"), ("ib", "0")):
            with self.subTest(layer=layer):
                self.check_ranks(program, layer, gid)

    def check_ranks(self, program, layer, gid):
        store = os.path.join(self.directory.name, layer)
        os.mkdir(store)
        settings = {"SOFTVERBS_LINK_LAYER": layer}
        ranks = [
            (arguments, *self.start(arguments, settings))
            for arguments in ([program, str(rank), str(self.RANKS), store, "softverbs0", gid] for rank in range(self.RANKS))
        ]
        for finished in [self.finish(*rank) for rank in ranks]:
            self.assertEqual(finished.status, 0, finished)
            self.assertRegex(finished.output, r"PCI device 5356:01:00\.0\nright\n$")
            work = finished.stats["work_requests"]
            self.assertGreater(work["rdma_write_with_imm"], 0, work)
            self.assertGreater(finished.stats["bytes"], 4 << 20)


class Missing(Exception):
    """Mooncake cannot be installed."""


def mooncake_python():
    """A Python that has Mooncake, or None without a network that offers it. Raises Missing."""
    for python in (sys.executable, os.path.join(MOONCAKE_ENVIRONMENT, "bin/python")):
        command = [python, "-c", "import mooncake.engine"]
        if os.path.exists(python) and subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return python
    shutil.rmtree(MOONCAKE_ENVIRONMENT, ignore_errors=True)
    pip = os.path.join(MOONCAKE_ENVIRONMENT, "bin/pip")
    for command in (
        [sys.executable, "-m", "venv", MOONCAKE_ENVIRONMENT],
        [pip, "install", "--quiet", "--retries", "1", MOONCAKE],
        [python, "-c", "import mooncake.engine"],
    ):
        result = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        if result.returncode != 0:
            output = result.stdout + result.stderr
            if command[0] == pip and NO_NETWORK.search(output):
                return None
            raise Missing(f"{' '.join(command)} failed: {output[-500:]}")
    return python


class Mooncake(ProgramTest):
    SIZES = [1, 2, 7, 64, 4095, 4096, 65537, 1 << 20, (8 << 20) + 1, 64 << 20]

    def test_transfers_over_rdma(self):
        try:
            python = mooncake_python()
        except Missing as missing:
            self.miss(f"Mooncake is not installed: {missing}")
        if python is None:
            self.skipTest("Mooncake is not installed, and there is no network")
        for layer in ("roce", "ib"):
            with self.subTest(layer=layer):
                self.check_transfers(python, layer)

    def check_transfers(self, python, layer):
        settings = {"SOFTVERBS_LINK_LAYER": layer, "PYTHONUNBUFFERED": "1"}
        program = [python, os.path.join(os.path.dirname(os.path.abspath(__file__)), "mooncake_transfer.py")]
        read_end, write_end = os.pipe()
        target, target_base = self.start([*program, "target"], settings, stdin=read_end)
        os.close(read_end)
        peer = None
        deadline = time.monotonic() + TIMEOUT_S
        while peer is None and target.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
            with open(target_base + ".out", encoding="utf-8", errors="replace") as output:
                peer = re.search(r"^peer (\d+) (\d+)$", output.read(), re.M)
        if peer is None:
            os.close(write_end)
            self.fail(str(self.finish(program, target, target_base)))
        arguments = [*program, "initiator", *peer.groups(), *map(str, self.SIZES)]
        initiator = self.finish(arguments, *self.start(arguments, settings))
        os.close(write_end)
        self.finish(program, target, target_base)
        self.assertEqual(initiator.status, 0, initiator)
        for size in self.SIZES:
            self.assertRegex(initiator.output, rf"(?m)^{size} right$")
        # Every byte was written and read.
        work = initiator.stats["work_requests"]
        self.assertGreater(work["rdma_write"], 0)
        self.assertGreater(work["rdma_read"], 0)
        self.assertEqual(initiator.stats["bytes"], 2 * sum(self.SIZES))


if __name__ == "__main__":
    main()
