#!/usr/bin/env python3
#: test order-model full args={verbatim_model}
"""Compares verbatim-model with a simulation quantum by quantum, and with known figures."""

import collections
import json
import subprocess
import sys
import unittest

PROGRAM = sys.argv.pop(1)

# PEs, QPs: efficiency in percent, deepest queue, first quantum (mean, max), senders, of the four orders.
KNOWN = {
    (4, 4): [(92, 9, 5.0, 12, 3), (98, 3, 1.75, 4, 3), (100, 1, 4.0, 8, 1), (100, 1, 1.0, 2, 1)],
    (8, 1): [(90, 7, 5.6, 12, 7), (90, 7, 5.6, 12, 7), (100, 1, 3.0, 6, 1), (100, 1, 3.0, 6, 1)],
    (8, 4): [(90, 25, 16.5, 44, 7), (97, 7, 5.6, 12, 7), (100, 1, 12.0, 24, 1), (100, 1, 3.0, 6, 1)],
    (16, 4): [(90, 57, 40, 108, 15), (97, 15, 13.6, 28, 15), (100, 1, 28.0, 56, 1), (100, 1, 7.0, 14, 1)],
    (32, 4): [(89, 121, 88, 236, 31), (97, 31, 29.5, 60, 31), (100, 1, 60.0, 120, 1), (100, 1, 15.0, 30, 1)],
}
QUANTA = 8


def model(pes, qps, quanta=QUANTA):
    lists = [",".join(map(str, values)) for values in (pes, qps)]
    output = subprocess.run(
        [PROGRAM, "--pes", lists[0], "--qps", lists[1], "--quanta", str(quanta), "--json"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    rows = collections.defaultdict(list)
    for row in json.loads(output):
        rows[row["pes"], row["qps"]].append(row)
    return rows


def wanted(me, n, q):
    """Receivers of one PE's QPs, interleaved and rotated, with the QP's own number among those of its peer."""
    return [((me + step) % n, number) for number in range(q) for step in range(1, n)]


def orders(me, n, q):
    others = [pe for pe in range(n) if pe != me]
    behind = others[me:] + others[:me]
    for peers in (others, behind):
        yield [(peer, number) for peer in peers for number in range(q)]
        yield [(peer, number) for number in range(q) for peer in peers]


def in_models_order(me, n, q):
    plain, interleaved, rotated, both = orders(me, n, q)
    return [plain, interleaved, rotated, both]


def simulate(n, q, quanta, which):
    queues = [[[to, quanta] for to, _ in in_models_order(me, n, q)[which]] for me in range(n)]
    turns = [0] * n
    ports = [collections.deque() for _ in range(n)]
    first, received, at_end = {}, collections.Counter(), {}
    deepest = senders = slot = 0
    left = n * (n - 1) * q * quanta
    while left:
        arrivals = collections.Counter()
        for me, queue in enumerate(queues):
            for _ in queue:
                one = queue[turns[me]]
                turns[me] = (turns[me] + 1) % len(queue)
                if one[1]:
                    one[1] -= 1
                    ports[one[0]].append(me)
                    arrivals[one[0]] += 1
                    break
        senders = max([senders, *arrivals.values()])
        ended = set()
        for to, port in enumerate(ports):
            deepest = max(deepest, len(port))
            if port:
                me = port.popleft()
                left -= 1
                first.setdefault((me, to), slot)
                received[me, to] += 1
                if received[me, to] == q * quanta:
                    ended.add(me)
        for me in ended - at_end.keys():
            shares = [received[me, to] for to in range(n) if to != me]
            at_end[me] = sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))
        slot += 1
    inversions = 0
    for me in range(n):
        place = {qp: i for i, qp in enumerate(wanted(me, n, q))}
        line = [place[qp] for qp in in_models_order(me, n, q)[which]]
        inversions += sum(a > b for i, a in enumerate(line) for b in line[i + 1 :])
    return {
        "efficiency": (n - 1) * q * quanta / slot,
        "deepest": deepest,
        "senders": senders,
        "first_mean": sum(first.values()) / len(first),
        "first_max": max(first.values()),
        "jain": min(at_end.values()),
        "inversions": inversions,
    }


class Model(unittest.TestCase):
    def test_as_simulated(self):
        for quanta in (1, 3):
            rows = model([2, 3, 4, 5, 8], [1, 2, 4], quanta)
            self.assertEqual(len(rows), 15)
            for (n, q), found in rows.items():
                for which, row in enumerate(found):
                    for key, value in simulate(n, q, quanta, which).items():
                        self.assertAlmostEqual(row[key], value, 9, f"{n} PEs, {q} QPs, {row['order']}: {key}")

    def test_known_figures(self):
        rows = model([4, 8, 16, 32], [1, 4])
        for shape, expected in KNOWN.items():
            for row, (efficiency, deepest, mean, largest, senders) in zip(rows[shape], expected, strict=True):
                with self.subTest(shape=shape, order=row["order"]):
                    self.assertAlmostEqual(100 * row["efficiency"], efficiency, delta=1)
                    self.assertEqual(row["deepest"], deepest)
                    self.assertAlmostEqual(row["first_mean"], mean, delta=0.06 if mean < 30 else 0.6)
                    self.assertEqual(row["first_max"], largest)
                    self.assertEqual(row["senders"], senders)

    def test_four_thousand(self):
        rows = model([4096], [1], 1)[4096, 1]
        self.assertEqual(rows[3]["first_max"], 4094)
        self.assertEqual(rows[3]["senders"], 1)
        self.assertEqual(rows[0]["senders"], 4095)
        self.assertGreater(rows[0]["first_max"], 4094)


if __name__ == "__main__":
    unittest.main()
