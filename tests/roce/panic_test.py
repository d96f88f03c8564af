#!/usr/bin/env python3
#: test roce-panic suite=roce sanitizer=none
"""What a suite does when the kernel of a virtual machine panics, or a machine fails in another way. In place of QEMU a shell
reads the commands of a guest."""

import contextlib
import io
import shlex
import signal
import sys
import tempfile
import unittest
from unittest import mock

sys.dont_write_bytecode = True
import topology  # noqa: E402
from machine import LIMIT_S, Failure, Machine, function_of_panic  # noqa: E402
from programs import succeed  # noqa: E402
from report import Report, expect  # noqa: E402

# As Linux 6.1 prints it: an exception in an interrupt, which has interrupted another function of the kernel.
PAGE_FAULT = """\
[   98.412233] BUG: kernel NULL pointer dereference, address: 0000000000000040
[   98.412874] #PF: supervisor write access in kernel mode
[   98.413301] #PF: error_code(0x0002) - not-present page
[   98.413730] PGD 0 P4D 0
[   98.414012] Oops: 0002 [#1] PREEMPT SMP NOPTI
[   98.414419] CPU: 0 PID: 913 Comm: ip Not tainted 6.1.0-40-amd64 #1  Debian 6.1.153-1
[   98.414952] Hardware name: QEMU Standard PC (i440FX + PIIX, 1996), BIOS 1.16.2-debian-1.16.2-1 04/01/2014
[   98.415711] RIP: 0010:rxe_skb_tx_dtor+0x1b/0x80 [rdma_rxe]
[   98.416164] Code: 00 00 0f 1f 44 00 00 55 53 48 8b 47 18 48 8b a8 88 02 00 00 b8 ff ff ff ff <f0> 0f c1 85 e0 02 00 00
[   98.417208] RSP: 0018:ffffb0c0c0003e58 EFLAGS: 00000246
[   98.417655] RAX: 00000000ffffffff RBX: ffff9a0a05b3e000 RCX: 0000000000000000
[   98.418266] Call Trace:
[   98.418492]  <IRQ>
[   98.418691]  skb_release_head_state+0x3e/0x90
[   98.419073]  napi_consume_skb+0x49/0x100
[   98.419421]  free_old_xmit_skbs+0x5a/0xd0 [virtio_net]
[   98.419870]  virtnet_poll_tx+0x7c/0x150 [virtio_net]
[   98.420303]  __napi_poll+0x28/0x160
[   98.420631]  __do_softirq+0xc6/0x2a8
[   98.420953]  </IRQ>
[   98.421154]  <TASK>
[   98.421357]  asm_common_interrupt+0x22/0x40
[   98.421726] RIP: 0010:pv_native_safe_halt+0xb/0x10
[   98.422145]  </TASK>
[   98.422354] Modules linked in: rdma_rxe ib_uverbs ib_core virtio_net
[   98.422889] ---[ end trace 0000000000000000 ]---
[   98.423301] RIP: 0010:rxe_skb_tx_dtor+0x1b/0x80 [rdma_rxe]
[   98.423780] Kernel panic - not syncing: Fatal exception in interrupt
[   98.424361] Kernel Offset: 0x2e400000 from 0xffffffff81000000 (relocation range: 0xffffffff80000000-0xffffffffbfffffff)
"""
# In the call of a process, which alone would be stopped without oops=panic.
PROTECTION_FAULT = """\
[   41.000100] general protection fault, probably for non-canonical address 0xdead000000000100: 0000 [#1] PREEMPT SMP NOPTI
[   41.000200] CPU: 0 PID: 402 Comm: roce-peer Not tainted 6.1.0-40-amd64 #1  Debian 6.1.153-1
[   41.000300] RIP: 0010:__rxe_cleanup.part.0+0x42/0x150 [rdma_rxe]
[   41.000400] Call Trace:
[   41.000500]  <TASK>
[   41.000600]  rxe_destroy_qp+0x51/0x70 [rdma_rxe]
[   41.000700] RIP: 0033:0x7f3b2d1b5aab
[   41.000800]  </TASK>
[   41.000900] ---[ end trace 0000000000000000 ]---
[   41.001000] Kernel panic - not syncing: Fatal exception
"""
BUG = """\
[   55.000100] kernel BUG at net/core/skbuff.c:120!
[   55.000200] invalid opcode: 0000 [#1] PREEMPT SMP NOPTI
[   55.000300] RIP: 0010:skb_panic+0x4c/0x50
[   55.000400] Call Trace:
[   55.000500]  <IRQ>
[   55.000600]  skb_push.cold+0x10/0x10
[   55.000700] Kernel panic - not syncing: Fatal exception in interrupt
"""
JUMP_TO_NULL = """\
[   12.000100] BUG: kernel NULL pointer dereference, address: 0000000000000000
[   12.000200] #PF: supervisor instruction fetch in kernel mode
[   12.000300] Oops: 0010 [#1] PREEMPT SMP NOPTI
[   12.000400] RIP: 0010:0x0
[   12.000500] Code: Unable to access opcode bytes at 0xffffffffffffffd6.
[   12.000600] Call Trace:
[   12.000700]  <TASK>
[   12.000800]  ? asm_exc_page_fault+0x22/0x30
[   12.000900]  rxe_do_task+0x83/0x100 [rdma_rxe]
[   12.001000]  tasklet_action_common+0xb1/0x130
[   12.001100] RIP: 0010:pv_native_safe_halt+0xb/0x10
[   12.001200] Kernel panic - not syncing: Fatal exception in interrupt
"""
WARNING = """\
[    9.000100] WARNING: CPU: 0 PID: 300 at drivers/infiniband/sw/rxe/rxe_pool.c:244 __rxe_cleanup+0x13d/0x150 [rdma_rxe]
[    9.000200] RIP: 0010:__rxe_cleanup+0x13d/0x150 [rdma_rxe]
[    9.000300] ---[ end trace 0000000000000000 ]---
"""
SOFT_LOCKUP = """\
[   70.000100] watchdog: BUG: soft lockup - CPU#0 stuck for 26s! [roce-peer:412]
[   70.000200] RIP: 0010:rxe_requester+0x1d2/0x1120 [rdma_rxe]
[   70.000300] Call Trace:
[   70.000400]  <TASK>
[   70.000500]  rxe_do_task+0x83/0x100 [rdma_rxe]
"""
PROCESS_CRASH = """\
[   33.000100] roce-peer[377]: segfault at 10 ip 00007f6ad5c0b2c4 sp 00007ffd9bb3f2a0 error 4 in libc.so.6[7f6ad5900000+155000]
[   33.000200] traps: roce-peer[378] general protection fault ip:7f6ad5c0b2c4 sp:7ffd9bb3f2a0 error:0 in libc.so.6[7f6ad5900000+155000]
"""
END_OF_FIRST_PROCESS = """\
[    4.000100] Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000100
[    4.000200] CPU: 0 PID: 1 Comm: sh Not tainted 6.1.0-40-amd64 #1  Debian 6.1.153-1
[    4.000300] Call Trace:
[    4.000400]  <TASK>
[    4.000500]  dump_stack_lvl+0x44/0x5c
[    4.000600]  panic+0x118/0x2ed
"""

