#!/bin/bash
# vLLM with expert parallelism; the arguments are those of `vllm serve`:
#
#     examples/vllm.sh deepseek-ai/DeepSeek-V3 --tensor-parallel-size 8 --enable-expert-parallel
#
# Needs: vLLM, and the plugin on every host. With several hosts every worker needs the variables, so start Ray, or the
# multi-node launcher that is used, with examples/environment.sh sourced.
# Expect: "Using network Verbatim" of each worker. The EPLB of vLLM uses NCCL with
#     --enable-eplb --eplb-config.communicator pynccl --eplb-config.use_async false
set -euo pipefail
. "$(dirname "$0")/environment.sh"

exec vllm serve "$@"
