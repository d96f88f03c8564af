"""The processes of a run over NIXL: one for each rank, with one NIXL agent that has the UCX backend. Each calls the function
`run(rank, plan)` of the program; what they return is the result."""

import ctypes
import importlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection, wait

FAILED = 3  # the tools' exit status
MODULES = ("nixl", "nixl_cu12", "nixl_cu13")
PR_SET_PDEATHSIG = 1
SLEEP_S = 50e-6
YIELDS = 200


class Failure(Exception):
    """Its text is for the user."""


class Backoff:
    """What a loop that polls does after a round: it yields, and after many rounds without progress it sleeps."""

    def __init__(self):
        self.idle_rounds = 0

    def after_round(self, progressed):
        self.idle_rounds = 0 if progressed else self.idle_rounds + 1
        if self.idle_rounds > YIELDS:
            time.sleep(SLEEP_S)
        elif self.idle_rounds > 0:
            os.sched_yield()


def load_nixl():
    """The module with NIXL's Python interface, and its name and version."""
    errors = []
    try:
        importlib.import_module("numpy")
    except ImportError as error:
        errors.append(str(error))
    for name in () if errors else MODULES:
        try:
            module = importlib.import_module(name + "._api")
            return module, f"NIXL {importlib.metadata.version(name.replace('_', '-'))}"
        except ImportError as error:
            errors.append(str(error))
    raise Failure(
        f"NIXL is not installed for {sys.executable} ({'; '.join(errors)}). Next: install it and numpy (pip install --no-deps "
        "nixl-cu12 numpy, in a virtual environment), and name that Python with --python"
    )


class Rank:
    """This process: its number, its agent, and the exchange of values with the other ranks."""

    def __init__(self, number, connection):
        self.number = number
        self.connection = connection
        self.api, _ = load_nixl()
        self.agent = None

    def exchange(self, value):
        """The values of all ranks. All ranks must call it."""
        self.connection.send(("value", value))
        return self.connection.recv()

    def connect(self, allocations, value):
        """Makes the agent, registers the memory, and gives the agents of all ranks to each other. Returns what the ranks
        passed as `value`."""
        try:
            # Without a thread for progress: the rank's own loop polls, and would wait for that thread's lock.
            config = self.api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self.agent = self.api.nixl_agent(str(self.number), config)
            self.agent.register_memory([(each.address, each.length, 0, "") for each in allocations], "DRAM")
        except Exception as error:  # NIXL's own exceptions have no common base class
            raise Failure(
                f"NIXL's UCX backend does not start: {error!r}. Next: run over a device that its UCX finds; over softverbs with "
                "tools/softverbs --preload, because NIXL brings a libibverbs of its own; UCX_TLS names the transports "
                f"({os.environ.get('UCX_TLS')})"
            ) from error
        values = self.exchange((self.agent.get_agent_metadata(), value))
        for number, (metadata, _) in enumerate(values):
            if number != self.number:
                self.agent.add_remote_agent(metadata)
        return [of_rank for _, of_rank in values]

    def barrier(self):
        self.exchange(None)


def descriptors(addresses, lengths):
    """NIXL's form of a list: address, length and device of each piece."""
    import numpy as np  # not above: load_nixl() says when it is missing

    rows = np.zeros((len(addresses), 3), dtype=np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = lengths
    return rows


def describe_error(error):
    """NIXL's exceptions have the name of the error in their type or text."""
    return f"{type(error).__name__}: {error}"


def run_rank(number, descriptor, function, plan):
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(descriptor)
    try:
        rank = Rank(number, connection)
        message = ("result", function(rank, plan))
    except Failure as failure:
        message = ("failure", f"rank {number}: {failure}")
    except Exception as error:  # whatever it is, the other ranks must end and the user must know
        message = ("failure", f"rank {number}: {error!r}")
        sys.excepthook(*sys.exc_info())
    try:
        connection.send(message)
        connection.recv()  # until all ranks have their result: an agent that ends early would disturb the others
    except (EOFError, OSError):
        pass


class Launcher:
    """The processes of all ranks and the connections to them."""

    def __init__(self, count):
        self.children, self.connections = [], []
        for number in range(count):
            own, other = socket.socketpair()
            command = [sys.executable, "-B", *sys.argv, str(number), str(other.fileno())]
            self.children.append(subprocess.Popen(command, pass_fds=[other.fileno()]))
            other.close()
            self.connections.append(Connection(own.detach()))

    def run(self):
        """What the ranks return. Raises Failure."""
        results = {}
        while len(results) < len(self.connections):
            kinds, values = zip(*self.receive_all())
            if "result" in kinds:
                results = dict(enumerate(values))
            for connection in self.connections:
                connection.send(list(values) if "value" in kinds else None)
        for child in self.children:
            child.wait()
        return [results[number] for number in sorted(results)]

    def receive_all(self):
        """One message of each rank, all of the same kind."""
        messages = {}
        while len(messages) < len(self.connections):
            for connection in wait([each for each in self.connections if each not in messages]):
                number = self.connections.index(connection)
                try:
                    messages[connection] = connection.recv()
                except (EOFError, OSError):
                    raise Failure(f"rank {number} ended: exit status {self.children[number].wait()}") from None
                if messages[connection][0] == "failure":
                    raise Failure(messages[connection][1])
        return [messages[connection] for connection in self.connections]

    def kill(self):
        for child in self.children:
            child.kill()
            child.wait()


def main():
    result, *rest = sys.argv[1:]
    try:
        version = load_nixl()[1]
        results = run_program(*rest) if rest else []
    except Failure as failure:
        print(failure, file=sys.stderr)
        sys.exit(FAILED)
    if results is None:
        return
    with open(result, "w", encoding="utf-8") as file:
        json.dump({"over": version, "ranks": results}, file)


def run_program(program, plan_file, *own):
    """What the ranks of the program return; in the process of a rank nothing."""
    with open(plan_file, encoding="utf-8") as file:
        plan = json.load(file)
    if own:
        number, descriptor = map(int, own)
        run_rank(number, descriptor, importlib.import_module(program).run, plan)
        return None
    launcher = Launcher(plan["ranks"])
    try:
        return launcher.run()
    except Failure:
        launcher.kill()
        raise
