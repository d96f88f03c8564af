#include "net/monitor/device_calls.h"

#include <pthread.h>

#include <utility>

#include "net/monitor/device_events.h"
#include "net/monitor/graceful_closes.h"
#include "net/transfer/comm.h"

namespace verbatim {

void DeviceCalls::request_qp_state(MonitoredConnection& connection, std::uint64_t now) {
  if (connection.qp_state_requested) return;
  connection.qp_state_requested = true;
  connection.qp_state_deadline_ns = now + MonitoredConnection::kQpStateTimeoutNs;
  connection.next_request = std::exchange(connection.device_calls->requests_, &connection);
}

bool DeviceCalls::must_start() {
  if (running_ || (!events_requested_ && requests_ == nullptr && closed_.empty())) return false;
  running_ = true;
  return true;
}

void DeviceCalls::start() noexcept {
  if (thread_.joinable()) thread_.join();  // it has found no more calls and returns
  try {
    thread_ = std::thread([this] {
      ::pthread_setname_np(::pthread_self(), "verbatim-verbs");
      run();
    });
  } catch (...) {
    run();
  }
}

void DeviceCalls::run() noexcept {
  while (call_next()) continue;
}

bool DeviceCalls::call_next() {
  bool events = false;
  MonitoredConnection* request = nullptr;
  ConnectionTable::Connections::node_type closed;
  {
    const MutexLock lock(table_.mutex);
    if (events_requested_) {
      events = std::exchange(events_requested_, false);
    } else if (requests_ != nullptr) {
      request = std::exchange(requests_, requests_->next_request);
    } else if (!closed_.empty()) {
      closed = closed_.extract(closed_.begin());
    } else {
      running_ = false;
      return false;
    }
  }
  if (events) {
    events_->read();
    return true;
  }
  if (request != nullptr) {
    const ibv_qp_state state = request->comm->qp_state();
    const MutexLock lock(table_.mutex);
    request->qp_state = state;
    request->qp_state_requested = false;
    table_.stall_check_due = true;
    table_.changed.notify_all();
    poller_.wake();
    return true;
  }
  closed.mapped().closing.reset();
  const MutexLock lock(table_.mutex);
  closes_.count_destroyed(closed.mapped().owner);
  table_.changed.notify_all();
  return true;
}

}  // namespace verbatim
