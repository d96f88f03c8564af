#include "verbatim-kv/put_prefill.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/clock.h"
#include "ranks/loaded_plugin.h"
#include "verbatim-kv/layout.h"

namespace verbatim::kv {
namespace {

// The value of *request before a call. NCCL does not clear the variable, so the plugin must write it.
char unwritten_put;

// NCCL has at most 32 times maxRecvs requests outstanding for a context and peer.
std::size_t most_puts(const ranks::RmaComm& comm) {
  constexpr std::size_t kMostPuts = 256;  // as many as --mode direct has sends
  return std::min(kMostPuts, std::size_t{nccl::kNetMaxRequests} * static_cast<std::size_t>(comm.max_recvs()));
}

std::vector<std::size_t> intervals_of(const Family& family, const IntervalSet& memory) {
  std::vector<std::size_t> intervals;
  for (const std::uint64_t base : family.bases) intervals.push_back(memory.find(base, family.layer_bytes()).value());
  return intervals;
}

}  // namespace

PutPrefill::PutPrefill(const PutContext& context, const Family& family, std::vector<Channel> channels,
                       std::vector<FamilyDescription> peers, void* words)
    : context_(context),
      family_(family),
      own_(family, context.memory),
      contents_(context.storage, family_),
      words_(words),
      part_bytes_(family.geometry.part_bytes()),
      most_puts_(most_puts(context.comm)),
      intervals_(intervals_of(family, context.memory)),
      pool_(prefill_pool(context.options, family.geometry.family, family.num_blocks, context.index)),
      lanes_(channels.size()) {
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    Lane& lane = lanes_[i];
    lane.decode = static_cast<std::uint32_t>(i);
    lane.channel = std::move(channels[i]);
    lane.peer = std::move(peers[i]);
    lane.peer_family.emplace(lane.peer.family, lane.peer.memory);
    lane.peer_intervals = intervals_of(lane.peer.family, lane.peer.memory);
    lane.reservations = std::make_unique<BlockReservations>(lane.peer.family.num_blocks);
  }
  stats_.connections = lanes_.size();
  if (!context_.options.check) return;
  std::vector<std::uint32_t> all(family_.num_blocks);
  std::iota(all.begin(), all.end(), 0U);
  contents_.set_canaries(all);
  contents_.forget_time();
}

bool PutPrefill::finished() const {
  return std::all_of(lanes_.begin(), lanes_.end(), [](auto& lane) { return lane.finished && lane.outgoing.empty(); });
}

bool PutPrefill::step(bool poll_sockets) {
  bool progressed = false;
  for (Lane& lane : lanes_) {
    if (poll_sockets) progressed = handle_messages(lane) || progressed;
    progressed = post(lane) || progressed;
    progressed = complete(lane) || progressed;
  }
  return retry_waiting() || progressed;
}

bool PutPrefill::handle_messages(Lane& lane) {
  bool progressed = false;
  if (lane.finished) return progressed;
  lane.channel.receive();
  while (!lane.finished) {
    const auto message = lane.channel.next();
    if (!message) break;
    progressed = true;
    Reader reader(message->payload);
    switch (message->kind) {
      case MessageKind::kAnnounce: {
        const auto request = reader.get<std::uint32_t>();
        const auto slot = reader.get<std::uint32_t>();
        Announced announced{request, slot, reader.get_list()};
        if (!handle_announcement(lane, announced)) waiting_.emplace_back(&lane, std::move(announced));
        break;
      }
      case MessageKind::kDone:
        handle_done(lane, reader.get<std::uint32_t>());
        break;
      case MessageKind::kFinished:
        lane.finished = true;
        break;
      default:
        throw Failure("the decode side sent an unknown message");
    }
  }
  return progressed;
}

bool PutPrefill::retry_waiting() {
  bool progressed = false;
  for (std::size_t count = waiting_.size(); count > 0; --count) {
    auto [lane, announced] = std::move(waiting_.front());
    waiting_.pop_front();
    if (handle_announcement(*lane, announced)) {
      progressed = true;
    } else {
      waiting_.emplace_back(lane, std::move(announced));
    }
  }
  return progressed;
}

// Accepts or rejects an announced request. Returns false when there are not enough free source blocks now.
bool PutPrefill::handle_announcement(Lane& lane, const Announced& announced) {
  const Request& request = request_of(announced.request);
  Source& source = sources_[request.id];
  if (source.blocks.empty() && !allocate_source(request, source)) return false;
  if (announced.slot >= context_.options.concurrency) throw Failure("the decode side sent an unknown signal word");
  const BlockList own = make_list(family_, source.blocks);
  if (const auto rejection = validate(lane, announced, own)) {
    stats_.rejected.push_back({request.id, "prefill", rejection->code, rejection->text});
    Writer writer;
    writer.put(request.id).put(rejection->code).put_text(rejection->text);
    lane.channel.send(MessageKind::kReject, writer.bytes());
    return true;
  }
  const std::size_t total = source.blocks.size() * family_.geometry.layers * family_.geometry.entries;
  lane.outgoing.push_back({request.id, announced.slot, source.blocks, announced.list.blocks, total});
  return true;
}

std::optional<Rejection> PutPrefill::validate(Lane& lane, const Announced& announced, const BlockList& own) {
  const std::uint64_t begin = monotonic_ns();
  const std::size_t count = own.blocks.size();
  auto rejection = validate_list(own_, own, count);
  if (!rejection) rejection = validate_list(*lane.peer_family, announced.list, count);
  if (!rejection) rejection = validate_pair(own, announced.list);
  if (!rejection) rejection = lane.reservations->reserve(announced.request, announced.list.blocks);
  stats_.validation_ns += monotonic_ns() - begin;
  ++stats_.validations;
  return rejection;
}

