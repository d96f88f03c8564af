"""verbatim-kv --mode nixl: moves the requests of a plan through NIXL.

Decode ranks announce the destination blocks of their requests with a notification. Prefill ranks WRITE all pieces of a request
in one transfer, whose notification tells the decode rank that they have arrived. Nothing validates a block list. One agent of a
rank carries both families; each family has its own requests in flight.
"""

import json
import time
import zlib
from collections import defaultdict, deque

import nixl_ranks
from nixl_kv_blocks import BadRequest, Blocks, Contents, Family, make_stats, remote_pieces
from nixl_ranks import Failure, describe_error, descriptors

MEMORY = "DRAM"


def now_ns():
    return time.monotonic_ns()


def to_message(kind, request, family, **more):
    return json.dumps({"kind": kind, "request": request, "family": family, **more}).encode()


class Side:
    """What prefill and decode ranks have in common."""

    def __init__(self, rank, plan):
        self.rank, self.plan = rank, plan
        self.is_prefill = rank.number < plan["prefills"]
        self.index = rank.number if self.is_prefill else rank.number - plan["prefills"]
        self.timeout_ns = plan["request_timeout_ms"] * 1_000_000
        self.families = [Family(each, self.is_prefill) for each in plan["families"]]
        self.blocks = Blocks(self.families, plan["allocations"], plan["pages"])
        self.contents = [Contents(family) for family in self.families]
        self.stats = [make_stats() for _ in self.families]
        self.busy = [set() for _ in self.families]
        if plan["check"]:
            for contents, family in zip(self.contents, self.families):
                contents.set_canaries(range(family.num_blocks))
        own = [(family.bases, family.num_blocks) for family in self.families]
        self.peers = rank.connect(self.blocks.allocations, own)
        self.agent = rank.agent
        self.progress_ns = now_ns()

    def poll(self, handle):
        """Calls `handle` with the sender and each new notification."""
        found = self.agent.get_new_notifs()
        for sender, messages in found.items():
            for message in messages:
                handle(int(sender), json.loads(message))
        return bool(found)

    def is_stuck(self):
        return now_ns() - self.progress_ns > self.timeout_ns

    def result(self, bad):
        return {
            "bytes": sum(family.bytes() for family in self.families),
            "allocations": len(self.blocks.allocations),
            "damage": sum(each.damage() for each in self.blocks.allocations),
            "families": self.stats,
            "bad_lists": bad,
        }


