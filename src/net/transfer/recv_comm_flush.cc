// The receiving end's flushes: what arrived in GPU memory is made visible to the GPU.
#include <cerrno>
#include <cstring>
#include <string>

#include "base/log.h"
#include "net/transfer/recv_comm.h"

namespace verbatim {

Failure RecvComm::flush_failure(const Error& error, std::size_t port) const {
  PathFacts path = endpoint_.path_facts(endpoint_.qp_on_port(port), settings_.host_name);
  path.age_ns = 0;  // the history of the connection is not the cause
  path.counters.clear();
  PathFacts loop = path;
  loop.remote = loop.local;
  return {std::string(error.operation) + " for flushes of GPU memory failed with " + std::strerror(error.sys_errno),
          verbatim::diagnose_setup(error, &loop, qp_usage(endpoint_.ports().subspan(port, 1))),
          error.step == SetupStep::kModifyQp ? loop : path};
}

bool RecvComm::prepare_flushes() {
  Status prepared;
  std::size_t port = 0;
  try {
    prepared = flush_.prepare(*this, endpoint_, settings_.config, control_, flush_target(), port);
  } catch (...) {  // not set before, because g++ 12 forgets a value that a call which throws would have replaced
    prepared = system_error("memory", ENOMEM);
  }
  if (!prepared) fail(ErrorKind::kSystem, "iflush", [&] { return flush_failure(prepared.error(), port); });
  return bool{prepared};
}

Request* RecvComm::iflush(const void* data, const MemoryKeys& memory) {
  begin_call();
  const Call call(*this);
  wait_for_monitor();
  if (error() != nullptr || !memory.device_memory || settings_.config.flush_disabled) return nullptr;
  if (!flush_.prepared() && !prepare_flushes()) return nullptr;
  int returned = 0;
  std::size_t port = 0;
  // What came over a lane that has failed may not be there yet, and its port may be left out.
  Request* request = flush_.post(data, memory, lanes_change(), returned, port);
  if (request != nullptr && FlushQueue::is_held(*request)) failure_state_.set_flag(kLanes);  // until complete_held()
  if (request == nullptr) {
    if (returned != 0) {
      fail_post("ibv_post_send", returned, endpoint_.qp_on_port(port));
    } else {
      fail(ErrorKind::kInternal, "iflush", 0, diagnose_contradicting_calls, [] {
        return "iflush while " + std::to_string(FlushQueue::kSlots) +
               " flushes are outstanding, as many as receives can be";
      });
    }
  }
  return request;
}

ErrorKind RecvComm::test_flush(Request& request, int* done, int*) noexcept {
  RecvComm& comm = *static_cast<RecvComm*>(request.comm);
  if (request.state != RequestState::kDone) {
    comm.CommProgress::progress();
    if (request.state != RequestState::kDone) {
      comm.tested_ = true;
      *done = 0;
      return comm.result();
    }
  }
  *done = 1;
  comm.flush_.retire(request);
  return ErrorKind::kNone;
}

}  // namespace verbatim
