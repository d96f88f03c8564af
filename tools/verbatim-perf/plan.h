// What one rank does in one iteration of an operation, computed before the time measurement starts: which messages go
// over which connection in which order, and what each of them must wait for. Operations make plans; Progress executes
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ranks/connections.h"
#include "workload/content.h"

namespace verbatim::perf {

using ranks::Flow;

enum class Buffer : std::uint8_t { kSend, kRecv, kStaging };
constexpr std::size_t kBuffers = 3;

// One message.
struct Message {
  Buffer buffer;
  std::size_t offset;    // in the buffer
  std::size_t bytes;     // bytes that are sent
  std::size_t capacity;  // bytes of the posted receive; NCCL posts the size of the buffer slot, not of the message
  int tag;
};

// Work after a completed receive: this rank's contribution is added to the message, over its bytes.
struct Reduction {
  bool wanted = false;
  std::size_t offset = 0;      // of the contribution, and of the result in the receive buffer
  Buffer own = Buffer::kSend;  // where the contribution is
  bool stays = false;          // the result stays where the message was received
  int contribution_of = -1;    // the message is what this rank contributes; -1: a partial result
  bool last = false;           // the result is complete
};

// How a rank reduces.
struct Arithmetic {
  workload::ElementType type;
  workload::ReductionKind kind;
  int rank;
  int ranks;
};

// One isend, or one irecv of `Lane::group` messages.
struct Step {
  // The step starts only after lane `after_lane` has completed `after_count` steps of this iteration; -1: at once.
  int after_lane = -1;
  std::uint64_t after_count = 0;
  Reduction reduction = {};
};

// One direction of a connection. Steps start in order and complete in order.
struct Lane {
  std::size_t flow;  // index in Operation::flows()
  bool sends;
  std::size_t group = 1;               // messages per step; 1 on a sending lane
  std::size_t window = 1;              // maximum number of started steps that are not complete
  std::vector<Message> messages = {};  // `group` messages for each step
  std::vector<Step> steps = {};
};

// A copy from the send buffer to the receive buffer before the first step.
struct LocalCopy {
  std::size_t from;
  std::size_t to;
  std::size_t bytes;
};

struct Plan {
  std::vector<LocalCopy> copies = {};
  std::vector<Lane> lanes = {};
};

// The same plan where the send buffer is a part of the receive buffer that begins at `offset`.
Plan in_place(Plan plan, std::size_t offset);

}  // namespace verbatim::perf
