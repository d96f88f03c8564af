#include "verbatim-kv/decode.h"

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

// After this number of failures in a row without a served request no new connection is made.
constexpr std::uint32_t kMaxFailures = 3;

}  // namespace

Decode::Decode(const RankContext& context, const Family& family, std::vector<Channel> channels, std::size_t reserved,
               std::size_t group)
    : context_(context),
      family_(family),
      own_(family, context.memory),
      contents_(context.storage, family_),
      faults_(context.options.faults, family.geometry.family),
      part_bytes_(family.geometry.part_bytes()),
      engine_(context.index / family.geometry.tp_ratio),
      part_(context.index % family.geometry.tp_ratio),
      group_(group),
      pool_(decode_pool(context.options, family.geometry.family, family.num_blocks, reserved, context.index)),
      reservations_(family.num_blocks),
      lost_(family.num_blocks) {
  for (const std::uint64_t base : family_.bases) {
    intervals_.push_back(context_.memory.find(base, family_.layer_bytes()).value());
  }
  lanes_.resize(channels.size());
  for (std::size_t i = 0; i < channels.size(); ++i) {
    lanes_[i].prefill = static_cast<std::uint32_t>(i);
    lanes_[i].channel = std::move(channels[i]);
  }
  next_ = next_request(0);
  if (!context_.options.check) return;
  std::vector<std::uint32_t> all(family_.num_blocks);
  std::iota(all.begin(), all.end(), 0U);
  contents_.set_canaries(all);
  contents_.forget_time();
}

void Decode::run() {
  PollBackoff backoff;
  for (Lane& lane : lanes_) open(lane);
  const auto opening = [this] {
    return std::any_of(lanes_.begin(), lanes_.end(), [](auto& lane) { return lane.state == LaneState::kOpening; });
  };
  bool begun = false;
  while (next_ < context_.requests.size() || !in_flight_.empty() || !begun) {
    bool progressed = false;
    for (Lane& lane : lanes_) {
      if (backoff.should_poll_sockets()) progressed = handle_messages(lane) || progressed;
      progressed = poll_accept(lane) || progressed;
      progressed = post(lane) || progressed;
      progressed = complete(lane) || progressed;
    }
    if (!begun && !opening()) {
      begun = true;
      begin_ns_ = timed_from_ns_ = monotonic_ns();
    }
    if (begun) progressed = start_requests() || progressed;
    if (backoff.is_idle()) progressed = check_clocks() || progressed;
    backoff.after_round(progressed);
  }
  const std::uint64_t end_ns = monotonic_ns();
  stats_.elapsed_ns = end_ns - begin_ns_;
  stats_.timed_ns = end_ns - timed_from_ns_;
  for (const Lane& lane : lanes_) lane.channel.send(MessageKind::kFinished, {});
}

// Creates a listen comm for the next generation of the connection and sends its handle to the prefill rank.
void Decode::open(Lane& lane) {
  lane.state = LaneState::kOpening;
  lane.opened = false;
  lane.opening_ns = monotonic_ns();
  std::array<char, nccl::kNetHandleMaxBytes> handle{};
  ranks::require(context_.plugin->listen(context_.plugin.context(), context_.device, handle.data(), &lane.listen_comm),
                 "listen");
  Writer writer;
  writer.put(lane.generation).put(handle);
  Family described = family_;
  if (faults_.has(FaultKind::kGeometry)) ++described.geometry.block_tokens;
  put_family(writer, described, context_.memory);
  lane.channel.send(MessageKind::kOpen, writer.bytes());
}

bool Decode::poll_accept(Lane& lane) {
  if (lane.state != LaneState::kOpening) return false;
  if (lane.comm == nullptr) {
    const nccl::Result result = context_.plugin->accept(lane.listen_comm, &lane.comm);
    if (result != nccl::Result::kSuccess) {
      lane.comm = nullptr;
      fail(lane, std::string("accept: ") + netapi::result_name(result));
      return true;
    }
    if (lane.comm == nullptr) return false;
    lane.mhandles = context_.registrations.attach(lane.comm);
  }
  if (!lane.opened) return false;
  ranks::require(context_.plugin->close_listen(lane.listen_comm), "closeListen");
  lane.listen_comm = nullptr;
  lane.state = LaneState::kReady;
  lane.progress_ns = monotonic_ns();
  ++stats_.connections;
  announce_waiting(lane);
  return true;
}

