#include "softverbs/api/extended_qp.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "softverbs/engine/call.h"
#include "softverbs/engine/datagrams.h"

#define SOFTVERBS_HOLDS_LOCK VERBATIM_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace verbatim::softverbs {
namespace {

// The operations (IBV_QP_EX_WITH_*) that a program may request for a QP.
constexpr std::uint64_t supported_send_ops(ibv_qp_type type) {
  constexpr std::uint64_t kUnreliable = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM |
                                        IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
  constexpr std::uint64_t kReliable =
      IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
  constexpr std::uint64_t kDatagram = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
  return type == IBV_QPT_UD ? kDatagram : type == IBV_QPT_UC ? kUnreliable : kUnreliable | kReliable;
}

Qp& qp_of(ibv_qp_ex* handle) {
  return *static_cast<Qp*>(&handle->qp_base);
}

void fail(WorkBatch& batch, int error) {
  if (batch.error == 0) batch.error = error;
}

void start(ibv_qp_ex* handle) SOFTVERBS_HOLDS_LOCK {
  Qp& qp = qp_of(handle);
  qp.sends.mutex.lock();
  const ibv_qp_state state = qp.current_state();
  const bool may_post = state != IBV_QPS_RESET && state != IBV_QPS_INIT && state != IBV_QPS_RTR;
  qp.batch = {qp.sends.posted.load(std::memory_order_relaxed), 0, may_post ? 0 : EINVAL};
}

// Each datagram of the batch needs an address.
bool has_addresses(const Qp& qp) {
  if (qp.qp_type != IBV_QPT_UD) return true;
  for (std::uint32_t at = qp.batch.next - qp.batch.count; at != qp.batch.next; ++at) {
    if (!qp.datagrams->addresses[at & qp.sends.mask].is_set) return false;
  }
  return true;
}

int complete(ibv_qp_ex* handle) SOFTVERBS_HOLDS_LOCK {
  Qp& qp = qp_of(handle);
  SendCounters& counters = qp.shared->counters.sends;
  counters.completes.add(1);
  const int refused = begin_data_call(kPostSendCall, qp.shared->device);
  if (!has_addresses(qp)) fail(qp.batch, EINVAL);
  const int error = refused != 0 ? refused : qp.batch.error;
  if (error == 0) {
    for (std::uint32_t at = qp.batch.next - qp.batch.count; at != qp.batch.next; ++at) {
      const SendRequest& request = qp.sends.requests[at & qp.sends.mask];
      count_request(counters, request.opcode, request.length, request.flags);
    }
    qp.sends.posted.store(qp.batch.next, std::memory_order_release);
  }
  qp.sends.mutex.unlock();
  if (error == 0) qp.process->engine().submit(qp);
  return error;
}

void abort(ibv_qp_ex* handle) SOFTVERBS_HOLDS_LOCK {
  qp_of(handle).sends.mutex.unlock();
}

// Begins a request in the next free entry of the send queue. nullptr: the queue is full or the batch has failed.
SendRequest* begin(ibv_qp_ex* handle, ibv_wr_opcode opcode, std::uint64_t operation) {
  Qp& qp = qp_of(handle);
  WorkBatch& batch = qp.batch;
  if ((qp.send_ops & operation) == 0) fail(batch, EOPNOTSUPP);
  if (batch.next - qp.sends.released.load(std::memory_order_acquire) >= qp.cap.max_send_wr) fail(batch, ENOMEM);
  if (batch.error != 0) return nullptr;
  SendRequest& request = qp.sends.requests[batch.next & qp.sends.mask];
  ++batch.next;
  ++batch.count;
  request = {};
  request.wr_id = handle->wr_id;
  request.arrival = qp.process->next_arrival();
  request.opcode = static_cast<std::uint8_t>(opcode);
  request.flags = static_cast<std::uint8_t>(handle->wr_flags & ~unsigned{IBV_SEND_INLINE});
  if (qp.qp_type == IBV_QPT_UD) qp.datagrams->addresses[(batch.next - 1) & qp.sends.mask].is_set = false;
  return &request;
}

// The request that a setter changes. nullptr: the batch has failed, also because no request was begun.
SendRequest* current(Qp& qp) {
  if (qp.batch.count == 0) fail(qp.batch, EINVAL);
  return qp.batch.error == 0 ? &qp.sends.requests[(qp.batch.next - 1) & qp.sends.mask] : nullptr;
}

void begin_rdma(ibv_qp_ex* handle, ibv_wr_opcode opcode, std::uint64_t operation, std::uint32_t rkey,
                std::uint64_t remote_address, __be32 imm) {
  SendRequest* const request = begin(handle, opcode, operation);
  if (request == nullptr) return;
  request->rkey = rkey;
  request->remote_address = remote_address;
  request->imm = imm;
}

void rdma_write(ibv_qp_ex* handle, std::uint32_t rkey, std::uint64_t remote_address) {
  begin_rdma(handle, IBV_WR_RDMA_WRITE, IBV_QP_EX_WITH_RDMA_WRITE, rkey, remote_address, 0);
}

void rdma_write_imm(ibv_qp_ex* handle, std::uint32_t rkey, std::uint64_t remote_address, __be32 imm) {
  begin_rdma(handle, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, rkey, remote_address, imm);
}

void rdma_read(ibv_qp_ex* handle, std::uint32_t rkey, std::uint64_t remote_address) {
  begin_rdma(handle, IBV_WR_RDMA_READ, IBV_QP_EX_WITH_RDMA_READ, rkey, remote_address, 0);
}

void send(ibv_qp_ex* handle) {
  begin(handle, IBV_WR_SEND, IBV_QP_EX_WITH_SEND);
}

void send_imm(ibv_qp_ex* handle, __be32 imm) {
  if (SendRequest* const request = begin(handle, IBV_WR_SEND_WITH_IMM, IBV_QP_EX_WITH_SEND_WITH_IMM)) {
    request->imm = imm;
  }
}

void begin_atomic(ibv_qp_ex* handle, ibv_wr_opcode opcode, std::uint64_t operation, std::uint32_t rkey,
                  std::uint64_t remote_address, std::uint64_t compare_add, std::uint64_t swap) {
  SendRequest* const request = begin(handle, opcode, operation);
  if (request == nullptr) return;
  request->rkey = rkey;
  request->remote_address = remote_address;
  request->compare_add = compare_add;
  request->swap = swap;
}

void atomic_cmp_swp(ibv_qp_ex* handle, std::uint32_t rkey, std::uint64_t remote_address, std::uint64_t compare,
                    std::uint64_t swap) {
  begin_atomic(handle, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, rkey, remote_address, compare,
               swap);
}

void atomic_fetch_add(ibv_qp_ex* handle, std::uint32_t rkey, std::uint64_t remote_address, std::uint64_t add) {
  begin_atomic(handle, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, rkey, remote_address, add, 0);
}

void set_ud_addr(ibv_qp_ex* handle, ibv_ah* ah, std::uint32_t remote_qpn, std::uint32_t remote_qkey) {
  Qp& qp = qp_of(handle);
  if (qp.qp_type != IBV_QPT_UD) fail(qp.batch, EOPNOTSUPP);
  if (current(qp) == nullptr) return;
  const std::uint32_t slot = (qp.batch.next - 1) & qp.sends.mask;
  if (const int error = set_datagram_address(qp, slot, ah, remote_qpn, remote_qkey); error != 0) fail(qp.batch, error);
}

void set_sge_list(ibv_qp_ex* handle, std::size_t count, const ibv_sge* sges) {
  Qp& qp = qp_of(handle);
  if (count > qp.cap.max_send_sge) fail(qp.batch, EINVAL);
  SendRequest* const request = current(qp);
  if (request == nullptr) return;
  const std::size_t slot = (qp.batch.next - 1) & qp.sends.mask;
  std::copy_n(sges, count, &qp.sends.sges[slot * qp.cap.max_send_sge]);
  request->sge_count = static_cast<std::uint32_t>(count);
  request->length = 0;
  for (std::size_t i = 0; i < count; ++i) request->length += sges[i].length;
}

void set_sge(ibv_qp_ex* handle, std::uint32_t lkey, std::uint64_t address, std::uint32_t length) {
  const ibv_sge sge{address, length, lkey};
  set_sge_list(handle, 1, &sge);
}

void set_inline_data_list(ibv_qp_ex* handle, std::size_t count, const ibv_data_buf* buffers) {
  Qp& qp = qp_of(handle);
  std::size_t length = 0;
  for (std::size_t i = 0; i < count; ++i) length += buffers[i].length;
  if (length > qp.cap.max_inline_data) fail(qp.batch, EINVAL);
  SendRequest* const request = current(qp);
  if (request == nullptr) return;
  if (request->opcode == IBV_WR_RDMA_READ || request->opcode > IBV_WR_RDMA_READ) {
    return fail(qp.batch, EINVAL);  // the data of READs and atomics comes from the peer
  }
  const std::size_t slot = (qp.batch.next - 1) & qp.sends.mask;
  std::uint8_t* bytes = qp.sends.inline_bytes.get() + slot * qp.cap.max_inline_data;
  for (std::size_t i = 0; i < count; ++i) {
    if (buffers[i].length != 0) std::memcpy(bytes, buffers[i].addr, buffers[i].length);
    bytes += buffers[i].length;
  }
  request->sge_count = 0;
  request->length = length;
  request->flags |= IBV_SEND_INLINE;
}

void set_inline_data(ibv_qp_ex* handle, void* address, std::size_t length) {
  const ibv_data_buf buffer{address, length};
  set_inline_data_list(handle, 1, &buffer);
}

// For operations of other QP types and operations that are not supported: the batch fails.
template <typename... Arguments>
void refuse(ibv_qp_ex* handle, Arguments...) {
  fail(qp_of(handle).batch, EOPNOTSUPP);
}

// Sets the QP's function pointers for the ibv_wr_* calls.
void set_work_request_calls(Qp& qp, std::uint64_t send_ops) {
  qp.send_ops = send_ops;
  ibv_qp_ex& calls = qp.extended();
  calls.wr_start = start;
  calls.wr_complete = complete;
  calls.wr_abort = abort;
  calls.wr_rdma_write = rdma_write;
  calls.wr_rdma_write_imm = rdma_write_imm;
  calls.wr_rdma_read = rdma_read;
  calls.wr_send = send;
  calls.wr_send_imm = send_imm;
  calls.wr_atomic_cmp_swp = atomic_cmp_swp;
  calls.wr_atomic_fetch_add = atomic_fetch_add;
  calls.wr_set_sge = set_sge;
  calls.wr_set_sge_list = set_sge_list;
  calls.wr_set_inline_data = set_inline_data;
  calls.wr_set_inline_data_list = set_inline_data_list;
  calls.wr_bind_mw = refuse;
  calls.wr_local_inv = refuse;
  calls.wr_send_inv = refuse;
  calls.wr_send_tso = refuse;
  calls.wr_set_ud_addr = set_ud_addr;
  calls.wr_set_xrc_srqn = refuse;
  calls.wr_atomic_write = refuse;
}

}  // namespace

