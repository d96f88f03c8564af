// VERBATIM_STATE_SOCKET: a UNIX socket. Each program that connects to it reads the state of all connections as JSON.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"
#include "base/unique_fd.h"
#include "net/monitor/connection_table.h"

namespace verbatim {

// Owned by the monitor; called by the monitoring thread, without the table's mutex.
class StateSocket {
 public:
  // Listens at `path`, which only this user may open. The socket of a process that has ended is replaced.
  static Result<std::unique_ptr<StateSocket>> open(const std::string& path, const std::string& host,
                                                   ConnectionTable& table);
  // Removes the file.
  ~StateSocket();
  StateSocket(const StateSocket&) = delete;
  StateSocket& operator=(const StateSocket&) = delete;

  // Accepts the readers that have connected, and requests the states of all QPs for them.
  void accept() noexcept VERBATIM_EXCLUDES(table_.mutex);
  // Sends the replies as far as the readers read them. Returns when it is to be called again at the latest.
  std::uint64_t advance() noexcept VERBATIM_EXCLUDES(table_.mutex);

 private:
  struct Reply {
    UniqueFd reader;
    std::string text;  // empty until the QP states are known
    std::size_t sent = 0;
    std::uint64_t deadline_ns = 0;  // then a reader that does not read is closed
  };

  StateSocket(const std::string& path, const std::string& host, UniqueFd listener, ConnectionTable& table);

  // While the process has no free descriptors, readers wait in the listen backlog.
  void pause(int why) noexcept;
  bool states_known(std::uint64_t now) VERBATIM_EXCLUDES(table_.mutex);
  void write_replies() noexcept VERBATIM_EXCLUDES(table_.mutex);
  static bool send(Reply& reply, std::uint64_t now) noexcept;
  std::string state_json() const VERBATIM_EXCLUDES(table_.mutex);

  const std::string path_;
  const std::string host_;
  const UniqueFd listener_;
  ConnectionTable& table_;
  const pid_t owner_pid_;        // a forked child does not remove the file
  std::uint64_t resume_ns_ = 0;  // kNever: readers are accepted
  std::uint64_t states_deadline_ns_ = 0;
  std::array<Reply, 4> replies_;
};

}  // namespace verbatim
