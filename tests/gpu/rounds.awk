# For tables of several rounds, one file per round and variant, named .../ROUND-VARIANT/table.txt: sets `round`, `variant` and
# `rounds`, the number of rounds.

function median(values, n,    i, j, value) {
  for (i = 2; i <= n; i++) {
    value = values[i]
    for (j = i - 1; j >= 1 && values[j] > value; j--) values[j + 1] = values[j]
    values[j + 1] = value
  }
  return n % 2 ? values[(n + 1) / 2] : (values[n / 2] + values[n / 2 + 1]) / 2
}

FNR == 1 {
  count = split(FILENAME, path, "/")
  split(path[count - 1], round_and_variant, "-")
  round = round_and_variant[1] + 0
  variant = round_and_variant[2]
  if (path[count] == "table.txt" && round > rounds) rounds = round
}
