#!/usr/bin/env python3
# Programs of other projects. Those that are not installed are skipped by the test itself.
#: test programs-foreign-{} full timeout=600 GLOO_RANKS=
#:   when has=gloo_ranks GLOO_RANKS={gloo_ranks}
#:   ucx args=Ucx
#:   openmpi args=OpenMpi
#:   qperf args=Qperf
#:   gloo args=Gloo
#:   mooncake args=Mooncake
#:   nixl args=Nixl
"""Programs of other projects that look for the files of a device: UCX, Open MPI and Gloo (Debian), Mooncake's transfer
engine and NIXL (PyPI). And qperf (Debian).

GLOO_RANKS names the program made of gloo_ranks.cc. Mooncake and NIXL are installed into the build directory. Each test checks with the
counters of softverbs that RDMA has carried the data, because these programs fall back to TCP without an error.
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time

from program_test_case import BUILD, TIMEOUT_S, ProgramTest, free_port, is_listening, main

MOONCAKE = ["mooncake-transfer-engine-non-cuda==0.3.13.post1"]
# Without its dependencies: those are for GPUs.
NIXL = ["--no-deps", "nixl-cu12==1.5.1", "numpy<3"]
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
        transport = ["-D", layout, "-x", "rc_verbs", "-d", "softverbs0:1"]
        client = self.run_perftest([*transport, "-t", test, "-s", str(size)], SOFTVERBS_LINK_LAYER=layer)
        self.assertGreaterEqual(client.stats["work_requests"][opcode], self.ITERATIONS, client)

    def run_perftest(self, options, **settings):
        port = str(free_port())
        server = self.start(["ucx_perftest", "-p", port], settings)
        deadline = time.monotonic() + TIMEOUT_S
        while not is_listening(int(port)) and server[0].poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        arguments = ["ucx_perftest", "localhost", "-p", port, *options]
        arguments += ["-n", str(self.ITERATIONS), "-w", str(self.WARMUP)]
        client = self.finish(arguments, *self.start(arguments, settings))
        if client.status != 0:
            server[0].kill()
        finished = self.finish(["ucx_perftest"], *server)
        self.assertEqual((finished.status, client.status), (0, 0), f"{finished}\n{client}")
        self.assertRegex(client.output, rf"\nFinal: +{self.ITERATIONS} ")
        self.assertNotIn("ERROR", client.output)
        return client

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


    # UCP connects over UD and then uses RC. It sends messages for its atomics, because the verbs do not have all of them, and
    # the receiver of a long message reads it.
    def test_upper_layer_over_rc(self):
        self.measure_upper_layer(
            "rc_verbs,ud_verbs",
            [
                ("tag_lat", 8, "send"),
                ("tag_lat", 4096, "send"),
                ("tag_bw", 8, "send"),
                ("tag_bw", 1 << 20, "send"),
                ("ucp_put_bw", 8, "rdma_write"),
                ("ucp_put_bw", 1 << 20, "rdma_write"),
                ("ucp_get", 8, "rdma_read"),
                ("ucp_get", 1 << 20, "rdma_read"),
                ("ucp_fadd", 8, "send"),
                ("ucp_cswap", 8, "send"),
            ],
        )

    # UCP does everything with datagrams.
    def test_upper_layer_over_ud(self):
        tests = [("tag_lat", 8), ("tag_bw", 65536), ("ucp_put_bw", 8), ("ucp_get", 8), ("ucp_fadd", 8), ("ucp_cswap", 8)]
        self.measure_upper_layer("ud_verbs", [(test, size, "send") for test, size in tests])

    def measure_upper_layer(self, transports, cases):
        for test, size, opcode in cases:
            for layer in ("roce", "ib"):
                with self.subTest(test=test, size=size, layer=layer):
                    settings = {"SOFTVERBS_LINK_LAYER": layer, "UCX_TLS": transports, "UCX_NET_DEVICES": "softverbs0:1"}
                    client = self.run_perftest(["-t", test, "-s", str(size)], **settings)
                    # UCX also creates a QP that it does not use, to find out its limits.
                    types = {qp["type"] for qp in client.stats["qps"] if qp["completions"] > 0}
                    self.assertEqual(types, {"RC", "UD"} if "rc_verbs" in transports else {"UD"})
                    self.assertGreater(client.stats["work_requests"][opcode], 0, client)


class OpenMpi(ProgramTest):
    SIZES = [1, 3, 1000, 5000, 20_000]  # elements of 4 bytes: short messages, several packets, reads by the receiver
    OPTIONS = ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    # UCX carries everything. The lists of devices are those that it may use without being asked for.
    UCX = ["--mca", "pml", "ucx", "--mca", "pml_ucx_tls", "any", "--mca", "pml_ucx_devices", "any", "--mca", "btl", "self"]

    def test_collectives(self):
        if shutil.which("mpirun") is None:
            self.miss("mpirun is not installed (Debian's package openmpi-bin)")
        for ranks in (4, 8):
            for layer in ("roce", "ib"):
                with self.subTest(ranks=ranks, layer=layer):
                    self.check_collectives(ranks, layer)

    def check_collectives(self, ranks, layer):
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "mpi_collectives.py")
        stats = os.path.join(self.directory.name, f"{ranks}-{layer}")
        os.mkdir(stats)
        settings = {
            "SOFTVERBS_LINK_LAYER": layer,
            "SOFTVERBS_STATS": os.path.join(stats, "%p.json"),
            "UCX_TLS": "rc_verbs,ud_verbs,self",
            "UCX_NET_DEVICES": "softverbs0:1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        arguments = ["mpirun", "-np", str(ranks), *self.OPTIONS, *self.UCX, sys.executable, program, *map(str, self.SIZES)]
        result = self.finish(arguments, *self.start(arguments, settings))
        self.assertEqual(result.status, 0, result)
        for rank in range(ranks):
            self.assertIn(f"rank {rank} of {ranks} right", result.output)
        processes = []
        for name in os.listdir(stats):
            with open(os.path.join(stats, name), encoding="utf-8") as file:
                processes.append(json.load(file))
        self.assertEqual(len(processes), ranks)
        for process in processes:
            self.assertEqual({qp["type"] for qp in process["qps"] if qp["completions"] > 0}, {"RC", "UD"})
            self.assertGreater(process["bytes"], 4 * sum(self.SIZES))


class Qperf(ProgramTest):
    """Without rdma_cm qperf knows only LIDs: its tests run with link layer InfiniBand."""

    BANDWIDTH = ("rc_bw", "rc_bi_bw", "rc_rdma_read_bw", "rc_rdma_write_bw", "uc_bw", "uc_bi_bw", "uc_rdma_write_bw", "ud_bw", "ud_bi_bw")
    LATENCY = ("rc_lat", "rc_rdma_read_lat", "rc_rdma_write_lat", "rc_rdma_write_poll_lat", "uc_lat", "uc_rdma_write_lat",
               "uc_rdma_write_poll_lat", "ud_lat")
    ATOMICS = ("rc_compare_swap_mr", "rc_fetch_add_mr")
    VERIFIED = ("ver_rc_compare_swap", "ver_rc_fetch_add")  # compare what the atomics have returned

    def setUp(self):
        super().setUp()
        if shutil.which("qperf") is None:
            self.miss("qperf is not installed (Debian's package qperf)")

    def measure(self, tests, layer):
        """The client's result."""
        port = str(free_port())
        settings = {"SOFTVERBS_LINK_LAYER": layer}
        server = self.start(["qperf", "-lp", port], settings)
        deadline = time.monotonic() + TIMEOUT_S
        while not is_listening(int(port)) and server[0].poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        arguments = ["qperf", "-lp", port, "-t", "1", "127.0.0.1", *tests]
        try:
            return self.finish(arguments, *self.start(arguments, settings))
        finally:
            # The server has a process for each client, and starts the next one when a client ends.
            deadline = time.monotonic() + 2
            while subprocess.run(["pkill", "-KILL", "-f", f"qperf -lp {port}"], check=False).returncode == 0:
                self.assertLess(time.monotonic(), deadline, "the server does not end")
                time.sleep(0.05)
            self.finish(["qperf"], *server)

    def test_every_test_over_infiniband(self):
        tests = self.BANDWIDTH + self.LATENCY + self.ATOMICS + self.VERIFIED
        client = self.measure(tests, "ib")
        self.assertEqual(client.status, 0, client)
        for test in tests:
            self.assertRegex(client.output, rf"{test}:\n +[a-z_]+ += +[1-9]", client)

    def test_roce_without_rdma_cm_is_refused_as_by_soft_roce(self):
        connected = self.measure(["rc_bw"], "roce")
        self.assertRegex(connected.output, "failed to modify QP to RTR", connected)
        datagrams = self.measure(["ud_lat"], "roce")
        self.assertRegex(datagrams.output, "failed to create address handle: Invalid argument", datagrams)


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
    """A package cannot be installed."""


