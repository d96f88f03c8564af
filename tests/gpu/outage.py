#!/usr/bin/env python3
"""Repeats an all_reduce for some seconds, checks every element, and prints how long the slowest ones took and when.

Shows what an outage costs. One process for each rank, with the variables of torchrun (RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT); tests/README.md, "A lane that fails", has the command. OUTAGE_S: duration in seconds (default 16);
OUTAGE_ITERATIONS: number of all_reduces in its place. OUTAGE_MB: size in MiB (default 8). Needs PyTorch with CUDA.
Each rank also prints the bytes that all RDMA ports have sent, by their counters.
"""

import datetime
import glob
import os
import sys
import time

import torch
import torch.distributed as dist

SLOWEST = 5  # iterations that are printed
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
    times = []  # (since the beginning, duration) of each all_reduce, in seconds
    begin = time.monotonic()
    while True:
        data.fill_(RANK + 1)
        torch.cuda.synchronize()
        start = time.monotonic()
        dist.all_reduce(data)
        torch.cuda.synchronize()
        now = time.monotonic()
        times.append((start - begin, now - start))
        wrong += int((data != RANKS * (RANKS + 1) // 2).sum())
        end.fill_(float(len(times) >= ITERATIONS if ITERATIONS else now - begin > SECONDS))
        dist.all_reduce(end)  # all ranks end with the same iteration
        if end.item() > 0:
            break
    if RANK == 0:
        median = sorted(took for _, took in times)[len(times) // 2]
        slowest = sorted(sorted(times, key=lambda one: -one[1])[:SLOWEST])
        print(f"iterations {len(times)}, median {1e3 * median:.2f} ms, wrong elements {wrong}; slowest:")
        for since, took in slowest:
            print(f"  {1e3 * took:8.1f} ms at {since:6.2f} s")
    print(f"rank {RANK}: {sent_bytes()} bytes sent")
    sys.stdout.flush()
    os._exit(0 if wrong == 0 else 1)  # a process group that an outage has ended does not end by itself


main()
