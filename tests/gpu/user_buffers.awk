# Whether registered user buffers themselves reach the plugin. Input: NCCL's logs with NCCL_DEBUG_SUBSYS=REG, which name the
# buffers that NCCL has registered with the network, and the files of watch/watch.cc, which say what the plugin got. Prints
# the number of buffers, and the sends and receives with them. Exit status 1: no buffer, a process that did not send from one or
# did not receive into one, or a buffer that is not registered as `type`.

/NET register userbuff 0x/ {
  split($1, id, ":")  # HOST:PID:TID
  match($0, /userbuff 0x[0-9a-f]+/)
  address = substr($0, RSTART + 11, RLENGTH - 11)
  while (length(address) < 16) address = "0" address
  if (!((id[2], address) in known)) {
    known[id[2], address] = 1
    pid_of[++buffers] = id[2]
    address_of[buffers] = address
  }
}

$1 == "memory" {
  ranges++
  range_pid[ranges] = $2
  begin[ranges] = $3
  end[ranges] = $4
  type_of[ranges] = $5
  sends[ranges] = $6
  receives[ranges] = $8
}

END {
  for (b = 1; b <= buffers; b++) {
    found = 0
    for (r = 1; r <= ranges; r++) {
      # equally long hexadecimal numbers, compared as text
      if (range_pid[r] != pid_of[b] || begin[r] "" > address_of[b] "" || end[r] "" <= address_of[b] "") continue
      found = 1
      if (type_of[r] != type) problem = "registered as " type_of[r] ", not as " type
      if (counted[r]++) continue
      sent[pid_of[b]] += sends[r]
      received[pid_of[b]] += receives[r]
      all_sends += sends[r]
      all_receives += receives[r]
    }
    if (!found) problem = "the plugin has no registration of a buffer"
    processes[pid_of[b]] = 1
  }
  if (!buffers) problem = "NCCL registered no user buffer with the network"
  for (pid in processes) if (!sent[pid] || !received[pid]) problem = "process " pid " did not send from and receive into one"
  if (problem) print "user buffers: " problem
  else printf "%d sent %d received %d\n", buffers, all_sends, all_receives
  exit problem != ""
}
