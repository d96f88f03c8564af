#include "verbatim-kv/prefill.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/clock.h"
#include "netapi/log.h"
#include "verbatim-kv/layout.h"
#include "verbatim-kv/poll_backoff.h"
#include "workload/kv/crc32.h"

namespace verbatim::kv {
namespace {

constexpr std::size_t kMaxSends = 256;  // outstanding isends per connection; the plugin may accept fewer
constexpr std::size_t kStagedBytes = std::size_t{256} << 10;  // maximum bytes of a kStaged message

}  // namespace

Prefill::Prefill(const RankContext& context, const Family& family, std::vector<Channel> channels)
    : context_(context),
      family_(family),
      own_(family, context.memory),
      contents_(context.storage, family_),
      faults_(context.options.faults, family.geometry.family),
      part_bytes_(family.geometry.part_bytes()),
      pool_(prefill_pool(context.options, family.geometry.family, family.num_blocks, context.index)) {
  for (const std::uint64_t base : family_.bases) {
    intervals_.push_back(context_.memory.find(base, family_.layer_bytes()).value());
  }
  lanes_.resize(channels.size());
  for (std::size_t i = 0; i < channels.size(); ++i) {
    lanes_[i].decode = static_cast<std::uint32_t>(i);
    lanes_[i].channel = std::move(channels[i]);
  }
  if (!context_.options.check) return;
  std::vector<std::uint32_t> all(family_.num_blocks);
  std::iota(all.begin(), all.end(), 0U);
  contents_.set_canaries(all);
  contents_.forget_time();
}

void Prefill::run() {
  PollBackoff backoff;
  const auto all_finished = [this] {
    return std::all_of(lanes_.begin(), lanes_.end(), [](auto& lane) { return lane.finished; });
  };
  while (!all_finished()) {
    bool progressed = false;
    for (Lane& lane : lanes_) {
      if (backoff.should_poll_sockets()) progressed = handle_messages(lane) || progressed;
      progressed = poll_connect(lane) || progressed;
      progressed = post(lane) || progressed;
      progressed = complete(lane) || progressed;
      progressed = copy_staged(lane) || progressed;
    }
    progressed = retry_waiting() || progressed;
    backoff.after_round(progressed);
  }
}

bool Prefill::handle_messages(Lane& lane) {
  bool progressed = false;
  if (lane.finished) return progressed;
  lane.channel.receive();
  while (!lane.finished) {
    const auto message = lane.channel.next();
    if (!message) break;
    progressed = true;
    Reader reader(message->payload);
    switch (message->kind) {
      case MessageKind::kOpen:
        open(lane, reader);
        break;
      case MessageKind::kAnnounce: {
        Announced announced{};
        announced.which = reader.get<Attempt>();
        announced.generation = reader.get<std::uint32_t>();
        announced.staged = reader.get<bool>();
        announced.list = reader.get_list();
        if (!handle_announcement(lane, announced)) waiting_.emplace_back(&lane, std::move(announced));
        break;
      }
      case MessageKind::kReject: {
        const auto which = reader.get<Attempt>();
        const auto code = reader.get<RejectionCode>();
        stats_.add_error("the decode side rejected request " + std::to_string(which.request) + ": " +
                         rejection_name(code) + ": " + reader.get_text());
        remove_outgoing(lane, which.request);
        break;
      }
      case MessageKind::kFailed:
        if (reader.get<std::uint32_t>() == lane.generation) drop_connection(lane);
        break;
      case MessageKind::kDone:
        finish_part(lane, reader.get<std::uint32_t>());
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

// Starts a new generation of the connection. Requests that were in transfer over the old one will be announced again.
void Prefill::open(Lane& lane, Reader reader) {
  drop_connection(lane);
  lane.generation = reader.get<std::uint32_t>();
  lane.handle = reader.get<std::array<char, nccl::kNetHandleMaxBytes>>();
  lane.peer = get_family(reader);
  lane.peer_family.emplace(lane.peer.family, lane.peer.memory);
  if (lane.generation == 0) lane.reservations = std::make_unique<BlockReservations>(lane.peer.family.num_blocks);
  const std::uint64_t own_hash = own_.geometry_hash;
  const std::uint64_t peer_hash = lane.peer_family->geometry_hash;
  std::string mismatch;
  if (own_hash != peer_hash) {
    char text[200];
    std::snprintf(text, sizeof text, "family %s: geometry %016llx on prefill rank %u, %016llx on decode rank %u",
                  family_.geometry.name.c_str(), static_cast<unsigned long long>(own_hash), context_.index,
                  static_cast<unsigned long long>(peer_hash), lane.decode);
    mismatch = text;
  } else if (const auto rejection = validate_family(*lane.peer_family)) {
    mismatch = rejection->text;
  }
  if (mismatch.empty()) {
    lane.connecting = true;
    return;
  }
  lane.channel.send(MessageKind::kMismatch, mismatch);
}

bool Prefill::poll_connect(Lane& lane) {
  if (!lane.connecting) return false;
  const nccl::Result result =
      context_.plugin->connect(context_.plugin.context(), context_.device, lane.handle.data(), &lane.comm);
  if (result != nccl::Result::kSuccess) {
    lane.comm = nullptr;
    fail(lane, std::string("connect: ") + netapi::result_name(result));
    return true;
  }
  if (lane.comm == nullptr) return false;
  lane.connecting = false;
  lane.mhandles = context_.registrations.attach(lane.comm);
  ++stats_.connections;
  Writer writer;
  writer.put(lane.generation);
  put_family(writer, family_, context_.memory);
  lane.channel.send(MessageKind::kOpened, writer.bytes());
  return true;
}

bool Prefill::retry_waiting() {
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
bool Prefill::handle_announcement(Lane& lane, const Announced& announced) {
  if (!announced.staged && announced.generation != lane.generation) return true;  // will be announced again
  const Request& request = request_of(announced.which.request);
  remove_outgoing(lane, request.id);  // an earlier attempt
  Source& source = sources_[request.id];
  if (source.blocks.empty() && !allocate_source(request, source)) return false;

  const BlockList own = make_list(family_, source.blocks);
  if (const auto rejection = validate(lane, announced, own)) {
    reject(lane, announced.which, *rejection);
    return true;
  }
  Outgoing& outgoing = lane.outgoing.emplace_back(Outgoing{.which = announced.which, .staged = announced.staged});
  outgoing.source = source.blocks;
  outgoing.destination = announced.list.blocks;
  outgoing.total = source.blocks.size() * family_.geometry.layers * family_.geometry.entries;
  outgoing.first_tag = lane.next_tag;
  lane.next_tag = static_cast<std::uint32_t>((lane.next_tag + outgoing.total) & kTagMask);
  const Attempt& which = announced.which;
  if (faults_.find(FaultKind::kKill, which.request, which.attempt) != nullptr) outgoing.kill_at = outgoing.total / 2;
  if (const Fault* delay = faults_.find(FaultKind::kDelay, which.request, which.attempt)) {
    outgoing.not_before_ns = monotonic_ns() + delay->delay_ms * kNanosecondsPerMillisecond;
  }
  if (context_.options.check) contents_.timed([&] { outgoing.crc = crc_of(lane, outgoing); });
  Writer writer;
  writer.put(which).put(lane.generation).put(outgoing.first_tag).put_list(own);
  lane.channel.send(MessageKind::kAccept, writer.bytes());
  return true;
}

std::optional<Rejection> Prefill::validate(Lane& lane, const Announced& announced, const BlockList& own) {
  const std::uint64_t begin = monotonic_ns();
  const std::size_t count = own.blocks.size();
  auto rejection = validate_list(own_, own, count);
  if (!rejection) rejection = validate_list(*lane.peer_family, announced.list, count);
  if (!rejection) rejection = validate_pair(own, announced.list);
  if (!rejection) rejection = lane.reservations->reserve(announced.which.request, announced.list.blocks);
  stats_.validation_ns += monotonic_ns() - begin;
  ++stats_.validations;
  return rejection;
}

void Prefill::reject(Lane& lane, const Attempt& which, const Rejection& rejection) {
  stats_.rejected.push_back({which.request, "prefill", rejection.code, rejection.text});
  Writer writer;
  writer.put(which).put(rejection.code).put_text(rejection.text);
  lane.channel.send(MessageKind::kReject, writer.bytes());
}

// Allocates source blocks for the request and fills them, as if its prompt had just been computed.
bool Prefill::allocate_source(const Request& request, Source& source) {
  const std::uint32_t tokens = family_.geometry.block_tokens;
  const std::size_t hits = request.hit_blocks(tokens);
  source.blocks = pool_.take(request.blocks(tokens) - hits);
  if (source.blocks.empty()) return false;
  if (context_.options.check) contents_.fill({request.id, hits, 0, source.blocks});
  return true;
}

// Removes the request from the lane, so that no more messages of it are sent.
void Prefill::remove_outgoing(Lane& lane, std::uint32_t request) {
  const auto old = std::find_if(lane.outgoing.begin(), lane.outgoing.end(),
                                [&](const Outgoing& outgoing) { return outgoing.which.request == request; });
  if (old == lane.outgoing.end()) return;
  if (old->posted > old->completed && !old->staged) {
    throw Failure("request " + std::to_string(request) + " was announced again while its data was in transfer");
  }
  lane.reservations->release(old->destination);
  lane.outgoing.erase(old);
}

void Prefill::finish_part(Lane& lane, std::uint32_t id) {
  remove_outgoing(lane, request_of(id).id);
  Source& source = sources_[id];
  if (++source.parts_done < family_.geometry.tp_ratio) return;
  if (context_.options.check) contents_.set_canaries(source.blocks);
  pool_.give_back(source.blocks);
  sources_.erase(id);
  context_.finished.fetch_add(1, std::memory_order_relaxed);
}

bool Prefill::post(Lane& lane) {
  if (lane.comm == nullptr) return false;
  bool progressed = false;
  for (Outgoing& outgoing : lane.outgoing) {
    if (outgoing.staged || outgoing.posted == outgoing.total) continue;
    if (outgoing.not_before_ns > 0 && monotonic_ns() < outgoing.not_before_ns) return progressed;
    while (outgoing.posted < outgoing.total) {
      if (outgoing.posted == outgoing.kill_at) {
        fail(lane, "killed in the middle of request " + std::to_string(outgoing.which.request) + " (--inject)");
        return true;
      }
      if (lane.sent.size() == kMaxSends) return progressed;
      const std::size_t layer = outgoing.posted / outgoing.source.size() / family_.geometry.entries;
      const auto tag = static_cast<int>((outgoing.first_tag + outgoing.posted) & kTagMask);
      void* request = nullptr;
      const nccl::Result result = context_.plugin->isend(lane.comm, piece(lane, outgoing, outgoing.posted), part_bytes_,
                                                         tag, lane.mhandles[intervals_[layer]], &request);
      if (result != nccl::Result::kSuccess) {
        fail(lane, std::string("isend: ") + netapi::result_name(result));
        return true;
      }
      if (request == nullptr) return progressed;
      lane.sent.push_back({request, &outgoing});
      ++outgoing.posted;
      ++stats_.sent_messages;
      stats_.sent_bytes += part_bytes_;
      progressed = true;
    }
  }
  return progressed;
}

bool Prefill::complete(Lane& lane) {
  bool progressed = false;
  while (!lane.sent.empty()) {
    int done = 0;
    int size = 0;
    const nccl::Result result = context_.plugin->test(lane.sent.front().request, &done, &size);
    if (result != nccl::Result::kSuccess) {
      fail(lane, std::string("test of a send: ") + netapi::result_name(result));
      return true;
    }
    if (done == 0) break;
    progressed = true;
    Outgoing& outgoing = *lane.sent.front().owner;
    lane.sent.pop_front();
    if (++outgoing.completed == outgoing.total) {
      notify(lane, outgoing);
      remove_outgoing(lane, outgoing.which.request);
    }
  }
  return progressed;
}

// Sends the next part of the first staged copy; blocks are copied in the order of messages.
bool Prefill::copy_staged(Lane& lane) {
  const auto found = std::find_if(lane.outgoing.begin(), lane.outgoing.end(), [](auto& o) { return o.staged; });
  if (found == lane.outgoing.end()) return false;
  Outgoing& outgoing = *found;
  if (outgoing.posted >= outgoing.kill_at) {  // the injected kill stops the staged copy too
    remove_outgoing(lane, outgoing.which.request);
    return true;
  }
  Writer writer;
  writer.put(outgoing.which).put(std::uint64_t{outgoing.posted});
  std::string bytes = writer.bytes();
  do {
    bytes.resize(bytes.size() + part_bytes_);
    context_.storage.download(bytes.data() + bytes.size() - part_bytes_, piece(lane, outgoing, outgoing.posted),
                              part_bytes_);
    ++outgoing.posted;
  } while (outgoing.posted < std::min(outgoing.total, outgoing.kill_at) && bytes.size() + part_bytes_ <= kStagedBytes);
  lane.channel.send(MessageKind::kStaged, bytes);
  if (outgoing.posted < outgoing.total) return true;
  notify(lane, outgoing);
  remove_outgoing(lane, outgoing.which.request);
  return true;
}

void Prefill::notify(Lane& lane, const Outgoing& outgoing) {
  if (faults_.find(FaultKind::kLostNotification, outgoing.which.request, outgoing.which.attempt) != nullptr) return;
  const Notification notification{outgoing.which, family_.geometry.family, outgoing.source.size(),
                                  outgoing.total * part_bytes_, outgoing.crc};
  lane.channel.send(MessageKind::kNotify, ranks::to_bytes(notification));
  ++stats_.notifications;
}

void Prefill::drop_connection(Lane& lane) {
  lane.connecting = false;
  if (lane.comm != nullptr) {
    context_.registrations.detach(lane.comm, lane.mhandles);
    context_.plugin->close_send(lane.comm);  // the result is ignored: the connection has failed already
    lane.comm = nullptr;
  }
  lane.sent.clear();
  for (auto outgoing = lane.outgoing.begin(); outgoing != lane.outgoing.end();) {
    if (outgoing->staged) {
      ++outgoing;
      continue;
    }
    lane.reservations->release(outgoing->destination);
    outgoing = lane.outgoing.erase(outgoing);
  }
}

void Prefill::fail(Lane& lane, const std::string& why) {
  stats_.add_error("prefill rank " + std::to_string(context_.index) + ", connection to decode rank " +
                   std::to_string(lane.decode) + ": " + why);
  drop_connection(lane);
  Writer writer;
  writer.put(lane.generation).put_text(why);
  lane.channel.send(MessageKind::kFailed, writer.bytes());
}

const Request& Prefill::request_of(std::uint32_t id) const {
  if (id >= context_.requests.size() || context_.requests[id].prefill != context_.index) {
    throw Failure("request " + std::to_string(id) + " does not belong to prefill rank " +
                  std::to_string(context_.index));
  }
  return context_.requests[id];
}

std::size_t Prefill::part_offset(const Lane& lane) const {
  return family_.geometry.part_offset(lane.decode % family_.geometry.tp_ratio);
}

std::byte* Prefill::piece(const Lane& lane, const Outgoing& outgoing, std::size_t message) const {
  const MessagePosition place = position_of(family_.geometry, outgoing.source.size(), message);
  return reinterpret_cast<std::byte*>(family_.address(place.layer, place.entry, outgoing.source[place.position]) +
                                      part_offset(lane));
}

std::uint32_t Prefill::crc_of(const Lane& lane, const Outgoing& outgoing) const {
  Crc32 crc;
  std::vector<std::byte> block(part_bytes_);
  for (std::size_t message = 0; message < outgoing.total; ++message) {
    context_.storage.download(block.data(), piece(lane, outgoing, message), part_bytes_);
    crc.add(block.data(), part_bytes_);
  }
  return crc.value();
}

void Prefill::check() {
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

void Prefill::close() {
  for (Lane& lane : lanes_) drop_connection(lane);
}

}  // namespace verbatim::kv
