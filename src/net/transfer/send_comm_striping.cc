// Groups that are not posted with one doorbell on one QP. A single message is striped over all QPs of the connection at
// once where that is possible; a pending post also stripes groups, cuts messages that are too long for one work
// request, and waits until the send queues have free entries.
#include <arpa/inet.h>

#include <algorithm>
#include <span>

#include "net/transfer/send_comm.h"
#include "verbs/qp.h"

namespace verbatim {
namespace {

SentPart sent_part(std::uint32_t index, std::uint32_t part, std::uint32_t parts, const Stripe& stripe) {
  return {static_cast<std::uint16_t>(index), static_cast<std::uint8_t>(part), static_cast<std::uint8_t>(parts - 1),
          static_cast<std::uint16_t>(stripe.begin), static_cast<std::uint16_t>(stripe.end - 1)};
}

}  // namespace

// Makes the head group the pending post. `stripes`: of a group that has been divided already.
void SendComm::start_pending_post(std::uint32_t first_member, std::uint32_t group_size,
                                  std::span<const Stripe> stripes) {
  const std::uint32_t index = wire::ring_index(first_member);
  const bool full = group_.bytes == group_.buffer_bytes;
  pending_post_ = {};
  pending_post_.active = true;
  pending_post_.optional_completion = group_.optional_completion;
  // For one member the arrival word has the size.
  pending_post_.writes_size_record = !full && !pending_post_.optional_completion && !(atomic_ && group_size == 1);
  if (pending_post_.writes_size_record) store_sizes(index, group_size);
  pending_post_.first_member = first_member;
  pending_post_.group_size = group_size;
  // Not from work_: what was posted again since the first member may have used it.
  for (std::uint32_t i = 0; i < group_size; ++i) {
    const SendRequest& request = requests_[index + i];
    pending_post_.sources[i] = {reinterpret_cast<std::uint64_t>(request.data), request.memory};
  }
  if (group_.bytes >= stripe_threshold_) {
    if (stripes.empty()) stripes = striping_.divide(group_.bytes);
    pending_post_.stripes = stripes.data();
    pending_post_.parts = static_cast<std::uint32_t>(stripes.size());
    pending_post_.end_part = pending_post_.parts;
  } else {
    pending_post_.whole = {turn_->queue->index, kWholeMessage};
    pending_post_.stripes = &pending_post_.whole;
    turn_ = turn_->next;
  }
  requests_[index].group_size = static_cast<std::uint8_t>(group_size);
  requests_[index].parts_left = static_cast<std::uint8_t>(pending_post_.parts);
  if (pending_post_.optional_completion) requests_[index].optional_member = first_member;
  continue_pending_post();
}

// Whether the head group is a single message of which every QP can accept its stripe now, in one work request.
bool SendComm::can_post_stripes() const {
  constexpr std::uint32_t kMaxWorkPerStripe = 2;  // the stripe, and a completion signal of its own
  return group_.group_size == 1 && group_.bytes >= stripe_threshold_ && group_.bytes <= max_piece_bytes_ &&
         !group_.optional_completion && !atomic_ &&
         std::all_of(queues_.begin(), queues_.end(),
                     [](const SendQueue& queue) { return queue.free >= kMaxWorkPerStripe; });
}

// Each stripe carries its immediate, or has a signal of its own (see append_completion).
void SendComm::post_stripes(std::uint32_t member) {
  const std::uint32_t index = wire::ring_index(member);
  const bool full = group_.bytes == group_.buffer_bytes;
  const std::uint64_t data = work_[0].segment.addr;
  const MemoryKeys& memory = *work_[0].memory;
  const std::uint64_t remote_address = work_[0].request.wr.rdma.remote_addr;
  const std::span<const Stripe> stripes = striping_.divide(group_.bytes);
  const auto parts = static_cast<std::uint32_t>(stripes.size());
  const bool separates_all = separates_completion(group_.bytes);
  wire::Immediate immediate{index, wire::SizeSource::kPosted, parts, wire::ring_pass(member)};
  std::uint32_t tail = 0;
  if (!full) [[unlikely]] {
    if (parts == 1 && !separates_all) {
      immediate.sizes = wire::SizeSource::kByteCount;  // of the only WRITE
    } else {
      tail = set_units(immediate, group_.bytes, group_.buffer_bytes);
    }
    // The first stripe of a message that is much shorter than its buffer may be shorter than a unit of that.
    if (tail > stripe_end(group_.bytes, stripes.front()) || separates_completion(tail))
      return start_pending_post(member, 1, stripes);
  }
  std::uint32_t immediate_bits = wire::encode_immediate(immediate);
  immediate.sizes = wire::SizeSource::kOtherPart;
  const std::uint32_t other_bits = wire::encode_immediate(immediate);
  requests_[index].group_size = 1;
  requests_[index].parts_left = static_cast<std::uint8_t>(parts);
  const bool is_logged = !logs_.empty();
  std::uint64_t done = 0;
  std::uint32_t part = 0;
  for (const Stripe& stripe : stripes) {
    const std::uint32_t used = stripe.queue;
    SendQueue& queue = queues_[used];
    const auto bytes = static_cast<std::uint32_t>(stripe_end(group_.bytes, stripe) - done);
    const bool separate = (part == 0 && !full && parts > 1) || separates_all;
    const std::uint32_t count = separate ? 2 : 1;
    ibv_send_wr& work = separate ? separate_data_ : single_;
    single_segment_ = {data + done, bytes, memory.lkey[queue.device]};
    const std::uint64_t wr_id = encode_send_work(index, used, count, true) | std::uint64_t{striping_.add(used, bytes)}
                                                                                 << kSendLoadShift;
    work.wr.rdma.remote_addr = remote_address + done;
    work.wr.rdma.rkey = remote_key(index, queue.remote_device);
    if (separate) {
      // If the data fails, only its signal frees the entries of both.
      work.wr_id = encode_send_work(index, used, 0, false);
      link_signal(queue, wr_id, immediate_bits, tail);
    } else {
      work.num_sge = bytes != 0 ? 1 : 0;
      work.wr_id = wr_id;
      work.imm_data = htonl(immediate_bits);
    }
    queue.free -= count;
    if (is_logged) [[unlikely]]
      logs_[used].add(sent_part(index, part, parts, stripe), true);
    const int returned = post_send(queue.qp, work);
    if (returned != 0) return fail_post("ibv_post_send", returned, used);
    immediate_bits = other_bits;
    tail = 0;
    done += bytes;
    ++part;
  }
  if (profiler_events_ != nullptr) [[unlikely]] {
    for (const Stripe& stripe : stripes) {
      profiler_events_->note({index, stripe, encode_send_work(index, stripe.queue, 0, true)});
    }
  }
}

// Formats the next WRITE of the current part; false when all of its data has been formatted.
bool SendComm::next_piece(const SendQueue& queue, std::uint32_t at) {
  const std::uint32_t first = wire::ring_index(pending_post_.first_member);
  for (; pending_post_.member < pending_post_.group_size; ++pending_post_.member, pending_post_.stripe_done = 0) {
    const std::uint32_t index = first + pending_post_.member;
    const std::uint64_t member_bytes = requests_[index].bytes;
    const Source& source = pending_post_.sources[pending_post_.member];
    const std::uint64_t begin = stripe_begin(member_bytes, current_stripe()) + pending_post_.stripe_done;
    const std::uint64_t end = stripe_end(member_bytes, current_stripe());
    if (begin >= end || (pending_post_.skipped_members >> pending_post_.member & 1) != 0) continue;
    const auto bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(end - begin, max_piece_bytes_));
    work_[at].segment = {source.data + begin, bytes, source.memory->lkey[queue.device]};
    work_[at].request.wr.rdma.remote_addr = entry(index).address + begin;
    work_[at].request.wr.rdma.rkey = remote_key(index, queue.remote_device);
    pending_post_.stripe_done += bytes;
    pending_post_.part_bytes += bytes;
    return true;
  }
  return false;
}

