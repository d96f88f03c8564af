#include "net/monitor/device_events.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "net/monitor/rma_sets.h"

namespace verbatim {
namespace {

// Open connections over that port of the device; 0: over any port. `other_lanes`: of these, those with failover.
std::size_t count_connections(ConnectionTable& table, const Device& device, std::uint8_t port_num,
                              std::size_t* other_lanes = nullptr) {
  const MutexLock lock(table.mutex);
  std::size_t count = 0;
  for (const auto& [fd, connection] : table.connections) {
    if (connection.closing != nullptr || !connection.comm->uses(device, port_num)) continue;
    ++count;
    const Comm& comm = *connection.comm;
    if (other_lanes != nullptr && comm.can_lose_lanes() && comm.endpoint().ports().size() > 1) ++*other_lanes;
  }
  return count;
}

void fail_device(ConnectionTable& table, const Device& device, std::uint32_t index) VERBATIM_REQUIRES(table.mutex) {
  table.earlier_failures[index].device = true;
  for (const auto& [fd, connection] : table.connections) {
    if (connection.comm->uses(device)) connection.comm->set_device_event(IBV_EVENT_DEVICE_FATAL, device);
  }
}

void set_comm_events(ConnectionTable& table, const Device& device, std::uint32_t index, const ibv_async_event& event) {
  const ibv_event_type type = event.event_type;
  const bool ends_qp = is_qp_event(type);
  const MutexLock lock(table.mutex);
  if (type == IBV_EVENT_DEVICE_FATAL) return fail_device(table, device, index);
  const bool down = type == IBV_EVENT_PORT_ERR;
  if (down || type == IBV_EVENT_PORT_ACTIVE) {
    const auto port = static_cast<std::uint8_t>(event.element.port_num);
    for (auto& [fd, connection] : table.connections) {
      Comm& comm = *connection.comm;
      if (down ? !comm.can_lose_lanes() : !comm.uses(device)) continue;
      if (down) comm.port_down(device, port);
      if (!down) comm.port_up(device, port);
      table.mark_changed(connection);
    }
  }
  if (!ends_qp && type != IBV_EVENT_CQ_ERR) return;
  bool found = false;
  for (const auto& [fd, connection] : table.connections) {
    Comm& comm = *connection.comm;
    if (!(ends_qp ? comm.uses(*event.element.qp) : comm.uses(*event.element.cq))) continue;
    found = true;
    // With several lanes the completions and VERBATIM_LANE_TIMEOUT_MS decide: bnxt_re and irdma report used up retries
    // as an event of the QP, too.
    if (!ends_qp || !comm.can_lose_lanes()) comm.set_device_event(type, device);
  }
  if (!found) table.earlier_failures[index].unowned_queue = true;
}

void log_link_down(ConnectionTable& table, const Device& device, std::uint8_t port_num) {
  if (!device.history().link_down(port_num, monotonic_ns())) return;
  std::size_t other_lanes = 0;
  const std::size_t users = count_connections(table, device, port_num, &other_lanes);
  std::string use = users == 0 ? "no net connection uses it" : std::to_string(users) + " connections use it";
  if (other_lanes != 0) use += ", " + std::to_string(other_lanes) + " go on over their other ports";
  if (other_lanes != users) {
    use += ", " + std::to_string(users - other_lanes) +
           " wait until their retries are used up (VERBATIM_TIMEOUT, VERBATIM_RETRY_CNT)";
  }
  VERBATIM_WARN("%s:%u: the link is down (port error); %s. Next: look at this port, its cable and its switch",
                device.name().c_str(), port_num, use.c_str());
}

void log_link_up(ConnectionTable& table, const Device& device, std::uint8_t port_num) {
  const std::uint64_t now = monotonic_ns();
  const std::uint64_t outage_ns = device.history().link_up(port_num, now);
  if (outage_ns == 0) return VERBATIM_INFO("%s:%u: the link is up", device.name().c_str(), port_num);
  VERBATIM_WARN("%s:%u: the link is up again after %s, outages so far: %u; %zu connections use it",
                device.name().c_str(), port_num, to_duration(outage_ns).c_str(),
                device.history().link_since(port_num, 0, now).downs, count_connections(table, device, port_num));
}

bool is_roce(const Comm& comm, const Device& device, std::uint8_t port_num) {
  return std::ranges::any_of(comm.endpoint().ports(), [&](const Port* port) {
    return port->device == &device && port->port_num == port_num && port->is_roce();
  });
}

// The lanes that have this GID are down, if others are left.
void take_lanes_down(ConnectionTable& table, const Device& device, std::uint8_t port_num, const GidEntry& gid) {
  const MutexLock lock(table.mutex);
  for (auto& [fd, connection] : table.connections) {
    if (!connection.comm->can_lose_lanes()) continue;
    connection.comm->gid_changed(device, port_num, gid);
    table.mark_changed(connection);
  }
}

// A lane keeps the address that it was made with: a change matters only where it is that of a lane. Lanes whose address
// has gone come back with another one.
void handle_gid_change(ConnectionTable& table, const Device& device, std::uint8_t port_num) {
  struct Used {
    GidEntry gid;
    std::size_t connections = 0;
  };
  std::map<std::pair<std::uint32_t, std::string>, Used> used;  // by index and text
  {
    const MutexLock lock(table.mutex);
    for (auto& [fd, connection] : table.connections) {
      if (!connection.comm->uses(device, port_num)) continue;
      connection.comm->port_up(device, port_num);
      table.mark_changed(connection);
      if (!is_roce(*connection.comm, device, port_num)) continue;
      for (const GidEntry& gid : connection.comm->gids(device, port_num)) {
        Used& entry = used[{gid.index, to_string(gid.gid)}];
        entry.gid = gid;
        ++entry.connections;
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
    affected += users.connections;
    change.assign("GID ").append(std::to_string(index)).append(" ").append(gid).append(" is now ").append(found);
    take_lanes_down(table, device, port_num, users.gid);
  }
  if (affected == 0) {
    return VERBATIM_INFO("%s:%u: the GID table has changed, no connection uses a changed entry", device.name().c_str(),
                         port_num);
  }
  VERBATIM_WARN(
      "%s:%u: %s (GID table change); %zu connections were made with the old one and may fail, new connections "
      "use the new table",
      device.name().c_str(), port_num, change.c_str(), affected);
}

void log_event(ConnectionTable& table, const Device& device, const ibv_async_event& event) {
  const char* const name = device.name().c_str();
  const char* const text = device.verbs().event_type_str(event.event_type);
  const auto port_num = static_cast<std::uint8_t>(event.element.port_num);
  switch (event.event_type) {
    case IBV_EVENT_DEVICE_FATAL:
      return VERBATIM_WARN("%s: the device has failed (%s); its %zu connections fail. Next: 'dmesg | grep %s'", name,
                           text, count_connections(table, device, 0), name);
    case IBV_EVENT_PORT_ERR:
      return log_link_down(table, device, port_num);
    case IBV_EVENT_PORT_ACTIVE:
      return log_link_up(table, device, port_num);
    case IBV_EVENT_GID_CHANGE:
      return handle_gid_change(table, device, port_num);
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_PKEY_CHANGE:
    case IBV_EVENT_SM_CHANGE:
    case IBV_EVENT_CLIENT_REREGISTER:
      return VERBATIM_INFO("%s:%u: %s", name, port_num, text);
    default:
      return VERBATIM_INFO("%s: %s", name, text);
  }
}

}  // namespace

Status open_device_events(const Device& device, const EventHandler& handler) {
  const int fd = device.context()->async_fd;
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) return system_error("fcntl", errno);
  return handler.watch(fd, EventHandler::kReadableOnce);
}

void read_device_events(ConnectionTable& table, const Device& device, std::uint32_t index,
                        const EventHandler& handler) {
  const Verbs& verbs = device.verbs();
  const char* const name = device.name().c_str();
  const int fd = device.context()->async_fd;
  ibv_async_event event{};
  while (verbs.get_async_event(device.context(), &event) == 0) {
    set_comm_events(table, device, index, event);
    table.rma_sets->device_event(device, event);
    try {
      log_event(table, device, event);
    } catch (...) {  // no memory for the details of an event of a port
      VERBATIM_INFO("%s:%d: %s", name, event.element.port_num, verbs.event_type_str(event.event_type));
    }
    verbs.ack_async_event(&event);
  }
  if ((errno == EAGAIN || errno == EINTR) && handler.watch(fd, EventHandler::kReadableOnce)) return;
  // The descriptor of a device that was removed stays readable: it is not polled any more.
  const char* const why = std::strerror(errno);
  VERBATIM_WARN("%s: no more events can be read from the device: %s; its %zu connections fail. Next: 'dmesg | grep %s'",
                name, why, count_connections(table, device, 0), name);
  handler.unwatch(fd);
  const MutexLock lock(table.mutex);
  fail_device(table, device, index);
}

}  // namespace verbatim
