// The meeting point of a job's ranks: gathers and hands out what they exchange, and when one fails tells all to stop.
// Run by the launcher, or between hosts by a thread of rank 0.
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

// The end of a rank's process, as its launcher sees it.
struct ProcessExit {
  std::string text;
  bool unexplained;  // the rank had no chance to say why
};

class Coordinator {
 public:
  // `listener` is a non-blocking listening socket. Whoever comes without the token is dropped.
  Coordinator(UniqueFd listener, int ranks, std::uint64_t token, int timeout_s);

  // Serves until every rank has said bye, or one failed, died, or time was up and all were told. `tick` is called at
  // least twenty times a second; a death that it reports ends the job. Says on stderr what went wrong, once for each
  // rank that complains.
  ExitStatus serve(const std::function<std::optional<ProcessExit>()>& tick);

 private:
  struct Peer {
    UniqueFd socket;
    FrameReader reader = {};
    int rank = -1;  // until the hello
    bool done = false;
    std::optional<std::string> part = {};  // of the all-gather under way
  };

  void accept_all();
  void serve_peer(Peer& peer);
  void handle_frame(Peer& peer, const Frame& frame);
  void handle_hello(Peer& peer, const Frame& frame);
  void gather();
  void give_up(ExitStatus status, const std::string& why);
  void send_abort(const Peer& peer) const;
  void wait_for_sockets();
  bool all_ranks_done() const;

  const UniqueFd listener_;
  const int ranks_;
  const std::uint64_t token_;
  const std::uint64_t deadline_ns_;
  const int timeout_s_;
  std::vector<Peer> peers_;
  ExitStatus status_ = ExitStatus::kOk;
};

}  // namespace verbatim::ranks
