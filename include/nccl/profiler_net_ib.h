// The events of a net plugin for NCCL's profiler plugins: the callback of init, from table v10 on, and the descriptor
// that profilers expect of an InfiniBand transport, version 1.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nccl {

// Values of `type` of ProfilerCallback.
enum ProfilerEventType : int { kProfilerStart = 0, kProfilerStop = 1, kProfilerUpdate = 2, kProfilerUpdateAndStop = 3 };

// plugin_id: the kind of transport, with the version of the descriptor in the lower 16 bits.
constexpr std::int64_t kProfilerNetIbV1 = (std::int64_t{1} << 16) | 1;

constexpr std::uint8_t kProfilerQpEvent = 1;  // NetIbEvent::type

struct NetIbQpEvent {
  int device;
  std::uint64_t wr_id;
  int opcode;  // ibv_wr_opcode
  int qp_num;
  std::size_t length;
};

struct NetIbEvent {
  std::uint8_t type;
  NetIbQpEvent qp;
};
static_assert(sizeof(NetIbEvent) == 40 && offsetof(NetIbEvent, qp) == 8 && offsetof(NetIbQpEvent, wr_id) == 8 &&
              offsetof(NetIbQpEvent, opcode) == 16 && offsetof(NetIbQpEvent, qp_num) == 20 &&
              offsetof(NetIbQpEvent, length) == 24);

}  // namespace nccl
