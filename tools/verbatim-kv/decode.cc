#include "verbatim-kv/decode.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/clock.h"
#include "netapi/log.h"
#include "verbatim-kv/poll_backoff.h"
#include "workload/kv/crc32.h"

namespace verbatim::kv {
namespace {

// Connections in a row over which nothing came: then no other is tried.
constexpr std::uint32_t kMaxFailures = 3;

}  // namespace

Decode::Decode(const RankContext& world, const Family& family, std::vector<Channel> channels, std::size_t reserved,
               std::size_t group)
    : context_(world),
      family_(family),
      own_(family, world.memory),
      contents_(family_),
      faults_(world.options.faults, family.geometry.family),
      part_bytes_(family.geometry.part_bytes()),
      engine_(world.index / family.geometry.tp_ratio),
      part_(world.index % family.geometry.tp_ratio),
      group_(group),
      pool_(family.num_blocks, reserved, world.options.fragmentation,
            world.options.requests.seed * 104'729 + std::uint64_t{world.index} * 2 +
                static_cast<std::uint64_t>(family.geometry.family)),
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
}

void Decode::run() {
  PollBackoff idle;
  for (Lane& lane : lanes_) open(lane);
  const auto opening = [this] {
    return std::any_of(lanes_.begin(), lanes_.end(), [](auto& lane) { return lane.state == LaneState::kOpening; });
  };
  bool begun = false;
  while (next_ < context_.requests.size() || !in_flight_.empty() || !begun) {
    bool moved = false;
    for (Lane& lane : lanes_) {
      if (idle.should_poll_sockets()) moved = take_messages(lane) || moved;
      moved = poll_accept(lane) || moved;
      moved = post(lane) || moved;
      moved = complete(lane) || moved;
    }
    if (!begun && !opening()) {
      begun = true;
      begin_ns_ = timed_from_ns_ = monotonic_ns();
    }
    if (begun) moved = start_requests() || moved;
    if (idle.is_idle()) moved = check_clocks() || moved;
    idle.after_round(moved);
  }
  const std::uint64_t end_ns = monotonic_ns();
  stats_.elapsed_ns = end_ns - begin_ns_;
  stats_.timed_ns = end_ns - timed_from_ns_;
  for (const Lane& lane : lanes_) lane.channel.send(MessageKind::kBye, {});
}

// Invites the prefill rank to a connection of the next generation.
void Decode::open(Lane& lane) {
  lane.state = LaneState::kOpening;
  lane.opened = false;
  lane.opening_ns = monotonic_ns();
  std::array<char, nccl::kNetHandleMaxBytes> handle{};
  ranks::require(context_.plugin->listen(context_.plugin.context(), context_.device, handle.data(), &lane.listen_comm),
                 "listen");
  Writer writer;
  writer.put(lane.generation).put(handle);
  Family introduced = family_;
  if (faults_.has(FaultKind::kGeometry)) ++introduced.geometry.block_tokens;
  put_family(writer, introduced, context_.memory);
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
  lane.moved_ns = monotonic_ns();
  ++stats_.connections;
  announce_waiting(lane);
  return true;
}

void Decode::announce_waiting(Lane& lane) {
  for (auto incoming = in_flight_.begin(); incoming != in_flight_.end();) {
    Incoming& next = *incoming++;  // announce() may end it
    if (next.lane == &lane && !next.announced) announce(next);
  }
}

bool Decode::take_messages(Lane& lane) {
  bool moved = false;
  lane.channel.receive();
  while (const auto message = lane.channel.next()) {
    moved = true;
    take(lane, *message);
  }
  return moved;
}

