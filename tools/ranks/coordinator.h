// The coordinator of a job: implements all-gather for the ranks, and makes all ranks exit when one of them fails. It
// runs in the launcher, or with --root in a thread of rank 0.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "ranks/failure.h"
#include "ranks/frame.h"
#include "ranks/new_connections.h"

namespace verbatim::ranks {

// The end of a rank's process as the launcher sees it.
struct ProcessExit {
  std::string text;
  bool unexplained;  // ended by a signal, so the rank could not report a reason
};

class Coordinator {
 public:
  // `listener` is a non-blocking listening socket. Ranks that do not present `token` are rejected; at a local socket
  // those of other users are, and the others get the token.
  Coordinator(UniqueFd listener, int ranks, std::uint64_t token, int timeout_s);

  // Serves until every rank has finished, or until a rank failed or died or the timeout passed and all ranks were sent
  // the abort. `tick` is called at least twenty times a second; a process exit that it returns ends the job. Prints to
  // stderr what failed, once for each rank that reports a failure.
  ExitStatus serve(const std::function<std::optional<ProcessExit>()>& tick);

 private:
  // A rank whose hello was accepted.
  struct Peer {
    UniqueFd socket;
    FrameReader reader;
    int rank;
    bool done = false;
    std::optional<std::string> part = {};  // received for the all-gather in progress
  };

  void admit(NewConnections::Arrived arrived);
  void reject_token(const UniqueFd& socket, std::uint32_t rank);
  void serve_peer(Peer& peer);
  void handle_frame(Peer& peer, const Frame& frame);
  void gather();
  void give_up(ExitStatus status, const std::string& why);
  void send_abort(const UniqueFd& socket) const;
  void wait_for_sockets();
  bool all_ranks_done() const;
  bool has(int rank) const;
  std::string missing_ranks() const;

  NewConnections new_connections_;
  const bool is_local_;
  const int ranks_;
  const std::uint64_t token_;
  const std::uint64_t comm_id_;
  const std::uint64_t deadline_ns_;
  const int timeout_s_;
  std::vector<Peer> peers_;
  int rejected_ = 0;  // for another token
  ExitStatus status_ = ExitStatus::kOk;
  std::string why_;  // after a failure: the first line of the reason
};

}  // namespace verbatim::ranks