void Decode::announce_waiting(Lane& lane) {
  for (auto incoming = in_flight_.begin(); incoming != in_flight_.end();) {
    Incoming& next = *incoming++;  // announce() may remove it
    if (next.lane == &lane && !next.announced) announce(next);
  }
}

bool Decode::handle_messages(Lane& lane) {
  bool progressed = false;
  lane.channel.receive();
  while (const auto message = lane.channel.next()) {
    progressed = true;
    handle(lane, *message);
  }
  return progressed;
}

void Decode::handle(Lane& lane, const Channel::Message& message) {
  Reader reader(message.payload);
  switch (message.kind) {
    case MessageKind::kOpened:
      if (reader.get<std::uint32_t>() != lane.generation) return;
      lane.peer = get_family(reader);
      lane.peer_family.emplace(lane.peer.family, lane.peer.memory);
      if (const auto rejection = validate_family(*lane.peer_family)) throw Failure(rejection->text);
      lane.opened = true;
      return;
    case MessageKind::kMismatch:
      throw Failure(std::string(rejection_name(RejectionCode::kGeometryMismatch)) + ": " + message.payload);
    case MessageKind::kAccept:
      return accept(lane, reader);
    case MessageKind::kReject: {
      Incoming* const incoming = find(lane, reader.get<Attempt>());
      if (incoming == nullptr) return;
      const auto code = reader.get<RejectionCode>();
      return reject(*incoming, nullptr, {code, reader.get_text()});
    }
    case MessageKind::kStaged:
      return receive_staged(lane, reader);
    case MessageKind::kNotify: {
      const auto notification = reader.get<Notification>();
      Incoming* const incoming = find(lane, notification.which);
      if (incoming == nullptr) return;
      incoming->notification = notification;
      incoming->progress_ns = monotonic_ns();
      return finish_if_complete(*incoming);
    }
    case MessageKind::kFailed:
      if (reader.get<std::uint32_t>() == lane.generation) fail(lane, reader.get_text());
      return;
    default:
      throw Failure("the prefill side sent an unknown message");
  }
}

bool Decode::start_requests() {
  bool progressed = false;
  while (next_ < context_.requests.size() && in_flight_.size() < context_.options.concurrency) {
    const Request& request = context_.requests[next_];
    if (!timed_ && context_.options.is_timed(request)) {
      if (!in_flight_.empty()) return progressed;
      timed_ = true;
      timed_from_ns_ = monotonic_ns();
    }
    const std::uint32_t tokens = family_.geometry.block_tokens;
    const std::size_t first = request.hit_blocks(tokens);
    const std::size_t count = request.blocks(tokens) - first;
    std::vector<std::uint32_t> blocks = pool_.take(count);
    if (blocks.empty()) {
      if (in_flight_.empty())
        throw Failure("too few blocks are left: the others may still be written by failed transfers");
      break;
    }
    const std::uint64_t now = monotonic_ns();
    const std::size_t total = count * family_.geometry.layers * family_.geometry.entries;
    Lane& lane = lanes_[request.prefill];
    Incoming& incoming = in_flight_.emplace_back(Incoming{.request = &request,
                                                          .lane = &lane,
                                                          .first = first,
                                                          .blocks = std::move(blocks),
                                                          .total = total,
                                                          .begin_ns = now,
                                                          .progress_ns = now});
    next_ = next_request(next_ + 1);
    if (lane.state == LaneState::kDead) {
      fall_back(incoming, false);
    } else {
      announce(incoming);
    }
    progressed = true;
  }
  return progressed;
}

// Sends the destination blocks to the prefill side. Returns false when the connection is not ready or the request was
// rejected.
bool Decode::announce(Incoming& incoming) {
  Lane& lane = *incoming.lane;
  const bool staged = incoming.stage == FallbackStage::kStaged;
  if (!staged && lane.state != LaneState::kReady) return false;
  BlockList list = make_list(family_, incoming.blocks);
  const auto corrupt_if = [&](bool in_flight) {
    const Fault* const fault = faults_.find(FaultKind::kInvalidList, incoming.request->id, incoming.attempt);
    if (fault != nullptr && fault->in_flight == in_flight) corrupt_block(list, fault->code, family_.num_blocks);
  };
  corrupt_if(false);
  if (const auto rejection = validate(incoming, list)) {
    reject(incoming, "decode", *rejection);
    return false;
  }
  corrupt_if(true);
  incoming.announced = true;
  incoming.progress_ns = monotonic_ns();
  Writer writer;
  writer.put(incoming.which()).put(lane.generation).put(staged).put_list(list);
  lane.channel.send(MessageKind::kAnnounce, writer.bytes());
  return true;
}

