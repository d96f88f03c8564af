#include "softverbs/engine/call.h"

#include <cerrno>

#include "softverbs/engine/context.h"
#include "softverbs/engine/process.h"

namespace verbatim::softverbs {

int begin_call(Verb verb, ibv_context* handle) {
  count(verb);
  const Context& context = context_of(handle);
  if (context.process->segment().service_pending.load(std::memory_order_relaxed) != 0) {
    context.process->engine().progress();
  }
  Faults* const all = faults();
  if (all == nullptr) return 0;
  const int error = all->refused_call(call_bit(verb), context.device);
  if (error != 0) errno = error;
  return error;
}

}  // namespace verbatim::softverbs
