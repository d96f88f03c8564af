# After rounds.awk. Reads the table of copies (copies.cu) and nccl_run's tables of several rounds and variants. Prints the
# median bus bandwidth of each variant, its share of the bare loop of copies with as many in flight (`in_flight`), and the
# median over the rounds of its ratio to NCCL's InfiniBand transport with the same copies.

$1 == "copies" && $2 == in_flight { copy_rate["direct"] = $4; copy_rate["staged"] = $6 }

/^# [a-z_]+$/ { operation = $2 }

NF == 8 && $3 == "uint32" { bandwidth[operation, round, variant] = $6; bytes = $1 }

function median_of(operation, variant,    round, values, n) {
  for (round = 1; round <= rounds; round++) values[++n] = bandwidth[operation, round, variant]
  return median(values, n)
}

function median_ratio(operation, variant, other,    round, values, n) {
  for (round = 1; round <= rounds; round++) {
    if (bandwidth[operation, round, other] + 0 == 0) return 0
    values[++n] = bandwidth[operation, round, variant] / bandwidth[operation, round, other]
  }
  return median(values, n)
}

function share_of_loop(value, copies) {
  return copy_rate[copies] + 0 == 0 ? 0 : value / copy_rate[copies]
}

function is_met(value, least) {
  return value + 0 < least + 0 ? "NOT met" : "met"
}

function print_row(name, variant, copies, ib,    i, value) {
  printf "%-24s", name
  for (i = 1; i <= 2; i++) {
    value = median_of(operations[i], variant)
    printf " %10.2f", value
    if (copies == "") printf " %8s", "-"
    else printf " %8.2f", share_of_loop(value, copies)
    if (ib == "") printf " %8s", "-"
    else printf " %8.2f", median_ratio(operations[i], variant, ib)
  }
  printf "\n"
}

# The targets hold for two H100.
function print_targets(variant, least, ib,    i, value, share, ratio) {
  for (i = 1; i <= 2; i++) {
    value = median_of(operations[i], variant)
    share = share_of_loop(value, variant)
    ratio = median_ratio(operations[i], variant, ib)
    printf "# target %s %s: %.1f GB/s, at least %d: %s; %.2f of the loop, at least 0.70: %s; %.2f of IB, at least 0.95: %s\n",
      variant, operations[i], value, least, is_met(value, least), share, is_met(share, 0.7), ratio, is_met(ratio, 0.95)
  }
}

END {
  split("sendrecv all_reduce", operations, " ")
  printf "# %d bytes, medians of %d rounds, bus bandwidth in GB/s; bare loop with %d copies in flight, both directions: direct %.2f, staged %.2f\n",
    bytes, rounds, in_flight, copy_rate["direct"], copy_rate["staged"]
  printf "%-24s %10s %8s %8s %10s %8s %8s\n", "#", "sendrecv", "of loop", "of IB", "all_reduce", "of loop", "of IB"
  print_row("Verbatim, direct", "direct", "direct", "IB")
  print_row("Verbatim, staged", "staged", "staged", "IBstaged")
  print_row("NCCL's IB, direct", "IB", "direct", "")
  print_row("NCCL's IB, staged", "IBstaged", "staged", "")
  print_row("Verbatim, host memory", "host", "", "")
  print_targets("direct", 30, "IB")
  print_targets("staged", 15, "IBstaged")
}
