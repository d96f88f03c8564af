// What a sender posts again when a lane fails (failover.h): the parts of its messages that have not arrived.
//
// Identical bytes may be written twice into a receive that is not complete. A group with optional completion has no
// immediate, so nobody knows whether its data has arrived, and the receiver may be using the bytes already. It is
// written again unless the receiver has announced an overlapping buffer later: an application announces a buffer again
// only when it has used what arrived there before. No new message is posted until all of this is acknowledged, so no
// later message is overtaken.
#include <algorithm>

#include "net/transfer/send_comm.h"

namespace verbatim {

void SendComm::set_turns() {
  const std::vector<std::uint8_t> turns = qp_turns(working_shares());
  turns_.resize(turns.size());
  for (std::size_t i = 0; i < turns.size(); ++i) {
    turns_[i] = {&queues_[turns[i]], &turns_[(i + 1) % turns.size()]};
  }
  turn_ = turns_.data();
}

void SendComm::stop_lane(std::size_t) {
  fencing_ = true;
  set_turns();
}

bool SendComm::queue_drained(std::size_t queue) const {
  return queues_[queue].free == endpoint_.qps()[queue].send_wr;
}

bool SendComm::lane_drained(std::size_t lane) const {
  return std::ranges::all_of(failover_->qps(lane), [&](std::size_t qp) { return queue_drained(qp); });
}

// Whether all CTS entries that the receiver has written have arrived.
bool SendComm::can_recover(const wire::LaneReport& peer) const {
  if (static_cast<std::int32_t>(head() - peer.members) >= 0) return true;
  // The last entry of a group may lie behind the regular ones.
  const auto has_arrived = [&](std::uint32_t place) {
    const auto* word = reinterpret_cast<const std::uint32_t*>(control_.data() + place * entry_bytes_ + ready_offset_);
    return __atomic_load_n(word, __ATOMIC_ACQUIRE) - peer.members < wire::kMaxInFlight;
  };
  const std::uint32_t place = wire::ring_index(peer.members - 1);
  return has_arrived(place) ||
         (place + wire::kMaxInFlight < wire::kRingEntries && has_arrived(place + wire::kMaxInFlight));
}

void SendComm::recover_lane(std::size_t lane, const std::optional<wire::LaneReport>& peer) {
  const std::span<const std::uint8_t> qps = failover_->qps(lane);
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
  // The WRITEs of a group that is not complete were formatted for the QP whose turn it was.
  if (group_.open_members != 0) group_.empty = true;
}

bool SendComm::recovered() {
  fencing_ = false;
  resume_pending_post();
  if (pending_post_.active || !missing_.empty()) return false;
  for (std::size_t queue = 0; queue < queues_.size(); ++queue) {
    if (!queue_drained(queue)) return false;
  }
  return true;
}

void SendComm::finish_recovery() {
  striping_.set_shares(working_shares());  // nothing is outstanding
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
    const wire::CtsHead& own = entry(first + i);
    if (!ready(control_.data() + (first + i) * entry_bytes_, first_member + i)) return std::nullopt;
    for (std::uint32_t place = 0; place < wire::kRingEntries; ++place) {
      const wire::CtsHead& other = entry(place);
      const auto* word = reinterpret_cast<const std::uint32_t*>(control_.data() + place * entry_bytes_ + ready_offset_);
      const std::uint32_t later = __atomic_load_n(word, __ATOMIC_ACQUIRE) - 1 - first_member;
      const bool is_later = later >= group_size && later <= wire::kMaxInFlight;
      if (is_later && other.address < own.address + own.size && own.address < other.address + other.size) {
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
    buffer_bytes += entry(index + i).size;
  }
  if (missing.immediate) {
    again.writes_size_record = bytes != buffer_bytes;
    if (again.writes_size_record) store_sizes(index, group_size);
  } else {
    const std::optional<std::uint32_t> overwritten = overwritten_members(first_member, group_size);
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
