#!/usr/bin/env python3
#: test ranks args='{verbatim_perf} {socket_plugin}'
"""usage: ranks_test.py VERBATIM_PERF PLUGIN
What a job of verbatim-perf accepts from processes that do not belong to it, at the place where its ranks meet."""

import contextlib
import multiprocessing
import os
import re
import socket
import struct
import subprocess
import sys
import time
import unittest

PERF, PLUGIN = sys.argv[1:3]
TIMEOUT_S = 60
TOKEN = "d1f5a8b0-6f0c-4c39-9a55-0f6f8f3f7a11"
MAGIC = 0x46505256
HELLO, GATHER, REFUSED = 1, 2, 8  # kinds of frames
NOBODY = 65534


def hash_of(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) % 2**64
    return value


def header(kind, payload_bytes):
    return struct.pack("=IIQ", MAGIC, kind, payload_bytes)


def frame(kind, payload=b""):
    return header(kind, len(payload)) + payload


def hello(rank, ranks=2, token=TOKEN, more=b""):
    return frame(HELLO, struct.pack("=QII", hash_of(token), rank, ranks) + more)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def is_closed(connection):
    """Whether the other end has closed a connection on which it has sent nothing."""
    try:
        return connection.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def eventually(check, what):
    deadline = time.monotonic() + TIMEOUT_S
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class Job(unittest.TestCase):
    """Ranks that are started one by one: two, unless a test says otherwise."""

    def setUp(self):
        self.port = free_port()
        self.address = ("127.0.0.1", self.port)

    def start(self, *arguments, steps=2, timeout=TIMEOUT_S, **settings):
        names = ("VERBATIM_", "NCCL_", "OMPI_", "PMI_", "SLURM_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
        sizes = ["-b", "64", "-e", "64", "-n", str(steps), "--timeout", str(timeout)]
        process = subprocess.Popen([PERF, "all_reduce", "--plugin", PLUGIN, *sizes, *arguments], env={**kept, **settings},
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def rank(self, number, token=TOKEN, **options):
        root = ["--root", f"127.0.0.1:{self.port}", "--rank", str(number), "--nranks", "2"]
        return self.start(*root, **options, VERBATIM_TOKEN=token)

    def end(self, process):
        output = process.communicate(timeout=TIMEOUT_S)[0]
        return process.returncode, output

    def connect(self, address=None):
        """To rank 0, which may not listen yet."""
        family = socket.AF_UNIX if address else socket.AF_INET
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            connection = socket.socket(family)
            connection.settimeout(TIMEOUT_S)
            try:
                connection.connect(address or self.address)
            except ConnectionRefusedError:
                connection.close()
                assert time.monotonic() < deadline, "rank 0 does not listen"
                time.sleep(0.05)
                continue
            self.addCleanup(connection.close)
            return connection

    def receive(self, connection):
        """The kind of the next frame, and its payload; None at the end."""
        start = connection.recv(16, socket.MSG_WAITALL)
        if len(start) < 16:
            return None, b""
        magic, kind, payload_bytes = struct.unpack("=IIQ", start)
        self.assertEqual(magic, MAGIC)
        return kind, connection.recv(payload_bytes, socket.MSG_WAITALL)

    def expect_success(self, *processes):
        for process in processes:
            status, output = self.end(process)
            self.assertEqual(status, 0, output)

    def ask(self, data):
        """The answer to a first message. As a rank does, it connects again when the connection is closed without one."""
        while True:
            connection = self.connect()
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
                kind, payload = self.receive(connection)
                if kind is not None:
                    return kind, payload

    def test_RankOutsideOfTheJob_AfterAFailure_IsRefused(self):
        first = self.rank(0)
        self.assertEqual(self.ask(hello(1, ranks=3))[0], REFUSED)
        for number in (2, 0x7FFFFFFF, 0xFFFFFFFF):
            with contextlib.suppress(ConnectionError), socket.socket() as outside:  # rank 0 may have ended
                outside.connect(self.address)
                outside.sendall(hello(number) + frame(GATHER, b"part"))
        status, output = self.end(first)
        self.assertEqual(status, 2, output)
        self.assertIn("rank 1 disagrees with rank 0: --nranks 3 instead of 2", output)

    def test_RankOutsideOfTheJob_IsRefusedAndTheJobGoesOn(self):
        first = self.rank(0)
        for number in (2, 0x7FFFFFFF, 0xFFFFFFFF):
            self.assertEqual(self.ask(hello(number))[0], REFUSED)
        self.expect_success(self.rank(1), first)

    def test_HelloOfAnotherBuild_IsAnsweredWithTheReason(self):
        first = self.rank(0)
        kind, reason = self.ask(hello(1, more=bytes(8)))
        self.assertEqual(kind, REFUSED)
        self.assertIn(b"it is another build of this program", reason)
        self.expect_success(self.rank(1), first)

    def test_LongFrameBeforeTheHello_ClosesTheConnection(self):
        first = self.rank(0)
        connection = self.connect()
        with self.assertRaises(ConnectionError):
            connection.sendall(header(HELLO, 200 << 20))
            for _ in range(100):
                connection.sendall(bytes(1 << 20))
        self.expect_success(self.rank(1), first)

    def test_ConnectionsWithoutHello_AreClosedAndTheJobGoesOn(self):
        first = self.rank(0)
        idle, halting = [self.connect() for _ in range(200)], self.connect()
        halting.sendall(hello(1)[:20])
        eventually(lambda: all(map(is_closed, [*idle, halting])), "they stay open")
        self.expect_success(self.rank(1), first)

    def test_ManyWrongTokens_AreReportedAFewTimes(self):
        first = self.rank(0)
        for _ in range(50):
            self.assertEqual(self.ask(hello(1, token="another token of 16"))[0], REFUSED)
        second = self.rank(1)
        status, output = self.end(first)
        self.assertEqual(status, 0, output)
        self.assertIn(output.count("rejected a process"), range(1, 20))
        self.expect_success(second)

    def test_RootWithoutAToken_IsRefusedBeforeItListens(self):
        for token, reason in (("", "VERBATIM_TOKEN"), ("7", "fewer than 16 characters")):
            status, output = self.end(self.rank(0, token, timeout=2))
            self.assertEqual(status, 2, output)
            self.assertIn(reason, output)
            self.assertIn("Next: export VERBATIM_TOKEN=", output)

    def test_RanksOfALauncherOnOneHost_NeedNoToken(self):
        for token in ("", "short"):
            self.expect_success(*[self.start(PMI_RANK=rank, PMI_SIZE="2", VERBATIM_TOKEN=token) for rank in ("0", "1")])

    def test_TwoStartsOfALauncherAtOneAddress_AreTwoJobs(self):
        def rank(number, run):
            return self.start(RANK=str(number), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port),
                              TORCHELASTIC_RUN_ID=run, VERBATIM_TOKEN=TOKEN)

        first = rank(0, "one")
        status, output = self.end(rank(1, "two"))
        self.assertEqual(status, 2, output)
        self.assertIn("it has another VERBATIM_TOKEN, or is of another job", output)
        self.expect_success(rank(1, "one"), first)

    def test_RanksOnThisMachine_HaveNoSecretInTheirArguments(self):
        launcher = self.start("--procs", "2", steps=100000000)

        def ranks():
            with open(f"/proc/{launcher.pid}/task/{launcher.pid}/children", encoding="ascii") as file:
                return file.read().split()

        def read(process, name):
            with open(f"/proc/{process}/{name}", encoding="utf-8") as file:
                return file.read()

        eventually(lambda: len(ranks()) == 2 and all("--child" in read(rank, "cmdline") for rank in ranks()), "the ranks do not start")
        for rank in ranks():
            (token,) = re.findall(r"\0VERBATIM_TOKEN=([0-9a-f]{32})\0", f"\0{read(rank, 'environ')}")
            command = read(rank, "cmdline")
            for secret in (token, str(hash_of(token)), f"{hash_of(token):x}"):
                self.assertNotIn(secret, command)


def local_name(process):
    """The local socket at which ranks meet whose launcher is `process` and gives no ID."""
    return f"\0verbatim-{os.geteuid()}-{hash_of(f'PMIprocess {process}'):016x}"


def as_another_user(act, *arguments):
    """Starts act(name of the socket, pipe, arguments...) as another user. Returns the process and its pipe, which first has
    why it cannot be one, or None."""
    own, other = multiprocessing.Pipe()

    def run(name):
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        except OSError as error:
            other.send(str(error))
            return
        other.send(None)
        act(name, other, *arguments)

    process = multiprocessing.get_context("fork").Process(target=run, args=(local_name(os.getpid()),))
    process.start()
    return process, own


def call(name, pipe, data):
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(TIMEOUT_S)
        caller.connect(name)
        try:
            caller.sendall(data)
            pipe.send(caller.recv(65536))
        except ConnectionError:
            pipe.send(b"")


def listen(name, pipe):
    """Answers with what it has received when the pipe says so."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        pipe.send("listens")
        pipe.recv()
        listener.setblocking(False)
        received = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                caller, _ = listener.accept()
                with caller, contextlib.suppress(ConnectionError):
                    received += caller.recv(65536)
        pipe.send(received)


class AnotherUser(Job):
    """At the local socket where the ranks of a launcher meet on one host."""

    def launched(self, rank, **options):
        return self.start(**options, PMI_RANK=str(rank), PMI_SIZE="2")

    def as_another_user(self, act, *arguments):
        process, pipe = as_another_user(act, *arguments)
        self.addCleanup(process.join)
        self.addCleanup(process.kill)
        if why := self.receive_from(pipe):
            self.skipTest(f"this user cannot be another one: {why}")
        return pipe

    def receive_from(self, pipe):
        self.assertTrue(pipe.poll(TIMEOUT_S))
        return pipe.recv()

    def test_RankOfAnotherUser_IsNotAnsweredAndTheJobGoesOn(self):
        first = self.launched(0)
        self.connect(local_name(os.getpid())).close()  # it listens
        self.assertEqual(self.receive_from(self.as_another_user(call, hello(1, token="PMI"))), b"")
        self.expect_success(self.launched(1), first)

    def test_ListenerOfAnotherUser_GetsNothing(self):
        other = self.as_another_user(listen)
        self.assertEqual(self.receive_from(other), "listens")
        status, output = self.end(self.launched(1, timeout=1))
        self.assertEqual(status, 4, output)
        self.assertIn("is of another user", output)
        other.send("end")
        self.assertEqual(self.receive_from(other), b"")


# Its own cases only: the inherited ones run once.
for name in [name for name in dir(Job) if name.startswith("test_")]:
    setattr(AnotherUser, name, None)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
