"""The suite for one machine: every table over one rxe device, whose packets the kernel loops back."""

import bandwidth
from programs import (
    PAUSE,
    changes,
    counters,
    expect_every_byte_right,
    report_googletest,
    succeed,
)
from report import expect

OPERATIONS = ("all_reduce", "all_gather", "alltoall", "sendrecv", "stream", "pingpong", "grouped")
LARGEST = 16 * 2**20
SETTINGS = {"VERBATIM_SOCKET_IFNAME": "lo", "VERBATIM_CLOSE_TIMEOUT_MS": "500"}
# softverbs' own library lies beside the one that counts, which must find the installed one instead.
SYSTEM_LIBRARIES = "/usr/lib/x86_64-linux-gnu:/usr/lib64:/lib/x86_64-linux-gnu"
# Those need a fault of softverbs, or gigabytes.
NOT_HERE = "*LastAcknowledgement*:*Sizes*:*Scale*"


def packets(machine):
    return counters(machine, "rxe0")["sent_pkts"]


def check_device(report, machine, programs):
    with report.case("device: the kernel's, by rdma-core's own library"):
        output = succeed(machine.start(["ibv_devinfo", "-d", "rxe0"]))
        expect("PORT_ACTIVE" in output, output)
        before = counters(machine, "rxe0")
        output = succeed(machine.start(programs.run_perf("stream", "-b", "1M", "-e", "1M", "-n", 2, "-w", 0, "--verbose")))
        expect("verbatim_rxe0" in output and "softverbs" not in output, output)
        moved = changes(before, counters(machine, "rxe0"))
        report.note(f"3 messages of 1 MiB: {moved}")
        expect(moved["sent_pkts"] >= 3 * 1024, f"too few packets for 3 MiB and an MTU of 1024: {moved}")


def check_operations(report, machine, programs):
    for operation in OPERATIONS:
        with report.case(f"verbatim-perf: {operation}, every byte right"):
            before = packets(machine)
            options = ("-b", 8, "-e", "512K", "-f", 16, "-n", 4, "-w", 1, "-c", 1, "--timeout", 50)
            output = succeed(machine.start(programs.run_perf(operation, *options)))
            expect_every_byte_right(output)
            expect(packets(machine) - before > 512, "hardly a packet went through rxe0")
    with report.case("verbatim-perf: a flipped bit is found"):
        settings = {"MUTATE_PLUGIN": programs.plugin, "MUTATE_MODE": "flip-byte"}
        options = ("-b", "4K", "-e", "4K", "-n", 2, "-w", 0)
        job = machine.run(programs.run_perf("sendrecv", *options, plugin=programs.mutate), settings=settings)
        expect(job.status == 1 and "FAILED" in job.output(), f"exit status {job.status}\n{job.output()}")


def check_conformance(report, machine, programs):
    before = packets(machine)
    arguments = [programs.conformance, *PAUSE, "--plugin", programs.plugin, "--largest", str(LARGEST - 1)]
    report_googletest(report, "conformance", machine.start(arguments, 280, settings=SETTINGS))
    with report.case("conformance: over rxe0"):
        moved = packets(machine) - before
        report.note(f"{moved} packets")
        expect(moved > 2 * LARGEST / 1024, f"only {moved} packets went through rxe0")


def check_lifecycle(report, machine, programs):
    settings = {
        **SETTINGS,
        "VERBATIM_VERBS_LIBRARY": programs.counted_verbs,
        "LD_LIBRARY_PATH": SYSTEM_LIBRARIES,
        "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1",
    }
    before = packets(machine)
    arguments = [programs.lifecycle, *PAUSE, "--plugin", programs.plugin, "--shorten", "50"]
    arguments += [f"--gtest_filter=*Rounds*/v8:*/v12:-{NOT_HERE}"]
    report_googletest(report, "lifecycle", machine.start(arguments, 150, settings=settings))
    with report.case("lifecycle: over rxe0"):
        expect(packets(machine) - before > 1000, "hardly a packet went through rxe0")


PARTS = {
    "device": check_device,
    "operations": check_operations,
    "conformance": check_conformance,
    "lifecycle": check_lifecycle,
    "bandwidth": bandwidth.compare,
}


def check(report, machines, programs, parts):
    for part in parts:
        PARTS[part](report, machines[0], programs)
