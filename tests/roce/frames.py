"""Ethernet frames between the machines: what a Link's `intercept` looks at and answers."""

import time

ARP = 0x0806


class Outage:
    """Loses the chosen frames for so many seconds from the first one on. `chosen(frame)` returns None for a frame that is
    carried, otherwise the answer to its sender (see topology.Link)."""

    def __init__(self, seconds, chosen):
        self.seconds, self.chosen = seconds, chosen
        self.lost = 0
        self.first = None

    def __call__(self, frame):
        answer = self.chosen(frame)
        if answer is None:
            return None
        now = time.monotonic()
        self.first = self.first or now
        if now - self.first >= self.seconds:
            return None
        self.lost += 1
        return answer


def lose_arp(frame):
    return b"" if ether_type(frame) == ARP else None


def ether_type(frame):
    return int.from_bytes(frame[12:14], "big")
