"""A virtual machine: QEMU without acceleration, which receives its commands over a serial port.

Host and guest exchange files in a shared directory (in the guest: /run/roce). Every wait has a deadline, and QEMU is killed
when this process ends, whatever the reason.
"""

import contextlib
import ctypes
import glob
import json
import os
import queue
import re
import shlex
import socket
import signal
import subprocess
import threading
import time

from image import program

SHARE = "/run/roce"
BOOT_S = 400  # 10 s on an idle machine
POWER_OFF_S = 120
LIMIT_S = 240  # for a command, which takes a few seconds on an idle machine
RESEND_S = 5  # until a command that has not started is sent again: guests sometimes lose a line of their serial port
EXTRA_S = 60  # between a job's own deadline, which timeout(1) enforces in the guest, and the failure of the machine
CONSOLE_LINES = 30  # at the end of a failure's text
# oops=panic, panic=-1 and QEMU's -no-reboot: an exception in the kernel ends the machine at once, also where the kernel would
# stop only a process. norandmaps: a program that is loaded at the same address again starts in a fifth of the time, because
# QEMU still has its translation.
KERNEL_PARAMETERS = "console=ttyS0 oops=panic panic=-1 loglevel=4 net.ifnames=0 mitigations=off norandmaps"
PR_SET_PDEATHSIG = 1
# Lines of programs: data that differs, an assertion of GoogleTest, descriptors or threads that remain.
SIGNS_OF_FAILURE = re.compile(r"[Ww]rong (?:data|elements|bytes?)\b(?! *: 0 OK)|: Failure$|^leaked: (?!0 descriptors, 0 threads$)")


class Failure(Exception):
    """A machine did not execute a command in time. The text ends with the last lines of its console."""

    def __init__(self, text):
        super().__init__(text)
        self.at = time.monotonic()


class EmulatorCrash(Failure):
    """QEMU was ended by a signal, which nothing in a guest may cause."""


def function_of_panic(console):
    """The function of the kernel in which an exception has stopped the guest, as its console names it; None without such a
    panic. Other panics do not count, because a test may cause them: the first process has ended, or memory is used up. Nor do
    reports after which the kernel goes on ("BUG: soft lockup"), crashes of processes ("segfault at"), and a panic that names no
    function."""
    # "Oops: 0002 [#1] PREEMPT SMP", "general protection fault, ...: 0000 [#1]", after "kernel BUG at" "invalid opcode: 0000 [#1]"
    found = re.search(r": [0-9a-f]{4} \[#\d+\].*?Kernel panic - not syncing: Fatal exception", console, re.DOTALL)
    if not found:
        return None
    name = r"([\w.]+)\+0x[0-9a-f]+/0x"
    here = re.search(rf"RIP: 0010:(?:{name})?", found[0])
    if not here or not here[1]:  # a jump to a wrong address: "RIP: 0010:0x0". Lines with "?" may be no callers.
        here = re.search(rf"Call Trace:.*?\n(?:\[[^]\n]*\])? +{name}", found[0], re.DOTALL)
    return here[1] if here else None


def die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Job:
    """A command in the guest. `ended_at`: when the guest has said so."""

    def __init__(self, machine, number, limit):
        self.machine, self.number, self.limit = machine, number, limit
        self.started = time.monotonic()
        self.status = None
        self.ended_at = None

    @property
    def output_path(self):
        return os.path.join(self.machine.share, f"{self.number}.out")

    @property
    def pid_path(self):
        return os.path.join(self.machine.share, f"{self.number}.pid")

    def output(self):
        if not os.path.exists(self.output_path):
            return ""  # the job has not started
        with open(self.output_path, encoding="utf-8", errors="replace") as file:
            return file.read()

    @property
    def seconds(self):
        return self.ended_at - self.started

    def signs_of_failure(self):
        """What no panic of a kernel explains: lines of its output, and that a signal has ended it, but for SIGKILL, which tests send."""
        signs = [line for line in self.output().splitlines() if SIGNS_OF_FAILURE.search(line)]
        if (self.status or 0) > 128 and self.status != 128 + signal.SIGKILL:
            signs.append(f"ended by signal {self.status - 128}\n{self.output()}")
        return [f"{self.machine.name}: {sign}" for sign in signs]

    def wait(self, on_output=None):
        """Returns the exit status; 124 after a timeout. on_output is called with new bytes of the output."""
        deadline = self.started + self.limit + EXTRA_S
        offset = 0
        while True:
            timeout = 0.1 if on_output else RESEND_S
            ended = self.machine.ended(self, max(0, min(timeout, deadline - time.monotonic())))
            if not ended:
                self.machine.resend_commands()
                self.machine.check_peers()
            if on_output and os.path.exists(self.output_path):
                with open(self.output_path, "rb") as file:
                    file.seek(offset)
                    new_bytes = file.read()
                    offset += len(new_bytes)
                    on_output(new_bytes)
            if ended:
                return self.status
            if time.monotonic() >= deadline:
                raise self.machine.failure(f"a command did not end within {self.limit} s")


