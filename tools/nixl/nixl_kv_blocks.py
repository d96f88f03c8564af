"""The blocks of a rank for nixl_kv.py: their places, their contents (those of verbatim-kv's cache.cc), and what becomes of a
request with a bad block list."""

import copy

import numpy as np

from nixl_content import MASK, Allocation, pattern

CANARY_SOURCE = MASK - 16

COUNTERS = (
    "validation_ns validations wrong_bytes connections sent_messages sent_bytes notifications received_messages received_bytes "
    "served_bytes served timed_messages timed_bytes crc_errors crc_sum fresh_connections staged_copies recomputes elapsed_ns "
    "timed_ns check_ns fallback_ns"
).split()
LISTS = ("rejected", "rejection_times", "recompute", "errors", "latencies_ns")


def make_stats():
    """The counters of a family as verbatim-kv reads them."""
    return {**{name: 0 for name in COUNTERS}, **{name: [] for name in LISTS}, "groups": {}}


class Family:
    """One family on one rank; `bases` are the addresses of its layers, `memory` the bytes of each layer."""

    def __init__(self, plan, is_prefill):
        self.id, self.name = plan["id"], plan["name"]
        self.layers, self.entries, self.tp_ratio = plan["layers"], plan["entries"], plan["tp_ratio"]
        self.planes = self.layers * self.entries
        self.part_bytes = plan["part_bytes"]
        self.divided = plan["divided"]
        self.num_blocks = plan["prefill_blocks"] if is_prefill else plan["decode_blocks"]
        self.block_len = plan["prefill_bytes"] if is_prefill else plan["part_bytes"]
        self.bases, self.memory = [], []

    def at_peer(self, bases, num_blocks):
        """The same family on a decode rank."""
        peer = copy.copy(self)
        peer.bases, peer.memory, peer.num_blocks, peer.block_len = bases, None, num_blocks, self.part_bytes
        return peer

    def layer_bytes(self):
        return self.entries * self.num_blocks * self.block_len

    def bytes(self):
        return self.layers * self.layer_bytes()

    def part_offset(self, part):
        return self.part_bytes * part if self.divided else 0

    def parts(self):
        """The parts of a prefill block that start at different offsets."""
        return [(part, self.part_offset(part)) for part in range(self.tp_ratio if self.divided else 1)]

    def pieces(self, blocks, offset=0, bases=None, block_len=None):
        """The addresses of the blocks in each layer and entry, in the order of the messages."""
        places = np.arange(self.entries, dtype=np.uint64)[:, None] * np.uint64(self.num_blocks)
        places = (places + np.asarray(blocks, dtype=np.uint64)[None, :]) * np.uint64(block_len or self.block_len)
        starts = np.asarray(self.bases if bases is None else bases, dtype=np.uint64) + np.uint64(offset)
        return (starts[:, None, None] + places[None, :, :]).reshape(-1)

    def all_pieces(self, offset):
        return self.pieces(range(self.num_blocks), offset)

    def indices(self, blocks):
        """The places of the blocks in all_pieces()."""
        planes = np.arange(self.planes, dtype=np.int32)[:, None] * np.int32(self.num_blocks)
        return (planes + np.asarray(blocks, dtype=np.int32)[None, :]).reshape(-1)

    def views(self, blocks, offset=0, length=None):
        """The bytes of the blocks in each layer and entry, in the order of the messages."""
        length = length or self.block_len
        for memory in self.memory:
            for entry in range(self.entries):
                for block in blocks:
                    start = (entry * self.num_blocks + block) * self.block_len + offset
                    yield memory[start : start + length]


def remote_pieces(family, announced, blocks):
    """The addresses that a list with its own description of the family means, without any validation."""
    return family.pieces(blocks, bases=announced["bases"], block_len=announced["block_len"])


class Blocks:
    """The memory of all families: one slab layer by layer, or one allocation for each family or layer."""

    def __init__(self, families, allocations, pages):
        self.allocations = []
        self.pages = pages
        if allocations == "slab":
            layers = max(family.layers for family in families)
            order = [family for layer in range(layers) for family in families if layer < family.layers]
            self.place(order)
            return
        for family in families:
            if allocations == "family":
                self.place([family] * family.layers)
            else:
                for _ in range(family.layers):
                    self.place([family])

    def place(self, layers):
        """One allocation for a layer of each of these families."""
        allocation = Allocation(sum(family.layer_bytes() for family in layers), self.pages)
        self.allocations.append(allocation)
        at = 0
        for family in layers:
            family.bases.append(allocation.address + at)
            family.memory.append(allocation.data[at : at + family.layer_bytes()])
            at += family.layer_bytes()


