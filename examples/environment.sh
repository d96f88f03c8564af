# Sourced by the examples: the variables that every rank needs.
# VERBATIM_LIBDIR: the directory of libnccl-net-verbatim.so, if the loader does not search it.
if [ -n "${VERBATIM_LIBDIR:-}" ]; then
  export LD_LIBRARY_PATH="$VERBATIM_LIBDIR${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
export NCCL_NET_PLUGIN="${NCCL_NET_PLUGIN:-verbatim}" # NCCL opens libnccl-net-verbatim.so, or the given path
export NCCL_NET=Verbatim                              # and uses no other network
export NCCL_NET_PLUGIN_REF_COUNT=1                    # and keeps the plugin loaded
export NCCL_DEBUG="${NCCL_DEBUG:-INFO}"               # shows the lines of README.md; WARN for long runs