// Formats the next of the work requests that close the current part; whether it is the last.
bool SendComm::next_completion_work(const SendQueue& queue, std::uint32_t at) {
  const std::uint32_t index = wire::ring_index(pending_post_.first_member);
  const bool writes_size_record = pending_post_.writes_size_record && pending_post_.part == 0;
  if (pending_post_.optional_completion) {
    // After the last part the CTS entries are used: the signalled WRITE reports that to the receiver at no extra cost.
    if (pending_post_.part + 1 == pending_post_.parts) {
      format_consumed_write(at, queue);
    } else {
      format_empty_write(at, queue);
    }
    return true;
  }
  if (writes_size_record && !pending_post_.record_written) {
    format_size_record(at, queue, index, pending_post_.group_size);
    pending_post_.record_written = true;
    if (atomic_) return false;
  } else if (!atomic_) {
    format_empty_write(at, queue);
  }
  if (atomic_) {
    format_arrival_atomic(at, queue, index,
                          wire::encode_arrival(pending_post_.part_bytes, pending_post_.part, pending_post_.parts));
    return true;
  }
  const wire::SizeSource sizes = pending_post_.part != 0            ? wire::SizeSource::kOtherPart
                                 : pending_post_.writes_size_record ? wire::SizeSource::kRecord
                                                                    : wire::SizeSource::kPosted;
  set_immediate(at, {index, sizes, pending_post_.parts, wire::ring_pass(pending_post_.first_member)});
  return true;
}

