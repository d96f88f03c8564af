#!/usr/bin/env python3
# perftest calibrates against the processor's clock in every run and polls without sleeping, so each of its cases is a
# test of its own, and they run alone but for that in which it measures nothing. On every change these: each of its
# programs on both link layers, datagrams, and requests that are refused.
#: all has=ib_atomic_bw,ib_atomic_lat,ib_read_bw,ib_read_lat,ib_send_bw,ib_send_lat,ib_write_bw,ib_write_lat
#: test programs-perftest-options-limits-are-enforced args=Options.test_limits_are_enforced
#: test programs-perftest-{} alone priority=-10
#:   plain-bandwidth args=Plain.test_bandwidth
#:   plain-latency args=Plain.test_latency
#:   unreliable-datagrams args=Unreliable.test_datagrams
#:   unreliable-connections full args=Unreliable.test_connections
#:   engines-inline full args=Engines.test_inline
#:   engines-all-symbols-bound-at-start full args=Engines.test_all_symbols_bound_at_start
#:   allsizes-ib-write-bw full args=AllSizes.test_ib_write_bw
#:   allsizes-ib-send-bw full args=AllSizes.test_ib_send_bw
#:   allsizes-ib-read-bw full args=AllSizes.test_ib_read_bw
#:   allsizes-latencies full args=AllSizes.test_latencies
#:   options-several-qps full args=Options.test_several_qps
#:   options-both-directions full args=Options.test_both_directions
#:   options-events full args=Options.test_events
#:   options-inline full args=Options.test_inline
#:   options-both-post-interfaces full args=Options.test_both_post_interfaces
#:   options-compare-and-swap full args=Options.test_compare_and_swap
#:   options-shared-receive-queue full args=Options.test_shared_receive_queue
#:   options-lists-of-requests full args=Options.test_lists_of_requests
#:   options-small-path-mtu full args=Options.test_small_path_mtu
"""The installed perftest programs (Debian's package): checks their output and the counters of their devices."""

import re

from program_test_case import ROCE, ProgramTest, main

ITERATIONS = 200
PINGPONGS = 20  # each waits until the other process runs; on a busy machine that takes a time slice of the scheduler
# perftest uses inline data and ibv_wr_* only on devices whose part number it knows. This is such a number.
KNOWN_PART = {"SOFTVERBS_VENDOR_PART_ID": "4119"}
ALL_SIZES = [2**power for power in range(1, 24)]

OPCODES = {
    "ib_write": "rdma_write",
    "ib_read": "rdma_read",
    "ib_send": "send",
    "ib_atomic": "atomic_fetch_and_add",
}


def rows(output):
    """The numbers in each line below the header of the table."""
    table = output[output.index("#bytes") :].splitlines()[1:]
    return [[float(word) for word in line.split()] for line in table if re.match(r"\s*\d", line)]


class Perftest(ProgramTest):
    def measure(self, program, *options, sizes=None, iterations=None, qps=1, layer="roce", posts=None, **settings):
        if iterations is None:
            iterations = PINGPONGS if program.endswith("_lat") else ITERATIONS
        arguments = ["-d", "softverbs0", "-n", str(iterations), *options]
        if layer == "roce":
            arguments += ROCE
        if qps > 1:
            arguments += ["-q", str(qps)]
        both = self.run_pair(program, *arguments, SOFTVERBS_LINK_LAYER=layer, **settings)
        server, client = both
        is_two_way = "-b" in options
        opcode = OPCODES[program.rsplit("_", 1)[0]]
        if "CMP_AND_SWAP" in options:
            opcode = "atomic_cmp_and_swp"
        expected = iterations * qps * len(sizes or [1])
        printing = both if program in ("ib_send_bw", "ib_send_lat", "ib_write_lat") or is_two_way else [client]
        for side in printing:
            self.check_table(side, program.endswith("_lat"), sizes, iterations * qps)
        for side in both:
            is_active = side is client or is_two_way or program in ("ib_send_lat", "ib_write_lat")
            self.check_work(side, opcode, expected if is_active else 0)
            received = opcode == "send" and (side is server or is_two_way or program == "ib_send_lat")
            self.assertEqual(side.stats["work_requests"]["recv"] >= expected, received, side.stats)
        if posts is not None:
            self.assertEqual([name for name in client.stats["calls"] if name in POSTS], [posts])
        return both

    def check_table(self, side, is_latency, sizes, iterations):
        found = rows(side.output)
        if sizes is not None:
            self.assertEqual([int(row[0]) for row in found], sizes, side)
        self.assertTrue(found, side)
        for row in found:
            self.assertEqual(int(row[1]), iterations, side)
            if is_latency:
                least, most, typical = row[2:5]
                self.assertLess(0, least, side)
                self.assertLessEqual(least, typical, side)
                self.assertLessEqual(typical, most, side)
            else:
                self.assertGreater(row[4], 0, side)  # million messages per second; MB/s may be rounded to 0

    # Every message is one work request, and there are no other send work requests.
    def check_work(self, side, opcode, expected):
        requests = {name: count for name, count in side.stats["work_requests"].items() if name != "recv"}
        self.assertEqual(requests[opcode], expected, side)
        self.assertEqual(sum(requests.values()), expected, side)


POSTS = ("ibv_post_send", "ibv_wr_complete")


class Plain(Perftest):
    def check(self, program, size):
        for layer in ("roce", "ib"):
            with self.subTest(program=program, layer=layer):
                self.measure(program, layer=layer, sizes=[size])

    def test_bandwidth(self):
        for program in ("ib_write_bw", "ib_read_bw", "ib_send_bw"):
            self.check(program, 65536)
        self.check("ib_atomic_bw", 8)

    def test_latency(self):
        for program in ("ib_write_lat", "ib_read_lat", "ib_send_lat"):
            self.check(program, 2)
        self.check("ib_atomic_lat", 8)


