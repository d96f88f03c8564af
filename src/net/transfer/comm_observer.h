// How a comm reports what the peer must learn. The monitor implements CommObserver, so net/transfer needs no include of
// net/monitor.
#pragma once

namespace verbatim {

class Comm;

class CommObserver {
 public:
  // `comm` has failed: comm.error() and comm.failure_text() are set. Or it has notices for the peer:
  // comm.take_lane_notice(). Called by the thread of its data path. The implementation may call only those functions
  // of the comm that are marked "any thread".
  virtual void comm_changed(Comm& comm) noexcept = 0;

 protected:
  ~CommObserver() = default;
};

}  // namespace verbatim
