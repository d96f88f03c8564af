"""An all-reduce over NCCL of which every element is checked, in two process groups, one after the other."""

import os

import torch
import torch.distributed as dist

ELEMENTS = 16 << 20


def check_all_reduce():
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = torch.full((ELEMENTS,), float(rank + 1), device="cuda")
    dist.all_reduce(data)
    expected = ranks * (ranks + 1) / 2
    wrong = int((data != expected).sum())
    dist.destroy_process_group()
    if wrong:
        raise SystemExit(f"rank {rank}: {wrong} wrong elements")
    if rank == 0:
        print(f"all_reduce of {data.nbytes} bytes between {ranks} ranks: every element is right", flush=True)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    for _ in range(2):
        check_all_reduce()


if __name__ == "__main__":
    main()
