# shellcheck shell=bash
# shellcheck disable=SC2154,SC2034  # variables of tests/gpu/run
# shellcheck disable=SC2030,SC2031  # the environment of a case is that of a subshell
# The parts of tests/gpu/run --gdr: NCCL with GPU Direct over softverbs. Sourced by tests/gpu/run.

gdr_header() {
  printf '%-11s %-12s %6s %4s %-8s %14s %9s %12s %9s %-28s %5s  %s\n' '# part' memory dmabuf read protocol elements wrong \
    'GDR rx/tx' flushes 'user buffers' s result
}

gdr_print_rows() {  # gdr_print_rows FILE...: of each NCCL
  local file
  gdr_header
  for file in "$@"; do
    [ -e "$file" ] || continue
    echo "# NCCL $(basename "$(dirname "$(dirname "$file")")")"
    cat "$file"
  done
}

# gdr_row PART MEMORY DMABUF READ PROTOCOL ELEMENTS WRONG CONNECTIONS FLUSHES BUFFERS SECONDS RESULT
gdr_row() {
  printf '%-11s %-12s %6s %4s %-8s %14s %9s %12s %9s %-28s %5s  %s\n' "$@" | tee -a "$gdr_directory/rows.txt"
}

gdr_count() {  # gdr_count PATTERN FILE...: lines of all files
  local pattern=$1
  shift
  cat "$@" 2>/dev/null | grep -c -e "$pattern" || true
}

# Each connection must use GPU Direct where it receives, and where it sends if READ is 1. Sets connections and problem.
gdr_check_logs() {  # gdr_check_logs NET READ LOG...
  local name=$1 read=$2 receives sends gdr_receives gdr_sends
  shift 2
  receives=$(gdr_count "\[receive\] via NET/$name/" "$@")
  sends=$(gdr_count "\[send\] via NET/$name/" "$@")
  gdr_receives=$(gdr_count "\[receive\] via NET/$name/.*/GDRDMA" "$@")
  gdr_sends=$(gdr_count "\[send\] via NET/$name/.*/GDRDMA" "$@")
  connections="$gdr_receives/$gdr_sends"
  if [ "$receives" -eq 0 ]; then
    problem="NCCL's logs name no connection over $name"
  elif [ "$gdr_receives" -ne "$receives" ]; then
    problem="GDRDMA on $gdr_receives of $receives receiving connections"
  elif [ "$read" = 1 ] && [ "$gdr_sends" -ne "$sends" ]; then
    problem="GDRDMA on $gdr_sends of $sends sending connections"
  elif [ "$read" = 0 ] && [ "$gdr_sends" -ne 0 ]; then
    problem="GDRDMA on $gdr_sends sending connections with NCCL_NET_GDR_READ=0"
  fi
}

