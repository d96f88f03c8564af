"""verbatim-eplb --over nixl: each rank READs the rows that it needs from where they lie in the weights of the old owner.

The notification of the READ shows each source that its rows may be overwritten. Contents, guards and the order of the rows
are those of verbatim-eplb's mover.cc and rows.cc.
"""

import time

import numpy as np

import nixl_ranks
from nixl_content import MASK, allocate, pattern
from nixl_ranks import Failure, describe_error, descriptors

MEMORY = "DRAM"
GUARD, ALIGNMENT = 64, 64
GUARD_SOURCE = 0x6775617264
EMPTY = -1


class Rows:
    """The rows of experts, tensor by tensor, with guards between the rows."""

    def __init__(self, name, tensors, count, pages):
        self.name, self.tensors, self.count = name, tensors, count
        self.begins, self.strides = [], []
        self.length = 0
        for length in tensors:
            self.length += GUARD
            self.begins.append(self.length)
            self.strides.append((length + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT + GUARD)
            self.length += count * self.strides[-1]
        self.data = allocate(self.length, pages)
        self.address = self.data.ctypes.data

    def offset(self, tensor, row):
        return self.begins[tensor] + row * self.strides[tensor]

    def view(self, tensor, row):
        start = self.offset(tensor, row)
        return self.data[start : start + self.tensors[tensor]]

    def guards(self):
        for tensor, length in enumerate(self.tensors):
            yield self.begins[tensor] - GUARD, GUARD, f"tensor {tensor}, guard before row 0"
            for row in range(self.count):
                yield self.offset(tensor, row) + length, self.strides[tensor] - length, f"tensor {tensor}, guard after row {row}"

    def write_guards(self):
        for offset, length, _ in self.guards():
            self.data[offset : offset + length] = pattern(GUARD_SOURCE, offset, length)

    def wrong_guards(self):
        for offset, length, what in self.guards():
            yield self.data[offset : offset + length], pattern(GUARD_SOURCE, offset, length), what

    def pieces(self, address):
        """Addresses and lengths of each row of each tensor that has bytes, if the rows were at `address`."""
        places = [(tensor, row) for row in range(self.count) for tensor in self.moved()]
        return descriptors([address + self.offset(*each) for each in places], [self.tensors[tensor] for tensor, _ in places])

    def moved(self):
        return [tensor for tensor, length in enumerate(self.tensors) if length > 0]

    def indices(self, rows):
        """The places of the rows in pieces()."""
        each = len(self.moved())
        return (np.asarray(rows, dtype=np.int32)[:, None] * each + np.arange(each, dtype=np.int32)[None, :]).reshape(-1)


class Expert:
    """One rank: its weights and new rows, and the work of each layer."""

    def __init__(self, rank, plan):
        self.rank, self.plan, self.number = rank, plan, rank.number
        self.tensors, self.local = plan["tensors"], plan["local_rows"]
        self.weights = Rows("weights", self.tensors, self.local, plan["pages"])
        self.new_rows = Rows("new rows", self.tensors, self.local, plan["pages"])
        addresses = rank.connect([self.weights, self.new_rows], self.weights.address)
        self.agent = rank.agent
        self.into = self.agent.prep_xfer_dlist("", self.new_rows.pieces(self.new_rows.address), MEMORY)
        self.sources = {}
        self.readers = [set() for _ in plan["layers"]]
        self.receives = [{} for _ in plan["layers"]]  # by layer and source: transfers
        for number, layer in enumerate(plan["layers"]):
            for transfer in layer["transfers"]:
                source, destination = transfer[:2]
                if source == self.number:
                    self.readers[number].add(destination)
                if destination == self.number:
                    self.receives[number].setdefault(source, []).append(transfer)
        for source in {source for layer in self.receives for source in layer}:
            pieces = self.weights.pieces(addresses[source])
            self.sources[source] = self.agent.prep_xfer_dlist(str(source), pieces, MEMORY)
            self.agent.make_connection(str(source))
        self.released = {}  # by tag of a layer: the ranks that have read
        self.received = [0] * plan["ranks"]
        self.operations = 0

    def content(self, layer, iteration, expert, row, tensor):
        length, seed = self.tensors[tensor], self.plan["seed"]
        if expert == EMPTY:
            return pattern(~seed & MASK, row << 8 | tensor, length)
        return pattern((seed + (iteration << 32)) & MASK, layer << 40 | expert << 8 | tensor, length)

    def rows(self, layer):
        """Of each own row: its number, how it is filled, from where, the expert before and after."""
        first, work = self.number * self.local, self.plan["layers"][layer]
        for row in range(self.local):
            how, origin = work["rows"][first + row]
            yield row, how, origin, work["before"][first + row], work["after"][first + row]

    def prepare(self, layer, iteration):
        for row, how, _, before, after in self.rows(layer):
            for tensor in range(len(self.tensors)):
                self.weights.view(tensor, row)[:] = self.content(layer, iteration, before, row, tensor)
                if how in ("receive", "copy"):
                    self.new_rows.view(tensor, row)[:] = ~self.content(layer, iteration, after, row, tensor)
                else:
                    self.new_rows.view(tensor, row)[:] = self.content(layer, iteration, EMPTY, row, tensor)
        self.weights.write_guards()
        self.new_rows.write_guards()

    def copy_row(self, to, row, origin, from_row):
        for tensor in range(len(self.tensors)):
            to.view(tensor, row)[:] = origin.view(tensor, from_row)

    def move(self, layer, iteration):
        tag = f"{iteration} {layer}".encode()
        active = []
        for source, transfers in self.receives[layer].items():
            local = self.new_rows.indices([transfer[4] for transfer in transfers])
            remote = self.weights.indices([transfer[3] for transfer in transfers])
            try:
                handle = self.agent.make_prepped_xfer("READ", self.into, local, self.sources[source], remote, tag)
                state = self.agent.transfer(handle)
            except Exception as error:  # NIXL's own exceptions have no common base class
                raise Failure(f"NIXL does not take the READ from rank {source}: {describe_error(error)}") from error
            if state == "ERR":
                raise Failure(f"the READ from rank {source} ended with ERR")
            active.append((handle, source))
            self.received[source] += len(transfers) * sum(self.tensors)
            self.operations += len(transfers)
        for row, how, origin, _, _ in self.rows(layer):
            if how == "copy":
                self.copy_row(self.new_rows, row, self.weights, origin)
        self.wait(active, tag, self.readers[layer])
        if self.plan["flip"] == [layer, self.number]:
            self.new_rows.view(0, min(transfer[4] for each in self.receives[layer].values() for transfer in each))[0] ^= 1
        for row, how, _, _, _ in self.rows(layer):
            if how in ("copy", "receive"):
                self.copy_row(self.weights, row, self.new_rows, row)
        for row, how, origin, _, _ in self.rows(layer):
            if how == "duplicate":
                self.copy_row(self.weights, row, self.new_rows, origin)

    def wait(self, active, tag, readers):
        """Until the own READs are done, and all readers of the own weights have said that theirs are."""
        backoff, begin_ns = nixl_ranks.Backoff(), time.monotonic_ns()
        while active or len(self.released.get(tag, ())) < len(readers):
            remaining = []
            for handle, source in active:
                state = self.agent.check_xfer_state(handle)
                if state == "DONE":
                    self.agent.release_xfer_handle(handle)
                elif state == "PROC":
                    remaining.append((handle, source))
                else:
                    raise Failure(f"the READ from rank {source} ended with {state}")
            found = self.agent.get_new_notifs()
            for sender, messages in found.items():
                for message in messages:
                    self.released.setdefault(message, set()).add(int(sender))
            progressed = bool(found) or len(remaining) < len(active)
            active = remaining
            if progressed:
                begin_ns = time.monotonic_ns()
            elif time.monotonic_ns() - begin_ns > self.plan["watchdog_s"] * 1_000_000_000:
                raise Failure(f"no progress for {self.plan['watchdog_s']} s: {len(active)} READs are not done")
            backoff.after_round(progressed)
        self.released.pop(tag, None)

    def check(self, layer, iteration):
        """The number of wrong bytes, and a text about the first."""
        wrong, first = 0, ""
        for found, expected, what in self.expected(layer, iteration):
            if not np.array_equal(found, expected):
                different = np.flatnonzero(found != expected)
                wrong += len(different)
                at = int(different[0])
                first = first or f"{what}, offset {at}: {found[at]:02x} instead of {expected[at]:02x}"
        return wrong, f"rank {self.number}, layer {layer}, {first}" if wrong else ""

    def expected(self, layer, iteration):
        for row, how, _, before, after in self.rows(layer):
            held = before if after == EMPTY else after
            new = after if how in ("receive", "copy") else EMPTY
            for rows, expert in ((self.weights, held), (self.new_rows, new)):
                for tensor in range(len(self.tensors)):
                    what = f"{rows.name}, row {row}, expert {expert}, tensor {tensor}"
                    yield rows.view(tensor, row), self.content(layer, iteration, expert, row, tensor), what
        for rows in (self.weights, self.new_rows):
            for found, expected, what in rows.wrong_guards():
                yield found, expected, f"{rows.name}, {what}"


def run(rank, plan):
    expert = Expert(rank, plan)
    layers = [{"times_ns": [], "wrong": 0, "first_wrong": ""} for _ in plan["layers"]]
    for iteration in range(plan["warmup"] + plan["iterations"]):
        for number, layer in enumerate(layers):
            if plan["check"] or iteration + number == 0:
                expert.prepare(number, iteration)
            rank.barrier()
            begin_ns = time.monotonic_ns()
            expert.move(number, iteration)
            if iteration >= plan["warmup"]:
                layer["times_ns"].append(time.monotonic_ns() - begin_ns)
            if plan["check"]:
                wrong, first = expert.check(number, iteration)
                layer["wrong"] += wrong
                layer["first_wrong"] = layer["first_wrong"] or first
            rank.barrier()
    return {
        "layers": layers,
        "received": expert.received,
        "operations": expert.operations,
        "row_bytes": expert.local * sum(expert.tensors),
        "allocated_bytes": expert.weights.length + expert.new_rows.length,
    }
