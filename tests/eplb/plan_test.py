#!/usr/bin/env python3
#: test eplb-plan args={verbatim_eplb}
"""usage: plan_test.py PROGRAM
Compares the plans of verbatim-eplb with those of a simple, slow implementation of the same rules."""

import json
import subprocess
import sys
import unittest

POLICIES = "identity shuffle rotate hot greedy-drift scale-up scale-down".split()
program = ""


def tool_plan(*arguments):
    """The parsed lines of --plan-only."""
    result = subprocess.run([program, "--plan-only", *map(str, arguments)], check=True, capture_output=True, text=True)
    return [json.loads(line) for line in result.stdout.splitlines()]


def rows_of(rank, rows, ranks):
    local = len(rows) // ranks
    return rows[rank * local:(rank + 1) * local]


def expected_transfers(old, new, ranks):
    """[source, destination, expert, first row at the source, first row at the destination], in posting order."""
    before = [rows_of(rank, old, ranks) for rank in range(ranks)]
    after = [rows_of(rank, new, ranks) for rank in range(ranks)]
    transfers = []
    for expert in sorted(set(new) - {-1}):
        senders = [rank for rank in range(ranks) if expert in before[rank]]
        receivers = [rank for rank in range(ranks) if expert in after[rank] and expert not in before[rank]]
        share = len(receivers) // len(senders)
        for k, source in enumerate(senders):
            served = receivers[k * share:(k + 1) * share]
            served += receivers[len(senders) * share + k:][:1]
            for destination in served:
                transfers.append([source, destination, expert, before[source].index(expert),
                                  after[destination].index(expert)])
    return transfers


def expected_rows(old, new, ranks):
    """How each new row is filled."""
    fills = []
    for rank in range(ranks):
        before, after = rows_of(rank, old, ranks), rows_of(rank, new, ranks)
        for row, expert in enumerate(after):
            if expert in (-1, before[row]):
                fills.append("keep")
            elif expert in before:
                fills.append(["copy", before.index(expert)])
            elif after.index(expert) == row:
                fills.append("receive")
            else:
                fills.append(["duplicate", after.index(expert)])
    return fills


class Plan(unittest.TestCase):
    def compare(self, *arguments):
        layers = tool_plan(*arguments)
        self.assertTrue(layers)
        for layer in layers:
            ranks, old, new = layer["ranks"], layer["old"], layer["new"]
            transfers = expected_transfers(old, new, ranks)
            self.assertEqual([transfer[:5] for transfer in layer["transfers"]], transfers)
            self.assertEqual(layer["rows"], expected_rows(old, new, ranks))
            packs = sorted({(source, expert, row) for source, _, expert, row, _ in transfers})
            self.assertEqual(sorted(map(tuple, layer["packs"])), packs)
        return layers

    def test_small_plans_of_every_policy(self):
        for policy in POLICIES:
            for ranks in (2, 3, 4, 8, 16, 32):
                with self.subTest(policy=policy, ranks=ranks):
                    self.compare("--policy", policy, "--ranks", ranks, "--layers", 6, "--seed", ranks)

    def test_deepseek_v3(self):
        for policy in POLICIES:
            for ranks in (8, 32):
                with self.subTest(policy=policy, ranks=ranks):
                    self.compare("--preset", "dsv3-fp8", "--policy", policy, "--ranks", ranks, "--layers", 2)

    def test_policies_move_the_expected_experts(self):
        def moved(policy):
            return sum(len(layer["transfers"]) for layer in tool_plan("--policy", policy, "--ranks", 4))

        self.assertEqual(moved("identity"), 0)
        self.assertGreater(moved("shuffle"), 0)
        self.assertLess(moved("greedy-drift"), moved("shuffle"))
        for layer in tool_plan("--policy", "rotate", "--ranks", 4):
            local = len(layer["old"]) // 4
            self.assertEqual(layer["new"], layer["old"][-local:] + layer["old"][:-local])
        for layer in tool_plan("--policy", "hot", "--ranks", 4):
            self.assertGreaterEqual(max(layer["new"].count(expert) for expert in layer["new"]), 9)
        for layer in tool_plan("--policy", "scale-up", "--ranks", 4):
            self.assertEqual(set(layer["old"][-len(layer["old"]) // 4:]), {-1})
            self.assertNotEqual(set(layer["new"][-len(layer["new"]) // 4:]), {-1})
        for layer in tool_plan("--policy", "scale-down", "--ranks", 4):
            self.assertEqual(set(layer["new"][-len(layer["new"]) // 4:]), {-1})

    def test_groups_are_bounded_at_both_ends(self):
        for mode, schedule in (("per-tensor", "all"), ("packed", "all"), ("batched", "batched"), ("batched-per-tensor", "batched"),
                               ("direct", "all"), ("direct", "batched")):
            calls = 4 if "per-tensor" in mode else 1
            for limit in (4, 9, 40):
                for layer in tool_plan("--preset", "dsv3-fp8", "--policy", "shuffle", "--ranks", 8, "--layers", 2,
                                          "--mode", mode, "--schedule", schedule, "--ops-per-group", limit):
                    operations, peers = {}, {}
                    for source, destination, _, _, _, group in layer["transfers"]:
                        for rank, peer in ((source, destination), (destination, source)):
                            operations[group, rank] = operations.get((group, rank), 0) + calls
                            peers.setdefault((group, rank), set()).add(peer)
                    self.assertLessEqual(max(operations.values()), limit)
                    self.assertEqual(max(operations.values()), layer["largest_group"])
                    if schedule == "batched":
                        self.assertEqual({len(others) for others in peers.values()}, {1})


if __name__ == "__main__":
    program = sys.argv.pop(1)
    unittest.main()
