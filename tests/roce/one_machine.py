"""The suite for one machine: every table over one rxe device. The kernel loops its packets back."""

import re

import bandwidth
import rma
from bandwidth import MTU
from programs import (
    PAUSE,
    changes,
    counters,
    expect_every_byte_right,
    report_googletest,
    succeed,
)
from report import expect

OPERATIONS = ("all_reduce", "sendrecv", "grouped")
OTHER_OPERATIONS = ("all_gather", "alltoall", "stream", "pingpong")
LARGEST = 16 * 2**20
SETTINGS = {"VERBATIM_SOCKET_IFNAME": "lo", "VERBATIM_CLOSE_TIMEOUT_MS": "500"}
# libcounted-verbs.so must load the installed libibverbs, not softverbs' library.
SYSTEM_LIBRARIES = "/usr/lib/x86_64-linux-gnu:/usr/lib64:/lib/x86_64-linux-gnu"
# These cases need a fault or a limit of softverbs or gigabytes of memory, or compare times.
EXCLUDED = "*LastAck*:*FullDevice*:*SlowDevice*:*Sizes*:*Scale*:*PoolSetUp*:*FailedInit*"


def packets(machine):
    return counters(machine, "rxe0")["sent_pkts"]


def check_device(report, machine, programs):
    @report.case("device: the kernel's device through rdma-core's own library")
    def _():
        output = succeed(machine.start(["ibv_devinfo", "-d", "rxe0"]))
        expect("PORT_ACTIVE" in output and re.search(rf"active_mtu:\s+{MTU} ", output), output)
        before = counters(machine, "rxe0")
        output = succeed(machine.start(programs.run_perf("stream", "-b", "1M", "-e", "1M", "-n", 2, "-w", 0, "--plugin-log")))
        expect("rxe0" in output and "softverbs" not in output, output)
        changed = changes(before, counters(machine, "rxe0"))
        report.note(f"3 messages of 1 MiB: {changed}")
        min_packets = 3 * 2**20 // MTU
        expect(changed["sent_pkts"] >= min_packets, f"too few packets for 3 MiB and an MTU of {MTU}: {changed}")


def run_operations(report, machine, programs, operations):
    for operation in operations:

        @report.case(f"verbatim-perf: {operation}, every byte right")
        def _():
            before = packets(machine)
            options = ("-b", 8, "-e", "512K", "-f", 16, "-n", 4, "-w", 1, "-c", 1, "--timeout", 200)
            output = succeed(machine.start(programs.run_perf(operation, *options)))
            expect_every_byte_right(output)
            expect(packets(machine) - before > 256, "too few packets went through rxe0")


def check_other_operations(report, machine, programs):
    run_operations(report, machine, programs, OTHER_OPERATIONS)


def check_operations(report, machine, programs):
    run_operations(report, machine, programs, OPERATIONS)

    @report.case("verbatim-perf: a flipped bit is found")
    def _():
        settings = {"MUTATE_PLUGIN": programs.plugin, "MUTATE_MODE": "flip-byte"}
        options = ("-b", "4K", "-e", "4K", "-n", 2, "-w", 0)
        job = machine.run(programs.run_perf("sendrecv", *options, plugin=programs.mutate), settings=settings)
        expect(job.status == 1 and "FAILED" in job.output(), f"exit status {job.status}\n{job.output()}")


def expect_mutation_found(job, pattern):
    """The comparison of bytes has found the mutation: exit status 1 and a line that matches."""
    status = job.wait()
    expect(status == 1 and re.search(pattern, job.output(), re.M), f"exit status {status}\n{job.output()}")


def check_workloads(report, machine, programs):
    """The direct modes of both tools, with their own checks: bytes, and the plugin's counters compared with the plan."""
    wrong = r"^# Wrong bytes +: [1-9]"

    @report.case("verbatim-eplb: direct, every byte right")
    def _():
        before = packets(machine)
        output = succeed(machine.start(programs.run_eplb(), settings=SETTINGS))
        expect(re.search(r"^# Wrong bytes +: 0 OK$", output, re.M), output)
        expect(re.search(r"^# Plugin's counters +: equal$", output, re.M), output)
        expect(packets(machine) - before > 100, "too few packets went through rxe0")

    @report.case("verbatim-eplb: a flipped bit is found")
    def _():
        expect_mutation_found(machine.start(programs.run_eplb("--inject", "flip-byte"), settings=SETTINGS), wrong)

    @report.case("verbatim-kv: both families, every byte right")
    def _():
        before = packets(machine)
        output = succeed(machine.start(programs.run_kv(), settings=SETTINGS))
        expect(re.search(r"^# Wrong bytes : 0 OK$", output, re.M), output)
        for family in ("kv", "lf"):
            expect(re.search(rf"^ +{family} +4 ", output, re.M), f"{family} does not have its four requests:\n{output}")
        expect(packets(machine) - before > 700, "too few packets went through rxe0")

    @report.case("verbatim-kv: a flipped bit is found")
    def _():
        settings = {**SETTINGS, "MUTATE_PLUGIN": programs.plugin, "MUTATE_MODE": "flip-byte"}
        expect_mutation_found(machine.start(programs.run_kv(plugin=programs.mutate), settings=settings), wrong)


# All cases of the newest table, except those that depend on settings or on invalid connections, not on the device; of the
# other tables only the cases of suite Tables.
NEWEST_TABLE = "*/v12:Net/Tables.*-*Setting*:*InvalidConnections*:*Merge*"


def check_conformance(report, machine, programs, cases=NEWEST_TABLE):
    arguments = [programs.conformance, *PAUSE, "--plugin", programs.plugin, "--largest", str(LARGEST - 1), "--shorten", "5"]
    arguments += [f"--gtest_filter={cases}"]
    report_googletest(report, "conformance", machine, arguments, SETTINGS, 2 * LARGEST / MTU)


def check_conformance_of_all_tables(report, machine, programs):
    check_conformance(report, machine, programs, "*")


def check_lifecycle(report, machine, programs):
    settings = {
        **SETTINGS,
        "VERBATIM_VERBS_LIBRARY": programs.counted_verbs,
        "LD_LIBRARY_PATH": SYSTEM_LIBRARIES,
        "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1",
    }
    arguments = [programs.lifecycle, *PAUSE, "--plugin", programs.plugin, "--shorten", "100"]
    arguments += [f"--gtest_filter=*/v12:-{EXCLUDED}"]
    report_googletest(report, "lifecycle", machine, arguments, settings, 1000)


MINUTES = 3  # expected on two idle processors; printed next to the time taken, not enforced
PARTS = {
    "device": check_device,
    "operations": check_operations,
    "workloads": check_workloads,
    "conformance": check_conformance,
    "lifecycle": check_lifecycle,
    "rma": rma.check,
    "other-operations": check_other_operations,
    "all-tables": check_conformance_of_all_tables,
    "bandwidth": bandwidth.compare,
}
FULL_PARTS = ("workloads", "other-operations", "all-tables", "bandwidth")  # run only with --part or --full


def check(report, machines, programs, parts):
    for part in parts:
        with report.timed(part, machines):
            PARTS[part](report, machines[0], programs)