class Machine:
    """Used by one thread. It can be powered on again after its end."""

    def __init__(self, name, kernel, initramfs, directory, cpus=1, memory_mib=1024):
        self.name = name
        self.kernel, self.initramfs, self.cpus, self.memory_mib = kernel, initramfs, cpus, memory_mib
        self.share = os.path.join(directory, name)
        self.results = os.path.join(self.share, "results")
        os.makedirs(self.results)
        self.console_path = os.path.join(directory, name + ".console")
        self.monitor_path = os.path.join(directory, name + ".monitor")
        self.jobs = []
        self.earlier_processor_s = self.last_processor_s = 0.0
        self.process = None
        self.threads = []
        self.links = []
        self.peers = []

    def emulator(self, wires):
        nics = []
        for number, wire in enumerate(wires):
            nics += ["-netdev", f"socket,id=net{number},fd={wire.fileno()}"]
            nics += ["-device", f"virtio-net-pci,netdev=net{number},mac={self.mac(number)}"]
        # CPU model qemu64, not max: max has five levels of page tables, which halve the speed of everything, and PCLMUL,
        # which the kernel prefers for rxe's checksums and which halves their speed.
        return [
            program("qemu-system-x86_64"),
            *("-accel", "tcg,thread=multi", "-cpu", "qemu64", "-smp", str(self.cpus), "-m", str(self.memory_mib)),
            *("-nodefaults", "-display", "none", "-no-reboot", "-kernel", self.kernel, "-initrd", self.initramfs),
            *("-append", KERNEL_PARAMETERS + " hostname=" + self.name),
            *("-qmp", f"unix:{self.monitor_path},server=on,wait=off"),
            *("-serial", "file:" + self.console_path),
            *("-chardev", "stdio,id=control,signal=off", "-serial", "chardev:control"),
            *("-virtfs", "local,path=/,mount_tag=hostroot,security_model=none,readonly=on,multidevs=remap"),
            *("-virtfs", f"local,path={self.share},mount_tag=share,security_model=none"),
            *nics,
        ]

    def power_on(self, wires=()):
        """`wires` are sockets, one per network interface; topology.Link connects them to the other machine."""
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.console_path)
        self.earlier_processor_s = self.last_processor_s
        self.lines = queue.Queue()
        self.running = {}
        self.ended_at = None
        self.process = subprocess.Popen(
            self.emulator(wires),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=[wire.fileno() for wire in wires],
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self.errors = []
        self.threads = [
            threading.Thread(target=self.read_control, daemon=True),
            threading.Thread(target=self.read_errors, daemon=True),
        ]
        for thread in self.threads:
            thread.start()
        self.deadline = time.monotonic() + BOOT_S

    def mac(self, number):
        return f"52:54:00:00:{number:02x}:{sum(map(ord, self.name)) % 256:02x}"

    def read_control(self):
        for line in self.process.stdout:
            words = line.decode("ascii", "replace").split()
            if words[:1] == ["ended"]:
                job = self.running.pop(int(words[1]))
                job.ended_at, job.status = time.monotonic(), int(words[2])
            self.lines.put(words)
        self.ended_at = time.monotonic()
        self.lines.put(None)

    def read_errors(self):
        for line in self.process.stderr:
            self.errors.append(line.decode("utf-8", "replace").rstrip())

    def wait_until_booted(self):
        while True:
            line = self.next_line(self.deadline - time.monotonic())
            if line is None:
                raise self.failure(f"did not boot within {BOOT_S} s")
            if line == ["ready"]:
                return

    def next_line(self, timeout):
        """The guest's next line as a list of words, None after the timeout."""
        try:
            line = self.lines.get(timeout=max(0.001, timeout))
        except queue.Empty:
            return None
        if line is None:
            self.lines.put(None)
            raise self.unexpected_end()
        return line

    def send_line(self, line):
        try:
            self.process.stdin.write(line.encode("ascii") + b"\n")
        except (BrokenPipeError, ValueError):  # ValueError: the pipe is closed
            raise self.unexpected_end() from None

    def resend_commands(self):
        for number, job in list(self.running.items()):
            if not os.path.exists(job.pid_path):
                self.send_line(f"\nrun {number}")  # starts with a line feed: part of the first attempt may have arrived

    def check_peers(self):
        """Notices the panic of a machine for which programs on this one wait."""
        for peer in self.peers:
            if not peer.is_running() and peer.panicked_in():
                raise peer.unexpected_end()

    def start(self, arguments, limit=LIMIT_S, settings=None, directory="/"):
        """Starts a program with its arguments (a list), or a shell command (a string)."""
        job = Job(self, len(self.jobs) + 1, limit)
        self.jobs.append(job)
        if isinstance(arguments, str):
            arguments = ["/bin/sh", "-c", arguments]
        lines = [
            "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root",
            f"export RESULTS={SHARE}/results ROCE_HOST={self.name}",
            *(f"export {name}={shlex.quote(value)}" for name, value in (settings or {}).items()),
            f"cd {shlex.quote(directory)} || exit 126",
            f"echo $$ >{SHARE}/{job.number}.pid",
            f"exec setsid -w timeout -k 5 {limit} {shlex.join(arguments)}",
        ]
        with open(os.path.join(self.share, f"{job.number}.sh"), "w", encoding="utf-8") as script:
            script.write("\n".join(lines) + "\n")
        self.running[job.number] = job
        self.send_line(f"run {job.number}")
        return job

    def run(self, arguments, limit=LIMIT_S, **options):
        job = self.start(arguments, limit, **options)
        job.wait()
        return job

    def ended(self, job, timeout):
        """Waits up to `timeout` seconds for the end of the job; returns whether it has ended."""
        deadline = time.monotonic() + timeout
        while job.status is None:
            if self.next_line(deadline - time.monotonic()) is None:
                return False
        return True

    def console(self):
        try:
            with open(self.console_path, encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return ""

    def panicked_in(self):
        return function_of_panic(self.console())

    def unexpected_end(self):
        status = self.wait_for_end()
        if status >= 0:
            function = self.panicked_in()
            return self.failure(f"kernel panic in {function}" if function else f"QEMU ended unexpectedly with status {status}")
        return EmulatorCrash(*self.failure(f"QEMU crashed: {signal.strsignal(-status)}").args)

    def failure(self, what):
        lines = [f"virtual machine {self.name}: {what}", *self.errors]
        lines += ["the end of its console:", *("  " + line.rstrip() for line in self.console().splitlines()[-CONSOLE_LINES:])]
        return Failure("\n".join(lines))

    def is_running(self):
        return self.ended_at is None

    def wait_for_end(self):
        """Returns QEMU's status when all that it has printed is read."""
        for thread in self.threads:
            thread.join()
        with self.process:  # closes its pipes
            return self.process.wait()

    def processor_s(self):
        """Processor time of the host that this machine has used so far, in seconds."""
        try:
            with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return self.last_processor_s
        spent_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        self.last_processor_s = self.earlier_processor_s + spent_s
        return self.last_processor_s

    def runnable_wait_s(self):
        """Sum over its threads of the seconds in which they were runnable while the host ran something else."""
        waited = 0
        for path in glob.glob(f"/proc/{self.process.pid}/task/*/schedstat"):
            with contextlib.suppress(OSError, ValueError, IndexError), open(path, encoding="ascii") as file:
                waited += int(file.read().split()[1])
        return waited / 1e9

    def plug(self, number, is_in):
        """Connects or disconnects the cable of a network interface. Without cable its packets are lost, and its driver reports that."""
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.settimeout(LIMIT_S)
            monitor.connect(self.monitor_path)
            with monitor.makefile("rw", encoding="utf-8") as stream:
                stream.readline()  # QEMU's greeting
                link = {"name": f"net{number}", "up": is_in}
                for command, arguments in (("qmp_capabilities", {}), ("set_link", link)):
                    stream.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
                    stream.flush()
                    reply = json.loads(stream.readline())
                    while "event" in reply:
                        reply = json.loads(stream.readline())
                    if "return" not in reply:
                        raise self.failure(f"{command}: {reply}")

    def freeze(self):
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # kill() does not wait

    def thaw(self):
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self):
        if self.process is None:
            return
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait_for_end()

    def power_off(self):
        """Powers the guest off; kills QEMU if that fails. Returns whether the guest powered off."""
        try:
            self.send_line("off")
            self.process.wait(POWER_OFF_S)
            return True
        except (Failure, subprocess.TimeoutExpired):
            return False
        finally:
            self.kill()
