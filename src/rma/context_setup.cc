#include "rma/context_setup.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <span>
#include <utility>

#include "base/clock.h"
#include "base/json.h"
#include "base/log.h"
#include "base/random.h"
#include "net/connect/qp_dump.h"
#include "net/context/stats.h"
#include "net/diagnose/diagnosis.h"
#include "net/transfer/endpoint.h"
#include "net/transfer/endpoint_block.h"
#include "rma/device_tests.h"
#include "rma/lane_qps.h"
#include "rma/queue_order.h"
#include "rma/work_id.h"
#include "verbs/device.h"
#include "verbs/errors.h"

namespace verbatim::rma {
namespace {

// NCCL's requests for each receive of a group.
constexpr std::uint32_t kRequestsPerReceive = 32;
// A put with a signal needs two work requests.
constexpr std::uint32_t kWorkPerRequest = 2;
constexpr unsigned kResolvePauseUs = 20'000;

}  // namespace

ContextSetup::ContextSetup(const ContextSetupRequest& request, std::span<const Port* const> known_ports,
                           ContextSetParts parts)
    : request_(request), known_ports_(known_ports), parts_(std::move(parts)) {
  const std::uint32_t ranks = parts_.ranks.ranks();
  const auto stride = static_cast<std::uint32_t>(std::max(request_.rank_stride, 1));
  for (std::uint32_t distance = stride; distance < ranks; distance += stride) {
    peers_.push_back((parts_.ranks.rank() + distance) % ranks);
  }
}

Result<std::unique_ptr<ContextSet>> ContextSetup::run() {
  Status own = check_request();
  if (own) own = create();
  const Result<std::vector<wire::RmaExchange>> offers = exchange(wire::RmaCall::kOffer, own);
  if (!offers) return offers.error();
  own = read_offers(*offers);
  if (own) own = connect();
  const Result<std::vector<wire::RmaExchange>> ready = exchange(wire::RmaCall::kConnected, own);
  if (!ready) return ready.error();
  log_success();
  if (!parts_.config.qp_dump.empty()) dump_queues();
  return std::move(set_);
}

Status ContextSetup::check_request() {
  failed_step_ = "checking the call";
  const auto ranks = static_cast<int>(parts_.ranks.ranks());
  if (request_.contexts < 1 || static_cast<std::size_t>(request_.contexts) > wire::kMaxRmaContexts) {
    return Error{ErrorKind::kArgument, 0, "the number of contexts"};
  }
  if (request_.rank_stride < 1 || ranks % request_.rank_stride != 0) {
    return Error{ErrorKind::kArgument, 0, "rankStride, which must divide the number of ranks"};
  }
  // NCCL 2.30.7 says INT_MIN where the user has set none (src/rma/rma_proxy.cc, src/gin/gin_host.cc).
  if (request_.traffic_class > UINT8_MAX) {
    return Error{ErrorKind::kArgument, 0, "trafficClass"};
  }
  return {};
}

std::uint32_t ContextSetup::slots_of(bool to_oneself) const {
  // Flushes use the QP to oneself, besides puts.
  return kRequestsPerReceive * parts_.max_recvs * (to_oneself ? 2U : 1U);
}

// Requests for which the queue has no room wait in the plugin.
std::uint32_t ContextSetup::work_of(bool to_oneself) const {
  int max_cqe = INT_MAX;
  for (const Port& port : parts_.ports) max_cqe = std::min(max_cqe, port.device->attributes().max_cqe);
  const auto contexts = static_cast<std::size_t>(request_.contexts);
  const std::size_t shares = contexts * (peers_.size() + 2) + 2 * parts_.ports.size();  // QPs to oneself have two
  const std::size_t share = static_cast<std::size_t>(std::max(max_cqe, 0)) / shares;
  const std::size_t wanted = std::min(std::size_t{kWorkPerRequest} * slots_of(false), share);
  return static_cast<std::uint32_t>(wanted * (to_oneself ? 2 : 1));
}

Status ContextSetup::create() {
  failed_step_ = "creating QPs";
  const bool single = known_ports_.size() == 1;
  for (const Port* const known : known_ports_) {
    const auto state = known->device->verbs().port_attributes(known->device->context(), known->port_num);
    const bool up = single || (state && state->state == IBV_PORT_ACTIVE);
    Result<Port> port = refresh_port(*known, parts_.config, single ? LogLevel::kWarn : LogLevel::kInfo);
    if (!port && single) return port.error();
    // Another lane can be used until this port is up.
    unusable_.push_back(up && port ? nullptr : "its link is down");
    parts_.ports.push_back(up && port ? *port : *known);  // a port that is down may lack its addresses
  }
  if (has_several_lanes()) leave_out_unknown();
  if (work_of(false) < kWorkPerRequest) return Error{ErrorKind::kUsage, ENOMEM, "ibv_create_cq"};
  set_ = std::make_unique<ContextSet>(parts_, static_cast<std::size_t>(request_.contexts), peers_.size());
  if (const Status filled = fill_random(std::as_writable_bytes(std::span(&set_->psn_, 1))); !filled) return filled;
  set_->psn_ &= kPsnMask;
  set_->peer_of_rank_.assign(parts_.ranks.ranks(), kNoPeer);
  for (std::size_t i = 0; i < peers_.size(); ++i) set_->peer_of_rank_[peers_[i]] = static_cast<std::uint32_t>(i);
  set_->peer_of_rank_[parts_.ranks.rank()] = static_cast<std::uint32_t>(peers_.size());
  set_->queue_of_.assign(static_cast<std::size_t>(request_.contexts) * parts_.ranks.ranks(), nullptr);
  if (const Status created = create_cqs(); !created) return created.error();
  return create_queues();
}

// What a device has executed must be known when a lane fails. It could not be asked over a port that does not work now,
// so the port's lanes come later, as if its link were down. Without any other one they are used all the same.
void ContextSetup::leave_out_unknown() {
  std::vector<const char*> unusable = unusable_;
  for (std::size_t i = 0; i < unusable.size(); ++i) {
    const bool known =
        unusable[i] != nullptr || executed_report(parts_.ports[i], parts_.config) != ExecutedReport::kNotKnown;
    if (!known) unusable[i] = "its test has failed";
  }
  if (std::find(unusable.begin(), unusable.end(), nullptr) != unusable.end()) unusable_ = std::move(unusable);
}

bool ContextSetup::has_several_lanes() const {
  for (std::size_t peer = 0; peer <= peers_.size(); ++peer) {
    if (lanes_to(peer) > 1) return true;
  }
  return false;
}

std::uint32_t ContextSetup::psn_of(std::uint32_t peer) const {
  return set_->is_own(peer) ? set_->psn_ : set_->paths_[peer].psn;
}

std::uint32_t ContextSetup::lanes_to(std::size_t peer) const {
  const std::size_t theirs = peer == peers_.size() ? 1 : parts_.port_counts[peers_[peer]];
  return static_cast<std::uint32_t>(std::max(parts_.ports.size(), theirs));
}

// One for each device. Only one lane to a peer has outstanding work requests at a time.
Status ContextSetup::create_cqs() {
  const std::size_t of_context = peers_.size() * work_of(false) + work_of(true);
  const std::size_t of_flushes = has_several_lanes() ? parts_.ports.size() * work_of(true) : 0;
  const std::size_t entries = static_cast<std::size_t>(request_.contexts) * of_context + of_flushes;
  for (const Port& port : parts_.ports) {
    const Device& device = *port.device;
    const Verbs& verbs = device.verbs();
    if (set_->cq_ != nullptr && cq_of(port) != nullptr) continue;
    Result<UniqueCq> cq =
        adopt("ibv_create_cq", verbs.create_cq(device.context(), static_cast<int>(entries), nullptr, nullptr, 0),
              verbs.destroy_cq, SetupStep::kCreateQueue);
    if (!cq) return cq.error();
    if (set_->cq_ == nullptr) {
      set_->cq_ = std::move(*cq);
    } else {
      set_->further_cqs_.push_back(std::move(*cq));
    }
  }
  return {};
}

ibv_cq* ContextSetup::cq_of(const Port& port) const {
  const ibv_context* const context = port.device->context();
  if (set_->cq_->context == context) return set_->cq_.get();
  for (const UniqueCq& cq : set_->further_cqs_) {
    if (cq->context == context) return cq.get();
  }
  return nullptr;
}

Result<RcQp> ContextSetup::create_queue(const Port& port, bool to_oneself) {
  return make_qp(port, cq_of(port), {.send_wr = work_of(to_oneself), .recv_wr = 1}, parts_.config);
}

Status ContextSetup::create_queues() {
  const auto contexts = static_cast<std::size_t>(request_.contexts);
  const std::vector<QueuePosition> order = queue_order(contexts, peers_.size(), parts_.config.qp_order);
  // The QPs to oneself have longer queues and come last: each part is sorted by number, because a device may give out
  // numbers in another order than that of the calls.
  std::vector<RcQp> made;
  const std::size_t to_others = contexts * peers_.size();
  for (std::size_t i = 0; i < order.size(); ++i) {
    Result<RcQp> one = create_queue(parts_.ports.front(), i >= to_others);
    if (!one) return one.error();
    made.push_back(std::move(*one));
  }
  const auto by_number = [](const RcQp& a, const RcQp& b) { return a.qp->qp_num < b.qp->qp_num; };
  const auto others_end = made.begin() + static_cast<std::ptrdiff_t>(to_others);
  std::sort(made.begin(), others_end, by_number);
  std::sort(others_end, made.end(), by_number);
  for (std::size_t i = 0; i < order.size(); ++i) {
    prepare(set_->queues_[order[i].context * (peers_.size() + 1) + order[i].peer], made[i]);
  }
  set_->batch_target_ = {0, peers_.empty() ? parts_.ranks.rank() : peers_.front()};
  set_->batch_.set_queue(&set_->queues_.front());
  return create_further_queues(order);
}

// Behind those of the first lane, in the same order.
Status ContextSetup::create_further_queues(const std::vector<QueuePosition>& order) {
  for (std::uint32_t lane = 1; lane < wire::kMaxRmaPorts; ++lane) {
    for (const QueuePosition& position : order) {
      if (lane >= lanes_to(position.peer)) continue;
      PeerQueue& queue = set_->queues_[position.context * (peers_.size() + 1) + position.peer];
      Result<RcQp> one = create_queue(set_->lane_port(lane), position.peer == peers_.size());
      if (!one) return one.error();
      queue.free_work = std::min(queue.free_work, one->send_wr);
      queue.further_qps.push_back(std::move(one->qp));
    }
  }
  return has_several_lanes() ? create_flush_queues() : Status();
}

Status ContextSetup::create_flush_queues() {
  set_->flush_work_ = slots_of(true);
  set_->flushes_under_way_.resize(parts_.ports.size());
  for (const Port& port : parts_.ports) {
    Result<RcQp> one = create_queue(port, true);
    if (!one) return one.error();
    set_->flush_work_ = std::min(set_->flush_work_, one->send_wr);
    set_->flush_qps_.push_back(std::move(one->qp));
  }
  return {};
}

void ContextSetup::prepare(PeerQueue& queue, RcQp& made) {
  queue.qp = std::move(made.qp);
  queue.active = queue.qp.get();
  queue.free_work = made.send_wr;
  const bool own = queue.peer == peers_.size();
  set_->queue_of_[queue.context * parts_.ranks.ranks() + (own ? parts_.ranks.rank() : peers_[queue.peer])] = &queue;
  queue.slots.resize(slots_of(own));
  for (Request& request : queue.slots) {
    request.set = set_.get();
    request.queue = &queue;
    request.next = std::exchange(queue.free_slot, &request);
  }
}

std::vector<std::uint8_t> ContextSetup::offer_for(std::size_t distance) const {
  wire::RmaOffer offer;
  offer.contexts = static_cast<std::uint32_t>(request_.contexts);
  offer.rank_stride = static_cast<std::uint32_t>(request_.rank_stride);
  offer.psn = set_->psn_;
  const std::uint32_t peer = set_->peer_of_rank_[parts_.ranks.all()[distance].rank];
  for (std::uint32_t lane = 0; peer != kNoPeer && lane < lanes_to(peer); ++lane) {
    offer.lanes.push_back(offer_lane(lane, peer));
  }
  return wire::encode_rma_offer(offer);
}

wire::RmaOfferedLane ContextSetup::offer_lane(std::uint32_t lane, std::uint32_t peer) const {
  const Port& port = set_->lane_port(lane);
  wire::RmaOfferedLane offer;
  offer.roce_version = static_cast<std::uint8_t>(port.gid.version);
  offer.device = hello_of(port);
  for (std::uint32_t context = 0; context < set_->contexts(); ++context) {
    offer.qps.push_back(hello_of(set_->queue_at(context, peer).qp_of(lane), *port.device, parts_.config.ece));
  }
  return offer;
}

Status ContextSetup::read_offers(const std::vector<wire::RmaExchange>& received) {
  failed_step_ = "reading the offers of QPs";
  std::size_t peer = 0;
  set_->max_message_bytes_ = max_message_bytes(parts_.ports.front());
  for (const Port& port : parts_.ports) {
    set_->max_message_bytes_ = std::min<std::uint64_t>(set_->max_message_bytes_, max_message_bytes(port));
  }
  for (std::size_t i = 0; i < received.size(); ++i) {
    const PeerRank& rank = parts_.ranks.all()[i];
    Result<wire::RmaOffer> offer = wire::decode_rma_offer(received[i].body);
    if (!offer) return offer.error();
    const bool spoken_to = set_->peer_of_rank_[rank.rank] != kNoPeer;
    if (offer->contexts != static_cast<std::uint32_t>(request_.contexts) ||
        offer->rank_stride != static_cast<std::uint32_t>(request_.rank_stride) ||
        offer->lanes.size() != (spoken_to ? lanes_to(peer) : 0)) {
      return Error{ErrorKind::kUsage, 0, "another number of contexts or another rankStride at another rank"};
    }
    if (!spoken_to) continue;
    PeerPath& path = set_->paths_[peer++];
    path.rank = rank.rank;
    path.name = rank.name;
    path.psn = offer->psn;
    for (std::uint32_t lane = 0; lane < offer->lanes.size(); ++lane) {
      path.lanes.push_back(read_lane(offer->lanes[lane], set_->lane_port(lane), rank));
    }
  }
  return {};
}

LanePath ContextSetup::read_lane(const wire::RmaOfferedLane& offer, const Port& port, const PeerRank& rank) const {
  set_->max_message_bytes_ = std::min<std::uint64_t>(set_->max_message_bytes_, offer.device.max_message_bytes);
  LanePath path;
  path.connection = {.remote = address_of(offer.device, static_cast<RoceVersion>(offer.roce_version)),
                     .path = path_to(offer.device, port, parts_.config, request_.traffic_class),
                     .peer_reads = offer.device.responder_reads};
  path.remote = path_end(rank.host, offer.device, path.connection.remote.roce_version);
  path.qps = offer.qps;
  return path;
}

Status ContextSetup::connect() {
  failed_step_ = "connecting QPs";
  const std::uint64_t deadline_ns = monotonic_ns() + parts_.config.connect_timeout_s * kNanosecondsPerSecond;
  for (std::uint32_t peer = 0; peer <= peers_.size(); ++peer) {
    const std::uint32_t lanes = lanes_to(peer);
    const std::size_t failed_before = failed_lanes_.size();
    for (std::uint32_t lane = 0; lane < lanes; ++lane) {
      Status connected;
      const char* const unusable = unusable_[lane % unusable_.size()];
      if (unusable != nullptr) connected = Error{ErrorKind::kSystem, 0, unusable};
      std::uint32_t qps = 0;
      for (const LaneQp& own : lane_qps(*set_, peer, lane)) {
        if (connected) connected = connect_lane(own, lanes == 1 ? deadline_ns : 0);
        qps += connected ? 1U : 0U;
      }
      if (connected) continue;
      failed_lanes_.push_back({peer, lane, qps, connected.error()});
      if (failed_lanes_.size() - failed_before == lanes) {
        failed_step_ = std::string("connecting QPs to ") + set_->name_of_peer(peer);
        failed_path_ = set_->known_facts(set_->queue_at(0, peer));
        failed_path_->age_ns = 0;
        return connected.error();
      }
    }
  }
  for (const Port& port : parts_.ports) {
    set_->counters_.push_back(port.device->history().recent_counters(port.port_num));
  }
  set_->connected_ns_ = monotonic_ns();
  prepare_failover();
  return {};
}

Status ContextSetup::connect_lane(const LaneQp& own, std::uint64_t deadline_ns) {
  while (true) {
    Status connected = connect_lane_qp(*set_, parts_.config, own, set_->lane_port(own.lane), nullptr,
                                       {.expected = set_->psn_, .first = psn_of(own.peer)});
    if (connected || !is_unresolved(connected.error()) || monotonic_ns() >= deadline_ns) return connected;
    ::usleep(kResolvePauseUs);
  }
}

void ContextSetup::prepare_failover() {
  if (!has_several_lanes()) return;
  std::vector<Failover::Peer> lanes;
  for (std::uint32_t peer = 0; peer <= peers_.size(); ++peer) {
    lanes.push_back({psn_of(peer), std::vector(lanes_to(peer), set_->contexts())});
  }
  for (const FailedLane& failed : failed_lanes_) lanes[failed.peer].connected[failed.lane] = failed.connected;
  for (PeerQueue& queue : set_->queues_) {
    queue.sent = std::make_unique<SentWork>(queue.free_work);
    queue.sent->start(psn_of(queue.peer));
    queue.packet_shift = packet_shift(set_->lane_mtu(queue, 0));
    queue.flushes_ports = set_->is_own(queue.peer) && !parts_.config.flush_disabled;
  }
  const ContextSet& set = *set_;
  PeerRanks& ranks = parts_.ranks;
  set_->failover_ = std::make_unique<Failover>(
      set, parts_.config, lanes, [&set, &ranks](std::uint32_t peer, const wire::RmaLane& message) {
        ranks.at(set.path_of(set.queue_at(0, peer)).rank).channel->send(wire::encode_rma_lane(message));
      });
  parts_.failures.set_lanes();
  for (std::size_t port = 0; port < parts_.ports.size(); ++port) {
    if (unusable_[port] == nullptr) continue;
    set_->failover_->port_down(*parts_.ports[port].device, parts_.ports[port].port_num, unusable_[port]);
  }
  for (const FailedLane& failed : failed_lanes_) {
    set_->failover_->lane_failed(failed.peer, failed.lane, Failover::Last::kLeave, to_string(failed.error).c_str());
  }
}

Result<std::vector<wire::RmaExchange>> ContextSetup::exchange(wire::RmaCall call, const Status& own) {
  const std::optional<std::string> failure =
      own ? std::nullopt : std::optional(failed_step_ + ": " + to_string(own.error()));
  Result<std::vector<wire::RmaExchange>> received = parts_.ranks.exchange(call, failure, [&](std::size_t distance) {
    return call == wire::RmaCall::kOffer ? offer_for(distance) : std::vector<std::uint8_t>();
  });
  if (!own) return log_failure(own.error());
  return received;
}

Error ContextSetup::log_failure(const Error& error) const {
  if (error.logged) return error;
  Failure failure;
  failure.what = "creating " + std::to_string(request_.contexts) + " RMA contexts at rank " +
                 std::to_string(parts_.ranks.rank()) + " on " + known_ports_.front()->name + " of " + parts_.host_name +
                 " failed: " + failed_step_ + ": " + to_string(error);
  failure.path = failed_path_;
  failure.diagnosis = diagnose_setup(error, failed_path_ ? &*failed_path_ : nullptr, qp_usage(known_ports_));
  VERBATIM_WARN("%s", log_line(failure).c_str());
  return {error.kind, error.sys_errno, error.operation, true};
}

void ContextSetup::log_success() const {
  std::string further;
  for (std::size_t port = 1; port < parts_.ports.size(); ++port) {
    further += (port == 1 ? "; if that fails: " : ", ") + parts_.ports[port].name;
  }
  VERBATIM_INFO("RMA: rank %u of %u has %d contexts to %zu peers on %s: %zu QPs, %s%s", parts_.ranks.rank(),
                parts_.ranks.ranks(), request_.contexts, peers_.size(), set_->port().name.c_str(), set_->qps(),
                parts_.config.qp_order == QpOrder::kNative ? "native" : "staggered", further.c_str());
}

void ContextSetup::dump_queues() const {
  const bool native = parts_.config.qp_order == QpOrder::kNative;
  const std::size_t contexts = set_->contexts_;
  std::string text;
  for (const PeerQueue& queue : set_->queues_) {
    const bool own = queue.peer == peers_.size();
    const std::size_t position = own      ? peers_.size() * contexts + queue.context
                                 : native ? queue.peer * contexts + queue.context
                                          : queue.context * peers_.size() + queue.peer;
    text +=
        json_object({json_field("pid", static_cast<std::uint64_t>(::getpid())), json_field("device", set_->port().name),
                     json_field("side", "rma"), json_field("order", native ? "native" : "staggered"),
                     json_field("rank", parts_.ranks.rank()), json_field("ranks", parts_.ranks.ranks()),
                     json_field("peer", own ? parts_.ranks.rank() : peers_[queue.peer]),
                     json_field("context", queue.context), json_field("qpn", queue.qp->qp_num),
                     json_field("position", position)}) +
        "\n";
  }
  append_to_qp_dump(expand_path(parts_.config.qp_dump, parts_.host_name), text);
}

}  // namespace verbatim::rma