void Decode::take(Lane& lane, const Channel::Message& message) {
  Reader reader(message.payload);
  switch (message.kind) {
    case MessageKind::kOpened:
      if (reader.get<std::uint32_t>() != lane.generation) return;
      lane.peer = get_family(reader);
      lane.peers.emplace(lane.peer.family, lane.peer.memory);
      if (const auto refusal = validate_family(*lane.peers)) throw Failure(refusal->text);
      lane.opened = true;
      return;
    case MessageKind::kMismatch:
      throw Failure(std::string(rejection_name(RejectionCode::kGeometryMismatch)) + ": " + message.payload);
    case MessageKind::kAccept:
      return accept(lane, reader);
    case MessageKind::kRefuse: {
      Incoming* const incoming = find(lane, reader.get<Attempt>());
      if (incoming == nullptr) return;
      const auto code = reader.get<RejectionCode>();
      return reject(*incoming, nullptr, {code, reader.get_text()});
    }
    case MessageKind::kStaged:
      return take_staged(lane, reader);
    case MessageKind::kNotify: {
      const auto notification = reader.get<Notification>();
      Incoming* const incoming = find(lane, notification.which);
      if (incoming == nullptr) return;
      incoming->notification = notification;
      incoming->moved_ns = monotonic_ns();
      return finish_if_complete(*incoming);
    }
    case MessageKind::kFailed:
      if (reader.get<std::uint32_t>() == lane.generation) fail(lane, reader.get_text());
      return;
    default:
      throw Failure("the prefill side talks nonsense");
  }
}

bool Decode::start_requests() {
  bool moved = false;
  while (next_ < context_.requests.size() && in_flight_.size() < context_.options.concurrency) {
    const Request& request = context_.requests[next_];
    if (!timed_ && context_.options.is_timed(request)) {
      if (!in_flight_.empty()) return moved;
      timed_ = true;
      timed_from_ns_ = monotonic_ns();
    }
    const std::uint32_t tokens = family_.geometry.block_tokens;
    const std::size_t first = request.hit_blocks(tokens);
    const std::size_t count = request.blocks(tokens) - first;
    std::vector<std::uint32_t> blocks = pool_.take(count);
    if (blocks.empty()) {
      if (in_flight_.empty()) throw Failure("too few blocks are left: too many were lost");
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
                                                          .moved_ns = now});
    next_ = next_request(next_ + 1);
    if (lane.state == LaneState::kDead) {
      fall_back(incoming, false);
    } else {
      announce(incoming);
    }
    moved = true;
  }
  return moved;
}

// Tells the prefill side where the request's blocks belong, once there is a way for them. False: not yet, or never.
bool Decode::announce(Incoming& incoming) {
  Lane& lane = *incoming.lane;
  const bool staged = incoming.stage == FallbackStage::kStaged;
  if (!staged && lane.state != LaneState::kReady) return false;
  BlockList list = make_list(family_, incoming.blocks);
  const auto spoil_if = [&](bool in_flight) {
    const Fault* const fault = faults_.find(FaultKind::kInvalidList, incoming.request->id, incoming.attempt);
    if (fault != nullptr && fault->in_flight == in_flight) corrupt_block(list, fault->code, family_.num_blocks);
  };
  spoil_if(false);
  if (const auto refusal = validate(incoming, list)) {
    reject(incoming, "decode", *refusal);
    return false;
  }
  spoil_if(true);
  incoming.announced = true;
  incoming.moved_ns = monotonic_ns();
  Writer writer;
  writer.put(incoming.which()).put(lane.generation).put(staged).put_list(list);
  lane.channel.send(MessageKind::kAnnounce, writer.bytes());
  return true;
}

std::optional<Rejection> Decode::validate(Incoming& incoming, const BlockList& list) {
  const std::uint64_t begin = monotonic_ns();
  auto refusal = validate_list(own_, list, incoming.blocks.size());
  if (!refusal && !incoming.claimed) {
    refusal = reservations_.reserve(incoming.request->id, list.blocks);
    incoming.claimed = !refusal.has_value();
  }
  stats_.validation_ns += monotonic_ns() - begin;
  ++stats_.validations;
  return refusal;
}

