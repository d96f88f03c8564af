"""The programs that the suites run in a machine, and checks of their output."""

import os
import re

from machine import Failure
from report import CaseFailure, expect

COUNTERS = "/sys/class/infiniband/{device}/ports/1/hw_counters"
# A program that polls without a pause takes the processor from the kernel's thread that processes the packets.
PAUSE = ["--pause", "100"]
LOW_PRIORITY = ["nice", "-n", "19"]  # for programs without the option --pause


class Programs:
    def __init__(self, build):
        self.plugin = os.path.join(build, "plugin/libnccl-net-verbatim.so")
        self.perf = os.path.join(build, "tools/verbatim-perf/verbatim-perf")
        self.eplb = os.path.join(build, "tools/verbatim-eplb/verbatim-eplb")
        self.kv = os.path.join(build, "tools/verbatim-kv/verbatim-kv")
        self.conformance = os.path.join(build, "tests/bin/conformance")
        self.lifecycle = os.path.join(build, "tests/bin/lifecycle")
        self.rma_ranks = os.path.join(build, "tests/bin/rma_ranks")
        self.rma_lanes = os.path.join(build, "tests/bin/rma_lanes")
        self.mutate = os.path.join(build, "tests/support/mutate/libnccl-net-mutate.so")
        self.peer = os.path.join(build, "tests/bin/roce-peer")
        self.counted_verbs = os.path.join(build, "tests/support/counted_verbs/libcounted-verbs.so")

    def require(self):
        missing = [path for path in vars(self).values() if not os.path.exists(path)]
        if missing:
            raise Failure(f"not built: {', '.join(missing)}")

    def run_eplb(self, *options):
        options = ("--mode", "direct", "--preset", "tiny-mixed", "--ranks", 2, "--layers", 3, "--timeout", 200, *options)
        return [*LOW_PRIORITY, self.eplb, "--plugin", self.plugin, *map(str, options)]

    def run_kv(self, *options, plugin=None):
        options = ("--ranks", 2, "--requests", 4, "--tokens", 256, "--scale", 60, "--timeout", 200, *options)
        options += ("--request-timeout-ms", 100000, "--stage-timeout-ms", 100000)
        return [*LOW_PRIORITY, self.kv, "--plugin", plugin or self.plugin, *map(str, options)]

    def run_perf(self, operation, *options, plugin=None):
        return [self.perf, operation, "--plugin", plugin or self.plugin, *PAUSE, *map(str, options)]


def counters(machine, device):
    """The kernel's hardware counters of a device: name to value."""
    job = machine.run(f"cd {COUNTERS.format(device=device)} && grep . *")
    expect(job.status == 0, f"reading the counters of {device} failed on {machine.name}: {job.output()}")
    return {name: int(value) for name, value in re.findall(r"^(\w+):(\d+)$", job.output(), re.M)}


def changes(before, after):
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


def succeed(job):
    """Waits for the end of a command that must not fail; returns its output."""
    status = job.wait()
    if status != 0:
        meaning = f"did not end within {job.limit} s" if status in (124, 137) else f"exit status {status}"
        raise CaseFailure(f"on {job.machine.name}: {meaning}\n{job.output()}", job.ended_at)
    return job.output()


def expect_every_byte_right(output):
    expect(re.search(r"^# Wrong elements +: 0 OK$", output, re.M), output)


def wait_until_listening(machine, port, limit=60):
    condition = f"grep -q ':{port:04X} .* 0A ' /proc/net/tcp /proc/net/tcp6"
    job = machine.run(f"for i in $(seq {limit * 10}); do {condition} && exit 0; sleep 0.1; done; exit 1", limit + 5)
    expect(job.status == 0, f"no process listens at port {port} of {machine.name}")


def report_googletest(report, title, machine, arguments, settings, min_packets):
    """Runs a GoogleTest program and reports each of its cases, and as one more each whether the program ran to its end and has
    sent so many packets."""

    def run():
        before = counters(machine, "rxe0")["sent_pkts"]
        job = machine.run(arguments, 1200, settings=settings)
        return job, counters(machine, "rxe0")["sent_pkts"] - before

    ran = report.attempt(title, run)
    if ran is None:
        return
    job, sent = ran
    output = job.output()
    failures = 0
    details = []
    for line in output.splitlines():
        found = re.match(r"\[ +(OK|FAILED|SKIPPED|RUN) +\] ([^ ,]+)(?:, where .*?)?(?: \((\d+) ms\))?$", line)
        if not found:
            details.append(line)
            continue
        result, name, milliseconds = found.groups()
        if result == "RUN":
            details = []
        elif milliseconds is not None:
            failures += result == "FAILED"
            skipped = (details[-1:] or [""])[0] if result == "SKIPPED" else None
            took = f"{title}: {name} ({int(milliseconds) / 1000:.1f} s)"
            report.result(result != "FAILED", took, "\n".join(details) if result == "FAILED" else "", skipped)
    ran = re.search(r"^\[==========\] (\d+) tests? from .* ran\.", output, re.M)
    whole = ran and int(ran[1]) > 0 and (job.status == 0 or failures)
    report.result(
        bool(whole),
        f"{title}: {ran[1] if ran else 'not all'} cases ran ({job.seconds:.0f} s)",
        "" if whole else f"exit status {job.status}\n" + "\n".join(output.splitlines()[-40:]),
    )
    report.result(sent > min_packets, f"{title}: over rxe0", f"{sent} packets")