void SendComm::continue_pending_post() {
  const std::uint32_t index = wire::ring_index(pending_post_.first_member);
  while (pending_post_.part < pending_post_.end_part && !fencing_) {
    if (!pending_post_.part_begun) {
      pending_post_.queue = current_stripe().queue;
      if (!works(pending_post_.queue)) {
        pending_post_.queue = turn_->queue->index;
        turn_ = turn_->next;
      }
      pending_post_.part_begun = true;
    }
    const std::uint32_t queue_index = pending_post_.queue;
    SendQueue& queue = queues_[queue_index];
    if (!logs_.empty() && logs_[queue_index].full()) break;
    const std::uint64_t bytes_before = pending_post_.part_bytes;
    const std::uint32_t free = std::min<std::uint32_t>(kBatch, queue.free);
    std::uint32_t count = 0;
    bool part_done = false;
    while (count < free && !part_done) {
      work_[count].request.wr_id = encode_send_work(index, queue_index, 0, false);  // no completion unless it fails
      if (!next_piece(queue, count)) part_done = next_completion_work(queue, count);
      ++count;
    }
    if (count == 0) break;  // progress() continues when completions have freed entries
    std::uint64_t wr_id = encode_send_work(index, queue_index, count, part_done);
    wr_id |= std::uint64_t{striping_.add(queue_index, pending_post_.part_bytes - bytes_before)} << kSendLoadShift;
    if (part_done) {
      log_part(queue_index, sent_part(index, pending_post_.part, pending_post_.parts, current_stripe()),
               !pending_post_.optional_completion);
    }
    post(queue, count, wr_id);
    if (error() != nullptr) break;
    if (part_done) {
      if (profiler_events_ != nullptr) {
        profiler_events_->note({index, {queue_index, current_stripe().end, current_stripe().begin}, wr_id});
      }
      ++pending_post_.part;
      pending_post_.part_begun = false;
      pending_post_.member = 0;
      pending_post_.stripe_done = 0;
      pending_post_.part_bytes = 0;
    }
  }
  pending_post_.active = pending_post_.part < pending_post_.end_part && error() == nullptr;
  if (pending_post_.active) {
    failure_state_.set_flag(kPostPending);
  } else {
    failure_state_.clear_flag(kPostPending);
  }
}

}  // namespace verbatim
