#!/usr/bin/env python3
#: test nixl-plan has=verbatim_top args='{verbatim_kv} {verbatim_eplb}'
"""What verbatim-kv and verbatim-eplb give to NIXL, and what they say without it: nixl_plan_test.py VERBATIM_KV VERBATIM_EPLB.

A script in place of Python keeps the plan of a run. NIXL is not needed: nixl_tools_test.py runs the plans.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

KV, EPLB = (os.path.abspath(path) for path in sys.argv[1:3])
USAGE, FAILED, TIMEOUT = 2, 3, 4
KEEP_PLAN = '#!/bin/sh\n[ -z "${5:-}" ] || cp "$5" "$(dirname "$0")/plan.json"\necho kept >&2\nexit 1\n'


class ToolTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)

    def script(self, text):
        path = self.directory / "python"
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return path

    def run_tool(self, *command, **environment):
        command = list(map(str, command))
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=25, check=False, env={**os.environ, **environment}
        )
        return result.returncode, result.stdout + result.stderr

    def plan_of(self, *command):
        status, output = self.run_tool(*command, "--python", self.script(KEEP_PLAN))
        self.assertEqual((status, "kept" in output), (FAILED, True), output)
        return json.loads((self.directory / "plan.json").read_text(encoding="utf-8"))


class Caches(ToolTest):
    SHAPES = (
        ["--prefill", "1", "--decode", "1"],
        ["--prefill", "2", "--decode", "4", "--tp-ratio", "2", "--hit", "0.3", "--concurrency", "3"],
        ["--preset", "llama-70b-tp1", "--scale", "40", "--decode", "2", "--tp-ratio", "2", "--fragmentation", "1"],
    )

    def test_blocks_of_requests_in_flight_differ(self):
        for shape in self.SHAPES:
            with self.subTest(shape=shape):
                plan = self.plan_of(KV, "--mode", "nixl", "--requests", 60, *shape)
                self.assertEqual([each["id"] for each in plan["requests"]], list(range(60)))
                for index, family in enumerate(plan["families"]):
                    self.check_family(plan, index, family)

    def check_family(self, plan, index, family):
        hits = max(request["families"][index]["first"] for request in plan["requests"])  # never destinations
        lists = {}  # by rank: the lists of blocks of its requests
        for request in plan["requests"]:
            of_family = request["families"][index]
            self.assertEqual(len(of_family["destinations"]), family["tp_ratio"])
            lists.setdefault(("prefill", request["prefill"]), []).append(of_family["source"])
            for part, blocks in enumerate(of_family["destinations"]):
                self.assertEqual(len(blocks), len(of_family["source"]))
                lists.setdefault(("decode", request["engine"], part), []).append(blocks)
        for rank, of_rank in lists.items():
            limit = family[rank[0] + "_blocks"]
            lowest = hits if rank[0] == "decode" else 0
            for blocks in of_rank:
                self.assertTrue(all(lowest <= block < limit for block in blocks))
            used = {}
            for number, blocks in enumerate(of_rank):
                self.assertEqual(len(set(blocks)), len(blocks))
                for block in blocks:
                    used.setdefault(block, []).append(number)
            self.assertTrue(any(len(numbers) > 1 for numbers in used.values()), "no block is used again")
            for one, other in zip(of_rank, of_rank[1:]):
                self.assertTrue(set(one).isdisjoint(other) or len(one) + len(other) > limit - lowest)

    def test_each_invalid_list_differs_in_its_field(self):
        kinds = "wrong-family count-mismatch length-mismatch base-conflict unregistered index-out-of-range overlapping-destination"
        faults = [word for kind in kinds.split() for word in ("--inject", f"{kind},family=lf,at=peer")]
        plan = self.plan_of(KV, "--mode", "nixl", "--requests", 40, *faults)
        kv, lf = plan["families"]
        found = {}
        for request in plan["requests"]:
            self.assertEqual(request["families"][0]["bad"], [])
            for bad in request["families"][1]["bad"]:
                found[bad["kind"]] = (bad, request["families"][1]["destinations"][0])
        self.assertEqual(sorted(found), sorted(kinds.split()))
        for kind, (bad, blocks) in found.items():
            with self.subTest(kind=kind):
                differs = {
                    "wrong-family": bad["family"] == kv["id"],
                    "count-mismatch": len(bad["blocks"]) == len(blocks) - 1,
                    "length-mismatch": bad["piece_bytes"] == 2 * lf["part_bytes"],
                    "base-conflict": bad["block_len"] == 2 * lf["part_bytes"],
                    "unregistered": any(bad["bases_added"]),
                    "index-out-of-range": max(bad["blocks"]) == lf["decode_blocks"],
                    "overlapping-destination": len(set(bad["blocks"])) == len(bad["blocks"]) - 1,
                }
                self.assertEqual([name for name, is_so in differs.items() if is_so], [kind])
                indexed = kind in ("wrong-family", "count-mismatch", "index-out-of-range", "overlapping-destination")
                self.assertEqual(bad["by"], "index" if indexed else "address")


class Experts(ToolTest):
    def test_transfers_are_those_of_the_plan(self):
        shape = ["--ranks", "4", "--mode", "direct", "--policy", "all", "--layers", "2"]
        plan = self.plan_of(EPLB, *shape, "--over", "nixl", "--inject", "flip-byte")
        status, output = self.run_tool(EPLB, *shape, "--plan-only")
        self.assertEqual(status, 0, output)
        layers = [json.loads(line) for line in output.splitlines()]
        self.assertEqual(len(plan["layers"]), len(layers))
        for mine, layer in zip(plan["layers"], layers):
            self.assertEqual(mine["transfers"], [transfer[:5] for transfer in layer["transfers"]])
            self.assertEqual((mine["before"], mine["after"]), (layer["old"], layer["new"]))
            rows = [how if how in ("keep", "receive") else [how, origin] for how, origin in mine["rows"]]
            self.assertEqual(rows, layer["rows"])
        number, rank = plan["flip"]
        self.assertIn(rank, [transfer[1] for transfer in plan["layers"][number]["transfers"]])


class Messages(ToolTest):
    def over_nixl(self):
        return ([KV, "--mode", "nixl"], [EPLB, "--over", "nixl", "--mode", "direct"])

    def compared(self):
        return ([KV, "--compare", "nixl", "--plugin", "p.so"], [EPLB, "--compare", "nixl", "--plugin", "p.so"])

    def test_python_without_nixl(self):
        python = self.script(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')  # -S: without installed packages
        for command in (*self.over_nixl(), *self.compared()):
            with self.subTest(command=command):
                status, output = self.run_tool(*command, "--python", python)
                self.assertEqual(status, FAILED, output)
                self.assertRegex(output, r"^verbatim-\w+: NIXL is not installed for .*Next: install it .* with --python\n$")

    def test_python_that_cannot_be_started(self):
        for command in self.over_nixl():
            status, output = self.run_tool(*command, "--python", self.directory / "none")
            self.assertEqual(status, FAILED, output)
            self.assertRegex(output, r"--python .*/none: cannot be started\. Next: ")

    def test_python_that_does_not_end(self):
        python = self.script("#!/bin/sh\nexec sleep 60\n")
        for command in self.over_nixl():
            status, output = self.run_tool(*command, "--python", python, "--timeout", "1")
            self.assertEqual(status, TIMEOUT, output)
            self.assertIn("has not finished in 1 s (--timeout)", output)

    def test_options_that_nixl_excludes(self):
        kv, eplb = self.over_nixl()
        compared_kv, compared_eplb = self.compared()
        for command, more, text in (
            (kv, ["--inject", "kill"], "only invalid lists are"),
            (kv, ["--memory", "cuda"], "not possible with NIXL"),
            (kv, ["--idle", "lf"], "--idle needs --mode direct"),
            (kv, ["--isolation"], "--isolation needs --mode direct"),
            (kv, ["--root", "127.0.0.1:5", "--rank", "0", "--nranks", "2"], "leave out --root"),
            (compared_kv, ["--inject", "kill"], "--compare nixl sets --inject itself"),
            (compared_kv, ["--requests", "6"], "too few requests"),
            ([KV, "--compare", "nixl"], [], "--compare nixl needs --plugin"),
            ([KV, "--compare", "nixl,p.so", "--mode", "nccl"], [], "--compare nixl needs --mode direct"),
            (eplb[:-2], ["--mode", "packed"], "--over nixl needs --mode direct"),
            (eplb, ["--schedule", "batched"], "it needs --schedule all"),
            (eplb, ["--inject", "wrong-slot"], "the only possible --inject is flip-byte"),
            (eplb, ["--compare", "p.so"], "--compare needs --over plugin or nccl"),
            (compared_eplb[:-2], [], "--over plugin needs --plugin"),
            (compared_eplb, ["--over", "nccl"], "--compare nixl needs --over plugin"),
        ):
            with self.subTest(command=[*command, *more]):
                status, output = self.run_tool(*command, *more)
                self.assertEqual(status, USAGE, output)
                self.assertIn(text, output)
                self.assertEqual(output.count("\n"), 1, output)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
