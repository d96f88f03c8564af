"""Ethernet frames between the machines: what a Link's `intercept` looks at and answers."""

import struct
import time

ARP, IPV4 = 0x0806, 0x0800
TCP = 6
FIN, SYN, RST, ACK = 1, 2, 4, 16


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


def reject_syn(frame, except_port):
    """Answers each TCP SYN with a reset, as a host does for a port without a listener; not those to one port."""
    if ether_type(frame) != IPV4 or frame[14 + 9] != TCP:
        return None
    ip_bytes = (frame[14] & 15) * 4
    ip, tcp = frame[14 : 14 + ip_bytes], frame[14 + ip_bytes :]
    source, target, sequence, _, _, flags = struct.unpack("!HHIIBB", tcp[:14])
    if flags & (SYN | ACK | RST | FIN) != SYN or target == except_port:
        return None
    addresses = ip[16:20] + ip[12:16]  # of the answer
    answer = struct.pack("!HHIIBBHHH", target, source, 0, (sequence + 1) & 0xFFFFFFFF, 5 << 4, RST | ACK, 0, 0, 0)
    pseudo = addresses + struct.pack("!BBH", 0, TCP, len(answer))
    answer = answer[:16] + checksum(pseudo + answer) + answer[18:]
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(answer), 0, 0, 64, TCP, 0) + addresses
    header = header[:10] + checksum(header) + header[12:]
    return frame[6:12] + frame[:6] + frame[12:14] + header + answer


def ether_type(frame):
    return int.from_bytes(frame[12:14], "big")


def checksum(data):
    """The Internet checksum (RFC 1071)."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", ~total & 0xFFFF)
