"""verbatim-perf compared with ib_write_bw: same device, boot, message size and depth."""

import re
from statistics import median

from programs import LOW_PRIORITY, changes, counters, succeed, wait_until_listening
from report import expect

DEPTH = 8  # outstanding messages in each direction
ROUNDS = 3  # each runs both programs; they alternate in running first
ATTEMPTS = 4
FLOOR, WANTED = 0.7, 0.9
# Counters of retransmissions, which rxe makes when its peer has not run for too long.
RETRANSMISSION_COUNTERS = ("duplicate_request", "rcvd_seq_err", "completer_retry_err", "out_of_seq_request", "rcvd_rnr_err")
MTU = 4096  # rxe derives it from the MTU of the interface
ADDRESS = "10.77.0.1"
PORT = 18515
KIB = 1024
SIZES = {64 * KIB: 2048, 1024 * KIB: 96}  # message size: messages in each direction
ITERATIONS = 4  # of sendrecv: an iteration ends before the next begins and has SIZES[size] / 4 messages


def ib_write_bw(report, machine, size, both_ways):
    """MiB/s, the sum of both directions. Neither program has warm-up iterations, so that their packets can be compared."""
    arguments = [*LOW_PRIORITY, "ib_write_bw", "-d", "rxe0", "-x", "1", "-p", str(PORT), "-s", str(size)]
    arguments += ["-n", str(SIZES[size]), "-t", str(DEPTH), *(["-b"] if both_ways else [])]
    for _ in range(ATTEMPTS):
        server = machine.start(arguments)
        wait_until_listening(machine, PORT)
        client = machine.start([*arguments, ADDRESS])
        statuses = [client.wait(), server.wait()]
        # On a busy host ib_write_bw cannot measure the frequency of its processor and stops.
        if "Correlation coefficient" not in client.output() + server.output() or statuses == [0, 0]:
            break
        report.note("ib_write_bw could not measure its processor's frequency: another attempt")
    output = succeed(client)
    succeed(server)
    found = re.search(rf"^ *{size} +\d+ +[\d.]+ +([\d.]+)", output, re.M)
    expect(found, f"no result line of ib_write_bw:\n{output}")
    return float(found[1])


def verbatim(machine, programs, size, both_ways):
    """MiB/s, the sum of both directions. An iteration of stream is one message, an iteration of sendrecv many."""
    count = SIZES[size]
    operation, iterations = ("sendrecv", ITERATIONS) if both_ways else ("stream", count)
    total = count * size // iterations
    options = ("-b", total, "-e", total, "-n", iterations, "-w", 0, "-c", 0, "--depth", DEPTH)
    # Like ib_write_bw it polls without a pause and at the lowest priority.
    command = [*LOW_PRIORITY, programs.perf, operation, "--plugin", programs.plugin, *map(str, options)]
    output = succeed(machine.start([*command, "--chunk", str(size), "--timeout", "200"]))
    found = re.search(rf"^ *{total} +\d+ +\w+ +([\d.]+)", output, re.M)
    expect(found, f"no result line of verbatim-perf:\n{output}")
    return total * (2 if both_ways else 1) / float(found[1]) * 1e6 / 2**20


class Side:
    """The results of one of the two programs, round by round."""

    def __init__(self, name, measure):
        self.name, self.measure = name, measure
        self.rates, self.packets = [], []

    def run_round(self, machine):
        before = counters(machine, "rxe0")
        self.rates.append(self.measure())
        moved = changes(before, counters(machine, "rxe0"))
        if not any(moved.get(name) for name in RETRANSMISSION_COUNTERS):
            self.packets.append(moved["sent_pkts"])


def compare(report, machine, programs):
    """The rates are printed and not checked: a program that passes work from one emulated processor to the other waits until
    the host runs both, and the host may be busy. The number of packets is the same on every host, except retransmissions."""
    for both_ways in (False, True):
        for size, count in SIZES.items():
            our_name, their_name = "sendrecv" if both_ways else "stream", "ib_write_bw" + " -b" * both_ways

            @report.case(f"bandwidth: {our_name} compared with {their_name} at {size // KIB} KiB, and its packets")
            def _():
                ours = Side(our_name, lambda: verbatim(machine, programs, size, both_ways))
                theirs = Side(their_name, lambda: ib_write_bw(report, machine, size, both_ways))
                ran, waited = machine.processor_s(), machine.runnable_wait_s()
                for number in range(ROUNDS):
                    for side in (theirs, ours) if number % 2 == 0 else (ours, theirs):
                        side.run_round(machine)
                ran, waited = machine.processor_s() - ran, machine.runnable_wait_s() - waited
                ratios = [one / other for one, other in zip(ours.rates, theirs.rates)]
                report.note(
                    f"{ours.name:8} {size // KIB:5} KiB: {median(ours.rates):6.2f} MiB/s, {theirs.name} "
                    f"{median(theirs.rates):6.2f} MiB/s, ratio {median(ratios):.2f} (floor {FLOOR}, {WANTED} wanted), "
                    f"medians of {ROUNDS} rounds; ratios {' '.join(f'{ratio:.2f}' for ratio in ratios)}; the machine was "
                    f"runnable but did not run for {100 * waited / (waited + ran):.0f} % of the time"
                )
                messages = count * (2 if both_ways else 1)
                for side in (ours, theirs):
                    each = [f"{packets / messages:.1f}" for packets in side.packets]
                    report.note(f"packets per message, {side.name}: {' '.join(each) or 'every round had retransmissions'}")
                data = size / MTU * messages
                expect(not ours.packets or data >= FLOOR * min(ours.packets), f"{ours.packets} packets, of which {data:.0f} carry data")
