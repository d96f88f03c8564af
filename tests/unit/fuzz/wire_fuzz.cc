// Fuzzes the decoders of data from sockets and of NCCL's handle. The first byte of an input selects the decoder.
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include "base/unique_fd.h"
#include "channel/message_stream.h"
#include "fuzz.h"
#include "wire/handle.h"
#include "wire/handshake.h"
#include "wire/limits.h"
#include "wire/notice.h"

namespace {

namespace wire = verbatim::wire;
using fuzz::require;

bool printable(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

void decode_handle(std::span<const std::uint8_t> input) {
  std::array<std::uint8_t, wire::kHandleBytes> bytes{};
  wire::encode_handle({}, bytes);
  constexpr std::size_t kMagicAndVersion = 6;
  const bool keeps_magic = !input.empty() && (input[0] & 1) != 0;
  const std::size_t from = keeps_magic ? kMagicAndVersion : 0;
  std::copy_n(input.begin(), std::min(input.size(), bytes.size() - from), bytes.begin() + from);
  const verbatim::Result<wire::Handle> handle = wire::decode_handle(bytes);
  if (!handle) return;
  require(handle->device_count >= 1 && handle->device_count <= wire::kMaxDevices, "a handle has 1 to 8 devices");
  require(handle->address.ss_family == AF_INET || handle->address.ss_family == AF_INET6, "a handle has an IP address");
  std::array<std::uint8_t, wire::kHandleBytes> again{};
  wire::encode_handle(*handle, again);
  const verbatim::Result<wire::Handle> same = wire::decode_handle(again);
  require(same && same->secret == handle->secret && same->device_count == handle->device_count,
          "a decoded handle can be encoded and decoded again");
}

void decode_hello(std::span<const std::uint8_t> body) {
  const verbatim::Result<wire::Hello> hello = wire::decode_hello(body);
  if (!hello) return;
  require(!hello->devices.empty() && hello->devices.size() <= wire::kMaxDevices, "a hello has 1 to 8 devices");
  require(!hello->qps.empty() && hello->qps.size() <= wire::kMaxQps, "a hello has 1 to 128 QPs");
  require(hello->traffic_class >= -1 && hello->traffic_class <= 255, "a traffic class is a byte or -1");
  require(printable(hello->host), "a host name is printable");
  for (const wire::HelloDevice& device : hello->devices) {
    require(device.mtu >= 1 && device.mtu <= 5 && device.max_message_bytes > 0 && device.speed_mbps > 0,
            "a device has a valid MTU and message size");
    require(printable(device.name), "a device name is printable");
  }
  for (const wire::HelloQp& qp : hello->qps) require(qp.device < hello->devices.size(), "a QP's device exists");
  const std::vector<std::uint8_t> again = wire::encode_hello(wire::MessageType::kConnect, *hello);
  require(again.size() <= wire::kHeaderBytes + wire::kMaxBodyBytes, "an encoded hello fits a message");
  require(!!wire::decode_hello(std::span(again).subspan(wire::kHeaderBytes)),
          "a decoded hello can be encoded and decoded again");
}

void decode_notices(std::span<const std::uint8_t> body) {
  std::vector<std::uint8_t> copy(body.begin(), body.end());
  if (const auto failed = wire::decode_failure(copy)) {
    require(failed->kind <= verbatim::ErrorKind::kRemote, "an error kind is known");
    require(printable(failed->text), "a peer's error text is printable");
  }
  static_cast<void>(wire::decode<std::uint32_t>(body));
  if (const auto status = wire::decode_status_reply(body))
    require(status->sends <= 1, "an end is a sender or a receiver");
  if (const auto connection = wire::decode_resume(body)) {
    const wire::Notice again = wire::Notice::resume(*connection, {});
    require(wire::decode_resume(again.bytes().subspan(wire::kHeaderBytes)) == connection,
            "a decoded identity can be encoded and decoded again");
  }
  static_cast<void>(wire::decode<wire::Ack>(body));
  static_cast<void>(wire::decode<wire::LaneDown>(body));
  if (const auto report = wire::decode_lane_fenced(body)) {
    require(report->qps <= wire::kMaxLaneQps, "a report has at most the QPs of a lane");
    const wire::Notice again = wire::Notice::lane_fenced(*report);
    const auto decoded = wire::decode_lane_fenced(again.bytes().subspan(wire::kHeaderBytes));
    require(decoded && decoded->qps == report->qps, "a decoded report can be encoded and decoded again");
  }
  if (const auto address = wire::decode_lane_address(body)) {
    require(address->qps <= wire::kMaxLaneQps, "an address has at most the QPs of a lane");
    const wire::Notice again = wire::Notice::lane_address(wire::MessageType::kLaneOffer, *address);
    const auto decoded = wire::decode_lane_address(again.bytes().subspan(wire::kHeaderBytes));
    require(decoded && decoded->qps == address->qps, "a decoded address can be encoded and decoded again");
  }
}

// Receives messages that arrive in pieces, as a socket may deliver them.
void receive_all(std::span<const std::uint8_t> stream) {
  int ends[2];
  require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0, "socketpair");
  const verbatim::UniqueFd reader(ends[0]);
  verbatim::UniqueFd writer(ends[1]);
  verbatim::MessageStream channel;
  fuzz::Input input(stream);
  const auto receive = [&] {
    while (true) {
      const auto message = channel.receive(reader);
      if (!message) return false;
      if (!*message) return true;
      require((*message)->body.size() <= wire::kMaxNoticeBody, "a notice is within its size limit");
      decode_notices((*message)->body);
    }
  };
  while (!input.rest().empty()) {
    const std::span<const std::uint8_t> piece = input.take(1 + input.get<std::uint8_t>() % 64);
    if (!piece.empty()) static_cast<void>(!::write(writer.get(), piece.data(), piece.size()));
    if (!receive()) return;
  }
  writer.reset();
  require(!receive(), "the end of the file is reported");
}

// Receives message bodies from the input, each with a valid header, and all but one with the MAC that is expected: the
// stream has a zero key.
void receive_messages(std::span<const std::uint8_t> bodies) {
  fuzz::Input input(bodies);
  std::vector<std::uint8_t> stream;
  const auto without_mac = input.get<std::uint8_t>();
  for (std::uint64_t sequence = 0; !input.rest().empty(); ++sequence) {
    const auto type = static_cast<wire::MessageType>(input.get<std::uint8_t>() % 17);
    const std::span<const std::uint8_t> body = input.take(input.get<std::uint8_t>());
    std::vector<std::uint8_t> message(wire::kHeaderBytes);
    message.insert(message.end(), body.begin(), body.end());
    message = wire::with_header(type, std::move(message));
    if (sequence != without_mac) message = wire::with_mac(std::move(message), {}, wire::message_context(1, sequence));
    for (const std::uint8_t byte : message) {
      if (stream.size() % 65 == 0) stream.push_back(63);  // selects a piece of 64 bytes
      stream.push_back(byte);
    }
  }
  receive_all(stream);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::span<const std::uint8_t> input(data + 1, size - 1);
  switch (data[0] % 7) {
    case 0:
      decode_handle(input);
      break;
    case 1:
      if (input.size() >= wire::kHeaderBytes) {
        const auto header = wire::decode_header(input.first<wire::kHeaderBytes>());
        require(!header || header->body_bytes <= wire::kMaxBodyBytes, "a message length is limited");
      }
      break;
    case 2:
      decode_hello(input);
      break;
    case 3:
      require(printable(wire::decode_reject(input)), "a peer's reason is printable");
      break;
    case 4:
      decode_notices(input);
      break;
    case 5:
      receive_all(input);
      break;
    default:
      receive_messages(input);
      break;
  }
  return 0;
}
