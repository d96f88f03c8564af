#include "verbatim-kv/channel.h"

#include <utility>

namespace verbatim::kv {
namespace {

ranks::Failure malformed() {
  return ranks::Failure("malformed message between the prefill and the decode side");
}

}  // namespace

Writer& Writer::put_list(const BlockList& list) {
  return put(list.family)
      .put(list.geometry_hash)
      .put(list.piece_bytes)
      .put(list.block_len)
      .put_all(list.bases)
      .put_all(list.blocks);
}

BlockList Reader::get_list() {
  BlockList list;
  list.family = get<FamilyId>();
  list.geometry_hash = get<std::uint64_t>();
  list.piece_bytes = get<std::uint64_t>();
  list.block_len = get<std::uint64_t>();
  list.bases = get_all<std::uint64_t>();
  list.blocks = get_all<std::uint32_t>();
  return list;
}

std::size_t Reader::count(std::size_t size) {
  const auto count = get<std::uint64_t>();
  if (count > rest_.size() / size) throw malformed();
  return count;
}

void Reader::read(void* into, std::size_t bytes) {
  if (rest_.size() < bytes) throw malformed();
  if (bytes > 0) std::memcpy(into, rest_.data(), bytes);
  rest_.remove_prefix(bytes);
}

void put_family(Writer& writer, const Family& family, const IntervalSet& memory) {
  const Geometry& geometry = family.geometry;
  writer.put(geometry.family).put_text(geometry.name).put_text(geometry.dtype);
  for (const std::uint32_t number :
       {geometry.layers, geometry.entries, geometry.block_tokens, geometry.heads, geometry.tp_ratio}) {
    writer.put(number);
  }
  writer.put(geometry.prefill_bytes).put(family.num_blocks).put(family.block_len);
  writer.put_all(family.bases).put_all(memory.all());
}

FamilyDescription get_family(Reader& reader) {
  FamilyDescription description;
  Family& family = description.family;
  Geometry& geometry = family.geometry;
  geometry.family = reader.get<FamilyId>();
  geometry.name = reader.get_text();
  geometry.dtype = reader.get_text();
  for (std::uint32_t* const number :
       {&geometry.layers, &geometry.entries, &geometry.block_tokens, &geometry.heads, &geometry.tp_ratio}) {
    *number = reader.get<std::uint32_t>();
  }
  geometry.prefill_bytes = reader.get<std::size_t>();
  if (geometry.tp_ratio == 0) throw malformed();
  family.num_blocks = reader.get<std::size_t>();
  family.block_len = reader.get<std::size_t>();
  family.bases = reader.get_all<std::uint64_t>();
  for (const Interval& interval : reader.get_all<Interval>()) {
    description.memory.add(interval.begin, interval.end - interval.begin);
  }
  return description;
}

void Channel::send(MessageKind kind, std::string_view payload) const {
  if (!ranks::send_frame(socket_.get(), static_cast<ranks::FrameKind>(kind), payload)) {
    throw ranks::Failure("the peer closed its control connection");
  }
}

void Channel::receive() {
  if (reader_.read(socket_.get()) == ranks::FrameReader::State::kClosed) closed_ = true;
}

std::optional<Channel::Message> Channel::next() {
  auto frame = reader_.next();
  if (frame) return Message{static_cast<MessageKind>(frame->kind), std::move(frame->payload)};
  if (closed_) throw ranks::Failure("the peer closed its control connection");
  return std::nullopt;
}

}  // namespace verbatim::kv