std::optional<Rejection> Decode::validate(Incoming& incoming, const BlockList& list) {
  const std::uint64_t begin = monotonic_ns();
  auto rejection = validate_list(own_, list, incoming.blocks.size());
  if (!rejection && !incoming.reserved) {
    rejection = reservations_.reserve(incoming.request->id, list.blocks);
    incoming.reserved = !rejection.has_value();
  }
  stats_.validation_ns += monotonic_ns() - begin;
  ++stats_.validations;
  return rejection;
}

// The prefill side has accepted the request and sent its source blocks. They are validated before any receive is
// posted.
void Decode::accept(Lane& lane, Reader reader) {
  Incoming* const incoming = find(lane, reader.get<Attempt>());
  const auto generation = reader.get<std::uint32_t>();
  if (incoming == nullptr || (incoming->stage != FallbackStage::kStaged && generation != lane.generation)) return;
  incoming->first_tag = reader.get<std::uint32_t>();
  const BlockList source = reader.get_list();
  const BlockList destination = make_list(family_, incoming->blocks);
  const std::uint64_t begin = monotonic_ns();
  auto rejection = validate_list(*lane.peer_family, source, incoming->blocks.size());
  if (!rejection) rejection = validate_pair(source, destination);
  stats_.validation_ns += monotonic_ns() - begin;
  if (rejection) {
    Writer writer;
    writer.put(incoming->which()).put(rejection->code).put_text(rejection->text);
    lane.channel.send(MessageKind::kReject, writer.bytes());
    return reject(*incoming, "decode", *rejection);
  }
  if (context_.options.check) {
    std::string where;
    if (incoming->attempt == 0) {
      const std::uint64_t wrong = contents_.check_canaries(incoming->blocks, where);
      stats_.wrong_bytes += wrong;
      if (wrong > 0) stats_.add_error(where);
    }
    contents_.poison(share_of(*incoming));
  }
  incoming->accepted = true;
  incoming->progress_ns = monotonic_ns();
  if (incoming->stage != FallbackStage::kStaged) lane.accepted.push_back(incoming);
}

void Decode::receive_staged(Lane& lane, Reader reader) {
  Incoming* const incoming = find(lane, reader.get<Attempt>());
  if (incoming == nullptr || !incoming->accepted || incoming->stage != FallbackStage::kStaged) return;
  const auto from = reader.get<std::uint64_t>();
  const std::string_view bytes = reader.rest();
  const std::size_t count = bytes.size() / part_bytes_;
  if (from != incoming->received || count > incoming->total - from)
    throw Failure("a part of a staged copy is out of order");
  for (std::size_t i = 0; i < count; ++i) {
    context_.storage.upload(piece(*incoming, from + i), bytes.data() + i * part_bytes_, part_bytes_);
  }
  incoming->received += count;
  incoming->progress_ns = monotonic_ns();
  finish_if_complete(*incoming);
}

bool Decode::post(Lane& lane) {
  if (lane.state != LaneState::kReady) return false;
  bool progressed = false;
  for (Incoming* const incoming : lane.accepted) {
    while (incoming->posted < incoming->total) {
      if (lane.groups.size() == static_cast<std::size_t>(context_.options.depth)) return progressed;
      const std::size_t members = std::min(group_, incoming->total - incoming->posted);
      void* data[netapi::kMaxGroup];
      void* mhandles[netapi::kMaxGroup];
      std::size_t sizes[netapi::kMaxGroup];
      int tags[netapi::kMaxGroup];
      for (std::size_t i = 0; i < members; ++i) {
        const std::size_t message = incoming->posted + i;
        data[i] = piece(*incoming, message);
        mhandles[i] = mhandle(lane, *incoming, message);
        sizes[i] = part_bytes_;
        tags[i] = static_cast<int>((incoming->first_tag + message) & kTagMask);
      }
      void* request = nullptr;
      const nccl::Result result =
          context_.plugin->irecv(lane.comm, static_cast<int>(members), data, sizes, tags, mhandles, &request);
      if (result != nccl::Result::kSuccess) {
        fail(lane, std::string("irecv: ") + netapi::result_name(result));
        return true;
      }
      if (request == nullptr) return progressed;
      lane.groups.push_back({request, incoming, incoming->posted, members});
      incoming->posted += members;
      ++stats_.groups[members];
      progressed = true;
    }
  }
  return progressed;
}

