// Fuzzes the handshake with a hostile peer, over softverbs and TCP: connect requests to a listen comm, and replies to a
// connect. A message starts as a valid hello. The input then changes fields, bytes and the type, truncates the message,
// and splits it into pieces. In every case accept and connect must end, no peer may connect without the secret, and the
// same listen comm must still serve a correct peer.
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/socket.h"
#include "base/unique_fd.h"
#include "fuzz.h"
#include "net/context/context.h"
#include "net/transfer/recv_comm.h"
#include "net/transfer/send_comm.h"
#include "wire/handle.h"
#include "wire/handshake.h"
#include "wire/notice.h"

namespace {

using namespace verbatim;
using fuzz::require;

using HandleBytes = std::array<std::uint8_t, wire::kHandleBytes>;

template <typename Poll>
void await(const char* invariant, Poll poll) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(50);
  while (!poll()) require(std::chrono::steady_clock::now() < end, invariant);
}

std::string text(fuzz::Input& input) {
  const std::span<const std::uint8_t> bytes = input.take(input.get<std::uint8_t>() % 80);
  return {bytes.begin(), bytes.end()};
}

wire::HelloDevice valid_device() {
  wire::HelloDevice device;
  device.gid = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, 1};
  device.max_message_bytes = 1 << 30;
  device.speed_mbps = 100'000;
  device.link_layer = 2;  // Ethernet
  device.mtu = 5;
  device.port = 1;
  device.gid_index = 3;
  device.responder_reads = 16;
  device.name = "softverbs0";
  return device;
}

wire::Hello hello_of(fuzz::Input& input, const wire::Secret& secret) {
  wire::Hello hello;
  hello.secret = secret;
  hello.host = "fuzz";
  hello.devices = {valid_device()};
  hello.qps = {{.number = 1}};
  const auto fields = input.get<std::uint8_t>();
  if ((fields & 1) != 0) hello.devices.resize(input.get<std::uint8_t>() % (wire::kMaxDevices + 2), valid_device());
  if ((fields & 2) != 0) hello.qps.resize(input.get<std::uint8_t>() % (wire::kMaxQps + 2));
  for (wire::HelloQp& qp : hello.qps) {
    if ((fields & 4) == 0) break;
    qp.number = input.get<std::uint32_t>();
    qp.device = input.get<std::uint8_t>() % (wire::kMaxDevices + 1);
    qp.has_ece = (qp.number & 1) != 0;
    if (qp.has_ece) qp.ece = {input.get<std::uint32_t>(), input.get<std::uint32_t>(), input.get<std::uint32_t>()};
  }
  for (wire::HelloDevice& device : hello.devices) {
    if ((fields & 8) == 0) break;
    device.mtu = input.get<std::uint8_t>() % 8;
    device.link_layer = input.get<std::uint8_t>() % 4;
    device.lid = input.get<std::uint16_t>();
    device.responder_reads = input.get<std::uint8_t>();
    device.max_message_bytes = input.get<std::uint32_t>();
    device.speed_mbps = input.get<std::uint32_t>();
    device.gid[15] = input.get<std::uint8_t>();
    device.port = input.get<std::uint8_t>();
  }
  if ((fields & 16) != 0) {
    hello.control_address = input.get<std::uint64_t>();
    hello.capabilities = input.get<std::uint32_t>();
    hello.addresses.resize(input.get<std::uint8_t>() % (wire::kMaxAddresses + 2));
  }
  if ((fields & 32) != 0) hello.traffic_class = input.get<std::int16_t>();
  if ((fields & 64) != 0) hello.host = text(input);
  if ((fields & 128) != 0 && !hello.devices.empty()) hello.devices.back().name = text(input);
  return hello;
}

std::vector<std::uint8_t> resume_of(fuzz::Input& input, const wire::Secret& secret) {
  const auto which = input.get<std::uint8_t>();
  const wire::Notice resume = wire::Notice::resume({{secret, which % 16U}, which / 16U % 3U});
  return {resume.bytes().begin(), resume.bytes().end()};
}

