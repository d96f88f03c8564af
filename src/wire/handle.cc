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
    return writer.fields(kIpv6, v6.sin6_port, v6.sin6_scope_id, v6.sin6_addr);
  }
  sockaddr_in v4{};
  std::memcpy(&v4, &address, sizeof v4);
  writer.fields(kIpv4, v4.sin_port, v4.sin_addr);
}

bool get_address(Reader& reader, sockaddr_storage& address) {
  const auto family = reader.get<std::uint8_t>();
  if (family == kIpv6) {
    sockaddr_in6 v6{};
    v6.sin6_family = AF_INET6;
    reader.fields(v6.sin6_port, v6.sin6_scope_id, v6.sin6_addr);
    std::memcpy(&address, &v6, sizeof v6);
    return true;
  }
  if (family != kIpv4) return false;
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  reader.fields(v4.sin_port, v4.sin_addr);
  std::memcpy(&address, &v4, sizeof v4);
  return true;
}

// The order of the fields between the magic and the address, for a Writer or a Reader.
template <typename Codec, typename AnyHandle>
void code_handle(Codec& codec, AnyHandle& handle) {
  codec.fields(handle.version, handle.device_count, handle.secret, handle.listener);
}

}  // namespace

void encode_handle(const Handle& handle, std::span<std::uint8_t, kHandleBytes> bytes) {
  Writer writer(kHandleMagic);
  code_handle(writer, handle);
  put_address(writer, handle.address);
  const std::vector<std::uint8_t> fields = std::move(writer).take();
  std::fill(bytes.begin(), bytes.end(), std::uint8_t{0});
  std::copy(fields.begin(), fields.end(), bytes.begin());
}

Result<Handle> decode_handle(std::span<const std::uint8_t, kHandleBytes> bytes) {
  Reader reader(bytes);
  if (reader.get<std::uint32_t>() != kHandleMagic) return Error{ErrorKind::kArgument, 0, "handle of another transport"};
  Handle handle;
  code_handle(reader, handle);
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
