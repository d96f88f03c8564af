#include "net/transfer/comm_trace.h"

namespace verbatim {

CommTrace::CommTrace(bool latency, const Profiler& profiler)
    : profiler_(profiler), latency_(latency ? std::make_unique<Latency>() : nullptr) {
  if (!profiles()) return;
  requests_.resize(wire::kRingEntries);
  noted_.reserve(wire::kMaxInFlight);
}

LatencyStats CommTrace::latency(bool sends) const {
  LatencyStats stats;
  if (latency_ == nullptr) return stats;
  const TickScale scale;
  if (sends) {
    stats.push_back({"isend_to_completion", latency_->send.read(scale)});
  } else {
    stats.push_back({"irecv_to_arrival", latency_->receive.read(scale)});
    stats.push_back({"cts_to_data", latency_->cts.read(scale)});
  }
  return stats;
}

void CommTrace::keep_handle(std::uint32_t index, void* handle) {
  ProfiledRequest& request = requests_[index];
  request.handle = handle;
  request.started = request.count = 0;
}

// Parts beyond what has been reserved have no events: a message has at most kMaxEvents anyway.
void CommTrace::note(const PostedPart& part) noexcept {
  if (profiles() && noted_.size() < noted_.capacity()) noted_.push_back(part);
}

void CommTrace::start(std::uint32_t index, std::size_t queue, const WorkEvent& work) noexcept {
  ProfiledRequest& request = requests_[index];
  if (request.handle == nullptr || request.started == kMaxEvents) return;
  ++request.started;
  void* event = nullptr;
  profiler_.start(profiler_.callback, &event, request.handle, work);
  if (event != nullptr) request.events[request.count++] = {event, queue};
}

void CommTrace::stop_queue(std::uint32_t index, std::size_t queue) noexcept {
  if (!profiles()) return;
  ProfiledRequest& request = requests_[index];
  std::uint32_t left = 0;
  for (std::uint32_t i = 0; i < request.count; ++i) {
    if (request.events[i].queue == queue) {
      profiler_.stop(profiler_.callback, &request.events[i].event);
    } else {
      request.events[left++] = request.events[i];
    }
  }
  request.count = left;
}

void CommTrace::stop_all(std::uint32_t index) noexcept {
  ProfiledRequest& request = requests_[index];
  for (std::uint32_t i = 0; i < request.count; ++i) profiler_.stop(profiler_.callback, &request.events[i].event);
  request.count = 0;
}

}  // namespace verbatim
