#include "net/transfer/flush_queue.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/log.h"
#include "net/transfer/endpoint_block.h"
#include "verbs/errors.h"
#include "verbs/qp.h"

namespace verbatim {

Result<UniqueQp> FlushQueue::make_flush_qp(const Port& port, ibv_cq* cq, std::uint32_t psn, const Config& config) {
  Result<RcQp> created = make_qp(port, cq, {.send_wr = kSlots, .recv_wr = 1}, config);
  if (!created) return created.error();
  ibv_qp* qp = created->qp.get();
  const Result<ConnectedQp> connected = connect_qp(qp, port, to_oneself(port, qp, psn, config), config);
  if (!connected) return connected.error();
  return std::move(created->qp);
}

Status FlushQueue::prepare(Comm& comm, const Endpoint& endpoint, const Config& config, const ControlMemory& control,
                           const std::byte* target, std::size_t& port) {
  auto state = std::make_unique<State>();
  state->target = reinterpret_cast<std::uint64_t>(target);
  Config any_gid = config;  // a port reaches itself from each of its GIDs, also while that of the lanes is away
  any_gid.gid = {};
  for (std::size_t i = 0; i < endpoint.ports().size(); ++i) {
    port = i;
    state->target_lkeys.push_back(control.lkey(i));
    state->qps.emplace_back();
    if (is_left_out(i)) continue;
    const Result<Port> now = refresh_port(*endpoint.ports()[i], any_gid, LogLevel::kInfo);
    if (!now) return now.error();
    Result<UniqueQp> qp = make_flush_qp(*now, endpoint.cqs()[i].get(), first_psn(endpoint.remote().attempt, 0), config);
    if (!qp) return qp.error();
    state->qps.back() = std::move(*qp);
  }
  state->slots.resize(kSlots);
  for (Slot& slot : state->slots) {
    slot.comm = &comm;
    slot.kind = RequestKind::kFlush;
  }
  state->free_slots.resize(kSlots);
  std::iota(state->free_slots.rbegin(), state->free_slots.rend(), 0U);
  state_ = std::move(state);
  active_.store(state_.get(), std::memory_order_release);
  return {};
}

bool FlushQueue::uses(const ibv_qp& qp) const {
  const State* state = active_.load(std::memory_order_acquire);
  return state != nullptr &&
         std::any_of(state->qps.begin(), state->qps.end(), [&](const UniqueQp& own) { return own.get() == &qp; });
}

Request* FlushQueue::post(const void* data, const MemoryKeys& memory, bool hold, int& returned, std::size_t& port) {
  State& state = *active_.load(std::memory_order_acquire);
  returned = 0;
  if (state.free_slots.empty()) return nullptr;
  const std::uint32_t index = state.free_slots.back();
  Slot& slot = state.slots[index];
  slot.state = RequestState::kPending;
  slot.reads_left = 0;
  ++pending_;
  for (std::size_t i = 0; i < state.qps.size(); ++i) {
    if (is_left_out(i)) continue;
    ibv_sge segment = {state.target, 1, state.target_lkeys[i]};
    ibv_send_wr work = {};
    work.wr_id = kFlushWorkBit | i << 32 | index;
    work.sg_list = &segment;
    work.num_sge = 1;
    work.opcode = IBV_WR_RDMA_READ;
    work.send_flags = IBV_SEND_SIGNALED;
    work.wr.rdma.remote_addr = reinterpret_cast<std::uint64_t>(data);
    work.wr.rdma.rkey = memory.rkey[i];
    returned = post_send(state.qps[i].get(), work);
    if (returned != 0) {
      port = i;
      if (slot.reads_left == 0) pending_ -= 1;
      return nullptr;
    }
    ++slot.reads_left;
  }
  if (hold || slot.reads_left == 0) {  // as if a READ had failed
    ++slot.reads_left;
    ++slot.held;
  }
  state.free_slots.pop_back();
  ++in_use_;
  return &slot;
}

void FlushQueue::complete(std::uint64_t wr_id) {
  Slot& slot = active_.load(std::memory_order_acquire)->slots[wr_id & 0xffff];
  if (--slot.reads_left != 0) return;
  slot.state = RequestState::kDone;
  pending_ -= 1;
}

void FlushQueue::leave_out(std::size_t port, const Device& device) {
  if (is_left_out(port)) return;
  left_out_ = left_out_ | 1U << port;
  State* const state = active_.load(std::memory_order_acquire);
  if (state == nullptr) return;
  static_cast<void>(to_error(state->qps[port].get(), device));  // without it they end when their retries do
}

bool FlushQueue::restore(std::size_t port, UniqueQp& qp) {
  State* const state = active_.load(std::memory_order_acquire);
  if (state != nullptr) {
    if (qp == nullptr) return false;
    std::swap(state->qps[port], qp);
  }
  left_out_ = left_out_ & ~(1U << port);
  return true;
}

void FlushQueue::hold(std::uint64_t wr_id) {
  ++active_.load(std::memory_order_acquire)->slots[wr_id & 0xffff].held;
}

void FlushQueue::complete_held() {
  State* const state = active_.load(std::memory_order_acquire);
  if (state == nullptr) return;
  for (std::size_t i = 0; i < state->slots.size(); ++i) {
    for (; state->slots[i].held != 0; --state->slots[i].held) complete(i);
  }
}

bool FlushQueue::all_done() const {
  const State* state = active_.load(std::memory_order_acquire);
  return state == nullptr || std::none_of(state->slots.begin(), state->slots.end(),
                                          [](const Slot& slot) { return slot.state == RequestState::kPending; });
}

void FlushQueue::retire(Request& request) {
  State& state = *active_.load(std::memory_order_acquire);
  request.state = RequestState::kFree;
  state.free_slots.push_back(static_cast<std::uint32_t>(static_cast<Slot*>(&request) - state.slots.data()));
  in_use_.publish(in_use_ - 1);
}

}  // namespace verbatim