# Its first command makes the RDMA device. The second one does what the first argument says.
GUEST = """
echo ready
commands=0
while read -r word id; do
  [ "$word" = run ] && [ ! -e "$2/$id.pid" ] || continue
  : >"$2/$id.pid"
  commands=$((commands + 1))
  if [ "$commands" = 1 ]; then echo "ended $id 0"; else eval "$1"; fi
done
"""
WORKS = 'echo "ended $id 0"'
COMMAND_FAILS = 'echo "ended $id 1"'
HANGS = ":"


def ends_with(console):
    return f"printf %s {shlex.quote(console)} >$3; exit"


PANICS = ends_with(PAGE_FAULT.replace("\n", "\r\n"))


def prints_and_panics(line):
    return f"echo {shlex.quote(line)} >$2/$id.out; {PANICS}"


def ends_and_panics(status):
    return f'echo "ended $id {status}"; {PANICS}'


class FakeMachine(Machine):
    """`lives`: what the guest does after each start."""

    def __init__(self, name, directory, lives):
        super().__init__(name, "no kernel", "no initramfs", directory)
        self.lives = list(lives)

    def emulator(self, wires):
        return ["/bin/sh", "-c", GUEST, "guest", self.lives.pop(0), self.share, self.console_path]


class FunctionOfPanic(unittest.TestCase):
    def test_exceptions_in_the_kernel(self):
        for console, function in (
            (PAGE_FAULT, "rxe_skb_tx_dtor"),
            (PROTECTION_FAULT, "__rxe_cleanup.part.0"),
            (BUG, "skb_panic"),
            (JUMP_TO_NULL, "rxe_do_task"),
            (WARNING + PROCESS_CRASH + PAGE_FAULT, "rxe_skb_tx_dtor"),
        ):
            with self.subTest(function):
                self.assertEqual(function_of_panic(console), function)

    def test_others(self):
        for console in (
            "",
            WARNING,
            SOFT_LOCKUP,
            PROCESS_CRASH,
            END_OF_FIRST_PROCESS,
            WARNING + END_OF_FIRST_PROCESS,
            PAGE_FAULT.partition("Kernel panic")[0],
            JUMP_TO_NULL.replace("rxe_do_task+0x83/0x100", "0xffffffffc05ff970").replace("tasklet_action_common+0xb1/0x130", "0x0"),
        ):
            with self.subTest(console):
                self.assertIsNone(function_of_panic(console))


