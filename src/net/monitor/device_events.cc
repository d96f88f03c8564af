#include "net/monitor/device_events.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "net/transfer/comm.h"

namespace verbatim {
namespace {

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

Status DeviceEvents::open() {
  const int fd = device_.context()->async_fd;
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) return system_error("fcntl", errno);
  return poller_.add_one_shot(fd, PollSource::kDevice, index_);
}

void DeviceEvents::read() {
  const Verbs& verbs = device_.verbs();
  const int fd = device_.context()->async_fd;
  ibv_async_event event{};
  while (verbs.get_async_event(device_.context(), &event) == 0) {
    dispatch(event);
    log(event);
    verbs.ack_async_event(&event);
  }
  if ((errno == EAGAIN || errno == EINTR) && poller_.rearm(fd, PollSource::kDevice, index_)) return;
  // The descriptor of a device that was removed stays readable: it is not polled any more.
  const char* const name = device_.name().c_str();
  const char* const why = std::strerror(errno);
  VERBATIM_WARN("%s: no more events can be read from the device: %s; its %zu connections fail. Next: 'dmesg | grep %s'",
                name, why, count_connections(0), name);
  poller_.remove(fd);
  const MutexLock lock(table_.mutex);
  fail_device();
}

void DeviceEvents::dispatch(const ibv_async_event& event) {
  const MutexLock lock(table_.mutex);
  if (ends_device(event.event_type)) return fail_device();
  if (!ends_qp(event.event_type) && !ends_cq(event.event_type)) return;
  bool found = false;
  for (const auto& [fd, connection] : table_.connections) {
    Comm& comm = *connection.comm;
    if (!(ends_qp(event.event_type) ? comm.uses(*event.element.qp) : comm.uses(*event.element.cq))) continue;
    comm.set_signal(event.event_type);
    found = true;
  }
  if (!found) table_.earlier_failures[index_].unowned_queue = true;
}

void DeviceEvents::fail_device() {
  table_.earlier_failures[index_].device = true;
  for (const auto& [fd, connection] : table_.connections) {
    if (connection.comm->uses(device_)) connection.comm->set_signal(IBV_EVENT_DEVICE_FATAL);
  }
}

std::size_t DeviceEvents::count_connections(std::uint8_t port_num) {
  const MutexLock lock(table_.mutex);
  return static_cast<std::size_t>(
      std::count_if(table_.connections.begin(), table_.connections.end(), [&](const auto& entry) {
        return entry.second.closing == nullptr && entry.second.comm->uses(device_, port_num);
      }));
}

void DeviceEvents::log(const ibv_async_event& event) {
  const char* const name = device_.name().c_str();
  const char* const text = device_.verbs().event_type_str(event.event_type);
  if (event.event_type == IBV_EVENT_DEVICE_FATAL) {
    VERBATIM_WARN("%s: the device has failed (%s); its %zu connections fail. Next: 'dmesg | grep %s'", name, text,
                  count_connections(0), name);
    return;
  }
  if (!names_port(event.event_type)) return VERBATIM_INFO("%s: %s", name, text);
  const auto port_num = static_cast<std::uint8_t>(event.element.port_num);
  try {
    switch (event.event_type) {
      case IBV_EVENT_PORT_ERR:
        return log_link_down(port_num);
      case IBV_EVENT_PORT_ACTIVE:
        return log_link_up(port_num);
      case IBV_EVENT_GID_CHANGE:
        return log_gid_change(port_num);
      default:
        break;
    }
  } catch (...) {  // out of memory: the line without details follows
  }
  VERBATIM_INFO("%s:%u: %s", name, port_num, text);
}

void DeviceEvents::log_link_down(std::uint8_t port_num) {
  if (!device_.history().link_down(port_num, monotonic_ns())) return;
  const std::size_t users = count_connections(port_num);
  VERBATIM_WARN(
      "%s:%u: the link is down (port error); %zu connections use it and wait until their retries are used up%s",
      device_.name().c_str(), port_num, users, users != 0 ? " (VERBATIM_TIMEOUT, VERBATIM_RETRY_CNT)" : "");
}

void DeviceEvents::log_link_up(std::uint8_t port_num) {
  const std::uint64_t now = monotonic_ns();
  const std::uint64_t outage_ns = device_.history().link_up(port_num, now);
  if (outage_ns == 0) return VERBATIM_INFO("%s:%u: the link is up", device_.name().c_str(), port_num);
  VERBATIM_WARN("%s:%u: the link is up again after %s, outages so far: %u; %zu connections use it",
                device_.name().c_str(), port_num, to_duration(outage_ns).c_str(),
                device_.history().link_since(port_num, 0, now).downs, count_connections(port_num));
}

// A connection keeps the address that it was made with: a change matters only where it is that of a connection.
void DeviceEvents::log_gid_change(std::uint8_t port_num) {
  std::map<std::pair<std::uint32_t, std::string>, std::size_t> used;  // index and GID: number of connections
  {
    const MutexLock lock(table_.mutex);
    for (const auto& [fd, connection] : table_.connections) {
      for (const Port* port : connection.comm->endpoint().ports()) {
        if (port->device != &device_ || port->port_num != port_num || !port->is_roce()) continue;
        ++used[{port->gid.index, to_string(port->gid.gid)}];
      }
    }
  }
  std::size_t affected = 0;
  std::string change;
  for (const auto& [entry, users] : used) {
    const auto& [index, gid] = entry;
    ibv_gid now{};
    const int failed = device_.verbs().query_gid(device_.context(), port_num, static_cast<int>(index), &now);
    const std::string found = failed == 0 ? to_string(now) : "unreadable";
    if (found == gid) continue;
    affected += users;
    change.assign("GID ").append(std::to_string(index)).append(" ").append(gid).append(" is now ").append(found);
  }
  if (affected == 0) {
    return VERBATIM_INFO("%s:%u: the GID table has changed, no connection uses a changed entry", device_.name().c_str(),
                         port_num);
  }
  VERBATIM_WARN(
      "%s:%u: %s (GID table change); %zu connections were made with the old one and may fail, new connections "
      "use the new table",
      device_.name().c_str(), port_num, change.c_str(), affected);
}

}  // namespace verbatim
