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
PR_SET_PDEATHSIG = 1


class Failure(Exception):
    """A machine did not execute a command in time. The text ends with the last lines of its console."""


class EmulatorCrash(Failure):
    """QEMU was ended by a signal, which nothing in a guest may cause."""


def die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Job:
    """A command in the guest."""

    def __init__(self, machine, number, limit):
        self.machine, self.number, self.limit = machine, number, limit
        self.started = time.monotonic()
        self.status = None
        self.seconds = None

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

    def wait(self, on_output=None):
        """Returns the exit status; 124 after a timeout. on_output is called with new bytes of the output."""
        deadline = self.started + self.limit + EXTRA_S
        offset = 0
        while True:
            timeout = 0.1 if on_output else RESEND_S
            ended = self.machine.ended(self, max(0, min(timeout, deadline - time.monotonic())))
            if not ended:
                self.machine.resend_commands()
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
    """Used by one thread. `wires` are sockets, one per network interface; topology.Link connects them to the other machine."""

    def __init__(self, name, kernel, initramfs, directory, cpus=1, memory_mib=1024, wires=()):
        self.name = name
        self.share = os.path.join(directory, name)
        self.results = os.path.join(self.share, "results")
        os.makedirs(self.results)
        self.console_path = os.path.join(directory, name + ".console")
        self.monitor_path = os.path.join(directory, name + ".monitor")
        self.jobs = 0
        self.last_processor_s = 0.0
        self.lines = queue.Queue()
        self.running = {}
        nics = []
        for number, wire in enumerate(wires):
            nics += ["-netdev", f"socket,id=net{number},fd={wire.fileno()}"]
            nics += ["-device", f"virtio-net-pci,netdev=net{number},mac={self.mac(number)}"]
        # CPU model qemu64, not max: max has five levels of page tables, which halve the speed of everything, and PCLMUL,
        # which the kernel prefers for rxe's checksums and which halves their speed. norandmaps: a program that is loaded
        # at the same address again starts in a fifth of the time, because QEMU still has its translation.
        self.process = subprocess.Popen(
            [
                program("qemu-system-x86_64"),
                *("-accel", "tcg,thread=multi", "-cpu", "qemu64", "-smp", str(cpus), "-m", str(memory_mib)),
                *("-nodefaults", "-display", "none", "-no-reboot", "-kernel", kernel, "-initrd", initramfs),
                *("-append", "console=ttyS0 panic=-1 loglevel=4 net.ifnames=0 mitigations=off norandmaps hostname=" + name),
                *("-qmp", f"unix:{self.monitor_path},server=on,wait=off"),
                *("-serial", "file:" + self.console_path),
                *("-chardev", "stdio,id=control,signal=off", "-serial", "chardev:control"),
                *("-virtfs", "local,path=/,mount_tag=hostroot,security_model=none,readonly=on,multidevs=remap"),
                *("-virtfs", f"local,path={self.share},mount_tag=share,security_model=none"),
                *nics,
            ],
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
            self.lines.put(line.decode("ascii", "replace").split())
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
        except BrokenPipeError:
            raise self.unexpected_end() from None

    def resend_commands(self):
        for number, job in self.running.items():
            if not os.path.exists(job.pid_path):
                self.send_line(f"\nrun {number}")  # starts with a line feed: part of the first attempt may have arrived

    def start(self, arguments, limit=LIMIT_S, settings=None, directory="/"):
        """Starts a program with its arguments (a list), or a shell command (a string)."""
        self.jobs += 1
        job = Job(self, self.jobs, limit)
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
            line = self.next_line(deadline - time.monotonic())
            if line is None:
                return False
            if line[0] == "ended":
                other = self.running.pop(int(line[1]))
                other.status, other.seconds = int(line[2]), time.monotonic() - other.started
        return True

    def console(self, count=30):
        try:
            with open(self.console_path, encoding="utf-8", errors="replace") as file:
                return [line.rstrip() for line in file.readlines()[-count:]]
        except OSError:
            return []

    def unexpected_end(self):
        status = self.process.wait()
        if status >= 0:
            return self.failure(f"QEMU ended unexpectedly with status {status}")
        return EmulatorCrash(*self.failure(f"QEMU crashed: {signal.strsignal(-status)}").args)

    def failure(self, what):
        lines = [f"virtual machine {self.name}: {what}", *self.errors]
        lines += ["the end of its console:", *("  " + line for line in self.console())]
        return Failure("\n".join(lines))

    def is_running(self):
        return self.process.poll() is None

    def processor_s(self):
        """Processor time of the host that this machine has used so far, in seconds."""
        try:
            with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return self.last_processor_s
        self.last_processor_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
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
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

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
