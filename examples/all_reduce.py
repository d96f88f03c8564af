"""An all-reduce over NCCL of which every element is checked, in two process groups, one after the other."""

import os

import torch
import torch.distributed as dist

ELEMENTS = 16 << 20


def check_all_reduce(store, rank, ranks):
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks)
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
    store, rank, ranks = next(dist.rendezvous("env://"))
    for group in ("first", "second"):  # keys of its own each: a rank must not find NCCL's id of the group before
        check_all_reduce(dist.PrefixStore(group, store), rank, ranks)


if __name__ == "__main__":
    main()
