#!/usr/bin/env python3
"""Repeats an all_reduce for some seconds, checks every element, and prints how long the slowest ones took and when.

Shows what an outage costs. By a small all_reduce behind each one all ranks learn whether to go on; it is timed too. One
process for each rank, with the variables of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); RESULTS.md,
"A lane that comes back", has the command. OUTAGE_S: duration in seconds (default 16); OUTAGE_ITERATIONS: number of
iterations in its place. OUTAGE_MB: size in MiB (default 8). Needs PyTorch with CUDA. Each rank also prints the bytes
that all RDMA ports have sent, by their counters.
"""

import datetime
import glob
import os
import sys
import time

import torch
import torch.distributed as dist

SLOWEST = 5  # collectives that are printed
RANK = int(os.environ["RANK"])
RANKS = int(os.environ["WORLD_SIZE"])
SECONDS = float(os.environ.get("OUTAGE_S", "16"))
ITERATIONS = int(os.environ.get("OUTAGE_ITERATIONS", "0"))
FLOATS = int(os.environ.get("OUTAGE_MB", "8")) * (1 << 20) // 4


def sent_bytes():
    total = 0
    for path in glob.glob("/sys/class/infiniband/*/ports/*/counters/port_xmit_data"):
        with open(path, encoding="ascii") as counter:
            total += 4 * int(counter.read())  # it counts words of four bytes
    return total


def main():
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=100))
    data = torch.empty(FLOATS, device="cuda")
    end = torch.zeros(1, device="cuda")
    wrong = 0
    iterations = 0
    times = []  # (since the beginning, duration, bytes) of each all_reduce, in seconds
    begin = time.monotonic()

    def all_reduce(tensor):
        torch.cuda.synchronize()
        start = time.monotonic()
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        times.append((start - begin, time.monotonic() - start, tensor.nelement() * tensor.element_size()))

    while end.item() == 0:
        data.fill_(RANK + 1)
        all_reduce(data)
        wrong += int((data != RANKS * (RANKS + 1) // 2).sum())
        iterations += 1
        end.fill_(float(iterations >= ITERATIONS if ITERATIONS else time.monotonic() - begin > SECONDS))
        all_reduce(end)  # all ranks end with the same iteration
    if RANK == 0:
        durations = sorted(took for _, took, _ in times[::2])  # of the data
        print(f"iterations {iterations}, median {1e3 * durations[iterations // 2]:.2f} ms, wrong elements {wrong}; slowest:")
        for since, took, size in sorted(sorted(times, key=lambda one: -one[1])[:SLOWEST]):
            print(f"  {1e3 * took:8.1f} ms at {since:6.2f} s, {size} bytes")
    print(f"rank {RANK}: {sent_bytes()} bytes sent")
    sys.stdout.flush()
    os._exit(0 if wrong == 0 else 1)  # a process group that an outage has ended does not end by itself


main()
