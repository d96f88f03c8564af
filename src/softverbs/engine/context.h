// An open device. ibv_open_device creates it, ibv_close_device destroys it.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <list>

#include "base/mutex.h"
#include "base/unique_fd.h"
#include "softverbs/engine/event_pipe.h"
#include "softverbs/host/layout.h"

namespace verbatim::softverbs {

class Process;

struct Context : verbs_context {
  Process* process = nullptr;
  std::uint32_t device = 0;
  std::uint32_t index = 0;
  SharedContext* shared = nullptr;
  EventPipe pipe;
  UniqueFd command_fd;
  Mutex objects_mutex;  // guards the lists below, which only rare calls use
  // Lists, because an entry that was made before is added without memory.
  std::list<struct Cq*> cqs VERBATIM_GUARDED_BY(objects_mutex);
  std::list<struct Qp*> qps VERBATIM_GUARDED_BY(objects_mutex);
  std::list<struct Srq*> srqs VERBATIM_GUARDED_BY(objects_mutex);
};

inline Context& context_of(ibv_context* context) {
  return *static_cast<Context*>(verbs_get_ctx(context));
}

}  // namespace verbatim::softverbs