class Contents:
    """Fills and checks the blocks of one family on one rank."""

    def __init__(self, family):
        self.family = family

    def canaries(self, blocks):
        """Each block's bytes and the content that it has while it is free."""
        family, views = self.family, self.family.views(blocks)
        for plane in range(family.planes):
            for block in blocks:
                step = plane * family.num_blocks + block
                yield next(views), pattern(CANARY_SOURCE + family.id, step, family.block_len)

    def contents(self, request, first, blocks, offset):
        """Each block's bytes and the content of the request; `first` blocks of it were hits, `offset` is that of the part."""
        family, views = self.family, self.family.views(blocks)
        for plane in range(family.planes):
            for position in range(len(blocks)):
                step = plane << 32 | (first + position)
                yield next(views), pattern(request * 2 + family.id, step, family.block_len, offset)

    def set_canaries(self, blocks):
        for view, content in self.canaries(blocks):
            view[:] = content

    def fill(self, request, first, blocks, offset):
        for view, content in self.contents(request, first, blocks, offset):
            view[:] = content

    def poison(self, request, first, blocks, offset):
        """Every byte differs from the content that is expected."""
        for view, content in self.contents(request, first, blocks, offset):
            view[:] = ~content

    def wrong_canaries(self, blocks):
        """The address and the number of wrong bytes of each block that was written although it was free."""
        return differences(self.canaries(blocks))

    def wrong(self, request, first, blocks, offset, poisoned=False):
        """The same of a request's blocks that do not have its content, or do not have the poison any more."""
        pairs = self.contents(request, first, blocks, offset)
        return differences((view, ~content) for view, content in pairs) if poisoned else differences(pairs)


def differences(pairs):
    found = []
    for view, content in pairs:
        if not np.array_equal(view, content):
            found.append((view.ctypes.data, int(np.count_nonzero(view != content))))
    return found


class BadRequest:
    """A request with an invalid destination list, and what became of it."""

    def __init__(self, request, index, fault, families, own_blocks):
        family = families[index]
        self.request, self.index, self.kind = request, index, fault["kind"]
        self.name = family.name
        self.blocks = fault["blocks"]
        self.announced = {
            "by": fault["by"],
            "family": fault["family"],
            "piece_bytes": fault["piece_bytes"],
            "block_len": fault["block_len"],
            "bases": [base + added for base, added in zip(family.bases, fault["bases_added"])],
        }
        named = next((each for each in families if each.id == fault["family"]), family)
        if fault["by"] == "index":
            starts, length = named.pieces(self.blocks), named.part_bytes
        else:
            starts, length = remote_pieces(named, self.announced, self.blocks), fault["piece_bytes"]
        self.written = (starts, starts + np.uint64(length))
        self.own = set(family.pieces(own_blocks).tolist())
        self.ended, self.result, self.error, self.after_ns = False, "no answer", "", 0
        self.call_ns = 0  # of NIXL's call, if that failed
        self.wrong_in_request, self.served_after = 0, 0
        self.overwritten = {}

    def prefill_of(self, requests):
        return requests[self.request]["prefill"]

    def wrote(self, address, length):
        """Whether the list names bytes of the block at `address`, which is not one of the request's own."""
        begins, ends = self.written
        hits = (begins < np.uint64(address + length)) & (ends > np.uint64(address))
        return address not in self.own and bool(hits.any())

    def overwrote(self, family, where, count):
        key = f"{where} of {family}"
        self.overwritten[key] = self.overwritten.get(key, 0) + count

    def end(self, message):
        self.ended = True
        self.result = {"done": "transferred"}.get(message["kind"], message["kind"])
        self.error = message.get("error", "")
        self.call_ns = message.get("call_ns", 0)

    def report(self, decode):
        return {
            "request": self.request,
            "family": self.name,
            "decode": decode,
            "kind": self.kind,
            "by": self.announced["by"],
            "result": self.result,
            "error": self.error,
            "after_ns": self.after_ns,
            "call_ns": self.call_ns,
            "wrong_in_request": self.wrong_in_request,
            "overwritten": self.overwritten,
            "served_after": self.served_after,
        }
