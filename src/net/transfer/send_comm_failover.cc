// What a sender posts again when a lane fails (failover.h): the parts of its messages that have not arrived.
//
// Identical bytes may be written twice into a receive that is not complete. A group with optional completion has no
// immediate, so nobody knows whether its data has arrived, and the receiver may be using the bytes already. It is
// written again unless the receiver has announced an overlapping buffer later: an application announces a buffer again
// only when it has used what arrived there before. No new message is posted until all of this is acknowledged, so no
// later message is overtaken.
#include <algorithm>

#include "net/transfer/send_comm.h"
#include "verbs/qp.h"

namespace verbatim {

void SendComm::set_turns() {
  if (failover_ != nullptr && failover_->working() == 0) return;  // nothing is posted
  const std::vector<std::uint8_t> turns = qp_turns(working_shares());
  turns_.resize(turns.size());
  for (std::size_t i = 0; i < turns.size(); ++i) {
    turns_[i] = {&queues_[turns[i]], &turns_[(i + 1) % turns.size()]};
  }
  turn_ = turns_.data();
  if (group_.open_members != 0) group_.empty = true;  // its WRITEs were formatted for the QP whose turn it was
}

void SendComm::stop_lane(std::size_t lane) {
  if (failover_->lane(lane).used) fencing_ = true;
  set_turns();
}

bool SendComm::queue_drained(std::size_t queue) const {
  return queues_[queue].free == endpoint_.qps()[queue].send_wr;
}

bool SendComm::lane_drained(std::size_t lane) const {
  if (!drains_all(lane)) {
    return std::ranges::all_of(failover_->lane(lane).qps, [&](std::size_t qp) { return queue_drained(qp); });
  }
  for (std::size_t queue = 0; queue < queues_.size(); ++queue) {
    if (failover_->lane(failover_->lane_of(queue)).used && !queue_drained(queue)) return false;
  }
  return true;
}

wire::LaneReport SendComm::lane_report(std::size_t lane) {
  return {.lane = static_cast<std::uint32_t>(lane), .members = head(), .all_drained = drains_all(lane) ? 1U : 0U};
}

// Whether the CTS entries of all receives before this one have arrived.
bool SendComm::cts_arrived(std::uint32_t members) const {
  if (static_cast<std::int32_t>(head() - members) >= 0) return true;
  // The last entry of a group may lie behind the regular ones.
  const auto has_arrived = [&](std::uint32_t place) {
    const auto* word = reinterpret_cast<const std::uint32_t*>(control_.data() + place * entry_bytes_ + ready_offset_);
    return __atomic_load_n(word, __ATOMIC_ACQUIRE) - members < wire::kMaxInFlight;
  };
  const std::uint32_t place = wire::ring_index(members - 1);
  return has_arrived(place) ||
         (place + wire::kMaxInFlight < wire::kRingEntries && has_arrived(place + wire::kMaxInFlight));
}

void SendComm::recover_lane(std::size_t lane, const std::optional<wire::LaneReport>& peer) {
  if (peer && (!awaited_members_ || static_cast<std::int32_t>(peer->members - *awaited_members_) > 0)) {
    awaited_members_ = peer->members;
  }
  const std::span<const std::uint8_t> qps = failover_->lane(lane).qps;
  if (replays_messages()) {
    if (failover_->lane(lane).used) recover_messages(peer);
    for (std::size_t i = 0; !logs_.empty() && i < qps.size(); ++i) logs_[qps[i]].clear();
    return;
  }
  const auto known = static_cast<std::ptrdiff_t>(missing_.size());
  for (std::size_t i = 0; i < qps.size(); ++i) {
    std::optional<std::uint32_t> count;
    if (peer && peer->all_arrived == 0) count = i < peer->qps ? peer->arrived[i] : 0;
    const auto arrived = [&](const SentPart& part) { part_finished(requests_[part.index]); };
    logs_[qps[i]].divide(count, arrived, [&](const SentPart& part, bool immediate) {
      if (!peer) return arrived(part);
      missing_.push_back({part, immediate});
    });
  }
  std::reverse(missing_.begin() + known, missing_.end());
  if (pending_post_.active && pending_post_.part_begun && !works(pending_post_.queue)) {
    // No signal of this part was posted: it begins anew on another QP.
    pending_post_.part_begun = pending_post_.record_written = false;
    pending_post_.member = 0;
    pending_post_.stripe_done = pending_post_.part_bytes = 0;
  }
}

// The oldest member whose request may be in use.
std::uint32_t SendComm::open_window_begin() const {
  // The requests of the group that is not complete are in the place of the oldest ones.
  return head() - wire::kMaxInFlight + (group_.open_members != 0 ? group_.group_size : 0);
}

// Whether the receiver has written another CTS entry into the place of this member's.
bool SendComm::is_written_again(std::uint32_t member) const {
  return !ready(control_.data() + wire::ring_index(member) * entry_bytes_, member);
}

// All members before it have arrived.
std::uint32_t SendComm::first_that_may_be_missing(const std::optional<wire::LaneReport>& peer) const {
  if (!peer) return head();
  if (peer->all_arrived == 0 || queues_.size() != 1) return peer->next_arrival;
  // One QP delivers in order, also what has no completion signal.
  const std::uint32_t begin = open_window_begin();
  std::uint32_t first = begin;
  for (std::uint32_t member = begin; member != head();) {
    const SendRequest& request = requests_[wire::ring_index(member)];
    const bool optional = request.optional_member == member;
    member += optional ? request.group_size : 1U;
    if (request.state == RequestState::kPending && !optional) first = member;
  }
  return first;
}

// The requests of the member with this ring index.
void SendComm::finish_members(std::uint32_t index) {
  // A group that goes on behind the end of the ring has its last requests there.
  const std::uint32_t last = index == wire::kRingMask ? wire::kRingEntries - 1 : index;
  for (std::uint32_t i = index; i <= last; ++i) {
    if (requests_[i].state != RequestState::kPending) continue;
    requests_[i].state = RequestState::kDone;
    requests_[i].parts_left = 0;
  }
}

// Nothing is outstanding on any lane: what is not acknowledged and has not arrived is missing, as a whole. What was
// posted again when a lane failed before is computed anew.
void SendComm::recover_messages(const std::optional<wire::LaneReport>& peer) {
  pending_post_ = {};
  failure_state_.clear_flag(kPostPending);
  missing_.clear();
  const bool in_order = queues_.size() == 1;
  const std::uint32_t first_missing = first_that_may_be_missing(peer);
  const auto has_arrived = [&](std::uint32_t member) {
    const std::uint32_t index = wire::ring_index(member);
    if (!peer) return true;
    // The receiver knows nothing of them, except by the order.
    if (!in_order && requests_[index].optional_member == member) return false;
    if (static_cast<std::int32_t>(member - first_missing) < 0 || is_written_again(member)) return true;
    if (peer->all_arrived != 0) return !in_order;
    const std::uint32_t word = index / wire::kArrivedBits;
    return word < peer->qps && (peer->arrived[word] >> index % wire::kArrivedBits & 1) != 0;
  };
  for (std::uint32_t member = open_window_begin(); member != head();) {
    const std::uint32_t index = wire::ring_index(member);
    SendRequest& request = requests_[index];
    const bool arrived = has_arrived(member);
    if (arrived) finish_members(index);
    if (arrived || request.state != RequestState::kPending) {
      ++member;
      continue;
    }
    const bool optional = request.optional_member == member;
    request.group_size = sent_group_size(request);
    request.parts_left = 1;
    missing_.push_back({{.index = static_cast<std::uint16_t>(index), .last = kWholeMessage - 1}, !optional});
    member += request.group_size;
  }
  std::reverse(missing_.begin(), missing_.end());
}

Comm::LaneProgress SendComm::lane_progress(std::size_t lane) const {
  LaneProgress progress;
  for (const std::size_t qp : failover_->lane(lane).qps) {
    progress.completed += logs_[qp].completed();
    progress.posted += logs_[qp].posted();
  }
  return progress;
}

void SendComm::adopt_lane(std::size_t lane) {
  std::uint8_t pings = 0;
  for (const std::size_t index : failover_->lane(lane).qps) {
    const EndpointQp& end = endpoint_.qps()[index];
    SendQueue& queue = queues_[index];
    queue.qp = end.qp.get();
    queue.free = end.send_wr - 1;
    queue.inline_bytes = end.inline_bytes;
    if (!logs_.empty()) logs_[index].restart();
    const std::uint64_t wr_id = encode_send_work(kSendPing, static_cast<std::uint32_t>(index), 1, false);
    const int returned = post_empty_write(queue.qp, wr_id, record_address_, queue.record_rkey);
    if (returned != 0) return fail_post("ibv_post_send", returned, index);
    ++pings;
  }
  pings_posted(lane, pings);
}

void SendComm::use_lane(std::size_t) {
  set_turns();
  shares_changed_ = true;
}

// Not while a post uses the stripes of before.
void SendComm::update_shares() noexcept try {
  if (pending_post_.active) return;
  shares_changed_ = false;
  striping_.set_shares(working_shares());
} catch (...) {
  fail_without_memory();
}

bool SendComm::recovered() {
  if (awaited_members_ && !cts_arrived(*awaited_members_)) return false;
  fencing_ = false;
  resume_pending_post();
  if (pending_post_.active || !missing_.empty()) return false;
  for (std::size_t queue = 0; queue < queues_.size(); ++queue) {
    if (works(queue) && !queue_drained(queue)) return false;
  }
  return true;
}

void SendComm::finish_recovery() {
  awaited_members_.reset();
  shares_changed_ = true;
}

void SendComm::post_missing_parts() {
  while (!missing_.empty() && !pending_post_.active && !fencing_ && error() == nullptr) {
    const MissingPart missing = missing_.back();
    missing_.pop_back();
    post_again(missing);
  }
}

// The members (bits) of a sent group whose buffers the receiver has announced again since. nullopt: their CTS entries
// do not exist any more.
std::optional<std::uint32_t> SendComm::overwritten_members(std::uint32_t first_member, std::uint32_t group_size) const {
  const std::uint32_t first = wire::ring_index(first_member);
  std::uint32_t overwritten = 0;
  for (std::uint32_t i = 0; i < group_size; ++i) {
    const wire::CtsEntry& own = entry(first + i);
    if (!ready(control_.data() + (first + i) * entry_bytes_, first_member + i)) return std::nullopt;
    for (std::uint32_t place = 0; place < wire::kRingEntries; ++place) {
      const wire::CtsEntry& other = entry(place);
      const auto* word = reinterpret_cast<const std::uint32_t*>(control_.data() + place * entry_bytes_ + ready_offset_);
      const std::uint32_t later = __atomic_load_n(word, __ATOMIC_ACQUIRE) - 1 - first_member;
      const bool is_later = later >= group_size && later <= wire::kMaxInFlight;
      if (is_later && other.address < own.address + own.size.bytes() &&
          own.address < other.address + other.size.bytes()) {
        overwritten |= 1U << i;
      }
    }
  }
  return overwritten;
}

void SendComm::post_again(const MissingPart& missing) {
  const std::uint32_t index = missing.part.index;
  const std::uint32_t first_member = member_at(index);
  const std::uint32_t group_size = requests_[index].group_size;
  PendingPost again;
  again.active = true;
  again.optional_completion = !missing.immediate;
  again.first_member = first_member;
  again.group_size = group_size;
  again.parts = missing.part.last_part + 1U;
  again.part = again.first_part = missing.part.part;
  again.end_part = again.part + 1;
  again.whole = {turn_->queue->index, missing.part.last + 1U, missing.part.begin};
  turn_ = turn_->next;
  std::uint64_t bytes = 0;
  std::uint64_t buffer_bytes = 0;
  for (std::uint32_t i = 0; i < group_size; ++i) {
    const SendRequest& request = requests_[index + i];
    again.sources[i] = {reinterpret_cast<std::uint64_t>(request.data), request.memory};
    bytes += request.bytes;
    buffer_bytes += entry(index + i).size.bytes();
  }
  if (missing.immediate) {
    again.writes_size_record = bytes != buffer_bytes && !(atomic_ && group_size == 1);
    if (again.writes_size_record) store_sizes(index, group_size);
  } else {
    const std::optional<std::uint32_t> overwritten = overwritten_members(first_member, group_size);
    // With one QP, an entry that was written again shows that the message has arrived.
    if (!overwritten && queues_.size() == 1) return part_finished(requests_[index]);
    if (!overwritten) {
      return fail(ErrorKind::kRemote, "lane", [&] {
        return Failure{"a message with optional completion was lost with a lane and cannot be sent again",
                       {"the receiver has announced so many receives since that its address is not known any more",
                        "look at the lines of the lane above"},
                       facts(0)};
      });
    }
    again.skipped_members = *overwritten;
  }
  pending_post_ = again;
  pending_post_.stripes = &pending_post_.whole;
  continue_pending_post();
}

}  // namespace verbatim