// The bytes that the peer sends, and how it sends them.
struct PeerMessage {
  std::vector<std::uint8_t> bytes;
  std::size_t piece = 0;
  bool sends_ready = false;  // sends kReady, which ends a handshake, after `bytes`
  bool keeps_open = false;   // keeps the socket open while the plugin is called 50 more times
  bool has_secret = true;    // the message contains the secret
};

PeerMessage make_message(fuzz::Input& input, wire::MessageType type, const wire::Secret& secret) {
  PeerMessage message;
  const auto flags = input.get<std::uint8_t>();
  message.sends_ready = (flags & 1) != 0;
  message.keeps_open = (flags & 2) != 0;
  if ((flags & 4) != 0) type = static_cast<wire::MessageType>(input.get<std::uint8_t>() % 17);
  wire::Secret sent_secret = secret;
  if ((flags & 8) != 0) sent_secret[input.get<std::uint8_t>() % sent_secret.size()] ^= 1;
  message.bytes = type == wire::MessageType::kReject   ? wire::encode_reject(text(input))
                  : type == wire::MessageType::kResume ? resume_of(input, sent_secret)
                                                       : wire::encode_hello(type, hello_of(input, sent_secret));
  for (int i = flags >> 4 & 3; i > 0; --i) {
    message.bytes[input.get<std::uint16_t>() % message.bytes.size()] = input.get<std::uint8_t>();
  }
  if ((flags & 64) != 0) message.bytes.resize(input.get<std::uint16_t>() % (message.bytes.size() + 1));
  message.piece = (flags & 128) != 0 ? 1 + input.get<std::uint8_t>() : message.bytes.size();
  const auto secret_begin = message.bytes.begin() + wire::kHeaderBytes;
  message.has_secret = message.bytes.size() >= wire::kHeaderBytes + secret.size() &&
                       std::equal(secret.begin(), secret.end(), secret_begin);
  return message;
}

// Sends the message, and kReady after it if `sends_ready` is set, in pieces. Calls `poll` after each piece. Errors are
// ignored, because the plugin may have closed the socket.
template <typename Poll>
void send_message(const UniqueFd& socket, const PeerMessage& message, Poll poll) {
  std::vector<std::uint8_t> all = message.bytes;
  const std::vector<std::uint8_t> ready = wire::encode_ready();
  if (message.sends_ready) all.insert(all.end(), ready.begin(), ready.end());
  for (std::size_t at = 0; at < all.size();) {
    const std::size_t count = std::min(std::max<std::size_t>(message.piece, 1), all.size() - at);
    static_cast<void>(::send(socket.get(), all.data() + at, count, MSG_NOSIGNAL));
    at += count;
    poll();
  }
}

UniqueFd tcp_socket() {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  require(!!socket, "socket succeeds");
  // A close of this socket sends a reset, so that no port remains in TIME_WAIT.
  const linger none{.l_onoff = 1, .l_linger = 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &none, sizeof none);
  return socket;
}