def python_with(name, module, packages):
    """A Python that has the module, or None without a network that offers it. Raises Missing."""
    with open(os.path.join(BUILD, name + ".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several tests use the same environment
        return find_or_install(name, module, packages)


def find_or_install(name, module, packages):
    environment = os.path.join(BUILD, name)
    for python in (sys.executable, os.path.join(environment, "bin/python")):
        command = [python, "-c", f"import {module}"]
        if os.path.exists(python) and subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return python
    shutil.rmtree(environment, ignore_errors=True)
    pip = os.path.join(environment, "bin/pip")
    for command in (
        [sys.executable, "-m", "venv", environment],
        [pip, "install", "--quiet", "--retries", "1", *packages],
        [python, "-c", f"import {module}"],
    ):
        result = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        if result.returncode != 0:
            output = result.stdout + result.stderr
            if command[0] == pip and NO_NETWORK.search(output):
                return None
            raise Missing(f"{' '.join(command)} failed: {output[-500:]}")
    return python


class PackageTest(ProgramTest):
    def python_with(self, name, module, packages):
        try:
            python = python_with(name, module, packages)
        except Missing as missing:
            self.miss(f"{name} is not installed: {missing}")
        if python is None:
            self.skipTest(f"{name} is not installed, and there is no network")
        return python


class Mooncake(PackageTest):
    SIZES = [1, 2, 7, 64, 4095, 4096, 65537, 1 << 20, (8 << 20) + 1, 64 << 20]

    def test_transfers_over_rdma(self):
        python = self.python_with("mooncake", "mooncake.engine", MOONCAKE)
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


class Nixl(PackageTest):
    SIZES = [1, 7, 4095, 4096, 65537, 1 << 20, 64 << 20]
    # It brings a libibverbs of its own. On RoCE its UCX looks for a route of the kernel to the device's address.
    options = ("--preload",)
    SETTINGS = {"SOFTVERBS_LINK_LAYER": "ib", "UCX_NET_DEVICES": "softverbs0:1", "PYTHONUNBUFFERED": "1"}

    def test_transfers_over_rdma(self):
        python = self.python_with("nixl", "nixl_cu12._api", NIXL)
        for transports in ("rc_verbs,ud_verbs", "ud_verbs"):
            with self.subTest(transports=transports):
                self.check_transfers(python, transports, self.SIZES if "rc" in transports else self.SIZES[:-1])

    def check_transfers(self, python, transports, sizes):
        settings = {**self.SETTINGS, "UCX_TLS": transports}
        directory = os.path.join(self.directory.name, transports)
        os.mkdir(directory)
        program = [python, os.path.join(os.path.dirname(os.path.abspath(__file__)), "nixl_transfer.py")]
        ends = [
            (arguments, *self.start(arguments, settings))
            for arguments in ([*program, "target", directory], [*program, "initiator", directory, *map(str, sizes)])
        ]
        initiator = self.finish(*ends[1])
        if initiator.status != 0:
            ends[0][1].kill()
        target = self.finish(*ends[0])
        self.assertEqual((target.status, initiator.status), (0, 0), f"{target}\n{initiator}")
        self.assertIn("notifications right", target.output)
        for size in sizes:
            self.assertRegex(initiator.output, rf"(?m)^{size} right$")
        work = initiator.stats["work_requests"]
        if "rc" in transports:
            self.assertGreater(work["rdma_write"], 0)
            self.assertGreater(work["rdma_read"], 0)
        self.assertGreaterEqual(initiator.stats["bytes"], sum(sizes))


if __name__ == "__main__":
    main()
