#!/bin/bash
# nccl-tests on the hosts of an MPI job, one GPU a rank.
#
#     examples/mpirun.sh -np 16 --host node1:8,node2:8                   # runs all_reduce_perf
#     PROGRAM="alltoall_perf" examples/mpirun.sh -np 16 --host ...
#     PROGRAM="verbatim-perf all_reduce --plugin verbatim --format nccl-tests" examples/mpirun.sh -np 2   # without NCCL
#                                                       # (on several hosts: with VERBATIM_TOKEN, see tools/README.md)
#
# Needs: Open MPI, nccl-tests (built with MPI=1) on every host, and the plugin there.
# Expect: "Using network Verbatim" of each rank, then the table of nccl-tests, and at its end
#     # Out of bounds values : 0 OK
set -euo pipefail
. "$(dirname "$0")/environment.sh"

program=${PROGRAM:-all_reduce_perf}
# shellcheck disable=SC2086  # the words of $program are separate arguments
exec mpirun "$@" \
  -x LD_LIBRARY_PATH -x NCCL_NET_PLUGIN -x NCCL_NET -x NCCL_NET_PLUGIN_REF_COUNT -x NCCL_DEBUG \
  ${VERBATIM_TOKEN:+-x VERBATIM_TOKEN} \
  $program -b 8 -e "${MAXBYTES:-1G}" -f 2 -g 1