# The receiver posts 512 receives before the first message, more than there are messages, so none is lost.
class Unreliable(Perftest):
    def check(self, program, kind, size, layer, engine):
        with self.subTest(program=program):
            both = self.measure(program, "-c", kind, "-s", str(size), sizes=[size], layer=layer, SOFTVERBS_ENGINE=engine)
            for side in both:
                self.assertEqual({qp["type"] for qp in side.stats["qps"]}, {kind})

    def test_datagrams(self):
        self.check("ib_send_bw", "UD", 2048, "roce", "thread")
        self.check("ib_send_lat", "UD", 2, "ib", "inline")

    def test_connections(self):
        self.check("ib_write_bw", "UC", 65536, "roce", "thread")
        self.check("ib_write_lat", "UC", 2, "ib", "inline")
        self.check("ib_send_bw", "UC", 65536, "ib", "thread")


class Engines(Perftest):
    PROGRAMS = [f"ib_{kind}_{what}" for kind in ("write", "read", "send", "atomic") for what in ("bw", "lat")]

    def test_inline(self):
        for program in self.PROGRAMS:
            with self.subTest(program=program):
                self.measure(program, SOFTVERBS_ENGINE="inline")

    def test_all_symbols_bound_at_start(self):
        for program in self.PROGRAMS:
            with self.subTest(program=program):
                self.measure(program, LD_BIND_NOW="1")


class AllSizes(Perftest):
    def test_ib_write_bw(self):
        self.measure("ib_write_bw", "-a", sizes=ALL_SIZES, iterations=10)

    def test_ib_send_bw(self):
        self.measure("ib_send_bw", "-a", sizes=ALL_SIZES, iterations=10)

    def test_ib_read_bw(self):
        self.measure("ib_read_bw", "-a", sizes=ALL_SIZES, iterations=10)

    # Without -a: the latency programs calibrate against the processor's clock for each size, which takes longer than
    # the measurement.
    def test_latencies(self):
        for program in ("ib_write_lat", "ib_send_lat"):
            for size in (4096, 1 << 20):
                self.measure(program, "-s", str(size), sizes=[size])


class Options(Perftest):
    def test_several_qps(self):
        for program in ("ib_write_bw", "ib_read_bw", "ib_send_bw", "ib_atomic_bw"):
            with self.subTest(program=program):
                _, client = self.measure(program, qps=4)
                shares = [qp["doorbells"] for qp in client.stats["qps"]]
                self.assertEqual(shares, [ITERATIONS] * 4)

    def test_both_directions(self):
        for program in ("ib_write_bw", "ib_read_bw", "ib_send_bw", "ib_atomic_bw"):
            with self.subTest(program=program):
                self.measure(program, "-b")

    # Without ib_send_lat: it uses one channel for both of its CQs, so it can take the event of the received response
    # for the event of its own send completion, and then finds no send completion. ib_write_* does not support events.
    def test_events(self):
        for program in ("ib_read_bw", "ib_read_lat", "ib_send_bw", "ib_atomic_bw", "ib_atomic_lat"):
            for engine in ("thread", "inline"):
                with self.subTest(program=program, engine=engine):
                    _, client = self.measure(program, "-e", SOFTVERBS_ENGINE=engine)
                    self.assertGreater(client.stats["calls"]["ibv_get_cq_event"], 0)

    def test_inline(self):
        for program in ("ib_write_bw", "ib_write_lat", "ib_send_bw", "ib_send_lat"):
            with self.subTest(program=program):
                _, client = self.measure(program, "-I", "64", "-s", "48", sizes=[48], **KNOWN_PART)
                self.assertEqual(client.stats["inline_bytes"], client.stats["bytes"])

    def test_both_post_interfaces(self):
        for program in ("ib_write_bw", "ib_send_bw", "ib_atomic_bw"):
            with self.subTest(program=program):
                self.measure(program, posts="ibv_wr_complete", **KNOWN_PART)
                self.measure(program, "--use_old_post_send", posts="ibv_post_send", **KNOWN_PART)

    def test_compare_and_swap(self):
        for program in ("ib_atomic_bw", "ib_atomic_lat"):
            self.measure(program, "-A", "CMP_AND_SWAP")

    def test_shared_receive_queue(self):
        server, _ = self.measure("ib_send_bw", "--use-srq", qps=3)
        self.assertEqual(server.stats["objects"]["srq"]["created"], 1)

    def test_lists_of_requests(self):
        for old in ([], ["--use_old_post_send"]):
            _, client = self.measure("ib_write_bw", "-l", "8", *old, **KNOWN_PART)
            self.assertEqual(client.stats["doorbells"], ITERATIONS // 8)

    def test_small_path_mtu(self):
        self.measure("ib_send_bw", "-m", "256", "-s", "100000", sizes=[100000])

    def test_limits_are_enforced(self):
        for settings, options, message in (
            ({"SOFTVERBS_MAX_QP": "2"}, ["-q", "3"], "QP"),
            ({"SOFTVERBS_MAX_MR": "0"}, [], "MR"),
            ({"SOFTVERBS_MAX_INLINE": "16", **KNOWN_PART}, ["-I", "64", "-s", "32"], "QP"),
        ):
            with self.subTest(settings=settings):
                for side in self.run_both("ib_write_bw", "-d", "softverbs0", *ROCE, *options, **settings):
                    self.assertEqual(side.status, 1, side)
                    self.assertRegex(side.output, rf"(?i)(couldn't|unable to|failed to) .*\b{message}\b")


if __name__ == "__main__":
    main()