bool Decode::complete(Lane& lane) {
  bool progressed = complete_receives(lane);
  while (lane.flushing > 0) {
    const Group group = lane.groups.front();
    int done = 1;
    if (group.request != nullptr) {
      const nccl::Result result = context_.plugin->test(group.request, &done, nullptr);
      if (result != nccl::Result::kSuccess) {
        fail(lane, std::string("test of a flush: ") + netapi::result_name(result));
        return true;
      }
    }
    if (done == 0) break;
    progressed = true;
    lane.groups.pop_front();
    --lane.flushing;
    Incoming& incoming = *group.owner;
    incoming.received += group.members;
    incoming.progress_ns = lane.progress_ns = monotonic_ns();
    stats_.received_messages += group.members;
    stats_.received_bytes += group.members * part_bytes_;
    if (incoming.received == incoming.total) std::erase(lane.accepted, &incoming);
    finish_if_complete(incoming);
  }
  return progressed;
}

// Tests receives and starts the flushes of those that are done.
bool Decode::complete_receives(Lane& lane) {
  bool progressed = false;
  while (lane.flushing < lane.groups.size()) {
    Group& group = lane.groups[lane.flushing];
    int done = 0;
    int sizes[netapi::kMaxGroup];
    const nccl::Result result = context_.plugin->test(group.request, &done, sizes);
    if (result != nccl::Result::kSuccess) {
      fail(lane, std::string("test of a receive: ") + netapi::result_name(result));
      return true;
    }
    if (done == 0) break;
    progressed = true;
    for (std::size_t i = 0; i < group.members; ++i) {
      if (sizes[i] == static_cast<int>(part_bytes_)) continue;
      throw Failure("test reported " + std::to_string(sizes[i]) + " bytes instead of " + std::to_string(part_bytes_) +
                    " for a block of request " + std::to_string(group.owner->request->id));
    }
    if (const nccl::Result flushed = start_flush(lane, group, sizes); flushed != nccl::Result::kSuccess) {
      fail(lane, std::string("iflush: ") + netapi::result_name(flushed));
      return true;
    }
    ++lane.flushing;
  }
  return progressed;
}

// Replaces the group's request by that of the flush which a receive into GPU memory needs before its data may be read.
nccl::Result Decode::start_flush(const Lane& lane, Group& group, int* sizes) {
  group.request = nullptr;
  if (context_.storage.is_host()) return nccl::Result::kSuccess;
  void* data[netapi::kMaxGroup];
  void* mhandles[netapi::kMaxGroup];
  for (std::size_t i = 0; i < group.members; ++i) {
    data[i] = piece(*group.owner, group.first + i);
    mhandles[i] = mhandle(lane, *group.owner, group.first + i);
  }
  return context_.plugin->iflush(lane.comm, static_cast<int>(group.members), data, sizes, mhandles, &group.request);
}

// A request is served only when all data and the prefill side's notification have arrived.
void Decode::finish_if_complete(Incoming& incoming) {
  if (incoming.received < incoming.total || !incoming.notification) return;
  const Notification& notification = *incoming.notification;
  const std::uint64_t bytes = incoming.total * part_bytes_;
  if (notification.family != family_.geometry.family || notification.blocks != incoming.blocks.size() ||
      notification.bytes != bytes) {
    throw Failure("request " + std::to_string(incoming.request->id) + ": a notification of " +
                  std::to_string(notification.blocks) + " blocks and " + std::to_string(notification.bytes) +
                  " bytes instead of " + std::to_string(incoming.blocks.size()) + " and " + std::to_string(bytes));
  }
  serve(incoming);
}

