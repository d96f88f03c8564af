"""One machine with a device, or two machines with two links between them."""

import contextlib
import os
import select
import socket
import threading

from machine import EmulatorCrash, Failure, Machine

ONE = """
set -e
ip link add d0 type dummy
ip addr add 10.77.0.1/24 dev d0
ip link set d0 mtu 4500 up
rdma link add rxe0 type rxe netdev d0
"""
TWO = """
set -e
for rail in 0 1; do
  ip addr add 10.77.$rail.{number}/24 dev eth$rail
  ip addr add fd77:$rail::{number}/64 dev eth$rail nodad
  ip link set eth$rail up
  rdma link add rxe$rail type rxe netdev eth$rail
done
"""


class Link:
    """A cable between two machines. A frame that does not fit into the other end's buffer is lost: QEMU's own sockets would
    wait for a frozen machine and stop the other one too.

    `intercept`, if set, is called with each frame. It returns None when the frame is to be carried; otherwise the frame is
    lost, and its sender gets the returned frame, if that is not empty."""

    def __init__(self):
        self.intercept = None
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
        self.ends = [pair[0] for pair in pairs]  # the ends that QEMU gets
        self.relay_ends = [pair[1] for pair in pairs]
        self.closed = False
        threading.Thread(target=self.carry, daemon=True).start()

    def carry(self):
        poll = select.poll()
        others = {}
        for number, end in enumerate(self.relay_ends):
            end.setblocking(False)
            poll.register(end, select.POLLIN)
            others[end.fileno()] = (end, self.relay_ends[1 - number])
        while not self.closed:
            for number, _ in poll.poll(500):
                source, target = others[number]
                with contextlib.suppress(OSError):  # the buffer is full, or the machine has ended
                    for _ in range(64):
                        frame = source.recv(1 << 16)
                        intercept = self.intercept
                        answer = intercept(frame) if intercept else None
                        if answer is None:
                            target.send(frame)
                        elif answer:
                            source.send(answer)

    def close(self):
        self.closed = True


@contextlib.contextmanager
def booted(count, kernel, directory):
    """Yields the booted machines with their RDMA devices; powers them off at the end."""
    with contextlib.ExitStack() as cleanup:
        try:
            machines = boot(count, kernel, os.path.join(directory, "first"), cleanup)
        except EmulatorCrash as crash:
            # Seen once in several hundred runs: a general protection fault of QEMU 7.2 before the guest's first line.
            print("# " + str(crash).replace("\n", "\n# ") + "\n# the machines boot again", flush=True)
            cleanup.close()
            machines = boot(count, kernel, os.path.join(directory, "second"), cleanup)
        yield machines
        for machine in machines:
            if machine.is_running() and not machine.power_off():
                raise Failure(f"virtual machine {machine.name}: did not power off")


def boot(count, kernel, directory, cleanup):
    """Returns the booted machines with their RDMA devices; `cleanup` ends them."""
    if count == "one":
        machines = [Machine("a", *kernel, directory, cpus=2, memory_mib=2048)]
        cleanup.callback(machines[0].kill)
    else:
        links = [Link() for _ in range(2)]
        machines = []
        for end, name in enumerate("ab"):
            machines.append(Machine(name, *kernel, directory, wires=[link.ends[end] for link in links]))
            machines[-1].links = links
            cleanup.callback(machines[-1].kill)
        for link in links:
            cleanup.callback(link.close)
            for end in link.ends:
                end.close()
    for machine in machines:
        machine.wait_until_booted()
    for number, machine in enumerate(machines, 1):
        job = machine.run(ONE if count == "one" else TWO.format(number=number))
        if job.status != 0:
            raise machine.failure("creating the RDMA device failed:\n" + job.output())
    return machines
