#include "wire/handshake.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "wire/codec.h"
#include "wire/limits.h"

namespace verbatim::wire {
namespace {

constexpr std::uint32_t kMessageMagic = 0x48544256;  // "VBTH"

// All fields before the addresses, for a Writer or a Reader.
template <typename Codec, typename AnyHello>
void code_hello(Codec& codec, AnyHello& hello) {
  codec.fields(hello.listen, hello.attempt, hello.key, hello.identity, hello.control_address, hello.capabilities,
               hello.traffic_class, hello.host, hello.pid);
}

bool is_valid(const Hello& hello) {
  if (hello.traffic_class < -1 || hello.traffic_class > 255) return false;
  if (!std::ranges::all_of(hello.devices, &HelloDevice::is_valid)) return false;
  for (const HelloQp& qp : hello.qps) {
    if (qp.device >= hello.devices.size()) return false;
  }
  return true;
}

}  // namespace

std::vector<std::uint8_t> encode_hello(MessageType type, const Hello& hello) {
  Writer writer(Header{});
  code_hello(writer, hello);
  put_addresses(writer, hello.addresses);
  writer.put(static_cast<std::uint8_t>(hello.devices.size()));
  for (const HelloDevice& device : hello.devices) code_device(writer, device);
  writer.put(static_cast<std::uint8_t>(hello.qps.size()));
  for (const HelloQp& qp : hello.qps) code_qp(writer, qp);
  return with_header(type, std::move(writer).take());
}

std::vector<std::uint8_t> encode_ready() {
  return with_header(MessageType::kReady, Writer(Header{}).take());
}

std::vector<std::uint8_t> encode_reject(const std::string& reason, std::uint16_t version) {
  return with_header(MessageType::kReject, Writer(Header{}, reason).take(), version);
}

void put_header(std::span<std::uint8_t, kHeaderBytes> bytes, MessageType type, std::size_t body_bytes,
                std::uint16_t version) {
  const Header header{kMessageMagic, version, type, static_cast<std::uint32_t>(body_bytes)};
  std::memcpy(bytes.data(), &header, sizeof header);
}

void put_body_bytes(std::span<std::uint8_t, kHeaderBytes> header, std::size_t body_bytes) {
  const auto bytes = static_cast<std::uint32_t>(body_bytes);
  std::memcpy(header.data() + offsetof(Header, body_bytes), &bytes, sizeof bytes);
}

std::vector<std::uint8_t> with_header(MessageType type, std::vector<std::uint8_t> message, std::uint16_t version) {
  put_header(std::span(message).first<kHeaderBytes>(), type, message.size() - kHeaderBytes, version);
  return message;
}

std::uint16_t protocol_version(std::span<const std::uint8_t, kHeaderBytes> bytes) {
  return Reader(bytes).get<Header>().version;
}

Result<Header> decode_header(std::span<const std::uint8_t, kHeaderBytes> bytes, std::size_t max_body) {
  const Header header = Reader(bytes).get<Header>();
  if (header.magic != kMessageMagic || header.body_bytes > max_body) {
    return Error{ErrorKind::kArgument, 0, "message of another protocol"};
  }
  if (header.version != kProtocolVersion) return Error{ErrorKind::kUsage, 0, "message of another protocol version"};
  return header;
}

ConnectionId decode_connection_id(std::span<const std::uint8_t> body) {
  return Reader(body).get<ConnectionId>();
}

Result<Hello> decode_hello(std::span<const std::uint8_t> body) {
  Reader reader(body);
  Hello hello;
  code_hello(reader, hello);
  if (!get_addresses(reader, hello.addresses)) {
    return Error{ErrorKind::kArgument, 0, "hello with impossible addresses"};
  }
  const std::size_t devices = reader.get<std::uint8_t>();
  if (devices == 0 || devices > kMaxDevices) return Error{ErrorKind::kArgument, 0, "hello with impossible devices"};
  hello.devices.resize(devices);
  for (HelloDevice& device : hello.devices) code_device(reader, device);
  const std::size_t qps = reader.get<std::uint8_t>();
  if (qps == 0 || qps > kMaxQps) return Error{ErrorKind::kArgument, 0, "hello with impossible QPs"};
  hello.qps.resize(qps);
  for (HelloQp& qp : hello.qps) code_qp(reader, qp);
  if (!reader.complete() || !is_valid(hello)) return Error{ErrorKind::kArgument, 0, "damaged hello"};
  return hello;
}

std::string decode_reject(std::span<const std::uint8_t> body) {
  return Reader(body).get<std::string>();
}

}  // namespace verbatim::wire