void Decode::serve(Incoming& incoming) {
  if (context_.options.is_timed(*incoming.request)) {
    stats_.latencies_ns.push_back(monotonic_ns() - incoming.begin_ns);
    stats_.timed_messages += incoming.total;
    stats_.timed_bytes += incoming.total * part_bytes_;
  }
  ++stats_.served;
  stats_.served_bytes += incoming.total * part_bytes_;
  if (incoming.stage != FallbackStage::kStaged) incoming.lane->failures = 0;
  if (context_.options.check) {
    Crc32 crc;
    contents_.timed([&] {
      std::vector<std::byte> block(part_bytes_);
      for (std::size_t message = 0; message < incoming.total; ++message) {
        context_.storage.download(block.data(), piece(incoming, message), part_bytes_);
        crc.add(block.data(), part_bytes_);
      }
    });
    stats_.crc_sum += crc.value();
    const std::string id = "request " + std::to_string(incoming.request->id);
    if (crc.value() != incoming.notification->crc) {
      ++stats_.crc_errors;
      stats_.add_error(id + ": the CRC of the data differs from that in the notification");
    }
    std::string where;
    const std::uint64_t wrong = contents_.check(share_of(incoming), where);
    stats_.wrong_bytes += wrong;
    if (wrong > 0) stats_.add_error(where);
    contents_.set_canaries(incoming.blocks);
  }
  reservations_.release(incoming.blocks);
  pool_.give_back(incoming.blocks);
  finish(incoming);
}

// `found_by` is null when the prefill side has rejected the request, because it counts the rejection itself.
void Decode::reject(Incoming& incoming, const char* found_by, const Rejection& rejection) {
  if (found_by != nullptr) stats_.rejected.push_back({incoming.request->id, found_by, rejection.code, rejection.text});
  stats_.rejection_times.push_back({incoming.request->id, monotonic_ns() - incoming.begin_ns});
  if (incoming.reserved) reservations_.release(incoming.blocks);
  if (incoming.attempt > 0 && context_.options.check) contents_.set_canaries(incoming.blocks);
  pool_.give_back(incoming.blocks);
  finish(incoming);
}

// The last fallback stage. The blocks are not freed, because a failed transfer may still write to them.
void Decode::give_up_request(Incoming& incoming) {
  for (const std::uint32_t block : incoming.blocks) lost_[block] = true;
  stats_.lost.push_back({incoming.request->id, incoming.first, incoming.blocks});
  finish(incoming);
}

void Decode::finish(Incoming& incoming) {
  if (incoming.failed_ns > 0) stats_.fallback_ns = std::max(stats_.fallback_ns, monotonic_ns() - incoming.failed_ns);
  incoming.lane->channel.send(MessageKind::kDone, ranks::to_bytes(incoming.request->id));
  context_.finished.fetch_add(1, std::memory_order_relaxed);
  in_flight_.remove_if([&](const Incoming& other) { return &other == &incoming; });
}

bool Decode::check_clocks() {
  const std::uint64_t now = monotonic_ns();
  const std::uint64_t request_ns = context_.options.request_timeout_ms * kNanosecondsPerMillisecond;
  const std::uint64_t stage_ns = context_.options.stage_timeout_ms * kNanosecondsPerMillisecond;
  for (Lane& lane : lanes_) {
    if (lane.state != LaneState::kOpening || now < lane.opening_ns + stage_ns) continue;
    fail(lane, "the connection was not established in time");
    return true;
  }
  for (Incoming& incoming : in_flight_) {
    if (!incoming.announced) continue;
    Lane& lane = *incoming.lane;
    if (incoming.stage == FallbackStage::kStaged) {
      if (now < incoming.progress_ns + stage_ns) continue;
      stats_.add_error("request " + std::to_string(incoming.request->id) + ": no progress of the staged copy in time");
      fall_back(incoming, false);
      return true;
    }
    // Requests of a lane are transferred one after the other. A request that waits for others has not failed, but one
    // that lacks only its notification has.
    const bool only_notification = incoming.received == incoming.total;
    const std::uint64_t progress_ns =
        only_notification ? incoming.progress_ns : std::max(incoming.progress_ns, lane.progress_ns);
    if (now < progress_ns + request_ns) continue;
    fail(lane, "request " + std::to_string(incoming.request->id) + ": no " +
                   (only_notification ? "notification" : "progress") + " in time");
    return true;
  }
  return false;
}

