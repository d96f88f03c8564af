#include "wire/handshake.h"

#include <cstring>
#include <utility>

#include "wire/codec.h"
#include "wire/limits.h"

namespace verbatim::wire {
namespace {

constexpr std::uint32_t kMessageMagic = 0x48544256;  // "VBTH"
constexpr std::size_t kVersionOffset = 4;
constexpr std::size_t kBodyBytesOffset = 8;
constexpr std::uint8_t kMaxMtu = 5;  // IBV_MTU_4096

Writer begin(MessageType type) {
  Writer writer;
  writer.put(kMessageMagic);
  writer.put(kProtocolVersion);
  writer.put(type);
  writer.put(std::uint32_t{0});
  return writer;
}

std::vector<std::uint8_t> finish(Writer writer) {
  writer.overwrite(kBodyBytesOffset, static_cast<std::uint32_t>(writer.size() - kHeaderBytes));
  return std::move(writer).take();
}

void put_device(Writer& writer, const HelloDevice& device) {
  writer.put(device.guid);
  writer.put(device.gid);
  writer.put(device.control_rkey);
  writer.put(device.max_message_bytes);
  writer.put(device.lid);
  writer.put(device.link_layer);
  writer.put(device.mtu);
  writer.put(device.port);
  writer.put(device.gid_index);
  writer.put(device.responder_reads);
  writer.put_text(device.name);
}

HelloDevice get_device(Reader& reader) {
  HelloDevice device;
  device.guid = reader.get<std::uint64_t>();
  device.gid = reader.get<std::array<std::uint8_t, 16>>();
  device.control_rkey = reader.get<std::uint32_t>();
  device.max_message_bytes = reader.get<std::uint32_t>();
  device.lid = reader.get<std::uint16_t>();
  device.link_layer = reader.get<std::uint8_t>();
  device.mtu = reader.get<std::uint8_t>();
  device.port = reader.get<std::uint8_t>();
  device.gid_index = reader.get<std::uint8_t>();
  device.responder_reads = reader.get<std::uint8_t>();
  device.name = reader.get_text();
  return device;
}

void put_qp(Writer& writer, const HelloQp& qp) {
  writer.put(qp.number);
  writer.put(qp.device);
  writer.put(static_cast<std::uint8_t>(qp.has_ece ? 1 : 0));
  if (qp.has_ece) writer.put(qp.ece);
}

HelloQp get_qp(Reader& reader) {
  HelloQp qp;
  qp.number = reader.get<std::uint32_t>();
  qp.device = reader.get<std::uint8_t>();
  qp.has_ece = reader.get<std::uint8_t>() != 0;
  if (qp.has_ece) qp.ece = reader.get<std::array<std::uint32_t, 3>>();
  return qp;
}

bool is_valid(const Hello& hello) {
  if (hello.traffic_class < -1 || hello.traffic_class > 255) return false;
  for (const HelloDevice& device : hello.devices) {
    if (device.max_message_bytes == 0 || device.mtu == 0 || device.mtu > kMaxMtu) return false;
  }
  for (const HelloQp& qp : hello.qps) {
    if (qp.device >= hello.devices.size()) return false;
  }
  return true;
}

}  // namespace

std::vector<std::uint8_t> encode_hello(MessageType type, const Hello& hello) {
  Writer writer = begin(type);
  writer.put(hello.secret);
  writer.put(hello.identity.host_id);
  writer.put(hello.identity.process_id);
  writer.put(hello.identity.device_guid);
  writer.put(hello.identity.context);
  writer.put(hello.identity.listen);
  writer.put(hello.attempt);
  writer.put(hello.control_address);
  writer.put(hello.capabilities);
  writer.put(hello.traffic_class);
  writer.put_text(hello.host);
  writer.put(hello.pid);
  writer.put(static_cast<std::uint8_t>(hello.devices.size()));
  for (const HelloDevice& device : hello.devices) put_device(writer, device);
  writer.put(static_cast<std::uint8_t>(hello.qps.size()));
  for (const HelloQp& qp : hello.qps) put_qp(writer, qp);
  return finish(std::move(writer));
}

std::vector<std::uint8_t> encode_ready() {
  return finish(begin(MessageType::kReady));
}

std::vector<std::uint8_t> encode_reject(const std::string& reason, std::uint16_t version) {
  Writer writer = begin(MessageType::kReject);
  writer.put_text(reason);
  std::vector<std::uint8_t> message = finish(std::move(writer));
  std::memcpy(message.data() + kVersionOffset, &version, sizeof version);
  return message;
}

void put_header(std::span<std::uint8_t, kHeaderBytes> bytes, MessageType type, std::uint32_t body_bytes) {
  std::memcpy(bytes.data(), &kMessageMagic, sizeof kMessageMagic);
  std::memcpy(bytes.data() + kVersionOffset, &kProtocolVersion, sizeof kProtocolVersion);
  std::memcpy(bytes.data() + 6, &type, sizeof type);
  std::memcpy(bytes.data() + kBodyBytesOffset, &body_bytes, sizeof body_bytes);
}

std::uint16_t protocol_version(std::span<const std::uint8_t, kHeaderBytes> bytes) {
  Reader reader(bytes);
  static_cast<void>(reader.get<std::uint32_t>());  // the magic
  return reader.get<std::uint16_t>();
}

Result<Header> decode_header(std::span<const std::uint8_t, kHeaderBytes> bytes) {
  Reader reader(bytes);
  Header header{};
  header.magic = reader.get<std::uint32_t>();
  header.version = reader.get<std::uint16_t>();
  header.type = reader.get<MessageType>();
  header.body_bytes = reader.get<std::uint32_t>();
  if (header.magic != kMessageMagic || header.body_bytes > kMaxBodyBytes) {
    return Error{ErrorKind::kArgument, 0, "message of another protocol"};
  }
  if (header.version != kProtocolVersion) return Error{ErrorKind::kUsage, 0, "message of another protocol version"};
  return header;
}

Result<Hello> decode_hello(std::span<const std::uint8_t> body) {
  Reader reader(body);
  Hello hello;
  hello.secret = reader.get<Secret>();
  hello.identity.host_id = reader.get<std::uint64_t>();
  hello.identity.process_id = reader.get<std::uint64_t>();
  hello.identity.device_guid = reader.get<std::uint64_t>();
  hello.identity.context = reader.get<std::uint32_t>();
  hello.identity.listen = reader.get<std::uint32_t>();
  hello.attempt = reader.get<std::uint64_t>();
  hello.control_address = reader.get<std::uint64_t>();
  hello.capabilities = reader.get<std::uint32_t>();
  hello.traffic_class = reader.get<std::int16_t>();
  hello.host = reader.get_text();
  hello.pid = reader.get<std::uint32_t>();
  const std::size_t devices = reader.get<std::uint8_t>();
  if (devices == 0 || devices > kMaxDevices) return Error{ErrorKind::kArgument, 0, "hello with impossible devices"};
  for (std::size_t i = 0; i < devices; ++i) hello.devices.push_back(get_device(reader));
  const std::size_t qps = reader.get<std::uint8_t>();
  if (qps == 0 || qps > kMaxQps) return Error{ErrorKind::kArgument, 0, "hello with impossible QPs"};
  for (std::size_t i = 0; i < qps; ++i) hello.qps.push_back(get_qp(reader));
  if (!reader.complete() || !is_valid(hello)) return Error{ErrorKind::kArgument, 0, "damaged hello"};
  return hello;
}

std::string decode_reject(std::span<const std::uint8_t> body) {
  Reader reader(body);
  return reader.get_text();
}

}  // namespace verbatim::wire
