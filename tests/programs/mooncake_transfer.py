"""One end of a transfer of Mooncake's transfer engine over RDMA; foreign_test.py runs it twice.

mooncake_transfer.py target           prints "peer PORT ADDRESS" and waits for the end of its input
mooncake_transfer.py initiator PORT ADDRESS SIZE...  writes each size to the target, reads it back, and prints "SIZE right"
"""

import ctypes
import random
import sys

from mooncake.engine import TransferEngine  # pylint: disable=import-error

HOST = "127.0.0.1"
BUFFER_BYTES = 64 << 20


def main():
    role, *arguments = sys.argv[1:]
    buffer = ctypes.create_string_buffer(BUFFER_BYTES)
    address = ctypes.addressof(buffer)
    engine = TransferEngine()
    assert engine.initialize(HOST, "P2PHANDSHAKE", "rdma", "") == 0
    assert engine.register_memory(address, BUFFER_BYTES) == 0
    if role == "target":
        print("peer", engine.get_rpc_port(), address, flush=True)
        sys.stdin.read()
        return
    port, peer, *sizes = (int(argument) for argument in arguments)
    for size in sizes:
        data = random.Random(size).randbytes(size)
        ctypes.memmove(address, data, size)
        assert engine.transfer_sync_write(f"{HOST}:{port}", address, peer, size) == 0
        ctypes.memset(address, 0, size)
        assert engine.transfer_sync_read(f"{HOST}:{port}", address, peer, size) == 0
        print(size, "right" if buffer.raw[:size] == data else "wrong", flush=True)


main()
