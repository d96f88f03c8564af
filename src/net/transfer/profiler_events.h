// The events that a comm gives to NCCL's profiler (VERBATIM_PROFILER). Its functions isend_profiled, irecv_profiled and
// test_profiled call those of the data path and note before and after them what has happened, so that the data path
// itself has no more to do than to select them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "net/transfer/lanes.h"
#include "wire/cts.h"

namespace verbatim {

// The part of a message that one QP carries, as NCCL's profiler learns of it.
struct WorkEvent {
  int device = 0;  // of the comm's ports
  std::uint64_t wr_id = 0;
  int opcode = 0;
  int qp_num = 0;
  std::size_t bytes = 0;
};

// Starts and stops events of NCCL's profiler. Only the plugin's tables know the type of its callback.
struct Profiler {
  using Callback = void (*)();

  Callback callback = nullptr;
  // `parent` is a profiler handle of isend or irecv, not null. `*event` stays null if the profiler wants no such event.
  void (*start)(Callback callback, void** event, void* parent, const WorkEvent& work) = nullptr;
  void (*stop)(Callback callback, void** event) = nullptr;
};

class ProfilerEvents {
 public:
  // NCCL's example profiler keeps so many network events of a step without checking for more.
  static constexpr std::size_t kMaxEvents = 8;

  // A part that was posted and has no events yet.
  struct PostedPart {
    std::uint32_t index;  // ring index of the group's first member
    Stripe stripe;
    std::uint64_t wr_id;
  };

  explicit ProfilerEvents(const Profiler& profiler);

  void keep_handle(std::uint32_t index, void* handle);
  void note(const PostedPart& part) noexcept;
  const std::vector<PostedPart>& noted() const { return noted_; }
  void clear_noted() { noted_.clear(); }
  // Starts an event for the request, unless it has no handle or as many events as possible. `queue`: see stop_queue.
  void start(std::uint32_t index, std::size_t queue, const WorkEvent& work) noexcept;
  // The part on this queue is complete, others are not.
  void stop_queue(std::uint32_t index, std::size_t queue) noexcept;
  void stop_all(std::uint32_t index) noexcept;

 private:
  struct ProfiledRequest {
    struct Event {
      void* event;
      std::size_t queue;
    };
    void* handle = nullptr;
    std::uint32_t started = 0;  // ever
    std::uint32_t count = 0;    // in `events`
    std::array<Event, kMaxEvents> events;
  };

  const Profiler profiler_;
  std::vector<ProfiledRequest> requests_;  // by ring index
  std::vector<PostedPart> noted_;
};

}  // namespace verbatim
