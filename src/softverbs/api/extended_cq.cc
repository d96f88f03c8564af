#include "softverbs/api/extended_cq.h"

#include <cerrno>
#include <climits>
#include <ctime>

#include "base/clock.h"
#include "softverbs/engine/call.h"
#include "softverbs/engine/completion_queue.h"
#include "softverbs/engine/process.h"
#include "softverbs/engine/qp.h"

#define SOFTVERBS_HOLDS_LOCK VERBATIM_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace verbatim::softverbs {
namespace {

constexpr std::uint64_t kTimestamps =
    IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
constexpr std::uint64_t kSupportedFields = IBV_WC_STANDARD_FLAGS | kTimestamps;

Cq& cq_of(ibv_cq_ex* handle) {
  return *static_cast<Cq*>(ibv_cq_ex_to_cq(handle));
}

// Makes the next entry the current one. ENOENT: the queue is empty. The caller holds poll_mutex.
int step(Cq& cq) {
  SharedCq& shared = *cq.shared;
  const std::uint32_t tail = shared.tail.load(std::memory_order_seq_cst);
  const std::uint32_t head = shared.head.load(std::memory_order_relaxed);
  if (head == tail) return ENOENT;
  const Cqe entry = take_entry(cq, head);
  read_entry(entry, cq.current);
  if (Qp* qp = cq.process->qp_at(entry.qp_index); qp != nullptr) qp->release_entry(entry);
  cq.current_timestamp_ns = entry.timestamp_ns;
  cq.extended().status = cq.current.status;
  cq.extended().wr_id = cq.current.wr_id;
  shared.counters.completions.add(1);
  return 0;
}

// Returns with poll_mutex held. For a single-threaded queue each step locks it separately, so that the thread may
// destroy QPs between the steps.
int start_poll(ibv_cq_ex* handle, ibv_poll_cq_attr* attributes) SOFTVERBS_HOLDS_LOCK {
  if (attributes != nullptr && attributes->comp_mask != 0) return EINVAL;
  Cq& cq = cq_of(handle);
  cq.process->engine().progress();
  if (const int refused = begin_data_call(kPollCqCall, context_of(cq.context).device); refused != 0) return refused;
  if (note_empty_poll(cq)) return ENOENT;
  cq.poll_mutex.lock();
  const int result = step(cq);
  (result == 0 ? cq.shared->counters.polls : cq.shared->counters.empty_polls).add(1);
  if (result != 0 || cq.is_single_threaded) cq.poll_mutex.unlock();
  return result;
}

int next_poll(ibv_cq_ex* handle) SOFTVERBS_HOLDS_LOCK {
  Cq& cq = cq_of(handle);
  if (!cq.is_single_threaded) return step(cq);
  FutexLock lock(cq.poll_mutex);
  return step(cq);
}

void end_poll(ibv_cq_ex* handle) SOFTVERBS_HOLDS_LOCK {
  Cq& cq = cq_of(handle);
  if (!cq.is_single_threaded) cq.poll_mutex.unlock();
}

ibv_wc_opcode read_opcode(ibv_cq_ex* cq) {
  return cq_of(cq).current.opcode;
}
std::uint32_t read_vendor_err(ibv_cq_ex* cq) {
  return cq_of(cq).current.vendor_err;
}
std::uint32_t read_byte_len(ibv_cq_ex* cq) {
  return cq_of(cq).current.byte_len;
}
__be32 read_imm_data(ibv_cq_ex* cq) {
  return cq_of(cq).current.imm_data;
}
std::uint32_t read_qp_num(ibv_cq_ex* cq) {
  return cq_of(cq).current.qp_num;
}
std::uint32_t read_src_qp(ibv_cq_ex* cq) {
  return cq_of(cq).current.src_qp;
}
unsigned read_wc_flags(ibv_cq_ex* cq) {
  return cq_of(cq).current.wc_flags;
}
std::uint32_t read_slid(ibv_cq_ex* cq) {
  return cq_of(cq).current.slid;
}
std::uint8_t read_sl(ibv_cq_ex* cq) {
  return cq_of(cq).current.sl;
}
std::uint8_t read_dlid_path_bits(ibv_cq_ex* cq) {
  return cq_of(cq).current.dlid_path_bits;
}
std::uint64_t read_completion_ts(ibv_cq_ex* cq) {
  return cq_of(cq).current_timestamp_ns;
}
std::uint64_t read_completion_wallclock_ns(ibv_cq_ex* cq) {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  const std::uint64_t wall_ns =
      static_cast<std::uint64_t>(now.tv_sec) * kNanosecondsPerSecond + static_cast<std::uint64_t>(now.tv_nsec);
  return wall_ns - (monotonic_ns() - cq_of(cq).current_timestamp_ns);
}

// The calls of fields that the program did not request stay nullptr, as with hardware.
void set_field_readers(ibv_cq_ex& calls, std::uint64_t fields) {
  const auto set_if_requested = [fields](std::uint64_t field, auto& call, auto* function) {
    if ((fields & field) != 0) call = function;
  };
  calls.start_poll = start_poll;
  calls.next_poll = next_poll;
  calls.end_poll = end_poll;
  calls.read_opcode = read_opcode;
  calls.read_vendor_err = read_vendor_err;
  calls.read_wc_flags = read_wc_flags;
  set_if_requested(IBV_WC_EX_WITH_BYTE_LEN, calls.read_byte_len, read_byte_len);
  set_if_requested(IBV_WC_EX_WITH_IMM, calls.read_imm_data, read_imm_data);
  set_if_requested(IBV_WC_EX_WITH_QP_NUM, calls.read_qp_num, read_qp_num);
  set_if_requested(IBV_WC_EX_WITH_SRC_QP, calls.read_src_qp, read_src_qp);
  set_if_requested(IBV_WC_EX_WITH_SLID, calls.read_slid, read_slid);
  set_if_requested(IBV_WC_EX_WITH_SL, calls.read_sl, read_sl);
  set_if_requested(IBV_WC_EX_WITH_DLID_PATH_BITS, calls.read_dlid_path_bits, read_dlid_path_bits);
  set_if_requested(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP, calls.read_completion_ts, read_completion_ts);
  set_if_requested(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK, calls.read_completion_wallclock_ns,
                   read_completion_wallclock_ns);
}

}  // namespace