void test_accept(Context& context, fuzz::Input& input) {
  HandleBytes bytes{};
  Result<ListenComm*> listen = context.listen(0, bytes);
  require(!!listen, "listen succeeds");
  const Result<wire::Handle> handle = wire::decode_handle(bytes);
  require(!!handle, "the handle can be decoded");
  const PeerMessage message = make_message(input, wire::MessageType::kConnect, handle->secret);
  // They stay open, without the secret and with or without a byte.
  std::vector<UniqueFd> unknown(input.get<std::uint8_t>());
  for (UniqueFd& socket : unknown) {
    socket = tcp_socket();
    require(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&handle->address), sizeof(sockaddr_in)) == 0,
            "a TCP connect to the listener succeeds");
    const std::span<const std::uint8_t> first = input.take(input.get<std::uint8_t>() % 16);
    if (!first.empty()) static_cast<void>(::send(socket.get(), first.data(), first.size(), MSG_NOSIGNAL));
  }
  std::vector<RecvComm*> accepted;
  bool failed = false;
  const auto accept = [&] {
    const Result<RecvComm*> comm = context.accept(**listen);
    if (!comm) failed = true;
    if (comm && *comm != nullptr) accepted.push_back(*comm);
    return failed || !accepted.empty();
  };
  {
    UniqueFd client = tcp_socket();
    require(::connect(client.get(), reinterpret_cast<const sockaddr*>(&handle->address), sizeof(sockaddr_in)) == 0,
            "a TCP connect to the listener succeeds");
    send_message(client, message, accept);
    for (int i = 0; message.keeps_open && i < 50; ++i) accept();
  }
  for (int i = 0; i < 50; ++i) accept();
  require(message.has_secret || (accepted.empty() && !failed),
          "a message without the secret gives no comm and no error");
  SendComm* send = nullptr;
  const std::size_t before = accepted.size();
  require(before <= 1, "one connect request gives at most one comm");
  await("a correct peer is accepted", [&] {
    if (send == nullptr) {
      const Result<SendComm*> comm = context.connect(0, bytes, -1);
      require(!!comm, "a correct peer connects");
      send = *comm;
    }
    accept();
    return send != nullptr && accepted.size() > before;
  });
  context.close(*send);
  for (RecvComm* comm : accepted) context.close(*comm);
  context.close(**listen);
}

void test_connect(Context& context, fuzz::Input& input) {
  UniqueFd listener = tcp_socket();
  sockaddr_in local{};
  local.sin_family = AF_INET;
  local.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  require(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&local), sizeof local) == 0, "bind succeeds");
  require(::listen(listener.get(), 1) == 0, "listen succeeds");
  // connect may wait for other connect requests before it opens its TCP connection.
  require(::fcntl(listener.get(), F_SETFL, O_NONBLOCK) == 0, "the listener can be non-blocking");
  const Result<sockaddr_storage> address = local_address(listener);
  require(!!address, "the listener has an address");
  wire::Handle handle;
  handle.address = *address;
  handle.secret.fill(0x5e);
  handle.device_count = static_cast<std::uint8_t>(1 + input.get<std::uint8_t>() % wire::kMaxDevices);
  HandleBytes bytes{};
  wire::encode_handle(handle, bytes);
  const PeerMessage message = make_message(input, wire::MessageType::kAccept, handle.secret);

  SendComm* send = nullptr;
  bool failed = false;
  const auto connect = [&] {
    if (failed || send != nullptr) return true;
    const Result<SendComm*> comm = context.connect(0, bytes, -1);
    failed = !comm;
    if (comm) send = *comm;
    return failed || send != nullptr;
  };
  connect();
  {
    UniqueFd socket;
    await("connect opens a TCP connection", [&] {
      if (connect()) return true;
      socket = UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      return static_cast<bool>(socket);
    });
    send_message(socket, message, connect);
    for (int i = 0; message.keeps_open && i < 50; ++i) connect();
  }
  listener.reset();  // a connector that retries its TCP connection is refused from here on
  await("connect ends", connect);
  require(send == nullptr || message.has_secret, "connect succeeds only with a reply that contains the secret");
  if (send != nullptr) {
    send->progress();
    context.close(*send);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Context* const context = [] {
    Result<Context*> opened = open_context(-1);
    require(!!opened, "open_context succeeds");
    return *opened;
  }();
  set_log_sink([](LogLevel, const char*, int, const char* line) {
    for (const char* at = line; *at != '\0'; ++at) require(*at >= ' ' && *at <= '~', "a log line is printable");
  });
  fuzz::Input input({data, size});
  if (input.get<std::uint8_t>() % 2 == 0) {
    test_accept(*context, input);
  } else {
    test_connect(*context, input);
  }
  return 0;
}
