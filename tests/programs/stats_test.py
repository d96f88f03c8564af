#!/usr/bin/env python3
#: all has=ib_send_bw,ibv_devinfo,ibv_rc_pingpong needs=softverbs_control
#: test programs-stats-atexit args=AtExit
#: test programs-stats-whilerunning args=WhileRunning
"""Compares the output of tools/softverbs stats and SOFTVERBS_STATS with the known work of a program."""

import json
import os
import subprocess
import time

from program_test_case import BUILD, LAUNCHER, NAMESPACE, TIMEOUT_S, ROCE, ProgramTest, free_port, main


def stats(*arguments):
    return subprocess.run(
        [LAUNCHER, "--namespace", NAMESPACE, "stats", *arguments],
        env={**os.environ, "SOFTVERBS_BUILD_DIR": BUILD},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


class AtExit(ProgramTest):
    def test_server_and_client_counts_match(self):
        server, client = self.run_pair("ib_send_bw", "-d", "softverbs0", *ROCE, "-n", "300", "-q", "2", "-s", "1000", "-Q", "1")
        self.assertEqual(client.stats["program"], "ib_send_bw")
        self.assertNotEqual(client.stats["pid"], server.stats["pid"])
        self.assertEqual(client.stats["work_requests"]["send"], 600)
        self.assertEqual(client.stats["bytes"], 600_000)
        self.assertEqual(client.stats["doorbells"], client.stats["calls"]["ibv_post_send"])
        self.assertEqual(client.stats["completions"], 600)
        self.assertEqual(server.stats["work_requests"]["recv"], server.stats["calls"]["ibv_post_recv"])
        self.assertEqual(server.stats["completions"], 600)
        for side in (server, client):
            self.assertEqual(side.stats["calls"]["ibv_create_qp"], 2)
            self.assertEqual(side.stats["calls"]["ibv_reg_mr_iova2"], 1)
            self.assertEqual(side.stats["objects"]["qp"], {"created": 2, "alive": 0})
            self.assertEqual(side.stats["objects"]["mr"], {"created": 1, "alive": 0})
            self.assertEqual(side.stats["objects"]["context"], {"created": 1, "alive": 0})
            self.assertEqual([qp["completions"] for qp in side.stats["qps"]], [300, 300])
            self.assertEqual([qp["path"] for qp in side.stats["qps"]], [0, 0])
            self.assertTrue(all(qp["udp_source_port"] >= 0xC000 for qp in side.stats["qps"]), side.stats["qps"])
            self.assertGreater(side.stats["polls"], side.stats["empty_polls"])
        self.assertEqual(
            [qp["qpn"] for qp in client.stats["qps"]], [qp["dest_qpn"] for qp in server.stats["qps"]]
        )

    def test_objects_left_alive_are_counted(self):
        finished = self.run_alone("ibv_devinfo", "-v")
        self.assertEqual({count["alive"] for count in finished.stats["objects"].values()}, {0})
        self.assertEqual(finished.stats["objects"]["context"]["created"], 1)

    def test_file_name_is_taken_from_setting(self):
        pattern = os.path.join(self.directory.name, "of-%p.json")
        self.run_alone("ibv_devinfo", SOFTVERBS_STATS=pattern)
        (name,) = [name for name in os.listdir(self.directory.name) if name.startswith("of-")]
        with open(os.path.join(self.directory.name, name), encoding="utf-8") as file:
            self.assertEqual(name, f"of-{json.load(file)['pid']}.json")
        result = self.run_alone("ibv_devinfo", SOFTVERBS_STATS="/nowhere/file")
        self.assertEqual(result.status, 0, result)
        self.assertIn("SOFTVERBS_STATS=/nowhere/file cannot be written", result.output)


class WhileRunning(ProgramTest):
    def await_processes(self, count):
        """Waits until `count` processes have QPs; returns their JSON."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            result = stats("--json")
            self.assertEqual(result.returncode, 0, result.stderr)
            processes = json.loads(result.stdout)
            if len(processes) == count and all(process["qps"] for process in processes):
                return processes
            time.sleep(0.05)
        self.fail(f"no {count} processes with QPs: {result.stdout}")

    def test_no_process_gives_empty_list(self):
        self.assertEqual(json.loads(stats("--json").stdout), [])
        self.assertEqual(len(stats().stdout.splitlines()), 1)

    def test_waiting_server_is_listed(self):
        # ibv_rc_pingpong creates its QP and posts its receives before it waits for its client.
        arguments = ["ibv_rc_pingpong", "-g", "3", "-r", "77", "-p", str(free_port())]
        self.start(arguments, {})
        child, _ = self.start([*arguments[:-1], str(free_port())], {})
        processes = self.await_processes(2)
        for process in processes:
            self.assertEqual(process["program"], "ibv_rc_pingpong"[:15])
            self.assertEqual(process["work_requests"]["recv"], 77)
            self.assertEqual(process["objects"]["qp"], {"created": 1, "alive": 1})
            self.assertEqual(process["objects"]["cq"], {"created": 1, "alive": 1})
            (qp,) = process["qps"]
            self.assertEqual((qp["state"], qp["alive"], qp["calls"]["ibv_modify_qp"]), ("INIT", True, 1))
            self.assertEqual(qp["work_requests"]["recv"], 77)
        table = stats("--qps").stdout.splitlines()
        self.assertEqual(len(table), 1 + 4)
        self.assertTrue(table[0].split()[:3] == ["#", "PID", "PROGRAM"], table[0])
        only = stats("--json", str(child.pid))
        self.assertEqual([process["pid"] for process in json.loads(only.stdout)], [child.pid])

    def test_unknown_process_is_named(self):
        result = stats("1")
        self.assertEqual(result.returncode, 3)
        self.assertIn("process 1 holds no softverbs device", result.stderr)


if __name__ == "__main__":
    main()