# A flush is an RDMA READ, and nothing else reads. Every process that has opened a device must have read. Sets flushes and
# problem.
gdr_check_flushes() {  # gdr_check_flushes DIRECTORY
  local without
  flushes=-
  [ "$softverbs" = yes ] || return 0
  # The first line of a file has the sum over the QPs, each of which has a line of its own.
  read -r flushes without < <(head -qn 1 "$1"/stats.* 2>/dev/null | awk -F '"rdma_read":' '
    { sum += $2; if ($2 + 0 == 0) without++ }
    END { printf "%d %d\n", sum, without + (NR == 0) }') || true
  if [ "${without:-1}" -ne 0 ]; then
    problem="no flush: softverbs counted $flushes RDMA READs, and none in $without processes (or there are no counters)"
  fi
}

# Sets buffers and problem.
gdr_check_buffers() {  # gdr_check_buffers DIRECTORY DMABUF LOG...
  local directory=$1 type=cuda
  [ "$2" = 0 ] || type=dmabuf
  shift 2
  buffers=$(cat "$@" "$directory"/watch.* 2>/dev/null | awk -v type="$type" -f tests/gpu/user_buffers.awk) || problem=$buffers
}

build_watch() {  # the plugin in front of Verbatim that records which memory it gets
  local directory=$gdr_directory/watch
  mkdir -p "$directory"
  g++ -std=c++20 -O2 -Wall -Wextra -D_GNU_SOURCE -shared -fPIC -fvisibility=hidden -fno-gnu-unique -static-libstdc++ \
    -static-libgcc -Iinclude tests/gpu/watch/watch.cc -o "$directory/$(basename "$plugin")" -ldl || return
  ln -sf "$(basename "$plugin")" "$directory/libnccl-net.so"
}

# The environment of one case; call it in a subshell.
gdr_environment() {  # gdr_environment DIRECTORY MEMORY DMABUF READ
  export SOFTVERBS_GPU_MEMORY=$2 NCCL_DMABUF_ENABLE=$3 NCCL_NET_GDR_READ=$4
  SOFTVERBS_STATS=$(realpath "$1")/stats.%p
  WATCH_FILE=$(realpath "$1")/watch.%p
  WATCH_PLUGIN=$(realpath "$plugin")
  export SOFTVERBS_STATS WATCH_FILE WATCH_PLUGIN
}

# Runs nccl_run in one way, checks its logs and counters, and prints a row. Status 2: it hung.
gdr_case() {  # gdr_case PART MEMORY DMABUF READ PROTOCOL OPTION...
  local part=$1 memory=$2 dmabuf=$3 read=$4 protocol=$5 status=0 start=$SECONDS
  local directory plugins=$plugin_directory options=() subsystems=INIT,NET,TUNING algorithm=
  local problem='' connections=- flushes=- buffers=- elements wrong result=right
  shift 5
  directory=$gdr_directory/$part-$memory-$dmabuf-$read-$protocol
  rm -rf "$directory"
  mkdir -p "$directory"
  [ "$protocol" = any ] || options+=(--proto "$protocol")
  if [ "$part" = registered ]; then
    options+=(--registered 1)
    subsystems+=,REG
    algorithm=Ring
    [ "$net" != Verbatim ] || plugins=$gdr_directory/watch
  fi
  [ "$gpus" -ge "$ranks" ] || options+=("$@" -e 16M)
  [ "$gpus" -lt "$ranks" ] || options+=("$@")
  (
    gdr_environment "$directory" "$memory" "$dmabuf" "$read"
    export NCCL_DEBUG_SUBSYS=$subsystems
    [ -z "$algorithm" ] || export NCCL_ALGO=$algorithm
    nccl_run_over "$net" "$plugins" "$directory" "${options[@]}" "${extra[@]}"
  ) >"$directory/table.txt" 2>&1 </dev/null || status=$?
  read -r elements wrong < <(sed -n 's/^# elements compared: \([0-9]*\), wrong: \([0-9]*\).*/\1 \2/p' "$directory/table.txt") ||
    { elements=- wrong=-; }
  gdr_check_logs "$net" "$read" "$directory"/nccl.rank*.log
  gdr_check_flushes "$directory"
  if [ "$part" = registered ] && [ "$net" = Verbatim ]; then
    gdr_check_buffers "$directory" "$dmabuf" "$directory"/nccl.rank*.log
  fi
  [ "$status" -eq 0 ] || problem="nccl_run: status $status${problem:+, $problem}"
  [ -z "$problem" ] || result="FAILED: $problem; see $directory"
  gdr_row "$part" "$memory" "$dmabuf" "$read" "$protocol" "$elements" "$wrong" "$connections" "$flushes" "$buffers" \
    $((SECONDS - start)) "$result"
  [ -n "$problem" ] || return 0
  tail -n 5 "$directory/table.txt" | sed 's/^/    /'
  ! grep -q '^time-out after' "$directory/table.txt" || return 2
  return 1
}

gdr_cases() {  # gdr_cases PART: cases from stdin, one a line
  local part=$1 status=0 one words
  while read -r -a words; do
    one=0
    gdr_case "$part" "${words[@]}" || one=$?
    [ "$one" -eq 0 ] || status=1
    if [ "$one" -eq 2 ]; then
      echo "tests/gpu/run: a case hung: the other cases of $part are not run"
      break
    fi
  done
  return "$status"
}

# MEMORY DMABUF READ PROTOCOL OPTION...; the first two are complete, the others take every path with fewer sizes.
run_gdr_sizes() {
  local memory read protocol
  if [ "$full_matrix" = yes ]; then
    for memory in 'dmabuf 1' 'peer-memory 0' 'peer-memory 1' 'both 0' 'both 1'; do
      for read in 1 0; do
        for protocol in Simple LL128 LL any; do echo "$memory $read $protocol -b 8 -e 1G -f 4 -n 4"; done
      done
    done | gdr_cases sizes
    return
  fi
  gdr_cases sizes <<'CASES'
dmabuf 1 1 Simple -b 8 -e 1G -f 2 -n 4
dmabuf 1 1 LL128 -b 8 -e 1G -f 4 -n 4
dmabuf 1 0 Simple -b 8 -e 64M -f 7 -n 4
dmabuf 1 0 LL128 -b 8 -e 64M -f 7 -n 4
peer-memory 0 1 Simple -b 8 -e 1G -f 8 -n 4
peer-memory 0 1 LL128 -b 8 -e 64M -f 8 -n 4
peer-memory 0 0 Simple -b 8 -e 64M -f 8 -n 4
peer-memory 0 0 LL128 -b 8 -e 64M -f 8 -n 4
both 1 1 any -b 8 -e 64M -f 8 -n 4
both 0 1 any -b 8 -e 64M -f 8 -n 4
CASES
}

# User buffers of NCCL's allocator, registered. NCCL gives them to the network only where both ends have GPU Direct (READ 1), with
# the protocol Simple, and in collectives only with rings.
run_gdr_registered() {
  [ "$net" != Verbatim ] || build_watch || return
  gdr_cases registered <<'CASES'
dmabuf 1 1 Simple -b 8 -e 1G -f 4 -n 4
peer-memory 0 1 Simple -b 8 -e 64M -f 8 -n 4
CASES
}

run_gdr_scenarios() {
  local directory=$gdr_directory/scenarios status=0 start=$SECONDS elements wrong problem='' connections=- result=right
  rm -rf "$directory"
  mkdir -p "$directory"
  (
    gdr_environment "$directory" dmabuf 1 1
    results=$directory
    run_scenarios
  ) >"$directory/table.txt" 2>&1 || status=$?
  grep '^ [a-z_]* ' "$directory/table.txt" || true
  read -r elements wrong < <(sed -n 's/^# elements compared: \([0-9]*\), wrong: \([0-9]*\).*/\1 \2/p' "$directory/table.txt") ||
    { elements=- wrong=-; }
  gdr_check_logs "$net" 1 "$directory"/scenarios/nccl.rank*.log
  [ "$status" -eq 0 ] || problem="nccl_run: status $status${problem:+, $problem}"
  [ -z "$problem" ] || result="FAILED: $problem; see $directory"
  gdr_row scenarios dmabuf 1 1 any "$elements" "$wrong" "$connections" - - $((SECONDS - start)) "$result"
  [ -n "$problem" ] || return 0
  tail -n 10 "$directory/table.txt" | sed 's/^/    /'
  return 1
}

# nccl-tests with registered buffers. In one process NCCL would send through the other GPU (PXN), and then not register.
run_gdr_nccl_tests() {
  local directory=$gdr_directory/nccl-tests status=0 start=$SECONDS problem='' connections=- flushes=- buffers=- result=right
  local wrong name logs
  command -v all_reduce_perf >/dev/null || { echo '# all_reduce_perf is not on the PATH: not run'; return 0; }
  rm -rf "$directory"
  mkdir -p "$directory"
  [ "$net" != Verbatim ] || build_watch || return
  (
    gdr_environment "$directory" dmabuf 1 1
    export NCCL_PXN_DISABLE=1 NCCL_ALGO=Ring NCCL_DEBUG_SUBSYS=INIT,NET,REG
    results=$directory
    [ "$net" != Verbatim ] || plugin_directory=$gdr_directory/watch
    nccl_tests_options=(-R 1)
    [ "$gpus" -lt "$ranks" ] || nccl_tests_options+=(-e 1G -f 4 -w 1 -n 5)
    run_nccl_tests
  ) >"$directory/table.txt" 2>&1 || status=$?
  grep -e '^# Out of bounds' -e '^# Avg bus' "$directory/table.txt" || true
  for name in all_reduce_perf sendrecv_perf; do
    logs=("$directory/$name".rank*)
    [ -e "${logs[0]}" ] || { problem="no log of $name"; continue; }
    gdr_check_logs "$net" 1 "${logs[@]}"
    [ "$net" != Verbatim ] || gdr_check_buffers "$directory" 1 "${logs[@]}"
  done
  gdr_check_flushes "$directory"
  wrong=$(sed -n 's/^# Out of bounds values : \([0-9]*\).*/\1/p' "$directory/table.txt" | awk '{ sum += $1 } END { print sum + 0 }')
  [ "$status" -eq 0 ] || problem="status $status${problem:+, $problem}"
  [ -z "$problem" ] || result="FAILED: $problem; see $directory"
  gdr_row nccl-tests dmabuf 1 1 any - "$wrong" "$connections" "$flushes" "$buffers" $((SECONDS - start)) "$result"
  [ -n "$problem" ] || return 0
  tail -n 10 "$directory/table.txt" | sed 's/^/    /'
  return 1
}

run_gdr_mutation() {
  local directory=$gdr_directory/mutation status=0 start=$SECONDS found=- result=found
  rm -rf "$directory"
  mkdir -p "$directory"
  (
    gdr_environment "$directory" dmabuf 1 1
    results=$directory
    run_mutation
  ) >"$directory/table.txt" 2>&1 || status=$?
  found=$(sed -n 's/^# elements compared: [0-9]*, wrong: \([0-9]*\).*/\1/p' "$directory/mutation.txt")
  [ "$status" -eq 0 ] || result="FAILED: see $directory"
  gdr_row mutation dmabuf 1 1 any - "${found:--}" - - - $((SECONDS - start)) "$result"
  [ "$status" -eq 0 ] || cat "$directory/table.txt"
  return "$status"
}

# build_with_nvcc NAME OPTION...: builds tests/gpu/NAME.cu for the GPUs of this machine
build_with_nvcc() {
  local name=$1 compiler=${nvcc:-$cuda/bin/nvcc} capability=''
  shift
  [ -x "$compiler" ] || { echo "tests/gpu/run: $name needs nvcc"; return 1; }
  [ "$build_only" = yes ] ||
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d '. ')
  [[ $capability =~ ^[0-9]+$ ]] || capability=90
  "$compiler" -std=c++20 -O2 "-arch=sm_$capability" -Xcompiler -Wall,-Wextra -o "$gdr_directory/$name" "tests/gpu/$name.cu" "$@" ||
    return
  echo "built $gdr_directory/$name with $compiler for sm_$capability"
}