// The prefill side has agreed, and says where the data comes from; that is looked at, too, before anything is posted.
void Decode::accept(Lane& lane, Reader reader) {
  Incoming* const incoming = find(lane, reader.get<Attempt>());
  const auto generation = reader.get<std::uint32_t>();
  if (incoming == nullptr || (incoming->stage != FallbackStage::kStaged && generation != lane.generation)) return;
  incoming->first_tag = reader.get<std::uint32_t>();
  const BlockList source = reader.get_list();
  const BlockList destination = make_list(family_, incoming->blocks);
  const std::uint64_t begin = monotonic_ns();
  auto refusal = validate_list(*lane.peers, source, incoming->blocks.size());
  if (!refusal) refusal = validate_pair(source, destination);
  stats_.validation_ns += monotonic_ns() - begin;
  if (refusal) {
    Writer writer;
    writer.put(incoming->which()).put(refusal->code).put_text(refusal->text);
    lane.channel.send(MessageKind::kRefuse, writer.bytes());
    return reject(*incoming, "decode", *refusal);
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
  incoming->moved_ns = monotonic_ns();
  if (incoming->stage != FallbackStage::kStaged) lane.accepted.push_back(incoming);
}

void Decode::take_staged(Lane& lane, Reader reader) {
  Incoming* const incoming = find(lane, reader.get<Attempt>());
  if (incoming == nullptr || !incoming->accepted || incoming->stage != FallbackStage::kStaged) return;
  const auto from = reader.get<std::uint64_t>();
  const std::string_view bytes = reader.rest();
  const std::size_t count = bytes.size() / part_bytes_;
  if (from != incoming->received || count > incoming->total - from) throw Failure("a staged copy out of order");
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(piece(*incoming, from + i), bytes.data() + i * part_bytes_, part_bytes_);
  }
  incoming->received += count;
  incoming->moved_ns = monotonic_ns();
  finish_if_complete(*incoming);
}

