#include "rma/coll_comm.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "rma/device_tests.h"

namespace verbatim::rma {
namespace {

constexpr std::size_t kScratchBytes = 4096;
// Messages of one rank about lanes of a set that is not made yet. It is at most one set ahead, with one message for
// each lane.
constexpr std::size_t kMaxEarly = 64;

template <typename T>
std::optional<std::string> failure_of(const Result<T>& own) {
  return own ? std::nullopt : std::optional(to_string(own.error()));
}

}  // namespace

CollComm::CollComm(const CollSettings& settings, LanePorts ports, std::vector<PeerRank> peers, std::uint32_t rank)
    : settings_(settings),
      ports_(std::move(ports.ports)),
      why_one_device_(ports.why_one_device),
      ranks_(std::move(peers), rank, settings.config.connect_timeout_s, failures_),
      failures_([this](const std::string& text) { tell_failure(text); }) {}

CollComm::~CollComm() {
  for (const PeerRank& peer : ranks_.all()) peer.channel->close();  // the loop's thread calls this object no more
}

Result<std::unique_ptr<CollComm>> CollComm::create(const CollSettings& settings, LanePorts ports,
                                                   std::vector<PeerRank> peers, std::uint32_t rank) {
  std::unique_ptr<CollComm> comm(new CollComm(settings, std::move(ports), std::move(peers), rank));
  for (const PeerRank& peer : comm->ranks_.all()) {
    peer.channel->open([&made = *comm, &peer] { made.channel_changed(peer); });
  }
  const Status own = comm->prepare();
  const Result<std::vector<wire::RmaExchange>> ready =
      comm->ranks_.exchange(wire::RmaCall::kReady, failure_of(own),
                            [&](std::size_t) { return std::vector{static_cast<std::uint8_t>(comm->ports_.size())}; });
  if (!own) return own.error();
  if (!ready) return ready.error();
  if (const Status read = comm->read_port_counts(*ready); !read) return read.error();
  return comm;
}

Status CollComm::read_port_counts(const std::vector<wire::RmaExchange>& received) {
  port_counts_.assign(ranks_.ranks(), static_cast<std::uint8_t>(ports_.size()));
  for (std::size_t i = 0; i < received.size(); ++i) {
    const std::vector<std::uint8_t>& body = received[i].body;
    const PeerRank& peer = ranks_.all()[i];
    if (body.size() != 1 || body[0] == 0 || body[0] > wire::kMaxRmaPorts) {
      return ranks_.log_failure(peer, wire::RmaCall::kReady, peer.name + " has sent a damaged message");
    }
    port_counts_[peer.rank] = body[0];
  }
  return {};
}

Status CollComm::prepare() {
  Result<ControlMemory> scratch = ControlMemory::create(ports_, kScratchBytes);
  if (!scratch) {
    if (!scratch.error().logged)
      VERBATIM_WARN("connecting (RMA, rank %u of %u) failed: %s. Next: look at what else uses the memory of %s",
                    ranks_.rank(), ranks_.ranks(), to_string(scratch.error()).c_str(), settings_.host_name.c_str());
    return scratch.error();
  }
  scratch_ = std::move(*scratch);
  return {};
}

Error CollComm::fail_exception(const char* call) noexcept {
  failures_.fail(ErrorKind::kSystem, Failures::Origin::kHere, [&] {
    return Failure{std::string(call) + " (RMA, rank " + std::to_string(ranks_.rank()) + ") failed: out of memory",
                   {"", "look at what else uses the memory of " + settings_.host_name}};
  });
  return {failures_.kind(), ENOMEM, "collective call", true};
}

Result<ContextSet*> CollComm::create_contexts(const ContextSetupRequest& request) try {
  const MutexLock lock(mutex_);
  if (failures_.has_failed()) return Error{failures_.kind(), 0, "createContext after a failure", true};
  remove_destroyed();
  ContextSetup setup(request, ports_,
                     {.owner = *this,
                      .config = settings_.config,
                      .host_name = settings_.host_name,
                      .ranks = ranks_,
                      .failures = failures_,
                      .number = sets_made_++,
                      .ports = {},
                      .port_counts = port_counts_,
                      .scratch = *scratch_,
                      .max_recvs = settings_.max_recvs});
  Result<std::unique_ptr<ContextSet>> set = setup.run();
  if (!set) return set.error();
  ContextSet* const made = set->get();
  sets_.push_back({std::move(*set)});
  sets_.back().watch = std::make_unique<StallWatch>(*made, failures_, settings_.monitor.rma_sets(), settings_.config);
  if (made->failover() != nullptr) add_lanes(*made);
  contexts_in_use_.fetch_add(1);
  // A rank may have ended since it took part.
  for (const PeerRank& peer : ranks_.all()) peer_ended(peer);
  return made;
} catch (...) {
  return fail_exception("creating contexts");
}

void CollComm::destroy_contexts(ContextSet& set) {
  const MutexLock lock(mutex_);
  const auto found =
      std::find_if(sets_.begin(), sets_.end(), [&](const CreatedSet& created) { return created.set.get() == &set; });
  if (found == sets_.end() || found->destroyed_ns != 0) return;
  // NCCL destroys the contexts when its kernel has ended, and a kernel does not wait for its last signals to the peers.
  if (!set.finish(monotonic_ns() + close_timeout_ns())) {
    if (!failures_.has_failed()) {
      VERBATIM_WARN(
          "rank %u on %s: puts or gets of RMA contexts that NCCL destroys have not completed after %u ms "
          "(VERBATIM_CLOSE_TIMEOUT_MS); they are given up. Next: look at the ranks that do not answer",
          ranks_.rank(), settings_.host_name.c_str(), settings_.config.close_timeout_ms);
    }
    set.abort();
  }
  found->watch.reset();
  found->destroyed_ns = monotonic_ns();
  contexts_in_use_.fetch_sub(1);
  remove_destroyed();
}

void CollComm::remove_destroyed() {
  const std::uint64_t now = monotonic_ns();
  const auto is_over = [&](const CreatedSet& created) {
    return created.destroyed_ns != 0 && now - created.destroyed_ns > close_timeout_ns();
  };
  {
    const MutexLock lock(lanes_mutex_);
    for (const CreatedSet& created : sets_) {
      if (is_over(created)) lanes_of_.erase(created.set->number());
    }
  }
  std::erase_if(sets_, is_over);
}

void CollComm::add_lanes(ContextSet& set) {
  const MutexLock lock(lanes_mutex_);
  lanes_of_[set.number()] = &set;
  newest_lanes_ = set.number() + 1;
  for (const auto& [rank, messages] : std::exchange(early_, {})) {
    for (const wire::RmaLane& message : messages) pass_on(rank, message);
  }
}

void CollComm::pass_on(std::uint32_t rank, const wire::RmaLane& message) {
  const auto found = lanes_of_.find(message.set);
  if (found != lanes_of_.end()) {
    return found->second->failover()->receive(found->second->peer_of(rank), message);
  }
  if (message.set >= newest_lanes_) {
    std::vector<wire::RmaLane>& messages = early_[rank];
    if (messages.size() == kMaxEarly)
      return ranks_.at(rank).channel->give_up("more messages about lanes than a rank sends");
    messages.push_back(message);
  } else if (message.step == wire::RmaLaneStep::kFenced) {
    // This rank has destroyed the set, and does not know any more what was executed.
    wire::RmaLane answer = message;
    answer.psns.clear();
    ranks_.at(rank).channel->send(wire::encode_rma_lane(answer));
  }
}

void CollComm::pass_on_lanes(const PeerRank& peer) {
  const MutexLock lock(lanes_mutex_);
  while (const std::optional<wire::RmaLane> message = peer.channel->take_lane()) pass_on(peer.rank, *message);
}

void CollComm::channel_changed(const PeerRank& peer) noexcept {
  try {
    pass_on_lanes(peer);
  } catch (...) {  // a message is lost
    peer.channel->give_up("out of memory");
  }
  peer_ended(peer);
  ranks_.channel_changed(peer);
}

// The loop's thread, or create_contexts.
void CollComm::peer_ended(const PeerRank& peer) noexcept {
  if (contexts_in_use_.load() == 0) return;  // a collective call finds out
  const PeerChannel::End end = peer.channel->end();
  if (end == PeerChannel::End::kOpen) return;
  if (end == PeerChannel::End::kClosed) return failures_.set_peer_closed();
  // All find out that a process has ended, but only its two ends that a channel is lost.
  const auto origin = end == PeerChannel::End::kLost ? Failures::Origin::kHere : Failures::Origin::kOtherRank;
  failures_.fail(ErrorKind::kRemote, origin, [&] {
    const std::string own = "rank " + std::to_string(ranks_.rank()) + " on " + settings_.host_name;
    if (end == PeerChannel::End::kLost) {
      return Failure{own + ": the channel to " + peer.name + " is lost: " + peer.channel->reason(),
                     {"", "look at the network between the hosts (VERBATIM_SOCKET_IFNAME), and at " + peer.name}};
    }
    if (end == PeerChannel::End::kFailed) {
      return Failure{own + ": the RMA communicator has failed at " + peer.name + ": " + peer.channel->reason(),
                     {"", "look at " + peer.name + " first: its log says more"}};
    }
    return Failure{
        own + ": " + peer.name + " has ended without closing its RMA communicator (" + peer.channel->reason() + ")",
        {"its process was killed or crashed, or its host failed",
         "look at " + peer.name +
             " first: its log says why, or 'dmesg' on its host, if it was killed for want of memory"}};
  });
}

void CollComm::tell_failure(const std::string& text) {
  const wire::Notice notice = wire::Notice::failed(failures_.kind(), text);
  for (const PeerRank& peer : ranks_.all()) peer.channel->send_last(notice);
  for (const PeerRank& peer : ranks_.all()) ranks_.channel_changed(peer);  // a collective call ends
}

Result<Memory*> CollComm::register_memory(const MrRequest& request) try {
  const MutexLock lock(mutex_);
  const Buffer buffer{request.address, request.bytes};
  const auto refused = std::exchange(refused_, std::nullopt);
  if (refused && refused->first == buffer) return refused->second;
  if (repeats_ && *repeats_ != buffer) {
    // The caller has given up the buffer for which the other ranks wait.
    static_cast<void>(exchange_registration(Error{ErrorKind::kSystem, 0, "registration as dma-buf"}, request));
    repeats_.reset();
  }
  const bool second = std::exchange(repeats_, std::nullopt).has_value();
  const bool may_repeat = request.type == MemoryType::kDmaBuf && !second;
  Result<std::unique_ptr<MemoryHandle>> own = verbatim::register_memory(ports_, request);
  if (!own && may_repeat) {
    ranks_.announce_repeat(wire::RmaCall::kRegister);
    repeats_ = buffer;
    return own.error();
  }
  if (own && (*own)->device_memory && request.ordering == MrOrdering::kAtomic) {
    if (const Status atomics = check_atomics(ports_, request, **own, settings_.config, gpu_atomics_); !atomics)
      own = atomics.error();
  }
  Result<std::unique_ptr<Memory>> memory = complete(std::move(own), request);
  if (!memory) {
    if (may_repeat && !failures_.has_failed()) refused_ = {buffer, memory.error()};
    return memory.error();
  }
  return settings_.memories.add(std::move(*memory));
} catch (...) {
  return fail_exception("registering memory");
}

Result<std::vector<wire::RmaExchange>> CollComm::exchange_registration(const Result<std::unique_ptr<MemoryHandle>>& own,
                                                                       const MrRequest& request) {
  return ranks_.exchange(wire::RmaCall::kRegister, failure_of(own), [&](std::size_t) {
    return wire::encode_rma_registration({reinterpret_cast<std::uint64_t>(request.address),
                                          request.bytes,
                                          {(*own)->rkey, (*own)->rkey + ports_.size()}});
  });
}

Result<std::unique_ptr<Memory>> CollComm::complete(Result<std::unique_ptr<MemoryHandle>> registered,
                                                   const MrRequest& request) {
  const Result<std::vector<wire::RmaExchange>> received = exchange_registration(registered, request);
  if (!registered) return registered.error();
  if (!received) return received.error();
  std::unique_ptr<MemoryHandle> own = *std::move(registered);
  auto memory = std::make_unique<Memory>();
  memory->own = {reinterpret_cast<std::uint64_t>(request.address), request.bytes, own->rkey[0]};
  memory->lkey = own->lkey[0];
  memory->device_memory = own->device_memory;
  memory->rank_count = ranks_.ranks();
  memory->ranks.resize(memory->rank_count);
  memory->ranks[ranks_.rank()] = memory->own;
  memory->lkeys.assign(own->lkey, own->lkey + ports_.size());
  memory->rkeys.resize(memory->rank_count);
  memory->rkeys[ranks_.rank()].assign(own->rkey, own->rkey + ports_.size());
  for (std::size_t i = 0; i < received->size(); ++i) {
    const PeerRank& peer = ranks_.all()[i];
    const Result<wire::RmaRegistration> theirs = wire::decode_rma_registration((*received)[i].body);
    if (!theirs)
      return ranks_.log_failure(peer, wire::RmaCall::kRegister, peer.name + " has sent a " + theirs.error().operation);
    memory->ranks[peer.rank] = {theirs->address, theirs->bytes, theirs->rkeys.front()};
    memory->rkeys[peer.rank] = theirs->rkeys;
  }
  memory->registration = std::move(own);
  return memory;
}

bool CollComm::begin_close() {
  const MutexLock lock(mutex_);
  bool graceful = !failures_.has_failed();
  for (CreatedSet& created : sets_) {
    if (created.destroyed_ns != 0) continue;
    graceful = graceful && created.set->finish(0);
    created.watch.reset();
    contexts_in_use_.fetch_sub(1);
  }
  if (graceful) {
    for (const PeerRank& peer : ranks_.all()) {
      peer.channel->send_last(wire::Notice::without_body(wire::MessageType::kClose));
    }
    return true;
  }
  for (const CreatedSet& created : sets_) created.set->abort();
  // A rank that has not found out itself reads why this one ends.
  tell_failure(failures_.has_failed() ? failures_.described()
                                      : "its application has closed it with outstanding operations");
  return false;
}

}  // namespace verbatim::rma