build_lines() {
  local includes=()
  read -r -a includes < <(pkg-config --cflags-only-I libibverbs 2>/dev/null) || true
  build_with_nvcc lines "${includes[@]}" -Xlinker "$build/src/softverbs/lib/libibverbs.so.1" -ldl
}

build_gdr_programs() {  # for --build-only
  mkdir -p "$gdr_directory"
  build_watch && build_with_nvcc copies && build_lines
}

run_gdr_lines() {
  local launcher=(tools/softverbs --lib "$build/src/softverbs/lib" --) output=$gdr_directory/lines.txt
  local status=0 mutated=0 start=$SECONDS torn late result=right wrong=-
  build_lines || return
  SOFTVERBS_GPU_MEMORY=dmabuf "${launcher[@]}" "$gdr_directory/lines" "${extra[@]}" 2>&1 | tee "$output" || status=$?
  wrong=$(sed -n 's/^# torn \([0-9]*\), late \([0-9]*\)$/\1+\2/p' "$output")
  [ "$status" -eq 0 ] || result="FAILED: status $status"
  gdr_row lines dmabuf - - - - "${wrong:--}" - - - $((SECONDS - start)) "$result"
  start=$SECONDS
  echo '# flags and signals are written before their data, which must be found'
  SOFTVERBS_GPU_MEMORY=dmabuf "${launcher[@]}" "$gdr_directory/lines" --seconds 0.05 --signals 5000 --signals-after 5000 --mutate 1 \
    >"$output.mutated" 2>&1 || mutated=$?
  read -r torn late < <(sed -n 's/^# torn \([0-9]*\), late \([0-9]*\)$/\1 \2/p' "$output.mutated") || { torn=0 late=0; }
  result=found
  if [ "$mutated" -ne 1 ] || [ "$torn" -eq 0 ] || [ "$late" -eq 0 ]; then
    result="FAILED: not found; see $output.mutated"
    status=1
  fi
  gdr_row lines-mut. dmabuf - - - - "$torn+$late" - - - $((SECONDS - start)) "$result"
  return "$status"
}

