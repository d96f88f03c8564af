#!/usr/bin/env python3
#: all has=ibv_devices,ibv_devinfo,ibv_rc_pingpong,ibv_srq_pingpong,ibv_uc_pingpong,ibv_ud_pingpong,ibv_xsrq_pingpong
#: test programs-rdma-core-listing args=Listing
#: test programs-rdma-core-pidnamespaces args=PidNamespaces
#: test programs-rdma-core-pingpong args=Pingpong
#: test programs-rdma-core-unsupported args=Unsupported
"""The installed programs of rdma-core (Debian's package ibverbs-utils)."""

import os
import re
import shutil
import subprocess

from program_test_case import ProgramTest, main

BOTH_LAYERS = (("roce", ["-g", "3"]), ("ib", []))


class Listing(ProgramTest):
    def test_ibv_devices(self):
        result = self.run_alone("ibv_devices", SOFTVERBS_DEVICES="2")
        self.assertEqual(result.status, 0, result)
        names = re.findall(r"^\s+(softverbs\d)\s+([0-9a-f]{16})$", result.output, re.M)
        self.assertEqual([name for name, _ in names], ["softverbs0", "softverbs1"])
        self.assertEqual(len({guid for _, guid in names}), 2)

    def test_ibv_devinfo(self):
        for layer, expected in (
            ("roce", ("link_layer:\t\tEthernet", "::ffff:10.77.0.1, RoCE v2", "port_lid:\t\t0\n")),
            ("ib", ("link_layer:\t\tInfiniBand", "GID[  0]:\t\tfe80:0000", "port_lid:\t\t1\n")),
        ):
            result = self.run_alone("ibv_devinfo", "-v", SOFTVERBS_LINK_LAYER=layer, SOFTVERBS_MTU="2048")
            self.assertEqual(result.status, 0, result)
            for text in (
                "hca_id:\tsoftverbs0",
                "PORT_ACTIVE (4)",
                "ATOMIC_HCA (1)",
                "active_mtu:\t\t2048 (4)",
                "hca_core_clock:\t\t\t1000000kHZ",
                *expected,
            ):
                self.assertIn(text, result.output)

    def test_limits_are_shown(self):
        result = self.run_alone(
            "ibv_devinfo", "-v", SOFTVERBS_MAX_QP="5", SOFTVERBS_MAX_QP_WR="77", SOFTVERBS_MAX_MSG_SZ="4096"
        )
        for text in ("max_qp:\t\t\t\t5\n", "max_qp_wr:\t\t\t77\n", "max_msg_sz:\t\t0x1000\n"):
            self.assertIn(text, result.output)


class Pingpong(ProgramTest):
    def run_pingpong(self, program, *arguments, size=4096, iterations=1000, **settings):
        both = self.run_pair(program, "-s", str(size), "-n", str(iterations), *arguments, **settings)
        for side in both:
            self.assertIn(f"{iterations * size * 2} bytes in ", side.output)
            self.assertRegex(side.output, rf"\n{iterations} iters in [\d.]+ seconds = [\d.]+ usec/iter")
            self.assertNotIn("invalid data", side.output)  # -c prints this for a wrong byte
            # ibv_srq_pingpong uses several QPs and continues until both directions have that many messages.
            sends = side.stats["work_requests"]["send"]
            self.assertGreaterEqual(sends, iterations)
            self.assertTrue(sends == iterations or program == "ibv_srq_pingpong", sends)
            self.assertGreaterEqual(side.stats["completions"], 2 * iterations)
            for kind, count in side.stats["objects"].items():
                self.assertEqual(count["alive"], 0, kind)
        return both

    def test_rc(self):
        for layer, address in BOTH_LAYERS:
            for engine in ("thread", "inline"):
                with self.subTest(layer=layer, engine=engine):
                    settings = {"SOFTVERBS_LINK_LAYER": layer, "SOFTVERBS_ENGINE": engine}
                    self.run_pingpong("ibv_rc_pingpong", "-c", *address, **settings)

    def test_rc_with_events(self):
        for layer, address in BOTH_LAYERS:
            for engine in ("thread", "inline"):
                with self.subTest(layer=layer, engine=engine):
                    settings = {"SOFTVERBS_LINK_LAYER": layer, "SOFTVERBS_ENGINE": engine}
                    server, _ = self.run_pingpong("ibv_rc_pingpong", "-e", "-c", *address, **settings)
                    self.assertGreater(server.stats["calls"]["ibv_get_cq_event"], 0)

    def test_all_symbols_bound_at_start(self):
        for program in ("ibv_rc_pingpong", "ibv_srq_pingpong"):
            with self.subTest(program=program):
                self.run_pingpong(program, "-c", "-g", "3", LD_BIND_NOW="1")

    def test_rc_large_messages(self):
        self.run_pingpong("ibv_rc_pingpong", "-c", "-g", "3", "-m", "4096", size=3_000_001, iterations=50)

    def test_rc_new_post_interface(self):
        for extra in ([], ["-e"]):
            server, _ = self.run_pingpong("ibv_rc_pingpong", "-N", "-c", "-g", "3", *extra)
            self.assertEqual(server.stats["calls"]["ibv_wr_complete"], 1000)
            self.assertNotIn("ibv_post_send", server.stats["calls"])

    # Without -e: the program ends when a poll after an event finds no completion, which can happen on any device.
    def test_rc_timestamps(self):
        server, client = self.run_pingpong("ibv_rc_pingpong", "-t", "-g", "3")
        for side in (server, client):
            found = re.search(r"Average receive completion clock cycles = ([\d.]+)", side.output)
            self.assertGreater(float(found.group(1)), 0)

    def test_uc(self):
        self.check_unreliable("ibv_uc_pingpong", "UC", 100_001)

    def test_ud(self):
        self.check_unreliable("ibv_ud_pingpong", "UD", 2048)

    def check_unreliable(self, program, kind, size):
        for (layer, address), engine, extra in zip(BOTH_LAYERS * 2, ("thread", "inline", "inline"), ([], [], ["-e"])):
            with self.subTest(layer=layer, engine=engine, extra=extra):
                settings = {"SOFTVERBS_LINK_LAYER": layer, "SOFTVERBS_ENGINE": engine}
                server, _ = self.run_pingpong(program, "-c", *extra, *address, size=size, **settings)
                self.assertEqual([qp["type"] for qp in server.stats["qps"]], [kind])

    def test_srq(self):
        for layer, address in BOTH_LAYERS:
            for extra in ([], ["-e"]):
                with self.subTest(layer=layer, extra=extra):
                    settings = {"SOFTVERBS_LINK_LAYER": layer}
                    server, _ = self.run_pingpong("ibv_srq_pingpong", "-c", *extra, *address, **settings)
                    self.assertEqual(server.stats["objects"]["srq"]["created"], 1)
                    self.assertGreater(server.stats["calls"]["ibv_post_srq_recv"], 0)