Result<Cq*> create_extended_cq(Context& context, const ibv_cq_init_attr_ex& attributes) {
  const std::uint32_t flags = (attributes.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS) != 0 ? attributes.flags : 0;
  if ((attributes.comp_mask & ~std::uint32_t{IBV_CQ_INIT_ATTR_MASK_FLAGS}) != 0 ||
      (flags & ~std::uint32_t{IBV_CREATE_CQ_ATTR_SINGLE_THREADED}) != 0 ||
      (attributes.wc_flags & ~kSupportedFields) != 0) {
    return system_error("create_cq_ex", EOPNOTSUPP);
  }
  const auto vectors = static_cast<std::uint32_t>(context.verbs_context::context.num_comp_vectors);
  if (attributes.comp_vector >= vectors || attributes.cqe > INT_MAX ||
      (attributes.channel != nullptr && attributes.channel->context != &context.verbs_context::context)) {
    return system_error("create_cq_ex", EINVAL);
  }
  Result<Cq*> cq = create_cq(context, static_cast<int>(attributes.cqe), attributes.cq_context, attributes.channel);
  if (!cq) return cq;
  (*cq)->is_single_threaded = (flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED) != 0;
  (*cq)->shared->is_stamped = (attributes.wc_flags & kTimestamps) != 0 ? 1 : 0;
  set_field_readers((*cq)->extended(), attributes.wc_flags);
  return cq;
}

}  // namespace verbatim::softverbs
