#include "profiler.h"

namespace verbatim::abi {
namespace {

nccl::ProfilerCallback restore(Profiler::Callback callback) {
  return reinterpret_cast<nccl::ProfilerCallback>(callback);
}

// NCCL ignores failures of its profiler plugin, and so does this.
void start_event(Profiler::Callback callback, void** event, void* parent, const WorkEvent& work) {
  nccl::NetIbEvent described{.type = nccl::kProfilerQpEvent,
                             .qp = {.device = work.device,
                                    .wr_id = work.wr_id,
                                    .opcode = work.opcode,
                                    .qp_num = work.qp_num,
                                    .length = work.bytes}};
  restore(callback)(event, nccl::kProfilerStart, parent, nccl::kProfilerNetIbV1, &described);
}

void stop_event(Profiler::Callback callback, void** event) {
  restore(callback)(event, nccl::kProfilerStop, nullptr, 0, nullptr);
}

}  // namespace

Profiler profiler_of(nccl::ProfilerCallback callback) {
  if (callback == nullptr) return {};
  return {.callback = reinterpret_cast<Profiler::Callback>(callback), .start = start_event, .stop = stop_event};
}

}  // namespace verbatim::abi
