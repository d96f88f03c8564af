#!/usr/bin/env python3
#: all full timeout=600 KV_TOOL={verbatim_kv} EPLB_TOOL={verbatim_eplb} PLUGIN={plugin}
#: test programs-nixl-caches args=Caches
#: test programs-nixl-experts args=Experts
"""verbatim-kv and verbatim-eplb over NIXL (PyPI) and beside it. KV_TOOL, EPLB_TOOL and PLUGIN name what was built.

The counters of softverbs show that RDMA has carried the data.
"""

import json
import os
import pathlib
import stat

from foreign_test import NIXL, PackageTest
from program_test_case import main

WRONG = 1
# Faults of LF, and whether NIXL takes such a list.
TAKEN = {
    "wrong-family": True,
    "count-mismatch": False,
    "length-mismatch": False,
    "base-conflict": None,  # as far as the addresses are registered
    "unregistered": False,
    "index-out-of-range": False,
    "overlapping-destination": True,
}
# In place of Python: changes one byte of the content that rank 0 sends as block 0 of request 3 of KV.
FLIP = """#!/bin/sh
cat >> "$(dirname "$2")/nixl_content.py" <<'END'

import sys

right = pattern


def pattern(source, step, length, offset=0):
    content = right(source, step, length, offset)
    if sys.argv[4:5] == ["0"] and (source, step) == (6, 0):
        content[100] ^= 1
    return content
END
exec {python} "$@"
"""


class NixlTools(PackageTest):
    options = ("--preload",)  # NIXL brings a libibverbs of its own
    timeout_s = 240  # several runs, each of several Python processes

    def setUp(self):
        super().setUp()
        self.python = self.python_with("nixl", "nixl_cu12._api", NIXL)
        self.report = os.path.join(self.directory.name, "report.json")

    def run_tool(self, tool, *arguments, status=0):
        """The report, and the counters of each process that moved data."""
        stats = pathlib.Path(self.directory.name) / f"stats-{self.started}"
        stats.mkdir()
        settings = {"SOFTVERBS_STATS": str(stats / "%p.json"), "VERBATIM_SOCKET_IFNAME": "lo"}
        command = [os.environ[tool], *map(str, arguments), "--json", self.report]
        if "--python" not in command:
            command += ["--python", self.python]
        finished = self.run_alone(*command, **settings)
        self.assertEqual(finished.status, status, finished)
        self.output = finished.output
        counters = [json.loads(path.read_text(encoding="utf-8")) for path in stats.iterdir()]
        return json.loads(pathlib.Path(self.report).read_text(encoding="utf-8")), counters

    def carried(self, counters, operation):
        self.assertGreater(sum(each["work_requests"][operation] for each in counters), 0)
        return sum(each["bytes"] for each in counters)


