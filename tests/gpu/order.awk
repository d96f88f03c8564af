# Where the QPs of point-to-point connections lie by number, against the formula: QP k to the peer with rotation r at
# k * P + r. Input: "rank PID RANK" lines, then the lines of VERBATIM_QP_DUMP by rising QP number. Prints a row a rank;
# exit status 1 when a QP is elsewhere, or there are no two QPs to a peer.

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
  place = count[me]++
  peer[me, place] = field("peer")
  connection[me, place] = field("connection")
  qp_index[me, place] = field("index")
  if (field("index") + 1 > width) width = field("index") + 1
  if (field("connection") + 1 > connections) connections = field("connection") + 1
  columns[me, place] = field("peers")
  position[me, place] = field("position")
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
    for (place = 0; place < count[me]; place++) {
      rotation = (rank_of[peer[me, place]] - me - 1 + ranks) % ranks
      k = connection[me, place] * width + qp_index[me, place]
      if (place == k * (ranks - 1) + rotation && position[me, place] == k * columns[me, place] + rotation) exact++
    }
    printf "  %4d %6d %6d %8d\n", me, count[me], exact, columns[me, 0]
    if (exact != count[me] || count[me] != (ranks - 1) * q) wrong = 1
  }
  if (q < 2) print "# one QP from rank to rank: nothing to see"
  print wrong ? "# NOT in order" : "# all in order"
  exit wrong
}
