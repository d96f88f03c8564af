#include "wire/rma.h"

#include <cstring>
#include <utility>

#include "wire/codec.h"
#include "wire/limits.h"

namespace verbatim::wire {
namespace {

constexpr std::uint8_t kMaxRoceVersion = 2;

template <typename Codec, typename Hello>
void code_rma_hello(Codec& codec, Hello& hello) {
  codec.fields(hello.listen, hello.attempt, hello.key, hello.ranks, hello.rank, hello.pid, hello.host);
}

template <typename Codec, typename Exchange>
void code_rma_exchange(Codec& codec, Exchange& exchange) {
  codec.fields(exchange.call, exchange.outcome, exchange.sequence);
}

template <typename Codec, typename Lane>
void code_rma_lane(Codec& codec, Lane& lane) {
  codec.fields(lane.step, lane.set, lane.lane, lane.round, lane.lid, lane.gid);
}

void put_list(Writer& writer, const std::vector<std::uint32_t>& values) {
  writer.put(static_cast<std::uint32_t>(values.size()));
  for (const std::uint32_t value : values) writer.put(value);
}

// False: there are more than `most`, or fewer than announced.
bool get_list(Reader& reader, std::size_t most, std::vector<std::uint32_t>& values) {
  const std::size_t count = reader.get<std::uint32_t>();
  if (!reader.complete() || count > most) return false;
  values.resize(count);
  for (std::uint32_t& value : values) reader.fields(value);
  return reader.complete();
}

Error damaged(const char* what) {
  return {ErrorKind::kArgument, 0, what};
}

}  // namespace

std::vector<std::uint8_t> encode_rma_hello(MessageType type, const RmaHello& hello) {
  Writer writer(Header{});
  code_rma_hello(writer, hello);
  put_addresses(writer, hello.addresses);
  return with_header(type, std::move(writer).take());
}

std::vector<std::uint8_t> encode_rma_exchange(const RmaExchange& exchange) {
  Writer writer(Header{});
  code_rma_exchange(writer, exchange);
  for (const std::uint8_t byte : exchange.body) writer.put(byte);
  return with_header(MessageType::kExchange, std::move(writer).take());
}

std::vector<std::uint8_t> encode_rma_lane(const RmaLane& lane) {
  Writer writer(Header{});
  code_rma_lane(writer, lane);
  put_list(writer, lane.psns);
  return with_header(MessageType::kRmaLane, std::move(writer).take());
}

std::vector<std::uint8_t> encode_rma_offer(const RmaOffer& offer) {
  Writer writer(offer.contexts, offer.rank_stride, offer.psn, static_cast<std::uint8_t>(offer.lanes.size()));
  for (const RmaOfferedLane& lane : offer.lanes) {
    writer.put(lane.roce_version);
    code_device(writer, lane.device);
    for (const HelloQp& qp : lane.qps) code_qp(writer, qp);
  }
  return std::move(writer).take();
}

std::vector<std::uint8_t> encode_rma_registration(const RmaRegistration& registration) {
  Writer writer(registration.address, registration.bytes);
  put_list(writer, registration.rkeys);
  return std::move(writer).take();
}

std::vector<std::uint8_t> encode_rma_text(const std::string& text) {
  return Writer(text).take();
}

Result<RmaHello> decode_rma_hello(std::span<const std::uint8_t> body) {
  Reader reader(body);
  RmaHello hello;
  code_rma_hello(reader, hello);
  const bool valid = get_addresses(reader, hello.addresses) && hello.rank < hello.ranks;
  if (!reader.complete() || !valid) return damaged("damaged hello");
  return hello;
}

Result<RmaExchange> decode_rma_exchange(std::span<const std::uint8_t> body) {
  Reader reader(body);
  RmaExchange exchange;
  code_rma_exchange(reader, exchange);
  constexpr std::size_t kFixedBytes = sizeof exchange.call + sizeof exchange.outcome + sizeof exchange.sequence;
  const bool known = exchange.call >= RmaCall::kOffer && exchange.call <= RmaCall::kConnected &&
                     exchange.outcome <= RmaOutcome::kRepeats;
  if (!reader.complete() || !known) return damaged("damaged message of a collective call");
  const std::span<const std::uint8_t> rest = body.subspan(kFixedBytes);
  exchange.body.assign(rest.begin(), rest.end());
  return exchange;
}

Result<RmaOffer> decode_rma_offer(std::span<const std::uint8_t> body) {
  Reader reader(body);
  RmaOffer offer;
  reader.fields(offer.contexts, offer.rank_stride, offer.psn);
  const std::size_t lanes = reader.get<std::uint8_t>();
  if (!reader.complete() || lanes > kMaxRmaPorts || offer.contexts > kMaxRmaContexts || offer.psn >> 24 != 0) {
    return damaged("damaged offer of QPs");
  }
  offer.lanes.resize(lanes);
  for (RmaOfferedLane& lane : offer.lanes) {
    reader.fields(lane.roce_version);
    code_device(reader, lane.device);
    lane.qps.resize(offer.contexts);
    for (HelloQp& qp : lane.qps) code_qp(reader, qp);
    const bool valid = lane.device.is_valid() && lane.roce_version <= kMaxRoceVersion;
    if (!reader.complete() || !valid) return damaged("damaged offer of QPs");
  }
  return offer;
}

Result<RmaLane> decode_rma_lane(std::span<const std::uint8_t> body) {
  Reader reader(body);
  RmaLane lane;
  code_rma_lane(reader, lane);
  if (!get_list(reader, kMaxRmaContexts, lane.psns) || lane.step > RmaLaneStep::kConnected) {
    return damaged("damaged message of a lane");
  }
  return lane;
}

Result<RmaRegistration> decode_rma_registration(std::span<const std::uint8_t> body) {
  Reader reader(body);
  RmaRegistration registration;
  reader.fields(registration.address, registration.bytes);
  if (!get_list(reader, kMaxRmaPorts, registration.rkeys) || registration.rkeys.empty() ||
      registration.address + registration.bytes < registration.address) {
    return damaged("damaged registration");
  }
  return registration;
}

std::string decode_rma_text(std::span<const std::uint8_t> body) {
  return Reader(body).get<std::string>();
}

}  // namespace verbatim::wire
