"""One machine with a device, or two machines with two links between them."""

import contextlib
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
    if count == "one":
        machines = [Machine("a", *kernel, directory, cpus=2, memory_mib=2048)]
    else:
        machines = [Machine(name, *kernel, directory) for name in "ab"]
    try:
        boot(machines)
        yield machines
        for machine in machines:
            if machine.is_running() and not machine.power_off():
                raise Failure(f"virtual machine {machine.name}: did not power off")
    finally:
        end(machines)


def end(machines):
    for machine in machines:
        machine.kill()
    for link in machines[0].links:
        link.close()


def boot(machines):
    """Boots the machines, anew if they run, and makes their RDMA devices."""
    try:
        boot_once(machines)
    except EmulatorCrash as crash:
        # Seen once in several hundred runs: a general protection fault of QEMU 7.2 before the guest's first line.
        print("# " + str(crash).replace("\n", "\n# ") + "\n# the machines boot again", flush=True)
        boot_once(machines)


def boot_once(machines):
    end(machines)
    links = [Link() for _ in range(2)] if len(machines) == 2 else []
    for number, machine in enumerate(machines):
        machine.links = links
        machine.peers = machines[:number] + machines[number + 1 :]
        machine.power_on([link.ends[number] for link in links])
    for link in links:
        for wire in link.ends:
            wire.close()
    for machine in machines:
        machine.wait_until_booted()
    for number, machine in enumerate(machines, 1):
        job = machine.run(ONE if len(machines) == 1 else TWO.format(number=number))
        if job.status != 0:
            raise machine.failure("creating the RDMA device failed:\n" + job.output())