bool Decode::post(Lane& lane) {
  if (lane.state != LaneState::kReady) return false;
  bool moved = false;
  for (Incoming* const incoming : lane.accepted) {
    while (incoming->posted < incoming->total) {
      if (lane.groups.size() == static_cast<std::size_t>(context_.options.depth)) return moved;
      const std::size_t members = std::min(group_, incoming->total - incoming->posted);
      void* data[netapi::kMaxGroup];
      void* mhandles[netapi::kMaxGroup];
      std::size_t sizes[netapi::kMaxGroup];
      int tags[netapi::kMaxGroup];
      for (std::size_t i = 0; i < members; ++i) {
        const std::size_t message = incoming->posted + i;
        data[i] = piece(*incoming, message);
        mhandles[i] = lane.mhandles[intervals_[place_of(family_.geometry, incoming->blocks.size(), message).layer]];
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
      if (request == nullptr) return moved;
      lane.groups.push_back({request, incoming, members});
      incoming->posted += members;
      ++stats_.groups[members];
      moved = true;
    }
  }
  return moved;
}

bool Decode::complete(Lane& lane) {
  bool moved = false;
  while (!lane.groups.empty()) {
    const Group group = lane.groups.front();
    int done = 0;
    int sizes[netapi::kMaxGroup];
    const nccl::Result result = context_.plugin->test(group.request, &done, sizes);
    if (result != nccl::Result::kSuccess) {
      fail(lane, std::string("test of a receive: ") + netapi::result_name(result));
      return true;
    }
    if (done == 0) break;
    moved = true;
    lane.groups.pop_front();
    for (std::size_t i = 0; i < group.members; ++i) {
      if (sizes[i] == static_cast<int>(part_bytes_)) continue;
      throw Failure("test reported " + std::to_string(sizes[i]) + " bytes in place of " + std::to_string(part_bytes_) +
                    " for a block of request " + std::to_string(group.owner->request->id));
    }
    Incoming& incoming = *group.owner;
    incoming.received += group.members;
    incoming.moved_ns = lane.moved_ns = monotonic_ns();
    stats_.received_messages += group.members;
    stats_.received_bytes += group.members * part_bytes_;
    if (incoming.received == incoming.total) std::erase(lane.accepted, &incoming);
    finish_if_complete(incoming);
  }
  return moved;
}

// The data is there and the prefill side has said so: only then is a request served.
void Decode::finish_if_complete(Incoming& incoming) {
  if (incoming.received < incoming.total || !incoming.notification) return;
  const Notification& notification = *incoming.notification;
  const std::uint64_t bytes = incoming.total * part_bytes_;
  if (notification.family != family_.geometry.family || notification.blocks != incoming.blocks.size() ||
      notification.bytes != bytes) {
    throw Failure("request " + std::to_string(incoming.request->id) + ": a notification of " +
                  std::to_string(notification.blocks) + " blocks and " + std::to_string(notification.bytes) +
                  " bytes in place of " + std::to_string(incoming.blocks.size()) + " and " + std::to_string(bytes));
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
    for (std::size_t message = 0; message < incoming.total; ++message) crc.add(piece(incoming, message), part_bytes_);
    stats_.crc_sum += crc.value();
    const std::string id = "request " + std::to_string(incoming.request->id);
    if (crc.value() != incoming.notification->crc) {
      ++stats_.crc_errors;
      stats_.add_error(id + ": the CRC differs from that in the notification");
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

// `found_by` is null when the prefill side, which keeps count itself, has refused.
void Decode::reject(Incoming& incoming, const char* found_by, const Rejection& refusal) {
  if (found_by != nullptr) stats_.refused.push_back({incoming.request->id, found_by, refusal.code, refusal.text});
  if (incoming.claimed) reservations_.release(incoming.blocks);
  if (incoming.attempt > 0 && context_.options.check) contents_.set_canaries(incoming.blocks);
  pool_.give_back(incoming.blocks);
  finish(incoming);
}

// The end of the ladder. The blocks stay taken: nobody knows what may still be written there.
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
  const std::uint64_t rung_ns = context_.options.stage_timeout_ms * kNanosecondsPerMillisecond;
  for (Lane& lane : lanes_) {
    if (lane.state != LaneState::kOpening || now < lane.opening_ns + rung_ns) continue;
    fail(lane, "no connection in time");
    return true;
  }
  for (Incoming& incoming : in_flight_) {
    if (!incoming.announced) continue;
    Lane& lane = *incoming.lane;
    if (incoming.stage == FallbackStage::kStaged) {
      if (now < incoming.moved_ns + rung_ns) continue;
      stats_.add_error("request " + std::to_string(incoming.request->id) + ": no staged copy in time");
      fall_back(incoming, false);
      return true;
    }
    // Requests go one after the other: who waits for its turn has not failed. Who lacks only the notification has.
    const bool only_notification = incoming.received == incoming.total;
    const std::uint64_t moved_ns = only_notification ? incoming.moved_ns : std::max(incoming.moved_ns, lane.moved_ns);
    if (now < moved_ns + request_ns) continue;
    fail(lane, "request " + std::to_string(incoming.request->id) + ": no " +
                   (only_notification ? "notification" : "progress") + " in time");
    return true;
  }
  return false;
}

void Decode::drop_connection(Lane& lane) {
  if (lane.comm != nullptr) {
    context_.registrations.detach(lane.comm, lane.mhandles);
    context_.plugin->close_recv(lane.comm);  // may well complain: it is given up because something failed
    lane.comm = nullptr;
  }
  if (lane.listen_comm != nullptr) {
    context_.plugin->close_listen(lane.listen_comm);
    lane.listen_comm = nullptr;
  }
  lane.groups.clear();
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
  // The prefill side hears of the end of the connection before it hears of any of these again.
  for (auto next = in_flight_.begin(); next != in_flight_.end();) {
    Incoming& incoming = *next++;
    if (incoming.lane != &lane || incoming.stage == FallbackStage::kStaged) continue;
    if (incoming.announced || !connection) fall_back(incoming, connection);
  }
}

// To the next rung. What was received on this one does not count.
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
  const MessagePosition place = place_of(family_.geometry, incoming.blocks.size(), message);
  return reinterpret_cast<std::byte*>(family_.address(place.layer, place.entry, incoming.blocks[place.position]));
}

// The first from there on that is this rank's.
std::size_t Decode::next_request(std::size_t from) const {
  if (context_.options.idle == family_.geometry.family) return context_.requests.size();
  while (from < context_.requests.size() && context_.requests[from].engine != engine_) ++from;
  return from;
}

void Decode::check() {
  if (!context_.options.check) return;
  std::vector<std::uint32_t> nobodys;
  for (std::uint32_t block = 0; block < family_.num_blocks; ++block) {
    if (!lost_[block]) nobodys.push_back(block);
  }
  std::string where;
  const std::uint64_t wrong = contents_.check_canaries(nobodys, where);
  stats_.wrong_bytes += wrong;
  if (wrong > 0) stats_.add_error("decode rank " + std::to_string(context_.index) + ": " + where);
}

void Decode::close() {
  for (Lane& lane : lanes_) drop_connection(lane);
}

}  // namespace verbatim::kv
