// How a comm reports its failure. The monitor implements CommObserver, so net/transfer needs no include of net/monitor.
#pragma once

namespace verbatim {

class Comm;

class CommObserver {
 public:
  // `comm` has failed: comm.error() and comm.failure_text() are set. Called once for a comm, by the thread of its data
  // path. The implementation may call only those functions of the comm that are marked "any thread".
  virtual void comm_failed(Comm& comm) noexcept = 0;

  // `comm` has notices for the peer: comm.send_lane_notices(). The same thread.
  virtual void lanes_changed(Comm& comm) noexcept = 0;

 protected:
  ~CommObserver() = default;
};

}  // namespace verbatim
