#!/usr/bin/env python3
#: all suite=tools sanitizer=none needs=softverbs_mlx5 args='{verbatim_info} {softverbs} {plugin}'
#: test verbatim-info-pairs
#: test verbatim-info-pairs-mpirun full args={mpirun}
"""usage: pairs_test.py TOOL VERBS_LIBRARY PLUGIN [MPIRUN]
verbatim-info --pairs over softverbs: ranks that are hosts of a job, some of them with a fault. With MPIRUN only: four
ranks that it starts."""

import collections
import json
import os
import re
import socket
import subprocess
import sys
import unittest

TOOL, VERBS_LIBRARY, PLUGIN, *OTHERS = sys.argv[1:]
TIMEOUT_S = 100
# A path that carries nothing is known after a fraction of a second, and nothing waits for it.
SETTINGS = {
    "NCCL_CONF_FILE": "/dev/null",
    "VERBATIM_VERBS_LIBRARY": VERBS_LIBRARY,
    "VERBATIM_SOCKET_IFNAME": "lo",
    "VERBATIM_TIMEOUT": "12",
    "VERBATIM_RETRY_CNT": "1",
    "VERBATIM_RECONNECT_S": "0",
    "VERBATIM_STATE_DIR": "none",
    "SOFTVERBS_DEVICES": "2",
    "VERBATIM_TOKEN": "a secret of this test",
}
Result = collections.namedtuple("Result", "status output errors")


def environment(settings):
    removed = ("VERBATIM_", "NCCL_", "SOFTVERBS_FAULTS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(removed)}
    return {**kept, **SETTINGS, **settings}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(ranks, *arguments, special=None):
    """One process a rank; `special` has the settings of the last one. The result of rank 0."""
    root = f"127.0.0.1:{free_port()}"
    processes = []
    for rank in range(ranks):
        command = [TOOL, "--pairs", "--plugin", PLUGIN, "--root", root, "--rank", str(rank), "--nranks", str(ranks)]
        settings = special or {} if rank == ranks - 1 else {}
        processes.append(
            subprocess.Popen(
                [*command, "--timeout", "90", *arguments],
                env=environment(settings),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return Result(processes[0].returncode, *outputs[0])


@unittest.skipUnless(OTHERS, "mpirun has a test of its own")
class PairsOfMpirun(unittest.TestCase):
    def test_four_ranks_are_one_job(self):
        command = [*OTHERS, "--allow-run-as-root", "--oversubscribe", "-np", "4", TOOL, "--pairs", "--plugin", PLUGIN]
        result = subprocess.run(command, env=environment({}), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        self.assertIn(result.returncode, (0, 1), result)
        self.assertRegex(result.stdout, r"(?m)^# 4 hosts, 24 links: 24 work, 0 fail, ")


@unittest.skipIf(OTHERS, "the test of mpirun")
class Pairs(unittest.TestCase):
    HOST = re.escape(socket.gethostname())

    def report(self, ranks, special=None):
        result = run(ranks, "--json", special=special)
        self.assertIn(result.status, (0, 1), result)
        report = json.loads(result.output)
        self.assertEqual(result.status, 1 if report["findings"] else 0, result)
        return report

    def test_every_link_works_and_is_measured(self):
        report = self.report(3)
        self.assertEqual(report["schema"], 1)
        self.assertEqual([len(host["ports"]) for host in report["hosts"]], [2, 2, 2])
        port = report["hosts"][1]["ports"][1]
        self.assertEqual((port["name"], port["link_layer"], port["gid_type"]), ("softverbs1", "RoCE", "RoCE v2"))
        ends = sorted((link["from"], link["from_port"], link["to"], link["to_port"]) for link in report["links"])
        expected = [(a, p, b, p) for a in range(3) for b in range(3) for p in range(2) if a != b]
        self.assertEqual(ends, sorted(expected))
        for link in report["links"]:
            self.assertEqual(link["error"], "")
            self.assertGreater(link["latency_us"], 0)
            self.assertGreater(link["gb_s"], 0)

    def test_a_port_that_carries_nothing_is_named(self):
        result = run(4, special={"SOFTVERBS_FAULTS": "unreachable device=1"})
        self.assertEqual(result.status, 1, result)
        first = result.output.splitlines()[0]
        self.assertRegex(first, rf"^{self.HOST}\[3\] softverbs1: the links to 3 of 3 ports fail, for example: ", result)
        self.assertIn("Next: look at the cable", first)
        self.assertRegex(result.output, r"(?m)^# 4 hosts, 24 links: 18 work, 6 fail, ")
        self.assertRegex(result.output, rf"(?m)^{self.HOST}\[3\] softverbs1 +{self.HOST}\[\d\] softverbs1 +fails")

    # What follows from the numbers is tested with given ones (pair_report_test.cc): those of a busy machine vary.
    def test_a_slow_port_has_its_latency(self):
        report = self.report(3, special={"SOFTVERBS_FAULTS": "delay by=3ms device=0"})
        slow = [link for link in report["links"] if link["from_port"] == 0 and 2 in (link["from"], link["to"])]
        self.assertEqual(len(slow), 4)
        for link in slow:
            self.assertGreaterEqual(link["latency_us"], 3000 / 2, link)  # of a message and its answer one is delayed

    def test_different_gid_types_are_named(self):
        report = self.report(2, special={"VERBATIM_GID_INDEX": "2", "SOFTVERBS_DEVICES": "1"})
        types = {host["ports"][0]["gid_type"] for host in report["hosts"]}
        self.assertEqual(types, {"RoCE v1", "RoCE v2"})
        self.assertRegex("\n".join(report["findings"]), r"Next: set VERBATIM_GID_INDEX on one side: the GIDs are of the types RoCE v\d and RoCE v\d")
        self.assertTrue(all(link["error"] for link in report["links"]))

    def test_a_host_without_a_port_is_named_and_the_others_are_tested(self):
        report = self.report(3, special={"VERBATIM_HCA": "mlx5_77"})
        self.assertRegex(report["findings"][0], rf"^{self.HOST}\[2\] has no usable port: .*Next: run verbatim-info there")
        self.assertEqual({(link["from"], link["to"]) for link in report["links"]}, {(0, 1), (1, 0)})

    def test_ranks_of_one_machine_start_together(self):
        command = [TOOL, "--pairs", "--procs", "2", "--plugin", PLUGIN]
        result = subprocess.run(command, env=environment({}), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        self.assertIn(result.returncode, (0, 1), result)
        self.assertRegex(result.stdout, r"(?m)^# 2 hosts, 4 links: 4 work, 0 fail, ")

    def test_the_forecast_is_refused(self):
        result = subprocess.run([TOOL, "--pairs", "--ranks", "4"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        self.assertEqual(result.returncode, 2, result)
        self.assertIn("--pairs", result.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