void Decode::drop_connection(Lane& lane) {
  if (lane.comm != nullptr) {
    context_.registrations.detach(lane.comm, lane.mhandles);
    context_.plugin->close_recv(lane.comm);  // the result is ignored: the connection has failed already
    lane.comm = nullptr;
  }
  if (lane.listen_comm != nullptr) {
    context_.plugin->close_listen(lane.listen_comm);
    lane.listen_comm = nullptr;
  }
  lane.groups.clear();
  lane.flushing = 0;
  lane.accepted.clear();
}

void Decode::fail(Lane& lane, const std::string& why) {
  stats_.add_error("decode rank " + std::to_string(context_.index) + ", connection from prefill rank " +
                   std::to_string(lane.prefill) + ": " + why);
  const bool connection = lane.state == LaneState::kReady && ++lane.failures < kMaxFailures;
  drop_connection(lane);
  if (connection) {
    ++lane.generation;
    open(lane);
  } else {
    lane.state = LaneState::kDead;
    Writer writer;
    writer.put(lane.generation).put_text(why);
    lane.channel.send(MessageKind::kFailed, writer.bytes());
  }
  // The prefill side receives the end of the connection before any new announcement of these requests.
  for (auto next = in_flight_.begin(); next != in_flight_.end();) {
    Incoming& incoming = *next++;
    if (incoming.lane != &lane || incoming.stage == FallbackStage::kStaged) continue;
    if (incoming.announced || !connection) fall_back(incoming, connection);
  }
}

// Starts the next fallback stage. Data that was received in the failed stage does not count.
void Decode::fall_back(Incoming& incoming, bool connection) {
  if (incoming.failed_ns == 0) incoming.failed_ns = monotonic_ns();
  incoming.stage = next_stage(incoming.stage, connection);
  ++stats_.fallbacks[static_cast<int>(incoming.stage)];
  if (incoming.stage == FallbackStage::kRecompute) return give_up_request(incoming);
  ++incoming.attempt;
  incoming.announced = incoming.accepted = false;
  incoming.posted = incoming.received = 0;
  incoming.notification.reset();
  if (incoming.stage == FallbackStage::kStaged) announce(incoming);
}

Decode::Incoming* Decode::find(const Lane& lane, const Attempt& which) {
  const auto found = std::find_if(in_flight_.begin(), in_flight_.end(), [&](const Incoming& incoming) {
    return incoming.lane == &lane && incoming.which() == which;
  });
  return found == in_flight_.end() ? nullptr : &*found;
}

BlockShare Decode::share_of(const Incoming& incoming) const {
  return {incoming.request->id, incoming.first, family_.geometry.part_offset(part_), incoming.blocks};
}

std::byte* Decode::piece(const Incoming& incoming, std::size_t message) const {
  const MessagePosition place = position_of(family_.geometry, incoming.blocks.size(), message);
  return reinterpret_cast<std::byte*>(family_.address(place.layer, place.entry, incoming.blocks[place.position]));
}

void* Decode::mhandle(const Lane& lane, const Incoming& incoming, std::size_t message) const {
  return lane.mhandles[intervals_[position_of(family_.geometry, incoming.blocks.size(), message).layer]];
}

// The first request from index `from` on that belongs to this rank.
std::size_t Decode::next_request(std::size_t from) const {
  if (context_.options.idle == family_.geometry.family) return context_.requests.size();
  while (from < context_.requests.size() && context_.requests[from].engine != engine_) ++from;
  return from;
}

void Decode::check() {
  if (!context_.options.check) return;
  stats_.check_ns = contents_.spent_ns();
  std::vector<std::uint32_t> free;
  for (std::uint32_t block = 0; block < family_.num_blocks; ++block) {
    if (!lost_[block]) free.push_back(block);
  }
  std::string where;
  const std::uint64_t wrong = contents_.check_canaries(free, where);
  stats_.wrong_bytes += wrong;
  if (wrong > 0) stats_.add_error("decode rank " + std::to_string(context_.index) + ": " + where);
}

void Decode::close() {
  for (Lane& lane : lanes_) drop_connection(lane);
}

}  // namespace verbatim::kv
