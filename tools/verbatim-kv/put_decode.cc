#include "verbatim-kv/put_decode.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/clock.h"
#include "verbatim-kv/layout.h"
#include "workload/kv/crc32.h"

namespace verbatim::kv {

PutDecode::PutDecode(const PutContext& context, const Family& family, std::vector<Channel> channels,
                     std::size_t reserved, const std::uint64_t* words)
    : context_(context),
      family_(family),
      own_(family, context.memory),
      contents_(context.storage, family_),
      faults_(context.options.faults, family.geometry.family),
      words_(words),
      part_bytes_(family.geometry.part_bytes()),
      engine_(context.index / family.geometry.tp_ratio),
      part_(context.index % family.geometry.tp_ratio),
      pool_(decode_pool(context.options, family.geometry.family, family.num_blocks, reserved, context.index)),
      reservations_(family.num_blocks),
      channels_(std::move(channels)),
      expected_(signal_words(context.options)),
      free_slots_(context.options.concurrency) {
  std::iota(free_slots_.begin(), free_slots_.end(), 0U);
  next_ = next_request(0);
  stats_.connections = channels_.size();
  if (!context_.options.check) return;
  std::vector<std::uint32_t> all(family_.num_blocks);
  std::iota(all.begin(), all.end(), 0U);
  contents_.set_canaries(all);
  contents_.forget_time();
}

bool PutDecode::step(bool poll_sockets) {
  if (finished_) return false;
  if (begin_ns_ == 0) begin_ns_ = timed_from_ns_ = progress_ns_ = monotonic_ns();
  bool progressed = false;
  for (Channel& channel : channels_) {
    if (poll_sockets) progressed = handle_messages(channel) || progressed;
  }
  progressed = receive_signals() || progressed;
  progressed = start_requests() || progressed;
  if (progressed) {
    progress_ns_ = monotonic_ns();
  } else {
    check_clock();
  }
  if (next_ == context_.requests.size() && in_flight_.empty()) finish();
  return progressed;
}

void PutDecode::finish() {
  const std::uint64_t end_ns = monotonic_ns();
  stats_.elapsed_ns = end_ns - begin_ns_;
  stats_.timed_ns = end_ns - timed_from_ns_;
  for (const Channel& channel : channels_) channel.send(MessageKind::kFinished, {});
  finished_ = true;
}

bool PutDecode::handle_messages(Channel& channel) {
  bool progressed = false;
  channel.receive();
  while (const auto message = channel.next()) {
    progressed = true;
    if (message->kind != MessageKind::kReject) throw Failure("the prefill side sent an unknown message");
    Reader reader(message->payload);
    const auto id = reader.get<std::uint32_t>();
    const auto found = std::find_if(in_flight_.begin(), in_flight_.end(),
                                    [&](const Incoming& incoming) { return incoming.request->id == id; });
    if (found == in_flight_.end()) throw Failure("the prefill side rejected a request that is not in flight");
    const Incoming incoming = std::move(*found);
    in_flight_.erase(found);
    free_slots_.push_back(incoming.slot);
    reservations_.release(incoming.blocks);
    reject(incoming);
  }
  return progressed;
}

bool PutDecode::start_requests() {
  bool progressed = false;
  while (next_ < context_.requests.size() && !free_slots_.empty()) {
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
    if (blocks.empty()) break;  // until another request ends
    next_ = next_request(next_ + 1);
    const std::size_t total = count * family_.geometry.layers * family_.geometry.entries;
    announce({&request, free_slots_.back(), first, std::move(blocks), total, monotonic_ns()});
    progressed = true;
  }
  return progressed;
}

// Sends the destination blocks to the prefill side, unless this side rejects them. From then on puts may write to them.
void PutDecode::announce(Incoming incoming) {
  BlockList list = make_list(family_, incoming.blocks);
  const Fault* const fault = faults_.find(FaultKind::kInvalidList, incoming.request->id, 0);
  if (fault != nullptr && !fault->in_flight) corrupt_block(list, fault->code, family_.num_blocks);
  if (const auto rejection = validate(incoming, list)) {
    stats_.rejected.push_back({incoming.request->id, "decode", rejection->code, rejection->text});
    return reject(incoming);
  }
  if (fault != nullptr && fault->in_flight) corrupt_block(list, fault->code, family_.num_blocks);
  if (context_.options.check) {
    std::string where;
    add_wrong(contents_.check_canaries(incoming.blocks, where), where);
    contents_.poison(share_of(incoming));
  }
  free_slots_.pop_back();
  Writer writer;
  writer.put(incoming.request->id).put(incoming.slot).put_list(list);
  channels_[incoming.request->prefill].send(MessageKind::kAnnounce, writer.bytes());
  in_flight_.push_back(std::move(incoming));
}

std::optional<Rejection> PutDecode::validate(const Incoming& incoming, const BlockList& list) {
  const std::uint64_t begin = monotonic_ns();
  auto rejection = validate_list(own_, list, incoming.blocks.size());
  if (!rejection) rejection = reservations_.reserve(incoming.request->id, list.blocks);
  stats_.validation_ns += monotonic_ns() - begin;
  ++stats_.validations;
  return rejection;
}

// Any change of a request's word is its signal, because a word belongs to one request at a time.
bool PutDecode::receive_signals() {
  bool progressed = false;
  for (auto next = in_flight_.begin(); next != in_flight_.end();) {
    const auto incoming = next++;
    const std::size_t index = signal_word(incoming->slot);
    const std::uint64_t value = word(index);
    if (value == expected_[index]) continue;
    progressed = true;
    const std::uint64_t wanted = expected_[index] + signal_value(family_.geometry.family, incoming->request->id);
    if (value != wanted) {
      add_wrong(sizeof value, "the signal word of request " + std::to_string(incoming->request->id) + " is " +
                                  std::to_string(value) + " instead of " + std::to_string(wanted));
    }
    expected_[index] = value;
    serve(*incoming);
    reservations_.release(incoming->blocks);
    pool_.give_back(incoming->blocks);
    free_slots_.push_back(incoming->slot);
    end(*incoming);
    in_flight_.erase(incoming);
  }
  return progressed;
}

void PutDecode::serve(const Incoming& incoming) {
  const std::uint64_t bytes = incoming.total * part_bytes_;
  if (context_.options.is_timed(*incoming.request)) {
    stats_.latencies_ns.push_back(monotonic_ns() - incoming.begin_ns);
    stats_.timed_messages += incoming.total;
    stats_.timed_bytes += bytes;
  }
  ++stats_.served;
  stats_.served_bytes += bytes;
  stats_.received_messages += incoming.total;
  stats_.received_bytes += bytes;
  if (context_.options.check) check_content(incoming);
}

void PutDecode::check_content(const Incoming& incoming) {
  Crc32 crc;
  contents_.timed([&] {
    for (std::size_t message = 0; message < incoming.total; ++message) {
      const MessagePosition place = position_of(family_.geometry, incoming.blocks.size(), message);
      crc.add(reinterpret_cast<const std::byte*>(
                  family_.address(place.layer, place.entry, incoming.blocks[place.position])),
              part_bytes_);
    }
  });
  stats_.crc_sum += crc.value();
  std::string where;
  add_wrong(contents_.check(share_of(incoming), where), where);
  contents_.set_canaries(incoming.blocks);
}

// `incoming` is not in flight.
void PutDecode::reject(const Incoming& incoming) {
  stats_.rejection_times.push_back({incoming.request->id, monotonic_ns() - incoming.begin_ns});
  if (context_.options.check) contents_.set_canaries(incoming.blocks);
  pool_.give_back(incoming.blocks);
  end(incoming);
}

void PutDecode::end(const Incoming& incoming) {
  channels_[incoming.request->prefill].send(MessageKind::kDone, ranks::to_bytes(incoming.request->id));
  context_.finished.fetch_add(1, std::memory_order_relaxed);
}

void PutDecode::check_clock() const {
  if (monotonic_ns() < progress_ns_ + context_.options.request_timeout_ms * kNanosecondsPerMillisecond) return;
  const std::string which = in_flight_.empty()
                                ? "no request is in flight"
                                : "request " + std::to_string(in_flight_.front().request->id) + " of prefill rank " +
                                      std::to_string(in_flight_.front().request->prefill) + " has waited longest";
  throw Failure("family " + family_.geometry.name + ": no signal in time (--request-timeout-ms); " + which +
                ". Next: look at that rank; --plugin-log shows what the plugin says");
}

void PutDecode::add_wrong(std::uint64_t wrong, const std::string& what) {
  stats_.wrong_bytes += wrong;
  if (wrong > 0) stats_.add_error("decode rank " + std::to_string(context_.index) + ": " + what);
}

BlockShare PutDecode::share_of(const Incoming& incoming) const {
  return {incoming.request->id, incoming.first, family_.geometry.part_offset(part_), incoming.blocks};
}

// The first request from index `from` on that belongs to this rank.
std::size_t PutDecode::next_request(std::size_t from) const {
  while (from < context_.requests.size() && context_.requests[from].engine != engine_) ++from;
  return from;
}

void PutDecode::check() {
  for (std::size_t i = 0; i < expected_.size(); ++i) {
    if (word(i) == expected_[i]) continue;
    add_wrong(sizeof(std::uint64_t), "word " + std::to_string(i) + " of the signals is " + std::to_string(word(i)) +
                                         " instead of " + std::to_string(expected_[i]));
  }
  if (!context_.options.check) return;
  stats_.check_ns = contents_.spent_ns();
  std::vector<std::uint32_t> all(family_.num_blocks);
  std::iota(all.begin(), all.end(), 0U);
  std::string where;
  add_wrong(contents_.check_canaries(all, where), where);
}

}  // namespace verbatim::kv
