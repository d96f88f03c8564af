"""verbatim-perf beside ib_write_bw: the same device, boot, size and depth."""

import re
from statistics import median

from programs import YIELDING, succeed, wait_until_listening
from report import expect

DEPTH = 8  # messages under way in each direction
TURNS = 3  # of the two, one after the other, each first as often; the median counts: the host has other work
MORE_TURNS = 6  # when that is below the floor
ATTEMPTS = 4
FLOOR, WANTED = 0.7, 0.9
ADDRESS = "10.77.0.1"
PORT = 18515
KIB = 1024
SIZES = {64 * KIB: 192, 1024 * KIB: 16}  # and how many messages, in each direction


def ib_write_bw(machine, size, both_ways):
    """MiB/s, of both directions together."""
    arguments = [*YIELDING, "ib_write_bw", "-d", "rxe0", "-x", "1", "-p", str(PORT), "-s", str(size)]
    arguments += ["-n", str(SIZES[size]), "-t", str(DEPTH), "--perform_warm_up", *(["-b"] if both_ways else [])]
    for _ in range(ATTEMPTS):
        server = machine.start(arguments, 60)
        wait_until_listening(machine, PORT)
        client = machine.start([*arguments, ADDRESS], 60)
        statuses = [client.wait(), server.wait()]
        # On a busy host it cannot measure the clock of its processor, and gives up.
        if "Correlation coefficient" not in client.output() + server.output() or statuses == [0, 0]:
            break
    output = succeed(client)
    succeed(server)
    found = re.search(rf"^ *{size} +\d+ +[\d.]+ +([\d.]+)", output, re.M)
    expect(found, f"no figure of ib_write_bw:\n{output}")
    return float(found[1])


def verbatim(machine, programs, size, both_ways):
    """MiB/s, of both directions together. An iteration of stream is a message; those of sendrecv, of which one ends
    before the next begins, are as many messages."""
    count = SIZES[size]
    operation, total, iterations = ("sendrecv", count * size, 1) if both_ways else ("stream", size, count)
    options = ("-b", total, "-e", total, "-n", iterations, "-w", 1 if both_ways else 5, "-c", 0, "--depth", DEPTH)
    output = succeed(machine.start(programs.run_perf(operation, *options, "--chunk", size, "--timeout", 50), 60))
    found = re.search(rf"^ *{total} +\d+ +\w+ +([\d.]+)", output, re.M)
    expect(found, f"no figure of verbatim-perf:\n{output}")
    return total * (2 if both_ways else 1) / float(found[1]) * 1e6 / 2**20


def compare(report, machine, programs):
    for both_ways in (False, True):
        for size in SIZES:
            names = ("sendrecv", "ib_write_bw -b") if both_ways else ("stream", "ib_write_bw")
            with report.case(f"bandwidth: {names[0]} reaches {FLOOR} of {names[1]} at {size // KIB} KiB"):
                ours, theirs, ratios = [], [], []
                while len(ratios) < TURNS or (median(ratios) < FLOOR and len(ratios) < TURNS + MORE_TURNS):
                    runs = [
                        lambda: theirs.append(ib_write_bw(machine, size, both_ways)),
                        lambda: ours.append(verbatim(machine, programs, size, both_ways)),
                    ]
                    for run in runs if len(ratios) % 2 == 0 else reversed(runs):
                        run()
                    ratios.append(ours[-1] / theirs[-1])
                report.note(
                    f"{names[0]:8} {size // KIB:5} KiB: {median(ours):6.2f} MiB/s, {names[1]} {median(theirs):6.2f} MiB/s, "
                    f"ratio {median(ratios):.2f} ({WANTED} wanted), medians of {len(ratios)} turns; "
                    f"ratios {' '.join(f'{ratio:.2f}' for ratio in ratios)}"
                )
                expect(median(ratios) >= FLOOR, f"turns: {ours} beside {theirs}")
