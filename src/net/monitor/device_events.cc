// What the control thread hears of devices: what ends connections, and what their links and addresses go through.
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "net/monitor/monitor.h"
#include "net/transfer/comm.h"

namespace verbatim {
namespace {

// Whether the event ends every connection of its device, or the one whose QP it names.
bool ends_device(ibv_event_type type) {
  return type == IBV_EVENT_DEVICE_FATAL;
}
bool ends_qp(ibv_event_type type) {
  return type == IBV_EVENT_QP_FATAL || type == IBV_EVENT_QP_REQ_ERR || type == IBV_EVENT_QP_ACCESS_ERR;
}
bool ends_cq(ibv_event_type type) {
  return type == IBV_EVENT_CQ_ERR;
}

bool names_port(ibv_event_type type) {
  return type == IBV_EVENT_PORT_ERR || type == IBV_EVENT_PORT_ACTIVE || type == IBV_EVENT_LID_CHANGE ||
         type == IBV_EVENT_PKEY_CHANGE || type == IBV_EVENT_SM_CHANGE || type == IBV_EVENT_CLIENT_REREGISTER ||
         type == IBV_EVENT_GID_CHANGE;
}

}  // namespace

void Monitor::read_device_events(std::size_t index) {
  const Device& device = *devices_[index];
  const Verbs& verbs = device.verbs();
  ibv_async_event event{};
  while (verbs.get_async_event(device.context(), &event) == 0) {
    {
      const MutexLock lock(mutex_);
      dispatch_event(event, index);
    }
    log_event(event, index);
    verbs.ack_async_event(&event);
  }
  if (errno == EAGAIN || errno == EINTR) return;
  // The device is gone, and its descriptor would wake us for ever.
  const char* const name = device.name().c_str();
  const char* const why = std::strerror(errno);
  VERBATIM_WARN(
      "%s: the device is gone, no more events can be read: %s; its %zu connections fail. Next: 'dmesg | grep %s'", name,
      why, count_connections(device, 0), name);
  static_cast<void>(::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, device.context()->async_fd, nullptr));
  const MutexLock lock(mutex_);
  fail_device(index);
}

void Monitor::dispatch_event(const ibv_async_event& event, std::size_t device) {
  if (ends_device(event.event_type)) return fail_device(device);
  if (!ends_qp(event.event_type) && !ends_cq(event.event_type)) return;
  bool known = false;
  for (const auto& [fd, connection] : connections_) {
    Comm& comm = *connection.comm;
    if (!(ends_qp(event.event_type) ? comm.uses(*event.element.qp) : comm.uses(*event.element.cq))) continue;
    comm.set_signal(event.event_type);
    known = true;
  }
  if (!known) unowned_queue_failed_ = true;
}

void Monitor::fail_device(std::size_t index) {
  device_failed_[index] = true;
  for (const auto& [fd, connection] : connections_) {
    if (connection.comm->uses(*devices_[index])) connection.comm->set_signal(IBV_EVENT_DEVICE_FATAL);
  }
}

std::size_t Monitor::count_connections(const Device& device, std::uint8_t port_num) {
  const MutexLock lock(mutex_);
  return static_cast<std::size_t>(std::count_if(connections_.begin(), connections_.end(), [&](const auto& entry) {
    return entry.second.closing == nullptr && entry.second.comm->uses(device, port_num);
  }));
}

void Monitor::log_event(const ibv_async_event& event, std::size_t index) {
  const Device& device = *devices_[index];
  const char* const name = device.name().c_str();
  const char* const text = device.verbs().event_type_str(event.event_type);
  if (event.event_type == IBV_EVENT_DEVICE_FATAL) {
    VERBATIM_WARN("%s: the device has failed (%s); its %zu connections fail. Next: 'dmesg | grep %s'", name, text,
                  count_connections(device, 0), name);
    return;
  }
  if (!names_port(event.event_type)) return VERBATIM_INFO("%s: %s", name, text);
  const auto port_num = static_cast<std::uint8_t>(event.element.port_num);
  try {
    switch (event.event_type) {
      case IBV_EVENT_PORT_ERR:
        return report_link_down(device, port_num);
      case IBV_EVENT_PORT_ACTIVE:
        return report_link_up(device, port_num);
      case IBV_EVENT_GID_CHANGE:
        return report_gids(device, port_num);
      default:
        break;
    }
  } catch (...) {  // no memory for more
  }
  VERBATIM_INFO("%s:%u: %s", name, port_num, text);
}

void Monitor::report_link_down(const Device& device, std::uint8_t port_num) {
  if (!device.history().link_down(port_num, monotonic_ns())) return;
  const std::size_t users = count_connections(device, port_num);
  VERBATIM_WARN(
      "%s:%u: the link is down (port error); %zu connections use it and wait at most as long as their retries last%s",
      device.name().c_str(), port_num, users, users != 0 ? " (VERBATIM_TIMEOUT, VERBATIM_RETRY_CNT)" : "");
}

void Monitor::report_link_up(const Device& device, std::uint8_t port_num) {
  const std::uint64_t now = monotonic_ns();
  const std::uint64_t outage_ns = device.history().link_up(port_num, now);
  if (outage_ns == 0) return VERBATIM_INFO("%s:%u: the link is up", device.name().c_str(), port_num);
  VERBATIM_WARN("%s:%u: the link is up again after %s, outages so far: %u; %zu connections use it",
                device.name().c_str(), port_num, to_duration(outage_ns).c_str(),
                device.history().link_since(port_num, 0, now).downs, count_connections(device, port_num));
}

// Connections keep the address that they were made with.
void Monitor::report_gids(const Device& device, std::uint8_t port_num) {
  std::map<std::pair<std::uint32_t, std::string>, std::size_t> used;  // index and GID: by how many
  {
    const MutexLock lock(mutex_);
    for (const auto& [fd, connection] : connections_) {
      for (const Port* port : connection.comm->endpoint().ports()) {
        if (port->device != &device || port->port_num != port_num || !port->is_roce()) continue;
        ++used[{port->gid.index, to_string(port->gid.gid)}];
      }
    }
  }
  std::size_t affected = 0;
  std::string change;
  for (const auto& [entry, users] : used) {
    const auto& [index, gid] = entry;
    ibv_gid now{};
    const int failed = device.verbs().query_gid(device.context(), port_num, static_cast<int>(index), &now);
    const std::string found = failed == 0 ? to_string(now) : "unreadable";
    if (found == gid) continue;
    affected += users;
    change.assign("GID ").append(std::to_string(index)).append(" ").append(gid).append(" is now ").append(found);
  }
  if (affected == 0) {
    return VERBATIM_INFO("%s:%u: the GID table has changed, no connection uses what did", device.name().c_str(),
                         port_num);
  }
  VERBATIM_WARN(
      "%s:%u: %s (GID table change); %zu connections were made with the old one and may fail, new ones take "
      "what is there",
      device.name().c_str(), port_num, change.c_str(), affected);
}

}  // namespace verbatim