class Prefill(Side):
    def __init__(self, rank, plan):
        super().__init__(rank, plan)
        self.requests = {each["id"]: each for each in plan["requests"]}
        self.parts_done = [defaultdict(int) for _ in self.families]  # by request
        self.filled = [set() for _ in self.families]  # requests
        self.users = [self.users_of_blocks(index) for index in range(len(self.families))]
        self.waiting = []  # announcements for which the source blocks are in use
        self.active = []  # (transfer, decode rank, announcement)
        self.ended = 0  # decode ranks
        self.local = [
            {part: self.prepare("", family.all_pieces(offset), family.part_bytes) for part, offset in family.parts()}
            for family in self.families
        ]
        self.remote = {}
        for decode in range(plan["decodes"]):
            number = plan["prefills"] + decode
            for index, (bases, num_blocks) in enumerate(self.peers[number]):
                family = self.families[index].at_peer(bases, num_blocks)
                pieces = family.all_pieces(0)
                self.remote[number, index] = (self.prepare(str(number), pieces, family.part_bytes), family)
            self.agent.make_connection(str(number))

    def users_of_blocks(self, index):
        """By block: the requests that use it, in their order. Each waits for the one before."""
        users = defaultdict(deque)
        for request in self.requests.values():
            if request["prefill"] == self.index:
                for block in request["families"][index]["source"]:
                    users[block].append(request["id"])
        return users

    def prepare(self, agent, addresses, length):
        return self.agent.prep_xfer_dlist(agent, descriptors(addresses, length), MEMORY)

    def run(self):
        backoff = nixl_ranks.Backoff()
        self.rank.exchange(None)
        while self.ended < self.plan["decodes"] or self.active:
            progressed = self.poll(self.handle)
            waiting, self.waiting = self.waiting, []
            for sender, announced in waiting:
                progressed = self.start(sender, announced) or progressed
            progressed = self.complete() or progressed
            if progressed:
                self.progress_ns = now_ns()
            elif backoff.idle_rounds > nixl_ranks.YIELDS and self.is_stuck():
                self.stats[0]["errors"].append(f"prefill rank {self.index}: nothing arrived any more")
                break
            backoff.after_round(progressed)
        self.rank.exchange(None)
        return self.check()

    def handle(self, sender, message):
        if message["kind"] == "end":
            self.ended += 1
        else:
            self.start(sender, message)

    def start(self, sender, announced):
        """Starts the transfer of an announced part of a request, when its source blocks are free."""
        index, request = announced["family"], self.requests[announced["request"]]
        family, parts = self.families[index], request["families"][index]
        if request["id"] not in self.filled[index]:
            if any(self.users[index][block][0] != request["id"] for block in parts["source"]):
                self.waiting.append((sender, announced))
                return False
            self.filled[index].add(request["id"])
            self.busy[index].update(parts["source"])
            if self.plan["check"]:
                self.contents[index].fill(request["id"], parts["first"], parts["source"], 0)
        part = (sender - self.plan["prefills"]) % family.tp_ratio
        pieces = len(parts["source"]) * family.planes
        length = pieces * family.part_bytes
        crc = 0
        if self.plan["check"]:
            for piece in family.views(parts["source"], family.part_offset(part), family.part_bytes):
                crc = zlib.crc32(piece, crc)
        done = to_message("done", request["id"], index, blocks=len(parts["source"]), bytes=length, crc=crc)
        is_bad = announced.get("bad") is not None
        begin_ns = now_ns()
        try:
            transfer = self.make_transfer(sender, announced, request, part, done)
            state = self.agent.transfer(transfer)
        except Exception as error:  # NIXL's own exceptions have no common base class
            if not is_bad:
                raise Failure(f"NIXL does not take request {request['id']}: {describe_error(error)}") from error
            self.refuse(sender, announced, error=describe_error(error), call_ns=now_ns() - begin_ns)
            return True
        self.stats[index]["sent_messages"] += 0 if is_bad else pieces
        self.stats[index]["sent_bytes"] += 0 if is_bad else length
        self.active.append((transfer, sender, announced))
        if state == "ERR":
            self.fail(self.active.pop(), "ERR")
        return True

    def make_transfer(self, sender, announced, request, part, done):
        index, bad = announced["family"], announced.get("bad")
        if bad is not None:
            index = next(number for number, each in enumerate(self.families) if each.id == bad["family"])
        family, source = self.families[index], request["families"][index]["source"]
        remote, peer = self.remote[sender, index]
        if bad is None or bad["by"] == "index":
            local = self.local[index][part if part in self.local[index] else 0]
            indices = family.indices(source), peer.indices(announced["blocks"])
            return self.agent.make_prepped_xfer("WRITE", local, indices[0], remote, indices[1], done)
        local = descriptors(family.pieces(source, family.part_offset(part)), family.part_bytes)
        named = descriptors(remote_pieces(peer, bad, announced["blocks"]), bad["piece_bytes"])
        lists = [self.agent.get_xfer_descs(each, MEMORY) for each in (local, named)]
        return self.agent.initialize_xfer("WRITE", *lists, str(sender), done)

    def complete(self):
        progressed, remaining = False, []
        for entry in self.active:
            transfer, _, announced = entry
            try:
                state = self.agent.check_xfer_state(transfer)
            except Exception as error:  # as above
                state = describe_error(error)
            if state == "PROC":
                remaining.append(entry)
                continue
            progressed = True
            if state != "DONE":
                self.fail(entry, state)
                continue
            self.agent.release_xfer_handle(transfer)
            if announced.get("bad") is None:
                self.stats[announced["family"]]["notifications"] += 1
            self.free(announced)
        self.active = remaining
        return progressed

    def refuse(self, sender, announced, **why):
        self.free(announced)
        self.agent.send_notif(str(sender), to_message("refused", announced["request"], announced["family"], **why))

    def fail(self, entry, state):
        """A transfer ended with an error after it was accepted."""
        _, sender, announced = entry
        self.stats[announced["family"]]["errors"].append(f"request {announced['request']}: the transfer ended with {state}")
        self.free(announced)
        self.agent.send_notif(str(sender), to_message("failed", announced["request"], announced["family"], error=state))

    def free(self, announced):
        index, request = announced["family"], self.requests[announced["request"]]
        family, source = self.families[index], request["families"][index]["source"]
        self.parts_done[index][request["id"]] += 1
        if self.parts_done[index][request["id"]] < family.tp_ratio:
            return
        for block in source:
            self.users[index][block].popleft()
        if self.plan["check"]:
            self.contents[index].set_canaries(source)
        self.busy[index].difference_update(source)

    def check(self):
        if self.plan["check"]:
            for contents, stats, busy in zip(self.contents, self.stats, self.busy):
                free = [block for block in range(contents.family.num_blocks) if block not in busy]
                wrong = sum(count for _, count in contents.wrong_canaries(free))
                stats["wrong_bytes"] += wrong
                if wrong:
                    stats["errors"].append(f"prefill rank {self.index}: {wrong} bytes of free blocks were written")
        return self.result([])


