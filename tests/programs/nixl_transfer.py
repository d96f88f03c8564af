"""NIXL with the UCX backend and host memory: `target DIRECTORY`, or `initiator DIRECTORY SIZE...`, which writes and reads
each size, checks the contents and prints "SIZE right". The target checks the notification of each write."""

import ctypes
import os
import pickle
import sys
import time

from nixl_cu12._api import nixl_agent, nixl_agent_config

DEADLINE_S = 50
BYTES = 64 << 20


def await_true(condition, what):
    deadline = time.monotonic() + DEADLINE_S
    while not (result := condition()):
        if time.monotonic() > deadline:
            sys.exit(f"no {what} after {DEADLINE_S} s")
        time.sleep(0.0005)
    return result


def publish(directory, name, value):
    path = os.path.join(directory, name)
    with open(path + ".new", "wb") as file:
        pickle.dump(value, file)
    os.rename(path + ".new", path)


def read(directory, name):
    path = os.path.join(directory, name)
    await_true(lambda: os.path.exists(path), name)
    with open(path, "rb") as file:
        return pickle.load(file)


def make_agent(name):
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    memory = ctypes.create_string_buffer(2 * BYTES)
    address = ctypes.addressof(memory)
    agent.register_memory([(address, 2 * BYTES, 0, name)], "DRAM")
    return agent, memory, address


def target(directory):
    agent, _, address = make_agent("target")
    publish(directory, "target", (agent.get_agent_metadata(), address))
    sizes = read(directory, "sizes")
    found = []
    while len(found) < len(sizes):
        found += await_true(lambda: agent.get_new_notifs().get("initiator"), "notification")
    assert found == [b"written %d" % size for size in sizes], found
    read(directory, "end")
    print("notifications right")


def transfer(agent, operation, local, remote, notification):
    descriptors = [agent.get_xfer_descs([item], "DRAM") for item in (local, remote)]
    handle = agent.initialize_xfer(operation, *descriptors, "target", notification)
    state = agent.transfer(handle)
    deadline = time.monotonic() + DEADLINE_S
    while state == "PROC" and time.monotonic() < deadline:
        state = agent.check_xfer_state(handle)
    assert state == "DONE", (operation, local, state)
    agent.release_xfer_handle(handle)


def initiator(directory, sizes):
    agent, memory, address = make_agent("initiator")
    metadata, remote = read(directory, "target")
    agent.add_remote_agent(metadata)
    publish(directory, "sizes", sizes)
    for size in sizes:
        pattern = os.urandom(min(size, 4096))
        content = (pattern * (size // len(pattern) + 1))[:size]
        ctypes.memmove(address, content, size)
        ctypes.memset(address + BYTES, 0, size)
        transfer(agent, "WRITE", (address, size, 0), (remote, size, 0), b"written %d" % size)
        transfer(agent, "READ", (address + BYTES, size, 0), (remote, size, 0), b"")
        assert ctypes.string_at(address + BYTES, size) == content, size
        print(f"{size} right", flush=True)
    del memory
    publish(directory, "end", True)


if __name__ == "__main__":
    if sys.argv[1] == "target":
        target(sys.argv[2])
    else:
        initiator(sys.argv[2], [int(size) for size in sys.argv[3:]])
