#include "rma/stall_watch.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/clock.h"
#include "base/json.h"
#include "base/log.h"
#include "net/diagnose/failure.h"
#include "rma/coll_comm.h"
#include "verbs/device.h"

namespace verbatim::rma {
namespace {

// Both ends leave a lane within milliseconds, if there is another one. A NIC with one port gives up after about as long
// (VERBATIM_TIMEOUT).
constexpr std::uint64_t kAnswerLimitNs = 34 * kNanosecondsPerSecond;

struct Outstanding {
  std::uint64_t completed = 0;  // read first: `number` is never too small
  std::uint64_t number = 0;

  explicit Outstanding(const QueueCounts& counts)
      : completed(counts.all_completed()), number(counts.all_begun() - completed) {}
};

std::uint64_t count_of(const QueueCounts::ByKind& counts, OperationKind kind) {
  return counts[static_cast<std::size_t>(kind)];
}

RmaCounts to_counts(const QueueCounts::ByKind& counts) {
  const std::uint64_t with_signal = count_of(counts, OperationKind::kPutSignal);
  return {.puts = count_of(counts, OperationKind::kPut) + with_signal,
          .signals = count_of(counts, OperationKind::kSignal) + with_signal,
          .gets = count_of(counts, OperationKind::kGet),
          .flushes = count_of(counts, OperationKind::kFlush)};
}

RmaCounts completed_by(const QueueCounts& counts) {
  RmaCounts completed = to_counts(counts.completed);
  completed.put_bytes = count_of(counts.bytes, OperationKind::kPut) + count_of(counts.bytes, OperationKind::kPutSignal);
  completed.get_bytes = count_of(counts.bytes, OperationKind::kGet);
  return completed;
}

// "3 puts, 1 flush".
std::string describe_outstanding(const QueueCounts& counts) {
  constexpr std::array<std::pair<const char*, const char*>, kOperationKinds> kNames{
      {{"put", "puts"},
       {"put with a signal", "puts with a signal"},
       {"signal", "signals"},
       {"get", "gets"},
       {"flush", "flushes"}}};
  std::string text;
  for (std::size_t kind = 0; kind < kOperationKinds; ++kind) {
    const std::uint64_t completed = counts.completed[kind];
    const std::uint64_t left = counts.begun[kind] - completed;
    if (left == 0) continue;
    text.append(text.empty() ? "" : ", ").append(std::to_string(left)).append(" ");
    text.append(left == 1 ? kNames[kind].first : kNames[kind].second);
  }
  return text;
}

std::string numbers_of_contexts(const ContextSet& set, std::span<const std::size_t> queues) {
  std::string text;
  for (const std::size_t queue : queues) {
    text += (text.empty() ? "" : ", ") + std::to_string(set.queues()[queue].context);
  }
  return text;
}

}  // namespace

StallWatch::StallWatch(const ContextSet& set, Failures& failures, RmaSets& monitored, const Config& config)
    : set_(set),
      failures_(failures),
      monitored_(monitored),
      lane_timeout_ns_(set.failover() != nullptr ? config.lane_timeout_ms * kNanosecondsPerMillisecond : 0),
      no_lane_limit_ns_(config.reconnect_s * kNanosecondsPerSecond),
      remembers_(!config.stats_file.empty()),
      watched_(set.queues().size()) {
  monitored_.add(*this);
}

StallWatch::~StallWatch() {
  monitored_.remove(*this, remembers_);
}

void StallWatch::device_event(const Device& device, const ibv_async_event& event) noexcept {
  if (set_.failover() == nullptr) return;
  const auto port = static_cast<std::uint8_t>(event.element.port_num);
  try {
    if (event.event_type == IBV_EVENT_PORT_ERR) set_.failover()->port_down(device, port);
    if (event.event_type == IBV_EVENT_GID_CHANGE) set_.failover()->gids_changed(device, port);
  } catch (...) {  // the retries find it out too
    VERBATIM_WARN("no memory to leave a lane of RMA at rank %u", set_.own_rank());
  }
}

void StallWatch::skip_gap(const StallSettings& settings, std::uint64_t now) {
  const std::uint64_t longest = std::max(4 * settings.idle_period_ns(), kNanosecondsPerSecond);
  const std::uint64_t gap = now - std::exchange(checked_ns_, now);
  if (gap <= longest) return;
  for (Watched& watched : watched_) {
    watched.progress_ns += gap;
    if (watched.lane_failed_ns != 0) watched.lane_failed_ns += gap;
  }
}

bool StallWatch::check_stalls(const StallSettings& settings, std::uint64_t now) noexcept {
  if (failures_.has_failed()) return false;
  if (checked_ns_ == 0) {
    checked_ns_ = now;
    for (Watched& watched : watched_) watched.progress_ns = now;
  }
  skip_gap(settings, now);
  recent_ns_ = 2 * settings.idle_period_ns();
  if (set_.take_polled()) poll_ended_ns_ = std::exchange(polled_ns_, now);
  bool outstanding = false;
  const std::size_t peers = set_.queues().size() / set_.contexts();
  try {
    for (std::size_t peer = 0; peer < peers && !failures_.has_failed(); ++peer) {
      check_peer(settings, peer, now, &outstanding);
    }
  } catch (...) {  // a stall that is to end the communicator is found again
    VERBATIM_WARN("no memory to describe a stall of RMA at rank %u", set_.own_rank());
  }
  return outstanding;
}

void StallWatch::check_peer(const StallSettings& settings, std::size_t peer, std::uint64_t now, bool* outstanding) {
  const std::size_t peers = set_.queues().size() / set_.contexts();
  Stalled found;
  for (std::size_t i = peer; i < watched_.size(); i += peers) {
    const PeerQueue& queue = set_.queues()[i];
    Watched& watched = watched_[i];
    const Outstanding left(queue.counts);
    if (left.number != 0) *outstanding = true;
    const std::uint64_t stalled_ns = now - watched.progress_ns;
    const std::uint64_t pieces = queue.counts.pieces;
    const bool has_moved = left.completed != watched.completed || std::exchange(watched.pieces, pieces) != pieces;
    const bool waited = std::exchange(watched.waits, left.number != 0);
    if (left.number == 0 || !waited || has_moved) {
      watched.completed = left.completed;
      watched.progress_ns = now;
      watched.lane_failed_ns = 0;
      if (!std::exchange(watched.reported, false)) continue;
      ++found.recovered;
      found.recovered_after_ns = std::max(found.recovered_after_ns, stalled_ns);
      continue;
    }
    const std::uint32_t lane = queue.lane.load(std::memory_order_relaxed);
    Failover* const failover = set_.failover();
    if (failover == nullptr || failover->is_used(queue.peer, lane)) {
      watched.lane_failed_ns = 0;
    } else if (watched.lane_failed_ns == 0 || !is_polled(now)) {
      watched.lane_failed_ns = now;
    } else if (now - watched.lane_failed_ns >=
               (failover->lane_for(queue.peer) == kNoLane ? no_lane_limit_ns_ : kAnswerLimitNs)) {
      return fail_without_lane(queue, now - watched.lane_failed_ns);
    }
    // A flush reads over the ports of all lanes to oneself: which one hangs is not known here.
    if (lane_timeout_ns_ != 0 && !set_.is_own(queue.peer)) {
      if (std::exchange(watched.lane, lane) != lane) {
        watched.progress_ns = now;
        continue;
      }
      if (poll_ended_ns_ >= watched.progress_ns + lane_timeout_ns_ && failover->is_used(queue.peer, lane)) {
        const std::string why = "nothing has completed for " + to_seconds(stalled_ns) + " (VERBATIM_LANE_TIMEOUT_MS)";
        failover->lane_failed(queue.peer, lane, Failover::Last::kKeep, why.c_str());
      }
    }
    if (settings.fail_ns != 0 && stalled_ns >= settings.fail_ns) return fail(queue, stalled_ns, now);
    if (watched.reported) {
      ++found.reported;
    } else if (settings.warn_ns != 0 && stalled_ns >= settings.warn_ns) {
      found.fresh.push_back(i);
    }
  }
  if (!found.fresh.empty()) {
    report(found.fresh, now);
    for (const std::size_t i : found.fresh) watched_[i].reported = true;
  } else if (found.recovered != 0 && found.reported == 0) {
    const PeerQueue& queue = set_.queues()[peer];
    VERBATIM_INFO("RMA from rank %u to %s makes progress again, after %s", set_.own_rank(),
                  set_.name_of_peer(queue.peer), to_seconds(found.recovered_after_ns).c_str());
  }
}

Diagnosis StallWatch::diagnose(const PeerQueue& queue, std::uint64_t now) const {
  const std::string& device = set_.port().device->name();
  if (!is_polled(now)) return diagnose_stall(StallCause::kOwnApplication, set_.name_of_peer(queue.peer), device);
  if (!set_.is_own(queue.peer)) return diagnose_stall(StallCause::kNetwork, set_.name_of_peer(queue.peer), device);
  return {"this host's device: what its QP to itself has to do was posted and does not complete",
          "'dmesg | grep " + device + "'"};
}

// One line for a peer: several contexts stall together.
void StallWatch::report(const std::vector<std::size_t>& queues, std::uint64_t now) const {
  const std::span<const PeerQueue> all = set_.queues();
  const std::size_t first = *std::min_element(queues.begin(), queues.end(), [this](std::size_t a, std::size_t b) {
    return watched_[a].progress_ns < watched_[b].progress_ns;
  });
  const PeerQueue& queue = all[first];
  const Diagnosis stall = diagnose(queue, now);
  std::vector<std::size_t> others = queues;
  std::erase(others, first);
  const std::string more =
      others.empty() ? "" : "; the same in the contexts " + numbers_of_contexts(set_, others) + " of this peer";
  VERBATIM_WARN("stalled for %s: %s: %s; outstanding: %s, completed: %llu operations%s%s%s. Path: %s",
                to_seconds(now - watched_[first].progress_ns).c_str(), set_.describe(queue).c_str(), stall.why.c_str(),
                describe_outstanding(queue.counts).c_str(),
                static_cast<unsigned long long>(queue.counts.all_completed()), more.c_str(), kNextStep,
                stall.next.c_str(), describe_path(set_.known_facts(queue)).c_str());
}

void StallWatch::fail_without_lane(const PeerQueue& queue, std::uint64_t waited_ns) const noexcept {
  failures_.fail(ErrorKind::kRemote, Failures::Origin::kHere, [&] {
    const bool none = set_.failover()->lane_for(queue.peer) == kNoLane;
    return Failure{set_.describe(queue) + ": its lane has failed, and for " + to_seconds(waited_ns) +
                       (none ? std::string(" no other one has worked") + set_.owner().why_one_device()
                             : " the peer has not said what it has executed there"),
                   {none ? "the ports of all lanes are down, here or at the peer"
                         : "the process or host of the peer, or the TCP connection to it, does not work",
                    std::string("look at ") + set_.name_of_peer(queue.peer)},
                   set_.known_facts(queue)};
  });
}

void StallWatch::fail(const PeerQueue& queue, std::uint64_t stalled_ns, std::uint64_t now) const noexcept {
  const bool local = set_.is_own(queue.peer) || !is_polled(now);
  failures_.fail(local ? ErrorKind::kSystem : ErrorKind::kRemote, Failures::Origin::kHere, [&] {
    return Failure{set_.describe(queue) + ": stalled for " + to_seconds(stalled_ns) +
                       " (VERBATIM_STALL_FAIL_S), outstanding: " + describe_outstanding(queue.counts),
                   diagnose(queue, now), set_.known_facts(queue)};
  });
}

RmaStats StallWatch::stats(std::uint64_t number, std::uint64_t now) const {
  RmaStats stats;
  std::vector<std::string> queues;  // those with which an operation was begun
  for (std::size_t i = 0; i < watched_.size(); ++i) {
    const PeerQueue& queue = set_.queues()[i];
    const Outstanding left(queue.counts);
    if (left.completed + left.number == 0) continue;
    const PathFacts facts = set_.known_facts(queue);
    const std::uint64_t stalled_ns = left.number != 0 && checked_ns_ != 0 ? now - watched_[i].progress_ns : 0;
    const RmaCounts completed = completed_by(queue.counts);
    stats.completed.add(completed);
    queues.push_back(
        json_object({json_field("context", queue.context),
                     json_field("peer", set_.is_own(queue.peer) ? set_.own_rank() : set_.path_of(queue).rank),
                     json_field("peer_host", facts.remote->host),
                     json_field("lane", queue.lane.load(std::memory_order_relaxed) + 1),
                     json_field("lanes", queue.further_qps.size() + 1), json_field("qp", facts.local.qp),
                     json_field("peer_qp", facts.remote->qp),
                     json_nested("posted", json_object({to_counts(queue.counts.begun).operations_json()})),
                     json_nested("completed", completed.json()), json_field("outstanding", left.number),
                     json_field("no_progress_ms", stalled_ns / kNanosecondsPerMillisecond),
                     json_flag("stalled", watched_[i].reported)}));
  }
  const bool failed = failures_.has_failed();
  const std::string error = failures_.text();
  stats.json = json_object(
      {json_field("number", number), json_field("rank", set_.own_rank()), json_field("ranks", set_.ranks()),
       json_field("contexts", set_.contexts()), json_field("qps", set_.qps()), json_field("device", set_.port().name),
       json_flag("failed", failed), json_nested("error", error.empty() ? "null" : json_text(error)),
       json_nested("queues", json_list(queues))});
  return stats;
}

}  // namespace verbatim::rma
