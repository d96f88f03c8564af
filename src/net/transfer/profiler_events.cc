#include "net/transfer/profiler_events.h"

namespace verbatim {

ProfilerEvents::ProfilerEvents(const Profiler& profiler) : profiler_(profiler), requests_(wire::kRingEntries) {
  noted_.reserve(wire::kMaxInFlight);
}

void ProfilerEvents::keep_handle(std::uint32_t index, void* handle) {
  ProfiledRequest& request = requests_[index];
  request.handle = handle;
  request.started = request.count = 0;
}

// Parts beyond what has been reserved have no events: a message has at most kMaxEvents anyway.
void ProfilerEvents::note(const PostedPart& part) noexcept {
  if (noted_.size() < noted_.capacity()) noted_.push_back(part);
}

void ProfilerEvents::start(std::uint32_t index, std::size_t queue, const WorkEvent& work) noexcept {
  ProfiledRequest& request = requests_[index];
  if (request.handle == nullptr || request.started == kMaxEvents) return;
  ++request.started;
  void* event = nullptr;
  profiler_.start(profiler_.callback, &event, request.handle, work);
  if (event != nullptr) request.events[request.count++] = {event, queue};
}

void ProfilerEvents::stop_queue(std::uint32_t index, std::size_t queue) noexcept {
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

void ProfilerEvents::stop_all(std::uint32_t index) noexcept {
  ProfiledRequest& request = requests_[index];
  for (std::uint32_t i = 0; i < request.count; ++i) profiler_.stop(profiler_.callback, &request.events[i].event);
  request.count = 0;
}

}  // namespace verbatim