class Case(unittest.TestCase):
    def run_case(self, *lives, peer_lives=None, body=None, limit=LIMIT_S):
        """Runs a case of one command on a machine, which may have a peer; returns the output of the report."""
        directory = tempfile.TemporaryDirectory(prefix="roce-panic-")
        self.addCleanup(directory.cleanup)
        machines = [FakeMachine("a", directory.name, lives)]
        if peer_lives:
            machines.append(FakeMachine("b", directory.name, peer_lives))
        self.machine = machines[0]
        self.addCleanup(topology.end, machines)
        topology.boot(machines)
        self.report = Report(machines, lambda: topology.boot(machines))
        self.calls = 0
        with contextlib.redirect_stdout(io.StringIO()) as output:

            @self.report.case("a case")
            def _():
                self.calls += 1
                if body:
                    body(self.machine)
                else:
                    succeed(self.machine.start("true", limit))

        return output.getvalue()

    def expect_repeated(self, calls, *lives, **options):
        output = self.run_case(*lives, **options)
        self.assertRegex(output, r"(?m)^ok 1 - a case \([\d.]+ s\)$")
        self.assertEqual(output.count("# a case: the kernel of a machine panicked in rxe_skb_tx_dtor\n"), calls - 1)
        self.assertEqual((self.calls, self.report.failed, self.machine.lives), (calls, [], []))

    def expect_failed_once(self, life, **options):
        with self.assertRaises(Failure):
            self.run_case(life, WORKS, **options)
        self.assertEqual((self.calls, self.report.failed, self.machine.lives), (1, ["a case"], [WORKS]))

    def expect_failed_although_panicked(self, life, **options):
        output = self.run_case(life, WORKS, **options)
        self.assertRegex(output, r"(?m)^not ok 1 - a case$")
        self.assertEqual((self.calls, self.report.failed, self.machine.lives), (1, ["a case"], [WORKS]))

    def test_works(self):
        self.expect_repeated(1, WORKS)

    def test_panics_once(self):
        self.expect_repeated(2, PANICS, WORKS)

    def test_panics_twice(self):
        self.expect_repeated(3, PANICS, PANICS, WORKS)

    def test_panic_is_noticed_as_another_failure(self):
        def body(machine):
            try:
                machine.run("true")
            except Failure:
                expect(False, "the other end has not ended")

        self.expect_repeated(2, PANICS, WORKS, body=body)

    def test_peer_panics(self):
        def body(machine):
            machine.peers[0].start("true")
            machine.run("true")

        with mock.patch("machine.RESEND_S", 0.1):
            self.expect_repeated(2, HANGS, WORKS, peer_lives=[PANICS, WORKS], body=body)

    def test_peer_ends_by_a_test(self):
        def body(machine):
            machine.peers[0].kill()
            with mock.patch("machine.RESEND_S", 0), mock.patch("machine.EXTRA_S", 0.1):
                with self.assertRaisesRegex(Failure, "did not end"):
                    machine.run("true", limit=0)

        self.expect_repeated(1, HANGS, peer_lives=[WORKS], body=body)

    def test_always_panics(self):
        output = self.run_case(PANICS, PANICS, PANICS, WORKS)
        self.assertRegex(output, r"(?m)^ok 1 - a case # SKIP .* rxe_skb_tx_dtor, 3 times$")
        self.assertEqual((self.calls, self.report.failed), (3, []))
        succeed(self.machine.start("true"))  # the next case

    def test_command_fails(self):
        output = self.run_case(COMMAND_FAILS, WORKS)
        self.assertRegex(output, r"(?m)^not ok 1 - a case$")
        self.assertEqual((self.calls, self.report.failed, self.machine.lives), (1, ["a case"], [WORKS]))

    def test_wrong_data_before_panic(self):
        for line in (
            "wrong data in message 7 of round 0",
            "# Wrong elements    : 3 FAILED",
            "# Wrong bytes : 12 FAILED",
            "rank 1: 3 wrong elements in the receive buffer, first at byte 0: 00 instead of 01",
            "../tests/rma/lanes_test.cc:137: Failure",
            "leaked: 1 descriptors, 0 threads",
        ):
            with self.subTest(line):
                self.expect_failed_once(prints_and_panics(line))

    def test_all_right_before_panic(self):
        for line in ("# Wrong elements    : 0 OK", "# Wrong bytes : 0 OK", "leaked: 0 descriptors, 0 threads"):
            with self.subTest(line):
                self.expect_repeated(2, prints_and_panics(line), WORKS)

    def test_command_fails_before_panic(self):
        def body(machine):
            job = machine.start("true")
            with contextlib.suppress(Failure):
                machine.run("sleep")  # until the machine has ended
            succeed(job)

        self.expect_failed_although_panicked(ends_and_panics(1), body=body)

    def test_command_crashes_before_panic(self):
        self.expect_failed_once(ends_and_panics(128 + signal.SIGSEGV), body=lambda machine: (machine.start("true"), machine.run("sleep")))

    def test_command_is_killed_before_panic(self):
        def body(machine):
            machine.start("true")
            machine.run("true")

        self.expect_repeated(2, ends_and_panics(128 + signal.SIGKILL), WORKS, body=body)

    def test_case_fails_before_panic(self):
        def body(machine):
            try:
                expect(False, "the case fails")
            finally:
                machine.run("clean up")

        self.expect_failed_once(PANICS, body=body)

    def test_first_process_ends(self):
        self.expect_failed_once(ends_with(END_OF_FIRST_PROCESS))

    def test_emulator_ends(self):
        self.expect_failed_once(ends_with(PROCESS_CRASH))

    def test_hangs(self):
        with mock.patch("machine.EXTRA_S", 0):
            self.expect_failed_once(HANGS, limit=0)


if __name__ == "__main__":
    unittest.main()
