#include "softverbs/fabric/link.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/log.h"
#include "softverbs/fabric/virtual_clock.h"

namespace verbatim::softverbs {
namespace {

std::uint64_t duration_ps(std::uint64_t bytes, std::uint32_t gbps) {
  constexpr std::uint64_t kBitsPerByte = 8;
  constexpr std::uint64_t kPsPerNs = 1000;
  return bytes * kBitsPerByte * kPsPerNs / gbps;  // 1 Gb/s is 1 bit/ns
}

}  // namespace

Status Link::start() {
  {
    VirtualClock& clock = registry_.clock();
    SharedLockGuard lock(clock.lock, registry_.me());
    clock.slots_end = std::max(clock.slots_end, registry_.slot() + 1);
    for (std::uint32_t device = 0; device < kMaxDevices; ++device) {
      clock.ports[registry_.slot()][device] = {registry_.me(), 0, settings_.link_gbps[device], clock.now_ps,
                                               clock.now_ps};
    }
  }
  if (settings_.trace_file.empty()) return {};
  trace_.reset(::open(settings_.trace_file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK,
                      S_IRUSR | S_IWUSR));
  if (trace_) return {};
  const int error = errno;
  VERBATIM_WARN("SOFTVERBS_TRACE=%s cannot be written: %s", settings_.trace_file.c_str(), std::strerror(error));
  return system_error("open", error);
}

void Link::add_backlog(std::uint32_t device) {
  VirtualClock& clock = registry_.clock();
  SharedLockGuard lock(clock.lock, registry_.me());
  LinkPort& port = clock.ports[registry_.slot()][device];
  if (port.backlog++ != 0) return;
  port.free_ps = std::max(port.free_ps, clock.now_ps);
  if (clock.grant_owner == 0) wake_port(clock, next_port(clock));
}

void Link::remove_backlog(std::uint32_t device) {
  VirtualClock& clock = registry_.clock();
  SharedLockGuard lock(clock.lock, registry_.me());
  LinkPort& port = clock.ports[registry_.slot()][device];
  if (--port.backlog == 0 && clock.grant_owner == 0) wake_port(clock, next_port(clock));
}

std::optional<std::uint32_t> Link::acquire_grant() {
  VirtualClock& clock = registry_.clock();
  SharedLockGuard lock(clock.lock, registry_.me());
  if (clock.held != 0 || clock.grant_owner != 0) return std::nullopt;
  const PortNumber next = next_port(clock);
  if (next.slot != registry_.slot()) return std::nullopt;
  clock.grant_owner = registry_.me();
  return next.device;
}

void Link::finish_grant(std::uint32_t device, const SentQuantum& quantum) {
  VirtualClock& clock = registry_.clock();
  SharedLockGuard lock(clock.lock, registry_.me());
  LinkPort& port = clock.ports[registry_.slot()][device];
  const std::uint64_t start = port.free_ps;
  clock.now_ps = std::max(clock.now_ps, start);
  port.free_ps = start + duration_ps(quantum.bytes, port.gbps);
  if (quantum.bytes != 0) {
    // The target's port receives one quantum at a time, at its own rate, in the order in which they were sent. What
    // arrives slower than that leaves it free for others.
    LinkPort& target = clock.ports[quantum.peer_slot][quantum.peer_device];
    const std::uint32_t target_gbps = target.gbps != 0 ? target.gbps : port.gbps;
    target.received_ps = std::max(target.received_ps, start) + duration_ps(quantum.bytes, target_gbps);
    trace(device, quantum, start, std::max(target.received_ps, port.free_ps));
  }
  clock.grant_owner = 0;
  wake_port(clock, next_port(clock));
}

void Link::return_grant() {
  VirtualClock& clock = registry_.clock();
  SharedLockGuard lock(clock.lock, registry_.me());
  clock.grant_owner = 0;
  wake_port(clock, next_port(clock));
}

void Link::trace(std::uint32_t device, const SentQuantum& quantum, std::uint64_t start_ps, std::uint64_t arrival_ps) {
  if (!trace_) return;
  const auto number = [](std::uint64_t value) { return static_cast<unsigned long long>(value); };
  char line[256];
  const int length = std::snprintf(
      line, sizeof line,
      "{\"ns\":%llu,\"port\":\"%d.%u\",\"qpn\":%u,\"to\":\"%d.%u\",\"to_qpn\":%u,\"bytes\":%llu,\"arrival_ns\":%llu,"
      "\"schema\":%u}\n",
      number(start_ps / 1000), ::getpid(), device, quantum.qpn, quantum.peer_pid, quantum.peer_device, quantum.dest_qpn,
      number(quantum.bytes), number(arrival_ps / 1000), kTraceSchema);
  if (::write(trace_.get(), line, static_cast<std::size_t>(length)) == length) return;
  VERBATIM_WARN("SOFTVERBS_TRACE=%s cannot be written any more, the trace ends: %s", settings_.trace_file.c_str(),
                std::strerror(errno));
  trace_.reset();
}

std::uint32_t Link::changes() const {
  return registry_.clock().wake_counters[registry_.slot()].load(std::memory_order_seq_cst);
}

void Link::wait(std::uint32_t seen) const {
  VirtualClock& clock = registry_.clock();
  if (wait_for_wake(clock.wake_counters[registry_.slot()], seen)) return;
  // Nothing has happened for the whole timeout: the process that holds the grant may be dead.
  SharedLockGuard lock(clock.lock, registry_.me());
  reap_dead_ports(clock, registry_);
}

std::uint32_t Link::releases() const {
  return registry_.clock().releases.load(std::memory_order_relaxed);
}

}  // namespace verbatim::softverbs
