"""verbatim-perf beside ib_write_bw: the same device, boot, size and depth."""

import re
from statistics import median

from programs import LOW_PRIORITY, changes, counters, succeed, wait_until_listening
from report import expect

DEPTH = 8  # messages under way in each direction
ROUNDS = 3  # of the two, one after the other; the other one begins each time
ATTEMPTS = 4
FLOOR, WANTED = 0.7, 0.9
# Counted when a packet is sent once more: rxe does so when its peer has not run for too long.
RETRANSMISSION_COUNTERS = ("duplicate_request", "rcvd_seq_err", "completer_retry_err", "out_of_seq_request", "rcvd_rnr_err")
MTU = 4096  # what rxe makes of the interface's
ADDRESS = "10.77.0.1"
PORT = 18515
KIB = 1024
SIZES = {64 * KIB: 2048, 1024 * KIB: 96}  # and how many messages, in each direction
ITERATIONS = 4  # of sendrecv, of which one ends before the next begins, for so many messages together


def ib_write_bw(report, machine, size, both_ways):
    """MiB/s, of both directions together. Neither of the two warms up, so that their packets can be compared."""
    arguments = [*LOW_PRIORITY, "ib_write_bw", "-d", "rxe0", "-x", "1", "-p", str(PORT), "-s", str(size)]
    arguments += ["-n", str(SIZES[size]), "-t", str(DEPTH), *(["-b"] if both_ways else [])]
    for _ in range(ATTEMPTS):
        server = machine.start(arguments)
        wait_until_listening(machine, PORT)
        client = machine.start([*arguments, ADDRESS])
        statuses = [client.wait(), server.wait()]
        # On a busy host it cannot measure the clock of its processor, and gives up.
        if "Correlation coefficient" not in client.output() + server.output() or statuses == [0, 0]:
            break
        report.note("ib_write_bw could not measure its processor's clock: once more")
    output = succeed(client)
    succeed(server)
    found = re.search(rf"^ *{size} +\d+ +[\d.]+ +([\d.]+)", output, re.M)
    expect(found, f"no figure of ib_write_bw:\n{output}")
    return float(found[1])


def verbatim(machine, programs, size, both_ways):
    """MiB/s, of both directions together. An iteration of stream is a message, of sendrecv many."""
    count = SIZES[size]
    operation, iterations = ("sendrecv", ITERATIONS) if both_ways else ("stream", count)
    total = count * size // iterations
    options = ("-b", total, "-e", total, "-n", iterations, "-w", 0, "-c", 0, "--depth", DEPTH)
    # It polls as the other does, without a pause and with as little right to a processor.
    command = [*LOW_PRIORITY, programs.perf, operation, "--plugin", programs.plugin, *map(str, options)]
    output = succeed(machine.start([*command, "--chunk", str(size), "--timeout", "200"]))
    found = re.search(rf"^ *{total} +\d+ +\w+ +([\d.]+)", output, re.M)
    expect(found, f"no figure of verbatim-perf:\n{output}")
    return total * (2 if both_ways else 1) / float(found[1]) * 1e6 / 2**20


class Side:
    """What one of the two needed, turn by turn."""

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
    """The rates are said and not judged: whoever has to hand work from one emulated processor to the other waits for the
    host to run both, and it may have other work. The packets are the same on every host, but for those sent again."""
    for both_ways in (False, True):
        for size, count in SIZES.items():
            ours = Side("sendrecv" if both_ways else "stream", lambda: verbatim(machine, programs, size, both_ways))
            theirs = Side("ib_write_bw" + " -b" * both_ways, lambda: ib_write_bw(report, machine, size, both_ways))
            with report.case(f"bandwidth: {ours.name} beside {theirs.name} at {size // KIB} KiB, and its packets"):
                ran, waited = machine.processor_s(), machine.runnable_wait_s()
                for turn in range(ROUNDS):
                    for side in (theirs, ours) if turn % 2 == 0 else (ours, theirs):
                        side.run_round(machine)
                ran, waited = machine.processor_s() - ran, machine.runnable_wait_s() - waited
                ratios = [one / other for one, other in zip(ours.rates, theirs.rates)]
                report.note(
                    f"{ours.name:8} {size // KIB:5} KiB: {median(ours.rates):6.2f} MiB/s, {theirs.name} "
                    f"{median(theirs.rates):6.2f} MiB/s, ratio {median(ratios):.2f} (floor {FLOOR}, {WANTED} wanted), "
                    f"medians of {ROUNDS} turns; ratios {' '.join(f'{ratio:.2f}' for ratio in ratios)}; the host let the "
                    f"machine wait for {100 * waited / (waited + ran):.0f} % of the time"
                )
                messages = count * (2 if both_ways else 1)
                for side in (ours, theirs):
                    each = [f"{packets / messages:.1f}" for packets in side.packets]
                    report.note(f"packets a message, {side.name}: {' '.join(each) or 'in every turn some were sent again'}")
                data = size / MTU * messages
                expect(not ours.packets or data >= FLOOR * min(ours.packets), f"{ours.packets} packets for {data:.0f} of data")
