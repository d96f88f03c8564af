#include "net/transfer/lane_renewal.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "base/log.h"
#include "net/transfer/endpoint_block.h"
#include "net/transfer/flush_queue.h"
#include "net/transfer/lanes.h"
#include "verbs/qp.h"

namespace verbatim {
namespace {

// While a link is down, and after a step that failed. The event of a link that comes up ends the pause.
constexpr std::uint64_t kRetryNs = kNanosecondsPerSecond;
constexpr std::uint64_t kLinkStateWaitNs = 50 * kNanosecondsPerMillisecond;
constexpr unsigned kLinkStatePollUs = 1000;
constexpr unsigned kMaxHoldDoublings = 6;  // of the hold-down: 32 s

// Like the QP `old` of the endpoint, in INIT.
Result<EndpointQp> make_lane_qp(const Endpoint& endpoint, std::size_t index, const Port& port, const Config& config) {
  const EndpointQp& old = endpoint.qps()[index];
  ibv_cq* const cq = endpoint.cqs()[index % endpoint.cqs().size()].get();
  Result<RcQp> created =
      make_qp(port, cq, {.send_wr = old.send_wr, .recv_wr = old.recv_wr, .inline_bytes = old.inline_bytes}, config);
  if (!created) return created.error();
  EndpointQp made{*std::move(created), old, std::make_unique<LaneGids>(LaneGids{.own = port.gid})};
  if (made.inline_bytes < old.inline_bytes || made.send_wr < old.send_wr || made.recv_wr < old.recv_wr) {
    return system_error("ibv_create_qp", ENOMEM);
  }
  return made;
}

Status make_qps(LaneQps& made, const LaneRenewal::Subject& subject, const Port& port) {
  made.qps.reserve(subject.qps.size());
  for (const std::size_t index : subject.qps) {
    Result<EndpointQp> qp = make_lane_qp(subject.endpoint, index, port, subject.config);
    if (!qp) return qp.error();
    made.local.qp_numbers[made.qps.size()] = qp->qp->qp_num;
    made.qps.push_back(std::move(*qp));
  }
  made.local.qps = static_cast<std::uint32_t>(made.qps.size());
  made.local.lid = port.lid;
  made.local.gid_index = static_cast<std::uint16_t>(port.gid.index);
  std::memcpy(made.local.gid.data(), port.gid.gid.raw, made.local.gid.size());
  if (!subject.flush) return {};
  ibv_cq* const cq = subject.endpoint.cqs()[made.qps.front().device].get();
  const std::uint32_t psn = first_psn(subject.endpoint.remote().attempt, made.local.round);
  Result<UniqueQp> flush = FlushQueue::make_flush_qp(port, cq, psn, subject.config);
  if (!flush) return flush.error();
  made.flush_qp = std::move(*flush);
  return {};
}

Status connect_qps(LaneQps& made, const LaneRenewal::Subject& subject, const Port& port) {
  const wire::Hello& hello = subject.endpoint.remote();
  const std::uint32_t psn = first_psn(hello.attempt, made.local.round);
  for (std::size_t i = 0; i < made.qps.size(); ++i) {
    EndpointQp& end = made.qps[i];
    const wire::HelloDevice& device = hello.devices[end.remote_device];
    const wire::HelloQp& first = hello.qps[subject.qps[i]];
    QpConnection connection{.remote = address_of(device, RoceVersion::kUnknown),
                            .psns = {psn, psn},
                            .path = end.path,
                            .peer_reads = device.responder_reads};
    connection.remote.qp_num = made.remote.qp_numbers[i];
    connection.remote.lid = made.remote.lid;
    std::memcpy(connection.remote.gid.raw, made.remote.gid.data(), sizeof connection.remote.gid.raw);
    if (end.ece) connection.ece = ece_of(first);
    if (end.lag_port != 0) connection.lag_index = end.lag_port - 1U;
    Port from = port;
    from.gid = end.gids->own;
    end.gids->remote = made.remote.gid;
    end.gids->remote_index = made.remote.gid_index;
    const Result<ConnectedQp> connected = connect_qp(end.qp.get(), from, connection, subject.config);
    if (!connected) return connected.error();
  }
  return {};
}

}  // namespace

std::uint64_t port_pause_ns(const Port& port, std::uint64_t now) {
  const LinkRecord link = port.device->history().link_since(port.port_num, 0, now);
  if (link.down) return kRetryNs;
  const std::uint64_t usable_ns = link.changed_ns + LaneRenewal::kHoldDownNs;
  if (link.changed_ns != 0 && now < usable_ns) return usable_ns - now;
  const Result<ibv_port_attr> attributes = port.device->verbs().port_attributes(port.device->context(), port.port_num);
  return attributes && attributes->state == IBV_PORT_ACTIVE ? 0 : kRetryNs;
}

bool link_goes_down(const Port& port) {
  const std::uint64_t end = monotonic_ns() + kLinkStateWaitNs;
  while (true) {
    const Result<ibv_port_attr> attributes =
        port.device->verbs().port_attributes(port.device->context(), port.port_num);
    if (attributes && attributes->state != IBV_PORT_ACTIVE) return true;
    if (monotonic_ns() >= end) return false;
    ::usleep(kLinkStatePollUs);
  }
}

bool LaneRenewal::allocate() {
  if (lanes_ == nullptr) lanes_.reset(new (std::nothrow) Lane[count_]);
  return lanes_ != nullptr;
}

bool LaneRenewal::has_remote(const Lane& lane) const {
  if (sends_) return lane.remote.round == lane.round && lane.step == Step::kOffered;
  return lane.remote.round > lane.round;
}

void LaneRenewal::lane_down(std::size_t lane, std::uint32_t round, bool unused) {
  const MutexLock lock(mutex_);
  if (!allocate()) throw std::bad_alloc();
  Lane& down = lanes_[lane];
  constexpr std::uint8_t kMost = kMaxHoldDoublings;
  down.failures = unused ? std::min(static_cast<std::uint8_t>(down.failures + 1), kMost) : std::uint8_t{0};
  down.round = round;
  down.step = Step::kPause;
  down.due_ns = sends_ ? monotonic_ns() + (kHoldDownNs << down.failures) : 0;
}

std::optional<std::uint32_t> LaneRenewal::ready(std::size_t lane) const {
  const MutexLock lock(mutex_);
  if (lanes_ == nullptr || lanes_[lane].step != Step::kReady) return std::nullopt;
  return lanes_[lane].round;
}

std::optional<LaneQps> LaneRenewal::adopt(std::size_t lane, std::uint32_t round) {
  const MutexLock lock(mutex_);
  if (lanes_[lane].step != Step::kReady || lanes_[lane].round != round) return std::nullopt;
  lanes_[lane].step = Step::kAdopted;
  return std::exchange(lanes_[lane].qps, {});
}

void LaneRenewal::retire(LaneQps qps) {
  const MutexLock lock(mutex_);
  retired_.push_back(std::move(qps));
}

bool LaneRenewal::receive(const wire::LaneAddress& address) {
  const MutexLock lock(mutex_);
  if (address.lane >= count_ || !allocate()) return false;
  Lane& lane = lanes_[address.lane];
  lane.remote = address;
  // The sender has given up the offer before this one.
  if (!sends_ && address.round > lane.round) discard(lane, 0);
  if (lane.step == Step::kOffered) lane.due_ns = 0;
  return true;
}

void LaneRenewal::cancel(std::size_t lane, std::uint32_t round) {
  const MutexLock lock(mutex_);
  if (lanes_ == nullptr || lanes_[lane].round != round) return;
  discard(lanes_[lane], monotonic_ns() + kHoldDownNs);
}

void LaneRenewal::discard(Lane& lane, std::uint64_t due_ns) {
  if (lane.step != Step::kMaking && lane.step != Step::kOffered && lane.step != Step::kReady) return;
  lane.due_ns = due_ns;
  lane.cancelled = lane.step == Step::kMaking;
  if (lane.cancelled) return;  // renew() has the QPs
  retired_.push_back(std::exchange(lane.qps, {}));
  lane.step = Step::kPause;
}

void LaneRenewal::look_again() {
  const MutexLock lock(mutex_);
  if (lanes_ == nullptr) return;
  const std::uint64_t due = monotonic_ns() + kHoldDownNs;
  for (Lane& lane : std::span(lanes_.get(), count_)) {
    if (lane.step == Step::kOffered) discard(lane, due);
    lane.due_ns = std::min(lane.due_ns, due);
  }
}

std::uint64_t LaneRenewal::due_ns() const {
  const MutexLock lock(mutex_);
  if (!retired_.empty()) return 0;
  std::uint64_t due = kNever;
  for (std::size_t i = 0; lanes_ != nullptr && i < count_; ++i) {
    const Lane& lane = lanes_[i];
    const bool waits = lane.step == Step::kPause ? sends_ || has_remote(lane) : has_remote(lane);
    if (waits && (lane.step == Step::kPause || lane.step == Step::kOffered)) due = std::min(due, lane.due_ns);
  }
  return due;
}

LaneRenewal::Outcome LaneRenewal::renew(std::size_t index, const Subject& subject, wire::LaneAddress& offer) {
  std::vector<LaneQps> retired;
  LaneQps made;
  bool connects = false;
  const std::uint64_t now = monotonic_ns();
  {
    const MutexLock lock(mutex_);
    retired.swap(retired_);
    if (lanes_ == nullptr) return Outcome::kNothing;
    Lane& lane = lanes_[index];
    const bool begins = lane.step == Step::kPause && (sends_ || has_remote(lane));
    connects = !sends_ || lane.step == Step::kOffered;
    if ((!begins && !(lane.step == Step::kOffered && has_remote(lane))) || now < lane.due_ns) return Outcome::kNothing;
    if (begins) lane.round = sends_ ? lane.round + 1 : lane.remote.round;
    lane.step = Step::kMaking;
    lane.cancelled = false;
    made = std::exchange(lane.qps, {});
    made.local.lane = static_cast<std::uint32_t>(index);
    made.local.round = lane.round;
    made.remote = lane.remote;
  }
  retired.clear();
  const Port& known = *subject.endpoint.ports()[subject.endpoint.qps()[subject.qps.front()].device];
  std::uint64_t pause_ns = port_pause_ns(known, now);
  Status done;
  if (pause_ns == 0 && connects && made.remote.qps != subject.qps.size()) done = system_error("lane", EPROTO);
  if (pause_ns == 0 && done && made.qps.empty()) {
    const Result<Port> port = refresh_port(known, subject.config, LogLevel::kInfo);
    done = port ? make_qps(made, subject, *port) : Status(port.error());
  }
  if (pause_ns == 0 && done && connects) done = connect_qps(made, subject, known);
  if (!done) {
    VERBATIM_INFO("%s: QPs for a lane that is down could not be made: %s", known.name.c_str(),
                  to_string(done.error()).c_str());
    pause_ns = kRetryNs;
  }
  const MutexLock lock(mutex_);
  Lane& lane = lanes_[index];
  if (pause_ns != 0 || lane.cancelled) {
    if (!made.qps.empty()) retired_.push_back(std::move(made));
    lane.step = Step::kPause;
    // A sender that has made its offer begins the next round: the peer may have begun this one.
    if (!lane.cancelled && !(sends_ && connects)) --lane.round;
    if (!lane.cancelled) lane.due_ns = now + pause_ns;
    return Outcome::kNothing;
  }
  lane.qps = std::move(made);
  lane.step = connects ? Step::kReady : Step::kOffered;
  lane.due_ns = 0;
  if (connects) return Outcome::kReady;
  offer = lane.qps.local;
  return Outcome::kOffer;
}

void LaneRenewal::give_up(std::size_t lane) {
  const MutexLock lock(mutex_);
  if (lanes_ == nullptr || lanes_[lane].step != Step::kMaking) return;
  lanes_[lane].step = Step::kPause;
  if (!sends_) --lanes_[lane].round;
  lanes_[lane].due_ns = monotonic_ns() + kRetryNs;
}

bool LaneRenewal::waits_for_others(bool hears_peer) const {
  const MutexLock lock(mutex_);
  if (lanes_ == nullptr) return hears_peer;
  const std::span<const Lane> lanes(lanes_.get(), count_);
  const auto for_application = [&](const Lane& lane) {
    return lane.step == Step::kReady ||
           (hears_peer && (lane.step == Step::kIdle || (lane.step == Step::kAdopted && !sends_)));
  };
  const auto for_peer = [&](const Lane& lane) {
    return lane.step == (sends_ ? Step::kOffered : Step::kPause) && !has_remote(lane);
  };
  return std::ranges::any_of(lanes, for_application) || (hears_peer && std::ranges::all_of(lanes, for_peer));
}

}  // namespace verbatim
