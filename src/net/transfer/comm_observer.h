// How a comm reports to the code that watches it. Implemented by the monitor; the connection core does not know it.
#pragma once

namespace verbatim {

class Comm;

class CommObserver {
 public:
  // `comm` has failed: comm.error() and comm.failure_text() are set. Any thread; must not call back into the comm.
  virtual void comm_failed(Comm& comm) noexcept = 0;

 protected:
  ~CommObserver() = default;
};

}  // namespace verbatim