class Flow:
    """The requests of one family on a decode rank."""

    def __init__(self, index, requests):
        self.index = index
        self.requests = requests
        self.next = 0
        self.in_flight = {}  # by request: when it began
        self.timed_from_ns = None


class Decode(Side):
    def __init__(self, rank, plan):
        super().__init__(rank, plan)
        self.engine, self.part = divmod(self.index, self.families[0].tp_ratio)
        own = [each for each in plan["requests"] if each["engine"] == self.engine]
        self.requests = {each["id"]: each for each in own}
        self.flows = [Flow(index, own) for index in range(len(self.families))]
        self.bad = {}  # by request and family
        for number in range(plan["prefills"]):
            self.agent.make_connection(str(number))

    def run(self):
        backoff = nixl_ranks.Backoff()
        self.rank.exchange(None)
        begin_ns = self.progress_ns = now_ns()
        unfinished = list(self.flows)
        while unfinished:
            progressed = False
            for flow in unfinished:
                progressed = self.start(flow, begin_ns) or progressed
            progressed = self.poll(self.handle) or progressed
            for flow in unfinished:
                if flow.next == len(flow.requests) and not flow.in_flight:
                    self.stats[flow.index]["elapsed_ns"] = now_ns() - begin_ns
                    self.stats[flow.index]["timed_ns"] = now_ns() - (flow.timed_from_ns or begin_ns)
            unfinished = [flow for flow in unfinished if flow.next < len(flow.requests) or flow.in_flight]
            if progressed:
                self.progress_ns = now_ns()
            elif backoff.idle_rounds > nixl_ranks.YIELDS and self.is_stuck():
                self.give_up(unfinished)
                break
            backoff.after_round(progressed)
        for number in range(self.plan["prefills"]):
            self.agent.send_notif(str(number), to_message("end", 0, 0))
        self.rank.exchange(None)
        return self.check()

    def start(self, flow, begin_ns):
        progressed = False
        while flow.next < len(flow.requests) and len(flow.in_flight) < self.plan["concurrency"]:
            request, busy = flow.requests[flow.next], self.busy[flow.index]
            if flow.timed_from_ns is None and request["id"] >= self.plan["warmup"]:
                if flow.in_flight:
                    break
                flow.timed_from_ns = begin_ns if flow.next == 0 else now_ns()
            blocks = request["families"][flow.index]["destinations"][self.part]
            if not busy.isdisjoint(blocks):
                break
            busy.update(blocks)
            flow.next += 1
            flow.in_flight[request["id"]] = now_ns()
            self.announce(flow.index, request, blocks)
            progressed = True
        return progressed

    def announce(self, index, request, blocks):
        parts = request["families"][index]
        if self.plan["check"]:
            self.count_wrong(index, self.contents[index].wrong_canaries(blocks), "free blocks")
            self.contents[index].poison(request["id"], parts["first"], blocks, self.part_offset(index))
        fault = parts["bad"][self.part] if parts["bad"] else None
        announced = {"blocks": blocks}
        if fault is not None:
            bad = BadRequest(request["id"], index, fault, self.families, blocks)
            self.bad[request["id"], index] = bad
            announced = {"blocks": bad.blocks, "bad": bad.announced}
        self.agent.send_notif(str(request["prefill"]), to_message("announce", request["id"], index, **announced))

    def part_offset(self, index):
        return self.families[index].part_offset(self.part)

    def handle(self, _, message):
        index, request = message["family"], self.requests[message["request"]]
        flow, stats = self.flows[index], self.stats[index]
        begin_ns = flow.in_flight.pop(request["id"])
        parts = request["families"][index]
        blocks = parts["destinations"][self.part]
        bad = self.bad.get((request["id"], index))
        if bad is not None:
            bad.after_ns = now_ns() - begin_ns
            self.finish_bad(bad, message, parts, blocks)
        elif message["kind"] == "done":
            length = len(blocks) * self.families[index].planes * self.families[index].part_bytes
            if (message["blocks"], message["bytes"]) != (len(blocks), length):
                raise Failure(f"request {request['id']}: a notification of {message['bytes']} bytes instead of {length}")
            if request["id"] >= self.plan["warmup"]:
                stats["latencies_ns"].append(now_ns() - begin_ns)
                stats["timed_messages"] += len(blocks) * self.families[index].planes
                stats["timed_bytes"] += length
            stats["served"] += 1
            for name, value in (("received", length), ("served", length)):
                stats[name + "_bytes"] += value
            stats["received_messages"] += len(blocks) * self.families[index].planes
            for each in self.bad.values():
                each.served_after += each.ended and each.prefill_of(self.requests) == request["prefill"]
            if self.plan["check"]:
                self.check_served(index, request, parts, blocks, message["crc"])
        else:
            stats["recompute"].append({"request": request["id"], "first": parts["first"], "blocks": blocks})
        if self.plan["check"]:
            self.contents[index].set_canaries(blocks)
        self.busy[index].difference_update(blocks)

    def check_served(self, index, request, parts, blocks, crc):
        stats, family = self.stats[index], self.families[index]
        own = 0
        for piece in family.views(blocks, 0, family.part_bytes):
            own = zlib.crc32(piece, own)
        stats["crc_sum"] += own
        wrong = self.contents[index].wrong(request["id"], parts["first"], blocks, self.part_offset(index))
        explained = self.count_wrong(index, wrong, "requests")
        if own != crc and not explained:
            stats["crc_errors"] += 1
            stats["errors"].append(f"request {request['id']}: the CRC of the data differs from that in the notification")

    def finish_bad(self, bad, message, parts, blocks):
        bad.end(message)
        if not self.plan["check"]:
            return
        contents = self.contents[bad.index]
        offset = self.part_offset(bad.index)
        if message["kind"] == "done":
            wrong = contents.wrong(bad.request, parts["first"], blocks, offset)
        else:
            wrong = contents.wrong(bad.request, parts["first"], blocks, offset, poisoned=True)
        bad.wrong_in_request = sum(count for _, count in wrong)

    def count_wrong(self, index, wrong, where):
        """Counts wrong bytes for the bad descriptors that wrote there, and all others as wrong. Returns whether all are
        explained by bad descriptors."""
        family, explained = self.families[index], True
        for address, count in wrong:
            cause = next((bad for bad in self.bad.values() if bad.wrote(address, family.part_bytes)), None)
            if cause is not None:
                cause.overwrote(family.name, where, count)
                continue
            explained = False
            self.stats[index]["wrong_bytes"] += count
            if len(self.stats[index]["errors"]) < 5:
                self.stats[index]["errors"].append(f"decode rank {self.index}: {count} wrong bytes in {where}")
        return explained

    def give_up(self, unfinished):
        """No answer in time: what was not served counts as lost."""
        for flow in unfinished:
            for request in [self.requests[each] for each in flow.in_flight] + flow.requests[flow.next :]:
                parts = request["families"][flow.index]
                blocks = parts["destinations"][self.part]
                bad = self.bad.get((request["id"], flow.index))
                if bad is not None:
                    bad.end({"kind": "no answer"})
                    continue
                self.stats[flow.index]["recompute"].append(
                    {"request": request["id"], "first": parts["first"], "blocks": blocks}
                )
            self.stats[flow.index]["errors"].append(f"decode rank {self.index}: no notification in time")

    def check(self):
        if self.plan["check"]:
            for index, contents in enumerate(self.contents):
                free = [block for block in range(contents.family.num_blocks) if block not in self.busy[index]]
                self.count_wrong(index, contents.wrong_canaries(free), "free blocks")
        return self.result([bad.report(self.index) for bad in self.bad.values()])


def run(rank, plan):
    side = Prefill if rank.number < plan["prefills"] else Decode
    return side(rank, plan).run()