Result<Qp*> create_extended_qp(Context& context, ibv_qp_init_attr_ex& wanted) {
  constexpr std::uint32_t kSupported =
      IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS | IBV_QP_INIT_ATTR_CREATE_FLAGS;
  const auto has = [&](std::uint32_t bit) { return (wanted.comp_mask & bit) != 0; };
  if ((wanted.comp_mask & ~kSupported) != 0) return system_error("create_qp_ex", EOPNOTSUPP);
  if (!has(IBV_QP_INIT_ATTR_PD) || wanted.pd->context != &context.verbs_context::context) {
    return system_error("create_qp_ex", EINVAL);
  }
  if (has(IBV_QP_INIT_ATTR_CREATE_FLAGS) && wanted.create_flags != 0) return system_error("create_qp_ex", EOPNOTSUPP);
  const std::uint64_t send_ops = has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) ? wanted.send_ops_flags : 0;
  if ((send_ops & ~supported_send_ops(wanted.qp_type)) != 0) return system_error("create_qp_ex", EOPNOTSUPP);
  ibv_qp_init_attr plain{wanted.qp_context, wanted.send_cq, wanted.recv_cq,   wanted.srq,
                         wanted.cap,        wanted.qp_type, wanted.sq_sig_all};
  Result<Qp*> qp = create_qp(context, wanted.pd, plain);
  if (!qp) return qp;
  wanted.cap = plain.cap;
  if (has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS)) set_work_request_calls(**qp, send_ops);
  return qp;
}

}  // namespace verbatim::softverbs
