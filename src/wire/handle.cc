#include "wire/handle.h"

#include <netinet/in.h>

#include <algorithm>
#include <cstring>

#include "wire/codec.h"
#include "wire/limits.h"

namespace verbatim::wire {
namespace {

constexpr std::uint32_t kHandleMagic = 0x4d544256;  // "VBTM"
constexpr std::size_t kTokenOffset = kHandleBytes - sizeof(std::uint64_t);
constexpr std::uint8_t kIpv4 = 4;
constexpr std::uint8_t kIpv6 = 6;

void put_address(Writer& writer, const sockaddr_storage& address) {
  if (address.ss_family == AF_INET6) {
    sockaddr_in6 v6{};
    std::memcpy(&v6, &address, sizeof v6);
    writer.put(kIpv6);
    writer.put(v6.sin6_port);
    writer.put(v6.sin6_scope_id);
    writer.put(v6.sin6_addr);
    return;
  }
  sockaddr_in v4{};
  std::memcpy(&v4, &address, sizeof v4);
  writer.put(kIpv4);
  writer.put(v4.sin_port);
  writer.put(v4.sin_addr);
}

bool get_address(Reader& reader, sockaddr_storage& address) {
  const auto family = reader.get<std::uint8_t>();
  if (family == kIpv6) {
    sockaddr_in6 v6{};
    v6.sin6_family = AF_INET6;
    v6.sin6_port = reader.get<in_port_t>();
    v6.sin6_scope_id = reader.get<std::uint32_t>();
    v6.sin6_addr = reader.get<in6_addr>();
    std::memcpy(&address, &v6, sizeof v6);
    return true;
  }
  if (family != kIpv4) return false;
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = reader.get<in_port_t>();
  v4.sin_addr = reader.get<in_addr>();
  std::memcpy(&address, &v4, sizeof v4);
  return true;
}

}  // namespace

void encode_handle(const Handle& handle, std::span<std::uint8_t, kHandleBytes> bytes) {
  Writer writer;
  writer.put(kHandleMagic);
  writer.put(handle.version);
  writer.put(handle.device_count);
  writer.put(handle.secret);
  writer.put(handle.listener.host_id);
  writer.put(handle.listener.process_id);
  writer.put(handle.listener.device_guid);
  writer.put(handle.listener.context);
  writer.put(handle.listener.listen);
  put_address(writer, handle.address);
  const std::vector<std::uint8_t> fields = std::move(writer).take();
  std::fill(bytes.begin(), bytes.end(), std::uint8_t{0});
  std::copy(fields.begin(), fields.end(), bytes.begin());
}

Result<Handle> decode_handle(std::span<const std::uint8_t, kHandleBytes> bytes) {
  Reader reader(bytes);
  if (reader.get<std::uint32_t>() != kHandleMagic) return Error{ErrorKind::kArgument, 0, "handle of another transport"};
  Handle handle;
  handle.version = reader.get<std::uint16_t>();
  handle.device_count = reader.get<std::uint8_t>();
  handle.secret = reader.get<Secret>();
  handle.listener.host_id = reader.get<std::uint64_t>();
  handle.listener.process_id = reader.get<std::uint64_t>();
  handle.listener.device_guid = reader.get<std::uint64_t>();
  handle.listener.context = reader.get<std::uint32_t>();
  handle.listener.listen = reader.get<std::uint32_t>();
  if (handle.version != kProtocolVersion) handle.device_count = 1;
  if (handle.device_count == 0 || handle.device_count > kMaxDevices || !get_address(reader, handle.address)) {
    return Error{ErrorKind::kArgument, 0, "damaged handle"};
  }
  return handle;
}

std::uint64_t load_connect_token(std::span<const std::uint8_t, kHandleBytes> bytes) {
  std::uint64_t token = 0;
  std::memcpy(&token, bytes.data() + kTokenOffset, sizeof token);
  return token;
}

void store_connect_token(std::span<std::uint8_t, kHandleBytes> bytes, std::uint64_t token) {
  std::memcpy(bytes.data() + kTokenOffset, &token, sizeof token);
}

}  // namespace verbatim::wire