class PidNamespaces(ProgramTest):
    """The server and the client are in two PID namespaces, as in two containers on one host."""

    # The launcher sets LD_LIBRARY_PATH, so unshare must run inside of it.
    UNSHARE = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
    # Without /proc a process does not know its PID namespace.
    WITHOUT_PROC = [*UNSHARE, "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]

    def setUp(self):
        super().setUp()
        if shutil.which("unshare") is None or subprocess.run([*self.UNSHARE, "true"], check=False).returncode != 0:
            self.skipTest("this system does not allow a new PID namespace")

    def test_shared_directory_joins_them(self):
        for prefix in (self.UNSHARE, self.WITHOUT_PROC):
            for arguments in ([], ["-e"]):
                both = self.run_pair(
                    *prefix, "ibv_rc_pingpong", "-c", "-g", "3", *arguments, SOFTVERBS_DIRECTORY=self.directory.name
                )
                for side in both:
                    self.assertIn("1000 iters in", side.output)
                    self.assertNotIn("invalid data", side.output)
                    self.assertIn("data is copied by a thread of the other process", side.output)
        self.assertEqual([name for name in os.listdir(self.directory.name) if name.startswith("softverbs")], [])

    def test_unreachable_peer_is_reported_at_both(self):
        foreign = {"SOFTVERBS_DIRECTORY": self.directory.name, "SOFTVERBS_ENGINE": "inline"}
        for prefix, settings, text in (
            (self.UNSHARE, {}, "no process that shares /dev/shm with this one has that QP"),
            (self.UNSHARE, foreign, "that process is in another PID namespace"),
            (self.WITHOUT_PROC, foreign, "in an unknown one"),
        ):
            with self.subTest(prefix=prefix, settings=settings):
                server, client = self.run_both(*prefix, "ibv_rc_pingpong", "-g", "3", **settings)
                self.assertEqual(client.status, 1, client)
                for side in (server, client):
                    self.assertRegex(side.output, r"softverbs: QP \d+ cannot .* its peer, QP \d+: .*Next: ")
                    self.assertIn(text, side.output)


class Unsupported(ProgramTest):
    """A call for an unsupported feature fails, and the program prints which feature it was."""

    def test_other_transports(self):
        for program, message in (
            ("ibv_xsrq_pingpong", "Open the XRC Domain"),
        ):
            result = self.run_alone(program, "-g", "3")
            self.assertNotEqual(result.status, 0, result)
            self.assertGreater(result.status, 0, "ended by a signal")
            self.assertIn(message, result.output, result)

    def test_on_demand_paging_and_device_memory(self):
        for option in ("-o", "-j"):
            result = self.run_alone("ibv_rc_pingpong", option, "-g", "3")
            self.assertEqual(result.status, 1, result)


if __name__ == "__main__":
    main()
