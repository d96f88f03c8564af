#include "rma/failover.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "net/transfer/endpoint_block.h"
#include "net/transfer/lane_renewal.h"
#include "rma/coll_comm.h"
#include "rma/context_set.h"
#include "rma/device_tests.h"
#include "rma/lane_qps.h"
#include "rma/work_id.h"
#include "verbs/qp.h"

namespace verbatim::rma {
namespace {

constexpr std::uint64_t kRetryNs = kNanosecondsPerSecond;
// rxe may still execute one packet after the call that moves the QP to ERR: seen in 10 of 1,500 rounds without a pause,
// in none of 3,600 with 0.2 or 1 ms (Linux 6.1).
constexpr unsigned kLastPacketUs = 10'000;
constexpr unsigned kMaxDoublings = 6;  // of the pause after rounds in which the lane was not used: 32 s
// A device has less than 2^23 packets under way, and takes the 2^23 PSNs before the one that it expects for repeats.
constexpr std::uint32_t kPsnsBetweenRounds = 1U << 22;

}  // namespace

Failover::Failover(const ContextSet& set, const Config& config, const std::vector<Peer>& peers, Send send)
    : set_(set),
      config_(config),
      send_(std::move(send)),
      first_used_(std::make_unique<std::atomic<std::uint32_t>[]>(peers.size())),
      worker_("verbatim-lanes", [this] { return advance(); }) {
  for (const Peer& peer : peers) {
    lane_counts_.push_back(static_cast<std::uint32_t>(peer.connected.size()));
    lanes_.push_back(std::make_unique<Lane[]>(peer.connected.size()));
    for (std::uint32_t index = 0; index < peer.connected.size(); ++index) {
      Lane& lane = lanes_.back()[index];
      lane.gid = set.lane_port(index).gid;
      lane.expected.assign(set.contexts(), peers.back().psn);
      lane.first.assign(set.contexts(), peer.psn);
      lane.connected = peer.connected[index];
      lane.entered = index == 0 || lanes_.size() == peers.size();
    }
  }
}

bool Failover::has_other(std::uint32_t peer, std::uint32_t lane) const {
  const auto is_used_there = [&](std::uint32_t of, bool over_port) {
    for (std::uint32_t one = 0; one < lane_counts_[of]; ++one) {
      if ((one % lane_counts_.back() == lane) == over_port && is_used(of, one)) return true;
    }
    return false;
  };
  for (std::uint32_t rank = 0; set_.is_own(peer) && rank < peer; ++rank) {
    if (is_used_there(rank, true) && !is_used_there(rank, false)) return false;
  }
  for (std::uint32_t other = 0; other < lane_counts_[peer]; ++other) {
    if (other != lane && is_used(peer, other)) return true;
  }
  return false;
}

void Failover::change(Lane& lane, Step step) {
  lane.step = step;
  ++lane.changes;
}

void Failover::set_used(std::uint32_t peer, std::uint32_t lane, bool used) {
  at(peer, lane).used = used;
  std::uint32_t first = 0;
  while (first < lane_counts_[peer] && !is_used(peer, first)) ++first;
  first_used_[peer] = first < lane_counts_[peer] ? first : kNoLane;
  changed_ = true;
}

void Failover::begin_failure(std::uint32_t peer, std::uint32_t lane) {
  Lane& failed = at(peer, lane);
  const bool was_used = failed.step == Step::kUsed;
  failed.unused_rounds = was_used ? 0 : std::min(failed.unused_rounds + 1, kMaxDoublings);
  failed.due_ns = monotonic_ns() + (LaneRenewal::kHoldDownNs << failed.unused_rounds);
  failed.look_at_gid = false;
  failed.fenced = false;
  failed.peer_fenced = false;
  failed.peer_offer.reset();
  failed.peer_connected = false;
  change(failed, Step::kFailed);
  if (was_used) {
    set_used(peer, lane, false);
    failed.executed.reset();
    failed.left = !failed.entered;
    to_leave_ += failed.left ? 0U : 1U;
  }
  wake_worker();
  for (std::uint32_t other = 0; set_.is_own(peer) && other < peer; ++other) {
    for (std::uint32_t with = lane; with < lane_counts_[other]; with += lane_counts_[peer]) {
      if (at(other, with).step != Step::kFailed) begin_failure(other, with);
    }
  }
}

bool Failover::is_open(std::uint32_t port) const {
  const MutexLock lock(mutex_);
  for (std::uint32_t peer = 0; peer < lane_counts_.size(); ++peer) {
    for (std::uint32_t lane = port; lane < lane_counts_[peer]; lane += lane_counts_.back()) {
      const Lane& one = at(peer, lane);
      if (one.step == Step::kFailed ? !one.fenced : !set_.is_own(peer) || one.step == Step::kUsed) return true;
    }
  }
  return false;
}

bool Failover::lane_failed(std::uint32_t peer, std::uint32_t lane, Last last, const char* why, const char* next) try {
  std::uint32_t other = kNoLane;
  std::ptrdiff_t alone = 0;
  {
    const MutexLock lock(mutex_);
    const Lane& failed = at(peer, lane);
    if (failed.step == Step::kFailed) return true;
    const bool may_wait = last == Last::kLeave && config_.reconnect_s != 0;
    if (failed.step == Step::kUsed && !has_other(peer, lane) && !may_wait) return false;
    begin_failure(peer, lane);
    other = lane_for(peer);
    alone = std::count(first_used_.get(), first_used_.get() + lane_counts_.size() - 1, kNoLane);
  }
  std::string with = set_.is_own(peer) ? "; the lanes to other ranks over this port are left with it" : "";
  if (set_.is_own(peer) && alone != 0) with += ", and " + std::to_string(alone) + " ranks have no other one";
  const std::string then =
      other != kNoLane
          ? "lane " + std::to_string(other + 1) + " (" + set_.lane_port(other).name + ") is used until it works again"
          : "no other lane works, so operations wait for one, " + std::to_string(config_.reconnect_s) +
                " s at most (VERBATIM_RECONNECT_S)" + set_.owner().why_one_device();
  VERBATIM_WARN("RMA from rank %u to %s: lane %u of %u (%s) has failed: %s%s; %s. Next: %s", set_.own_rank(),
                set_.name_of_peer(peer), lane + 1, lane_counts_[peer], set_.lane_port(lane).name.c_str(), why,
                with.c_str(), then.c_str(), next);
  return true;
} catch (...) {  // The failure has begun.
  VERBATIM_WARN("RMA from rank %u to %s: lane %u has failed: %s; there is no memory to say more. Next: %s",
                set_.own_rank(), set_.name_of_peer(peer), lane + 1, why, next);
  return true;
}

Failover::PortLeft Failover::leave_port(std::uint32_t port) {
  PortLeft ranks;
  for (std::uint32_t peer = 0; peer < lane_counts_.size(); ++peer) {
    bool was_used = false;
    bool is_kept = false;
    for (std::uint32_t lane = port; lane < lane_counts_[peer]; lane += lane_counts_.back()) {
      const Step step = at(peer, lane).step;
      was_used = was_used || step == Step::kUsed;
      is_kept = step == Step::kUsed && !has_other(peer, lane);
      if (step != Step::kFailed && !is_kept) begin_failure(peer, lane);
    }
    if (was_used && !set_.is_own(peer)) ++(is_kept ? ranks.without : ranks.with_other);
  }
  return ranks;
}

void Failover::port_down(const Device& device, std::uint8_t port, const char* why) {
  PortLeft ranks;
  const Port* used = nullptr;
  {
    const MutexLock lock(mutex_);
    for (std::uint32_t index = 0; index < lane_counts_.back(); ++index) {
      const Port& own = set_.lane_port(index);
      if (own.device != &device || own.port_num != port) continue;
      used = &own;
      ranks = leave_port(index);
    }
  }
  if (ranks.with_other == 0) return;
  VERBATIM_WARN(
      "RMA at rank %u, %s: %s: its lanes to %zu ranks are not used until it works, and %zu ranks have no other one. "
      "Next: look at this port, its cable and its switch",
      set_.own_rank(), used->name.c_str(), why, ranks.with_other, ranks.without);
}

void Failover::gids_changed(const Device& device, std::uint8_t port) {
  const MutexLock lock(mutex_);
  for (std::uint32_t peer = 0; peer < lane_counts_.size(); ++peer) {
    for (std::uint32_t lane = 0; lane < lane_counts_[peer]; ++lane) {
      const Port& own = set_.lane_port(lane);
      if (own.device == &device && own.port_num == port && own.is_roce()) at(peer, lane).look_at_gid = true;
    }
  }
  wake_worker();
}

void Failover::check_gid(const Job& job) {
  GidEntry used;
  {
    const MutexLock lock(mutex_);
    Lane& lane = at(job.peer, job.lane);
    lane.look_at_gid = false;
    used = lane.gid;
  }
  const Port& port = set_.lane_port(job.lane);
  ibv_gid now{};
  const int failed =
      port.device->verbs().query_gid(port.device->context(), port.port_num, static_cast<int>(used.index), &now);
  if (failed == 0 && std::memcmp(now.raw, used.gid.raw, sizeof now.raw) == 0) return;  // unlike is_gone()
  lane_failed(job.peer, job.lane, Last::kLeave, "the GID of its port has changed",
              "nothing, if this was intended: the lane is made again with the new one");
}

void Failover::receive(std::uint32_t peer, const wire::RmaLane& message) {
  if (peer >= lane_counts_.size() || message.lane >= lane_counts_[peer] || set_.is_own(peer)) return;
  bool first = false;
  {
    const MutexLock lock(mutex_);
    Lane& lane = at(peer, message.lane);
    const bool is_now = message.round == lane.round;
    const bool is_next = message.round == lane.round + 1 && lane.step == Step::kFailed;
    switch (message.step) {
      case wire::RmaLaneStep::kFenced:
        if (is_next) {
          // The peer has offered the next round, and lost the lane again.
          lane.round = message.round;
          begin_failure(peer, message.lane);
        } else if (!is_now) {
          return;
        } else if (lane.step != Step::kFailed) {
          first = lane.step == Step::kUsed;
          begin_failure(peer, message.lane);
        }
        lane.peer_fenced = true;
        if (!lane.executed) lane.executed = message.psns;
        changed_ = true;
        break;
      case wire::RmaLaneStep::kOffered:
        if ((is_now && lane.step == Step::kOffered) || is_next) lane.peer_offer = message;
        break;
      case wire::RmaLaneStep::kConnected:
        if (is_now && lane.step != Step::kFailed) lane.peer_connected = true;
        break;
    }
    wake_worker();
  }
  if (!first) return;
  VERBATIM_INFO("RMA from rank %u to %s: lane %u of %u has failed at the other end", set_.own_rank(),
                set_.name_of_peer(peer), message.lane + 1, lane_counts_[peer]);
}

std::vector<Failover::Left> Failover::take_lanes_to_leave() {
  std::vector<Left> lanes;
  const MutexLock lock(mutex_);
  changed_ = retry_ns_ != 0;
  if (retry_ns_ != 0) wake_worker();
  for (std::uint32_t peer = 0; peer < lane_counts_.size(); ++peer) {
    for (std::uint32_t lane = 0; lane < lane_counts_[peer]; ++lane) {
      const Lane& failed = at(peer, lane);
      if (failed.left || failed.step != Step::kFailed) continue;
      lanes.push_back({peer, lane, failed.fenced ? failed.executed : std::nullopt});
    }
  }
  return lanes;
}

void Failover::left(std::uint32_t peer, std::uint32_t lane) {
  const MutexLock lock(mutex_);
  if (std::exchange(at(peer, lane).left, true)) return;
  --to_leave_;
  wake_worker();
}

std::optional<std::uint32_t> Failover::enter(std::uint32_t peer, std::uint32_t lane, std::uint32_t context) {
  const MutexLock lock(mutex_);
  Lane& used = at(peer, lane);
  if (used.step != Step::kUsed) return std::nullopt;
  used.entered = true;
  return used.first[context];
}

void Failover::leave_for_now(std::uint32_t peer, std::uint32_t lane, std::uint32_t context, std::uint32_t psn) {
  const MutexLock lock(mutex_);
  if (Lane& left = at(peer, lane); left.step == Step::kUsed) left.first[context] = psn & kPsnMask;
}

void Failover::use(std::uint32_t peer, std::uint32_t lane) {
  change(at(peer, lane), Step::kUsed);
  at(peer, lane).entered = set_.is_own(peer);  // flushes enter all lanes to oneself
  set_used(peer, lane, true);
  // Lanes that were kept because there was no other one.
  for (std::uint32_t port = 0; port < lane_counts_.back(); ++port) {
    const Port& own = set_.lane_port(port);
    if (own.device->history().link_since(own.port_num, 0, monotonic_ns()).down) leave_port(port);
  }
}

void Failover::probe_ended(std::uint32_t peer, std::uint32_t lane, bool works) {
  {
    const MutexLock lock(mutex_);
    Lane& probed = at(peer, lane);
    probed.probing = false;
    wake_worker();
    if (probed.step != Step::kProbed) return;
    works ? use(peer, lane) : begin_failure(peer, lane);
    works = is_used(peer, lane);
  }
  if (!works && !set_.is_own(peer)) return;
  const char* const now = !works ? "does not come back yet; the lanes to other ranks over this port are left"
                          : set_.is_own(peer) ? "can be used again"
                                              : "works again";
  VERBATIM_INFO("RMA from rank %u to %s: lane %u of %u (%s) %s", set_.own_rank(), set_.name_of_peer(peer), lane + 1,
                lane_counts_[peer], set_.lane_port(lane).name.c_str(), now);
}

void Failover::wake_worker() {
  if (monotonic_ns() < retry_ns_) return;
  const Status woken = worker_.wake();
  retry_ns_ = woken ? 0 : monotonic_ns() + kRetryNs;
  if (woken) return;
  changed_ = true;
  VERBATIM_WARN("RMA at rank %u: no thread could be started to leave a lane: %s; that is tried again", set_.own_rank(),
                std::strerror(woken.error().sys_errno));
}

Failover::Action Failover::action_of(const Lane& lane, bool own, std::uint64_t now, std::uint64_t& due_ns) const {
  if (lane.look_at_gid && lane.step != Step::kFailed) return Action::kCheckGid;
  switch (lane.step) {
    case Step::kFailed:
      if (!lane.fenced) return Action::kFence;
      if (!lane.peer_fenced || !lane.left || lane.probing) return Action::kNothing;
      if (now >= lane.due_ns) return Action::kOffer;
      due_ns = std::min(due_ns, lane.due_ns);
      break;
    case Step::kOffered:
      if (own || lane.peer_offer) return Action::kConnect;
      break;
    case Step::kConnected:
      if (own || lane.peer_connected) return Action::kProbe;
      break;
    case Step::kUsed:
    case Step::kProbed:
      break;
  }
  return Action::kNothing;
}

Failover::Job Failover::next_job(std::uint64_t now, std::uint64_t& due_ns) {
  for (std::uint32_t peer = 0; peer < lane_counts_.size(); ++peer) {
    for (std::uint32_t index = 0; index < lane_counts_[peer]; ++index) {
      const Lane& lane = at(peer, index);
      const Action action = action_of(lane, set_.is_own(peer), now, due_ns);
      if (action == Action::kNothing) continue;
      return {action, peer, index, lane.round, lane.changes, lane.connected, lane.expected, lane.peer_offer};
    }
  }
  return {};
}

std::uint64_t Failover::advance() noexcept {
  Job job;
  try {
    std::uint64_t due_ns = kNever;
    {
      const MutexLock lock(mutex_);
      job = next_job(monotonic_ns(), due_ns);
    }
    switch (job.action) {
      case Action::kNothing:
        return due_ns;
      case Action::kCheckGid:
        check_gid(job);
        break;
      case Action::kFence:
        fence_all();
        break;
      case Action::kOffer:
        offer(job);
        break;
      case Action::kConnect:
        connect(job);
        break;
      case Action::kProbe:
        probe(job);
        break;
    }
    return 0;
  } catch (...) {
    VERBATIM_WARN("RMA at rank %u: no memory for a lane to %u; it is tried again", set_.own_rank(), job.peer);
    put_off(job, kRetryNs);
    return monotonic_ns() + kRetryNs;
  }
}

void Failover::send(const Job& job, wire::RmaLane message) const {
  if (set_.is_own(job.peer)) return;
  message.set = set_.number();
  message.lane = job.lane;
  send_(job.peer, message);
}

// A port that is lost is that of a lane to every rank: all of them wait together.
void Failover::fence_all() {
  std::vector<Job> jobs;
  {
    const MutexLock lock(mutex_);
    for (std::uint32_t peer = 0; peer < lane_counts_.size(); ++peer) {
      for (std::uint32_t index = 0; index < lane_counts_[peer]; ++index) {
        const Lane& lane = at(peer, index);
        if (lane.step != Step::kFailed || lane.fenced) continue;
        jobs.push_back({Action::kFence, peer, index, lane.round, lane.changes, lane.connected, lane.expected});
      }
    }
  }
  std::vector<std::vector<LaneQp>> moved;
  for (const Job& job : jobs) {
    const Device& device = *set_.lane_port(job.lane).device;
    std::vector<LaneQp>& qps = moved.emplace_back(lane_qps(set_, job.peer, job.lane));
    // A device that refuses has failed: then nothing is known.
    std::erase_if(qps, [&](const LaneQp& own) { return !to_error(own.qp, device) || own.is_for_flushes; });
  }
  ::usleep(kLastPacketUs);
  for (std::size_t i = 0; i < jobs.size(); ++i) fence(jobs[i], moved[i]);
}

void Failover::fence(const Job& job, const std::vector<LaneQp>& qps) {
  Psns psns(set_.contexts(), wire::kNoPsn);
  for (const LaneQp& own : qps) {
    if (own.context >= job.connected) psns[own.context] = job.expected[own.context];  // it has never had a peer
    const Device& device = *set_.lane_port(job.lane).device;
    if (own.context >= job.connected || device.executed_report() != ExecutedReport::kRight) continue;
    if (const auto psn = expected_psn(own.qp, device)) psns[own.context] = *psn;
  }
  {
    const MutexLock lock(mutex_);
    Lane& lane = at(job.peer, job.lane);
    if (lane.changes != job.changes) return;  // then it is fenced for the next round
    lane.fenced = true;
    for (std::size_t i = 0; i < psns.size(); ++i) {
      if (psns[i] != wire::kNoPsn) lane.expected[i] = psns[i];
    }
    if (set_.is_own(job.peer)) {
      lane.peer_fenced = true;
      if (!lane.executed) lane.executed = psns;
    }
    changed_ = true;
  }
  send(job, {.step = wire::RmaLaneStep::kFenced, .round = job.round, .psns = std::move(psns)});
}

void Failover::put_off(const Job& job, std::uint64_t pause_ns) {
  const MutexLock lock(mutex_);
  for (std::uint32_t peer = 0; peer < lane_counts_.size(); ++peer) {
    for (std::uint32_t lane = job.lane % lane_counts_.back(); lane < lane_counts_[peer]; lane += lane_counts_.back()) {
      at(peer, lane).due_ns = std::max(at(peer, lane).due_ns, monotonic_ns() + pause_ns);
    }
  }
}

void Failover::offer(const Job& job) {
  const Port& known = set_.lane_port(job.lane);
  if (const std::uint64_t pause_ns = port_pause_ns(known, monotonic_ns()); pause_ns != 0) {
    return put_off(job, pause_ns);
  }
  const Result<Port> port = refresh_port(known, config_, LogLevel::kInfo);
  if (!port || executed_report(*port, config_) == ExecutedReport::kNotKnown) return put_off(job, kRetryNs << 2);
  for (const LaneQp& own : lane_qps(set_, job.peer, job.lane)) {
    const Status made = make_again(own.qp, *port, config_);
    if (made) continue;
    VERBATIM_INFO("RMA from rank %u to %s: lane %u (%s) could not be made again: %s; that is tried again later",
                  set_.own_rank(), set_.name_of_peer(job.peer), job.lane + 1, known.name.c_str(),
                  to_string(made.error()).c_str());
    return put_off(job, kRetryNs << 2);
  }
  Psns expected = job.expected;
  for (std::uint32_t& psn : expected) psn = (psn + kPsnsBetweenRounds) & kPsnMask;
  wire::RmaLane message{
      .step = wire::RmaLaneStep::kOffered, .round = job.round + 1, .psns = expected, .lid = port->lid};
  std::memcpy(message.gid.data(), port->gid.gid.raw, message.gid.size());
  {
    const MutexLock lock(mutex_);
    Lane& lane = at(job.peer, job.lane);
    if (lane.changes != job.changes) return;
    lane.expected = std::move(expected);
    lane.connected = 0;
    lane.gid = port->gid;
    ++lane.round;
    change(lane, Step::kOffered);
    if (set_.is_own(job.peer)) lane.peer_offer = message;
  }
  send(job, std::move(message));
}

void Failover::connect(const Job& job) {
  const Port& known = set_.lane_port(job.lane);
  const wire::RmaLane& theirs = *job.peer_offer;
  Port port = known;
  {
    const MutexLock lock(mutex_);
    port.gid = at(job.peer, job.lane).gid;
  }
  Status connected;
  if (theirs.psns.size() != set_.contexts()) connected = Error{ErrorKind::kRemote, EPROTO, "offer of a lane"};
  for (const LaneQp& own : lane_qps(set_, job.peer, job.lane)) {
    if (!connected) break;
    connected =
        connect_lane_qp(set_, config_, own, port, &theirs, {job.expected[own.context], theirs.psns[own.context]});
  }
  {
    const MutexLock lock(mutex_);
    Lane& lane = at(job.peer, job.lane);
    if (lane.changes != job.changes) return;
    if (connected) {
      lane.first = theirs.psns;
      lane.connected = set_.contexts();
      change(lane, Step::kConnected);
    } else {
      begin_failure(job.peer, job.lane);
    }
  }
  if (connected) return send(job, {.step = wire::RmaLaneStep::kConnected, .round = job.round, .psns = {}});
  VERBATIM_INFO("RMA from rank %u to %s: lane %u (%s) could not be connected again: %s; that is tried again later",
                set_.own_rank(), set_.name_of_peer(job.peer), job.lane + 1, known.name.c_str(),
                to_string(connected.error()).c_str());
}

void Failover::probe(const Job& job) {
  {
    const MutexLock lock(mutex_);
    Lane& lane = at(job.peer, job.lane);
    if (lane.changes != job.changes) return;
    change(lane, Step::kProbed);
    lane.probing = true;
    ++lane.first.front();
    lane.first.front() &= kPsnMask;
  }
  ibv_qp* const qp = set_.queue_at(0, job.peer).qp_of(job.lane);
  if (post_empty_write(qp, WorkId::make_probe(job.peer, job.lane), 0, 0) != 0) probe_ended(job.peer, job.lane, false);
}

}  // namespace verbatim::rma