class Caches(NixlTools):
    SMALL = ["--requests", 40, "--tokens", 300, "--hit", "0.2", "--request-timeout-ms", 60000]
    SHAPES = (
        ["--scale", 40],
        ["--scale", 40, "--prefill", 2, "--decode", 2, "--tp-ratio", 2, "--allocations", "layer"],
        ["--preset", "llama-70b-tp1", "--scale", 40, "--prefill", 1, "--decode", 2, "--tp-ratio", 2],
    )

    def test_every_byte_is_right(self):
        for shape in self.SHAPES:
            with self.subTest(shape=shape):
                report, counters = self.run_tool("KV_TOOL", "--mode", "nixl", *self.SMALL, *shape)
                self.assertEqual(report["wrong"], 0)
                carried = self.carried(counters, "rdma_write")
                self.assertGreaterEqual(carried, sum(family["plan"]["bytes"] for family in report["families"]))
                for family in report["families"]:
                    for planned, counted in (("requests", "served"), ("requests", "notifications"), ("bytes", "served_bytes")):
                        self.assertEqual(family["plan"][planned], family[counted], self.output)
                    self.assertGreater(family["crc_sum"], 0)
                    self.assertEqual(family["crc_errors"], 0)

    def test_a_changed_byte_is_found(self):
        script = pathlib.Path(self.directory.name) / "python"
        script.write_text(FLIP.replace("{python}", self.python), encoding="utf-8")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        arguments = ["--mode", "nixl", "--requests", 12, "--tokens", 300, "--scale", 40, "--python", script]
        report, _ = self.run_tool("KV_TOOL", *arguments, status=WRONG)
        self.assertEqual(report["wrong"], 1, self.output)
        self.assertEqual([family["wrong_bytes"] for family in report["families"]], [1, 0])

    def test_comparison_with_bad_lists_of_lf(self):
        arguments = [*self.SMALL, "--scale", 40, "--rounds", 1, "--compare", "nixl", "--plugin", os.environ["PLUGIN"]]
        (plugin, nixl), _ = self.run_tool("KV_TOOL", *arguments)
        for entry in (plugin, nixl):
            self.assertEqual(entry["last_run"]["wrong"], 0)
            for family in entry["families"]:
                for name in ("gb_s", "requests_per_s", "latency_p50_ms", "latency_p99_ms"):
                    self.assertGreater(family[name][0], 0, name)
            kv, lf = entry["bad_lists"]["run"]["families"]
            self.assertEqual((kv["served"], lf["served"]), (40, 40 - len(TAKEN)), self.output)
            self.assertEqual((kv["wrong_bytes"], lf["wrong_bytes"]), (0, 0), self.output)
        # The plugin's run rejects all; over NIXL what is taken has effects, which the run must find and explain.
        for each in plugin["bad_lists"]["lists"]:
            self.assertRegex(each["outcome"], r" ms: rejected by the prefill side, nothing posted$")
        lists = {each["kind"]: each for each in nixl["bad_lists"]["run"]["bad_lists"]}
        self.assertEqual(sorted(lists), sorted(TAKEN))
        for kind, is_taken in TAKEN.items():
            bad = lists[kind]
            taken = bad["result"] == "transferred"
            if is_taken is not None:
                self.assertEqual(taken, is_taken, f"{kind}: {bad}")
            self.assertEqual(bool(bad["error"]), not taken, bad)
            self.assertEqual(bad["wrong_in_request"] > 0, taken, bad)
            self.assertEqual(bad["call_ns"] > 0, not taken, bad)
            self.assertGreater(bad["after_ns"], bad["call_ns"])
        self.assertTrue(all(where.endswith(" of kv") for where in lists["wrong-family"]["overwritten"]), lists["wrong-family"])
        self.assertGreater(sum(lists["wrong-family"]["overwritten"].values()), 0)
        self.assertEqual(lists["overlapping-destination"]["overwritten"], {})


class Experts(NixlTools):
    SMALL = ["--ranks", 4, "--watchdog", 100]

    def test_every_byte_is_right(self):
        arguments = ["--over", "nixl", "--mode", "direct", "--policy", "all", "--layers", 1, "--iters", 2, *self.SMALL]
        report, counters = self.run_tool("EPLB_TOOL", *arguments)
        self.assertEqual((report["wrong_bytes"], report["errors"]), (0, []))
        self.assertGreaterEqual(self.carried(counters, "rdma_read"), 2 * report["iteration_bytes"])
        self.assertGreater(report["iteration_bytes"], 0)

    def test_a_changed_byte_is_found(self):
        arguments = ["--over", "nixl", "--mode", "direct", "--layers", 1, "--inject", "flip-byte", *self.SMALL]
        report, _ = self.run_tool("EPLB_TOOL", *arguments, status=WRONG)
        self.assertEqual(report["wrong_bytes"], 2, self.output)  # in the new rows and in the weights

    def test_comparison(self):
        arguments = ["--preset", "dsv3-fp8", "--scale", 256, "--layers", 2, "--policy", "greedy-drift", "--rounds", 1]
        arguments += ["--compare", "nixl", "--plugin", os.environ["PLUGIN"], *self.SMALL]
        entries, _ = self.run_tool("EPLB_TOOL", *arguments)
        self.assertEqual([entry["over"] for entry in entries], ["packed", "direct", "nixl"])
        moved = {entry["last_run"]["iteration_bytes"] for entry in entries}
        self.assertEqual(len(moved), 1, moved)
        for entry in entries:
            self.assertEqual(entry["last_run"]["wrong_bytes"], 0)
            self.assertGreater(entry["gb_s"][0], 0)


if __name__ == "__main__":
    main()
