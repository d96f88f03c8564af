#!/bin/bash
# PyTorch with torchrun. On each host, with the same address of the first one:
#
#     examples/torchrun.sh --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node1:29500
#
# On one host without an RDMA NIC (two GPUs; within a host NCCL uses the network only if it must):
#
#     NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 SOFTVERBS_LOCK_LIMIT=none softverbs -- examples/torchrun.sh --nproc-per-node 2
#
# Needs: PyTorch with NCCL 2.19 or newer, and the plugin on every host.
# Expect: "Using network Verbatim" of each rank, and from rank 0
#     all_reduce of 67108864 bytes between 16 ranks: every element is right
# and no error of the second process group, which NCCL_NET_PLUGIN_REF_COUNT=1 is for.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

exec torchrun "$@" "$(dirname "$0")/all_reduce.py"