# Rounds of 128 MiB with each way to move the bytes, beside bare loops of copies. NCCL decides about flushes as it does by
# default.
run_gdr_bandwidth() {
  local directory=$gdr_directory/bandwidth round variant variants tables=() network memory copy read
  rm -rf "$directory"
  mkdir -p "$directory"
  build_with_nvcc copies || return
  "$gdr_directory/copies" 2>&1 | tee "$directory/copies.txt" || return
  for round in $(seq "$pairs"); do
    variants=(direct staged IB IBstaged host)
    [ $((round % 2)) -eq 1 ] || variants=(host IBstaged IB staged direct)
    for variant in "${variants[@]}"; do
      network=Verbatim memory=dmabuf copy=direct read=1
      case "$variant" in
        staged) copy=staged ;;
        IB) network=IB ;;
        IBstaged) network=IB copy=staged ;;
        host) memory=none ;;
      esac
      mkdir -p "$directory/$round-$variant"
      (
        unset NCCL_NET_FORCE_FLUSH
        export SOFTVERBS_GPU_MEMORY=$memory SOFTVERBS_GPU_COPY=$copy NCCL_DMABUF_ENABLE=1 NCCL_NET_GDR_READ=$read
        export SOFTVERBS_LINK_LAYER=ib NCCL_IB_QPS_PER_CONNECTION=${NCCL_IB_QPS_PER_CONNECTION:-1}
        # NCCL makes as many channels as the device's speed needs. It sends chunks of 128 KiB by default, eight of a channel
        # under way: their way through NCCL then limits send/receive to about 24 GB/s, over any transport.
        export SOFTVERBS_SPEED_GBPS=${SOFTVERBS_SPEED_GBPS:-400} NCCL_P2P_NET_CHUNKSIZE=${NCCL_P2P_NET_CHUNKSIZE:-524288}
        nccl_run_over "$network" "$(dirname "$plugin")" "$directory/$round-$variant" --op sendrecv,all_reduce -b 128M -e 128M \
          -n 200 "${extra[@]}"
      ) >"$directory/$round-$variant/table.txt" 2>&1 || { cat "$directory/$round-$variant/table.txt"; return 1; }
      gdr_check_variant "$variant" "$network" "$directory/$round-$variant" || return
      tables+=("$directory/$round-$variant/table.txt")
      echo "# round $round, $variant: $(awk 'NF == 8 && $3 == "uint32" { printf "%s %s GB/s; ", name, $6 } /^# [a-z_]+$/ { name = $2 }' \
        "$directory/$round-$variant/table.txt")"
    done
  done
  awk -v in_flight="$in_flight" -f tests/gpu/rounds.awk -f tests/gpu/bandwidth.awk "$directory/copies.txt" "${tables[@]}" | tee "$directory/table.txt"
}

gdr_check_variant() {  # gdr_check_variant VARIANT NET DIRECTORY
  local problem='' connections=-
  gdr_check_logs "$2" 1 "$3"/nccl.rank*.log
  if [ "$1" = host ]; then
    [ "$connections" != 0/0 ] || return 0
    problem="GPU Direct on $connections connections"
  fi
  [ -n "$problem" ] || return 0
  echo "tests/gpu/run: $1: $problem; see $3"
  return 1
}
