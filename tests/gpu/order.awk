# Compares the positions of the QPs of point-to-point connections, sorted by QP number, with the formula: QP k to the peer
# with rotation r has the position k * P + r. Input: "rank PID RANK" lines, then the lines of VERBATIM_QP_DUMP by rising QP
# number. Prints a row per rank. Exit status 1: a QP has another position, or there are fewer than two QPs to a peer.

function field(key, text) {
  if (!match($0, "\"" key "\":\"?[^,\"}]+")) return ""
  text = substr($0, RSTART, RLENGTH)
  sub(/^"[a-z_]+":"?/, "", text)
  return text
}

$1 == "rank" {
  rank_of_pid[$2] = $3
  if ($3 >= ranks) ranks = $3 + 1
  next
}

field("side") == "send" && field("traffic") == "p2p" {
  pid = field("pid")
  rank_of[field("self")] = rank_of_pid[pid]
  me = rank_of_pid[pid]
  ordinal = count[me]++
  peer[me, ordinal] = field("peer")
  connection[me, ordinal] = field("connection")
  qp_index[me, ordinal] = field("index")
  if (field("index") + 1 > width) width = field("index") + 1
  if (field("connection") + 1 > connections) connections = field("connection") + 1
  columns[me, ordinal] = field("peers")
  position[me, ordinal] = field("position")
  order[field("order")]++
}

END {
  q = connections * width
  for (name in order) orders = orders " " name
  printf "# %d ranks, %d connections of %d QPs from each to each other one, order%s\n", ranks, connections, width, orders
  printf "# %4s %6s %6s %8s\n", "rank", "QPs", "exact", "columns"
  wrong = q < 2 || ranks < 4
  for (me = 0; me < ranks; me++) {
    exact = 0
    for (ordinal = 0; ordinal < count[me]; ordinal++) {
      rotation = (rank_of[peer[me, ordinal]] - me - 1 + ranks) % ranks
      k = connection[me, ordinal] * width + qp_index[me, ordinal]
      if (ordinal == k * (ranks - 1) + rotation && position[me, ordinal] == k * columns[me, ordinal] + rotation) exact++
    }
    printf "  %4d %6d %6d %8d\n", me, count[me], exact, columns[me, 0]
    if (exact != count[me] || count[me] != (ranks - 1) * q) wrong = 1
  }
  if (q < 2) print "# one QP from rank to rank: the check needs at least two"
  print wrong ? "# NOT in order" : "# all in order"
  exit wrong
}
