// VERBATIM_STATE_SOCKET: who connects to this UNIX socket and reads is given the state of all connections as JSON. The
// control thread serves it.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/result.h"
#include "base/unique_fd.h"
#include "net/monitor/stall_detector.h"

namespace verbatim {

class Comm;

class StateSocket {
 public:
  // Listens at `path`, which only this user may open. A file that a dead process has left is replaced.
  static Result<std::unique_ptr<StateSocket>> open(const std::string& path);
  // Removes the file.
  ~StateSocket();
  StateSocket(const StateSocket&) = delete;
  StateSocket& operator=(const StateSocket&) = delete;

  const UniqueFd& listener() const { return listener_; }

  // Whoever has connected; nullopt: nobody. An error that stays: nobody can be served any more.
  Result<std::optional<UniqueFd>> accept() const;
  // Gives `text` to a reader, as fast as it reads, and hangs up.
  void send_reply(UniqueFd reader, std::string text, std::uint64_t now);
  // False when a reader still waits. Those that do not read are left.
  bool flush(std::uint64_t now);

 private:
  struct Reply {
    UniqueFd reader;
    std::string text;
    std::size_t sent = 0;
    std::uint64_t deadline_ns = 0;
  };

  StateSocket(std::string path, UniqueFd listener);

  const std::string path_;
  const UniqueFd listener_;
  const pid_t owner_pid_;  // a forked child removes nothing
  std::array<Reply, 4> replies_;
};

// One connection. `closing`: its owner has closed it.
std::string connection_json(const Comm& comm, const wire::ConnectionStatus& status, const StallDetector& detector,
                            bool closing, bool peer_closed);

}  // namespace verbatim