// Allocates source blocks for the request and fills them, as if its prompt had just been computed.
bool PutPrefill::allocate_source(const Request& request, Source& source) {
  const std::uint32_t tokens = family_.geometry.block_tokens;
  const std::size_t hits = request.hit_blocks(tokens);
  source.blocks = pool_.take(request.blocks(tokens) - hits);
  if (source.blocks.empty()) return false;
  if (context_.options.check) contents_.fill({request.id, hits, 0, source.blocks});
  return true;
}

bool PutPrefill::post(Lane& lane) {
  bool progressed = false;
  for (Outgoing& outgoing : lane.outgoing) {
    while (outgoing.posted < outgoing.total) {
      if (lane.sent.size() >= most_puts_) return progressed;
      start(lane, outgoing);
      progressed = true;
    }
  }
  return progressed;
}

void PutPrefill::start(Lane& lane, Outgoing& outgoing) {
  const MessagePosition place = position_of(family_.geometry, outgoing.source.size(), outgoing.posted);
  const std::size_t from = intervals_[place.layer];
  const std::size_t to = lane.peer_intervals[place.layer];
  const std::uint64_t source = family_.address(place.layer, place.entry, outgoing.source[place.position]) +
                               family_.geometry.part_offset(lane.decode % family_.geometry.tp_ratio);
  const std::uint64_t target = lane.peer.family.address(place.layer, place.entry, outgoing.destination[place.position]);
  const netapi::RmaPart local{context_.window[from], source - context_.memory.all()[from].begin};
  const netapi::RmaPart remote{context_.window[to], target - lane.peer.memory.all()[to].begin};
  netapi::RmaPlugin& plugin = context_.comm.plugin();
  const auto number = static_cast<int>(family_.geometry.family);
  const auto rank = static_cast<std::uint32_t>(context_.options.prefills) + lane.decode;
  void* request = &unwritten_put;
  if (outgoing.posted + 1 < outgoing.total) {
    ranks::require(plugin.iput(context_.comm.contexts(), number, local, part_bytes_, remote, rank, &request), "iput");
  } else {
    const netapi::RmaSignal signal{.word = {words_, signal_word(outgoing.slot) * sizeof(std::uint64_t)},
                                   .value = signal_value(family_.geometry.family, outgoing.request)};
    ranks::require(
        plugin.iput_signal(context_.comm.contexts(), number, local, part_bytes_, remote, rank, signal, &request),
        "iputSignal");
    ++stats_.notifications;
  }
  if (request == &unwritten_put || request == nullptr) throw Failure("a put returned success without a request");
  lane.sent.push_back({request, &outgoing});
  ++outgoing.posted;
  ++stats_.sent_messages;
  stats_.sent_bytes += part_bytes_;
}

bool PutPrefill::complete(Lane& lane) {
  bool progressed = false;
  while (!lane.sent.empty()) {
    int done = 0;
    ranks::require(context_.comm.plugin().test(context_.comm.coll(), lane.sent.front().request, &done),
                   "test of a put");
    if (done == 0) break;
    progressed = true;
    ++lane.sent.front().owner->completed;
    lane.sent.pop_front();
  }
  for (auto outgoing = lane.outgoing.begin(); outgoing != lane.outgoing.end();) {
    if (!outgoing->arrived || outgoing->completed < outgoing->total) {
      ++outgoing;
      continue;
    }
    finish_part(outgoing->request);
    outgoing = lane.outgoing.erase(outgoing);
  }
  return progressed;
}

// A signal can be seen before the put that carries it is done at this end. The destination blocks are free then, and
// the next request may have them; the source blocks are not.
void PutPrefill::handle_done(Lane& lane, std::uint32_t request) {
  const auto found = std::find_if(lane.outgoing.begin(), lane.outgoing.end(),
                                  [&](const Outgoing& outgoing) { return outgoing.request == request; });
  if (found == lane.outgoing.end()) return finish_part(request);  // rejected
  found->arrived = true;
  lane.reservations->release(found->destination);
}

void PutPrefill::finish_part(std::uint32_t id) {
  Source& source = sources_[request_of(id).id];
  if (++source.parts_done < family_.geometry.tp_ratio) return;
  if (context_.options.check) {
    const Request& request = request_of(id);
    std::string where;
    const BlockShare share{id, request.hit_blocks(family_.geometry.block_tokens), 0, source.blocks};
    const std::uint64_t wrong = contents_.check(share, where);
    stats_.wrong_bytes += wrong;
    if (wrong > 0) stats_.add_error("source of " + where);
    contents_.set_canaries(source.blocks);
  }
  pool_.give_back(source.blocks);
  sources_.erase(id);
  context_.finished.fetch_add(1, std::memory_order_relaxed);
}

const Request& PutPrefill::request_of(std::uint32_t id) const {
  if (id >= context_.requests.size() || context_.requests[id].prefill != context_.index) {
    throw Failure("request " + std::to_string(id) + " does not belong to prefill rank " +
                  std::to_string(context_.index));
  }
  return context_.requests[id];
}

void PutPrefill::check() {
  if (!context_.options.check) return;
  stats_.check_ns = contents_.spent_ns();
  std::vector<std::uint32_t> free;
  for (std::uint32_t block = 0; block < family_.num_blocks; ++block) {
    if (pool_.is_free(block)) free.push_back(block);
  }
  std::string where;
  const std::uint64_t wrong = contents_.check_canaries(free, where);
  stats_.wrong_bytes += wrong;
  if (wrong > 0) stats_.add_error("prefill rank " + std::to_string(context_.index) + ": " + where);
}

}  // namespace verbatim::kv
