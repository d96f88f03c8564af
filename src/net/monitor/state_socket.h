// VERBATIM_STATE_DIR and VERBATIM_STATE_SOCKET: UNIX sockets. Each program that connects to one reads the state of all
// connections and RMA contexts as JSON (plugin/STATE.md).
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"
#include "base/unique_fd.h"
#include "net/monitor/connection_table.h"
#include "net/monitor/rma_sets.h"

namespace verbatim {

// Owned by the monitor. After open() the monitoring thread calls it.
class StateSocket {
 public:
  struct Options {
    std::string path;
    const char* setting = "";  // the variable that it is of
    bool queries_qps = false;  // asks the devices for the states of the QPs, for each reader
    std::string host = {};
  };

  // Listens at `path`, which only this user may open. The socket of a process that has ended is replaced.
  static Result<std::unique_ptr<StateSocket>> open(Options options, ConnectionTable& table, const RmaSets& rma_sets);
  // Removes the file.
  ~StateSocket();
  StateSocket(const StateSocket&) = delete;
  StateSocket& operator=(const StateSocket&) = delete;

  // The states of QPs may be known.
  void look_again() { handler_.call_at(0); }

 private:
  struct Reply {
    UniqueFd reader;
    std::string text;  // empty until the QP states are known
    std::size_t sent = 0;
    std::uint64_t deadline_ns = 0;  // then a reader that does not read is closed
  };

  StateSocket(Options options, UniqueFd listener, ConnectionTable& table, const RmaSets& rma_sets);

  // Accepts the readers that have connected.
  void accept() noexcept VERBATIM_EXCLUDES(table_.mutex);
  // Sends the replies as far as the readers read them. Returns when it is to be called again at the latest.
  std::uint64_t advance() noexcept VERBATIM_EXCLUDES(table_.mutex);
  // While the process has no free descriptors, readers wait in the listen backlog.
  void pause(int why) noexcept;
  bool states_known(std::uint64_t now) VERBATIM_EXCLUDES(table_.mutex);
  void write_replies() noexcept VERBATIM_EXCLUDES(table_.mutex);
  static bool send(Reply& reply, std::uint64_t now) noexcept;
  std::string state_json() const VERBATIM_EXCLUDES(table_.mutex);

  const Options options_;
  const UniqueFd listener_;
  ConnectionTable& table_;
  const RmaSets& rma_sets_;
  bool bound_ = false;           // the file is this object's
  const pid_t owner_pid_;        // a forked child does not remove the file
  std::uint64_t resume_ns_ = 0;  // kNever: readers are accepted
  std::uint64_t states_deadline_ns_ = 0;
  std::array<Reply, 4> replies_;
  EventHandler handler_;
};

}  // namespace verbatim
