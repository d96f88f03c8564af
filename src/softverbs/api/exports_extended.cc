// The C API: the verbs that the header calls through verbs_context. For entries that are nullptr the header returns
// EOPNOTSUPP: memory windows, XRC, flows, work queues, device memory, counters, thread and parent domains.
#include <infiniband/verbs.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "softverbs/api/exports.h"
#include "softverbs/api/extended_cq.h"
#include "softverbs/api/extended_qp.h"
#include "softverbs/engine/call.h"
#include "softverbs/engine/process.h"
#include "softverbs/engine/receive_queue.h"
#include "softverbs/host/device_attributes.h"

namespace verbatim::softverbs {
namespace {

int query_device_ex(ibv_context* context, const ibv_query_device_ex_input* input, ibv_device_attr_ex* attributes,
                    std::size_t bytes) {
  if (const int error = begin_call(Verb::kQueryDeviceEx, context); error != 0) return error;
  if (input != nullptr && input->comp_mask != 0) return EINVAL;
  if (bytes < sizeof(ibv_device_attr)) return EINVAL;
  const Context& owner = context_of(context);
  const ibv_device_attr_ex all = extended_device_attributes(owner.device, owner.process->settings());
  std::memset(static_cast<void*>(attributes), 0, bytes);
  std::memcpy(static_cast<void*>(attributes), &all, std::min(bytes, sizeof all));
  return 0;
}

int query_rt_values(ibv_context*, ibv_values_ex* values) {
  count(Verb::kQueryRtValuesEx);
  if ((values->comp_mask & ~std::uint32_t{IBV_VALUES_MASK_RAW_CLOCK}) != 0) return EOPNOTSUPP;
  return ::clock_gettime(CLOCK_MONOTONIC, &values->raw_clock) == 0 ? 0 : errno;
}

ibv_cq_ex* create_cq_ex(ibv_context* context, ibv_cq_init_attr_ex* attributes) {
  if (begin_call(Verb::kCreateCqEx, context) != 0) return nullptr;
  Cq* cq = call_and_return_pointer([&] { return create_extended_cq(context_of(context), *attributes); });
  return cq != nullptr ? &cq->extended() : nullptr;
}

ibv_qp* create_qp_ex(ibv_context* context, ibv_qp_init_attr_ex* attributes) {
  if (begin_call(Verb::kCreateQpEx, context) != 0) return nullptr;
  return call_and_return_pointer([&] { return create_extended_qp(context_of(context), *attributes); });
}

ibv_srq* create_srq_ex(ibv_context* context, ibv_srq_init_attr_ex* attributes) {
  if (begin_call(Verb::kCreateSrqEx, context) != 0) return nullptr;
  constexpr std::uint32_t kSupported = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD;
  const bool is_basic = (attributes->comp_mask & IBV_SRQ_INIT_ATTR_TYPE) == 0 || attributes->srq_type == IBV_SRQT_BASIC;
  const bool is_supported = is_basic && (attributes->comp_mask & ~kSupported) == 0;
  if (!is_supported || (attributes->comp_mask & IBV_SRQ_INIT_ATTR_PD) == 0) {
    errno = is_supported ? EINVAL : EOPNOTSUPP;
    return nullptr;
  }
  const ibv_srq_init_attr plain{attributes->srq_context, attributes->attr};
  return call_and_return_pointer([&] { return create_srq(context_of(context), attributes->pd, plain); });
}

}  // namespace

void fill_extended_calls(Context& context) {
  context.query_device_ex = query_device_ex;
  context.query_rt_values = query_rt_values;
  context.create_cq_ex = create_cq_ex;
  context.create_qp_ex = create_qp_ex;
  context.create_srq_ex = create_srq_ex;
}

}  // namespace verbatim::softverbs

using namespace verbatim::softverbs;

extern "C" {

// nullptr for a QP that was created without IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.
SOFTVERBS_EXPORT ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp* handle) {
  ibv_qp_ex& extended = static_cast<Qp*>(handle)->extended();
  return extended.wr_start != nullptr ? &extended : nullptr;
}

}  // extern "C"
