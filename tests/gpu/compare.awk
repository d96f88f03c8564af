# After rounds.awk. Reads nccl_run's tables of several rounds; the variants are networks. Prints the median time and
# bandwidth of each network, and the medians over the rounds of the ratios within one round.

# An operation's table starts with a line "# NAME".
/^# [a-z_]+$/ { operation = $2 }

NF == 8 && $3 == "uint32" {
  row = operation " " $1
  if (!(row in seen)) {
    seen[row] = 1
    rows[++row_count] = row
  }
  time[row, round, variant] = $4
  bandwidth[row, round, variant] = $6
  cpu[row, round, variant] = $8
}

function median_of(table, row, network,    round, values, n) {
  n = 0
  for (round = 1; round <= rounds; round++) values[++n] = table[row, round, network]
  return median(values, n)
}

function median_ratio(row, other,    round, values, n) {
  n = 0
  for (round = 1; round <= rounds; round++) values[++n] = time[row, round, other] / time[row, round, "Verbatim"]
  return median(values, n)
}

END {
  printf "# medians of %d rounds: us, bus bandwidth in GB/s; last two columns: speed of Verbatim relative to that network\n", rounds
  printf "%-12s %12s %19s %19s %19s %8s %8s\n", "# operation", "bytes", "Verbatim", "IB", "Socket", "IB", "Socket"
  for (i = 1; i <= row_count; i++) {
    row = rows[i]
    split(row, name, " ")
    printf "%-12s %12d", name[1], name[2]
    split("Verbatim IB Socket", networks, " ")
    for (j = 1; j <= 3; j++) printf " %10.1f %8.2f", median_of(time, row, networks[j]), median_of(bandwidth, row, networks[j])
    printf " %8.2f %8.2f\n", median_ratio(row, "IB"), median_ratio(row, "Socket")
  }
  print "\n# CPU time of NCCL's progress threads, all ranks, in s per GB of the operation's size; from 512 KiB"
  printf "%-12s %12s %10s %10s %10s\n", "# operation", "bytes", "Verbatim", "IB", "Socket"
  for (i = 1; i <= row_count; i++) {
    row = rows[i]
    split(row, name, " ")
    if (name[2] < 524288) continue
    printf "%-12s %12d", name[1], name[2]
    for (j = 1; j <= 3; j++) printf " %10.3f", median_of(cpu, row, networks[j]) * 1000 / name[2]
    printf "\n"
  }
}
