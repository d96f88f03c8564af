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

namespace verbatim::ranks {

// The end of a rank's process as the launcher sees it.
struct ProcessExit {
  std::string text;
  bool unexplained;  // ended by a signal, so the rank could not report a reason
};

class Coordinator {
 public:
  // `listener` is a non-blocking listening socket. Ranks that do not present `token` are rejected.
  Coordinator(UniqueFd listener, int ranks, std::uint64_t token, int timeout_s);

  // Serves until every rank has finished, or until a rank failed or died or the timeout passed and all ranks were sent
  // the abort. `tick` is called at least twenty times a second; a process exit that it returns ends the job. Prints to
  // stderr what failed, once for each rank that reports a failure.
  ExitStatus serve(const std::function<std::optional<ProcessExit>()>& tick);

 private:
  struct Peer {
    UniqueFd socket;
    FrameReader reader = {};
    int rank = -1;  // -1 until the hello was received
    bool done = false;
    std::optional<std::string> part = {};  // received for the all-gather in progress
  };

  void accept_all();
  void serve_peer(Peer& peer);
  void handle_frame(Peer& peer, const Frame& frame);
  void handle_hello(Peer& peer, const Frame& frame);
  void refuse(Peer& peer, const std::string& why) const;
  void gather();
  void give_up(ExitStatus status, const std::string& why);
  void send_abort(const Peer& peer) const;
  void wait_for_sockets();
  bool all_ranks_done() const;
  bool has(int rank) const;
  std::string missing_ranks() const;

  const UniqueFd listener_;
  const int ranks_;
  const std::uint64_t token_;
  const std::uint64_t deadline_ns_;
  const int timeout_s_;
  std::vector<Peer> peers_;
  ExitStatus status_ = ExitStatus::kOk;
  std::string why_;  // after a failure: the first line of the reason
};

}  // namespace verbatim::ranks
