#include "net/monitor/device_calls.h"

#include <utility>

#include "net/monitor/device_events.h"

namespace verbatim {

DeviceCalls::DeviceCalls(ConnectionTable& table, const Device* device, std::uint32_t index)
    : device_(device),
      index_(index),
      handler_(table.loop,
               [this, &table](int) {
                 const MutexLock lock(table.mutex);
                 events_requested_ = true;
                 start(table);
               }),
      worker_("verbatim-verbs", [this, &table] {
        const MutexLock lock(table.mutex);
        make_call(table);
        return has_calls() ? 0 : kNever;
      }) {}

void DeviceCalls::request_qp_state(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now) {
  if (connection.qp_state_requested) return;
  add_request(connection);
  connection.qp_state_requested = true;
  ++table.open_qp_state_requests;
  connection.qp_state_deadline_ns = now + MonitoredConnection::kQpStateTimeoutNs;
}

void DeviceCalls::request_renewal(MonitoredConnection& connection) {
  connection.renewal_requested = true;
  add_request(connection);
}

void DeviceCalls::request_advance(MonitoredConnection& connection) {
  connection.advance_requested = true;
  add_request(connection);
}

void DeviceCalls::add_request(MonitoredConnection& connection) {
  if (std::exchange(connection.calls_requested, true)) return;
  DeviceCalls& calls = *connection.device_calls;
  connection.next_request = nullptr;
  (calls.requests_ == nullptr ? calls.requests_ : calls.last_request_->next_request) = &connection;
  calls.last_request_ = &connection;
}

void DeviceCalls::withdraw(ConnectionTable& table, MonitoredConnection& connection) {
  if (connection.calls_run || !std::exchange(connection.calls_requested, false)) return;
  DeviceCalls& calls = *connection.device_calls;
  MonitoredConnection** link = &calls.requests_;
  MonitoredConnection* before = nullptr;
  for (; *link != &connection; link = &before->next_request) before = *link;
  *link = connection.next_request;
  if (calls.last_request_ == &connection) calls.last_request_ = before;
  connection.renewal_requested = connection.advance_requested = false;
  if (std::exchange(connection.qp_state_requested, false)) --table.open_qp_state_requests;
}

void DeviceCalls::start(ConnectionTable& table) noexcept {
  if (!has_calls() || worker_.wake()) return;
  while (has_calls()) make_call(table);
}

void DeviceCalls::make_call(ConnectionTable& table) noexcept {
  if (std::exchange(events_requested_, false)) {
    table.mutex.unlock();
    read_device_events(table, *device_, index_, handler_);
    table.mutex.lock();
  } else if (requests_ != nullptr) {
    MonitoredConnection& connection = *std::exchange(requests_, requests_->next_request);
    connection.calls_requested = false;
    connection.calls_run = true;
    const bool reads_state = connection.qp_state_requested;
    const bool renews = std::exchange(connection.renewal_requested, false);
    const bool advances = std::exchange(connection.advance_requested, false);
    table.mutex.unlock();
    const ibv_qp_state state = reads_state ? connection.comm->qp_state() : IBV_QPS_UNKNOWN;
    if (renews) connection.comm->renew_lanes();
    if (advances) connection.comm->advance_for_idle();
    table.mutex.lock();
    connection.calls_run = false;
    if (reads_state) {
      connection.qp_state = state;
      connection.qp_state_requested = false;
      --table.open_qp_state_requests;
      connection.stall_check_ns = 0;
    }
    table.mark_changed(connection);
    table.changed.notify_all();
  } else if (!closed_.empty()) {
    ConnectionTable::Connections::node_type closed = closed_.extract(closed_.begin());
    table.mutex.unlock();
    closed.mapped().closing.reset();
    table.mutex.lock();
    --table.closing.find(closed.mapped().owner)->second;
    table.changed.notify_all();
  }
}

}  // namespace verbatim
