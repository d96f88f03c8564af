// Fuzzes the handshake with a hostile peer, over softverbs and TCP: connect requests to a listen comm, and replies to a
// connect. A message starts as a valid hello. The input then changes fields, bytes and the type, truncates the message,
// and splits it into pieces. In every case accept and connect must end, no peer may connect without the secret, and the
// same listen comm must still serve a correct peer.
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
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
#include "wire/authentication.h"
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

// Of all peers.
const wire::KeyPair& keys() {
  static const wire::KeyPair made = *wire::make_key_pair();
  return made;
}

wire::Hello hello_of(fuzz::Input& input, const wire::ListenId& listen) {
  wire::Hello hello;
  hello.listen = listen;
  hello.key = keys().sent;
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
    if (hello.control_address % 4 == 0) hello.key = {};
    hello.addresses.resize(input.get<std::uint8_t>() % (wire::kMaxAddresses + 2));
  }
  if ((fields & 32) != 0) hello.traffic_class = input.get<std::int16_t>();
  if ((fields & 64) != 0) hello.host = text(input);
  if ((fields & 128) != 0 && !hello.devices.empty()) hello.devices.back().name = text(input);
  return hello;
}

std::vector<std::uint8_t> resume_of(fuzz::Input& input, const wire::ListenId& listen, const wire::Key& session = {}) {
  const auto which = input.get<std::uint8_t>();
  const wire::Notice resume =
      wire::Notice::resume({{{listen, which % 4U}, which / 4U % 3U}, which / 16U % 4U}, session);
  return {resume.bytes().begin(), resume.bytes().end()};
}

// The bytes that the peer sends, and how it sends them.
struct PeerMessage {
  std::vector<std::uint8_t> bytes;
  std::size_t piece = 0;
  bool sends_ready = false;      // sends kReady, which ends a handshake, when the reply has come
  std::uint8_t wrong_ready = 0;  // of four values one leaves out its MAC, one changes a byte
  bool keeps_open = false;       // keeps the socket open while the plugin is called 50 more times
  bool has_secret = true;        // the message shows the secret
};

// `context`: of the MAC.
PeerMessage make_message(fuzz::Input& input, wire::MessageType type, const wire::Secret& secret,
                         std::span<const std::uint8_t> context = {}) {
  PeerMessage message;
  const auto flags = input.get<std::uint8_t>();
  message.sends_ready = (flags & 1) != 0;
  message.keeps_open = (flags & 2) != 0;
  if ((flags & 4) != 0) type = static_cast<wire::MessageType>(input.get<std::uint8_t>() % 17);
  wire::Secret sent_secret = secret;
  if ((flags & 8) != 0) sent_secret[input.get<std::uint8_t>() % sent_secret.size()] ^= 1;
  const wire::ListenId listen = wire::listen_id(secret);
  message.bytes = type == wire::MessageType::kReject   ? wire::encode_reject(text(input))
                  : type == wire::MessageType::kResume ? resume_of(input, listen)
                                                       : wire::encode_hello(type, hello_of(input, listen));
  for (int i = flags >> 4 & 3; i > 0; --i) {
    message.bytes[input.get<std::uint16_t>() % message.bytes.size()] = input.get<std::uint8_t>();
  }
  if ((flags & 64) != 0) message.bytes.resize(input.get<std::uint16_t>() % (message.bytes.size() + 1));
  message.piece = (flags & 128) != 0 ? 1 + input.get<std::uint8_t>() : message.bytes.size();
  const bool ends_with_mac = type != wire::MessageType::kReject && type != wire::MessageType::kResume &&
                             message.bytes.size() >= wire::kHeaderBytes && input.get<std::uint8_t>() % 4 != 1;
  if (ends_with_mac) message.bytes = wire::with_mac(std::move(message.bytes), wire::hello_key(sent_secret), context);
  message.has_secret = ends_with_mac && sent_secret == secret;
  message.wrong_ready = input.get<std::uint8_t>();
  return message;
}

// Sends the message in pieces. Calls `poll` after each piece. Errors are ignored, because the plugin may have closed
// the socket.
template <typename Poll>
void send_message(const UniqueFd& socket, const PeerMessage& message, Poll poll) {
  const std::vector<std::uint8_t>& all = message.bytes;
  for (std::size_t at = 0; at < all.size();) {
    const std::size_t count = std::min(std::max<std::size_t>(message.piece, 1), all.size() - at);
    static_cast<void>(::send(socket.get(), all.data() + at, count, MSG_NOSIGNAL));
    at += count;
    poll();
  }
}

// kReady for the reply, if that has come, or something else. Returns the session key.
wire::Key send_ready(const UniqueFd& socket, const PeerMessage& message, const wire::Secret& secret) {
  pollfd waits{socket.get(), POLLIN, 0};
  if (!message.has_secret || ::poll(&waits, 1, 0) != 1) return {};
  IncomingMessage reply;
  const Result<bool> received = reply.receive(socket);
  const wire::Key key = wire::hello_key(secret);
  if (!received || !*received || !reply.authenticate(key, wire::mac_of(message.bytes))) return {};
  const Result<wire::Hello> hello = wire::decode_hello(reply.body());
  require(!!hello, "a reply can be decoded");
  const std::optional<wire::Key> shared = wire::shared_key(keys(), hello->key);
  require(shared.has_value(), "a reply has a public key");
  const wire::Key session = wire::session_key(key, *shared, wire::mac_of(message.bytes), reply.mac());
  std::vector<std::uint8_t> ready = wire::encode_ready();
  if (message.wrong_ready % 4 != 1) ready = wire::with_mac(std::move(ready), session);
  if (message.wrong_ready % 4 == 2) ready[message.wrong_ready / 4 % ready.size()] ^= 1;
  static_cast<void>(::send(socket.get(), ready.data(), ready.size(), MSG_NOSIGNAL));
  return session;
}

UniqueFd tcp_socket() {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  require(!!socket, "socket succeeds");
  // A close of this socket sends a reset, so that no port remains in TIME_WAIT.
  const linger none{.l_onoff = 1, .l_linger = 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &none, sizeof none);
  return socket;
}

// Asks for the side channel of the connection, or of another one, and sends messages.
void resume(fuzz::Input& input, const wire::Handle& handle, const wire::Key& session) {
  const UniqueFd socket = tcp_socket();
  require(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&handle.address), sizeof(sockaddr_in)) == 0,
          "a TCP connect to the listener succeeds");
  std::vector<std::uint8_t> bytes = resume_of(input, wire::listen_id(handle.secret), session);
  if (input.get<std::uint8_t>() % 4 == 1) bytes[input.get<std::uint8_t>() % bytes.size()] = input.get<std::uint8_t>();
  const auto number = wire::decode_resume(std::span(bytes).subspan(wire::kHeaderBytes, sizeof(wire::Resume)));
  const wire::Key key = wire::channel_key(session, 1, number ? number->number : 0);
  for (std::uint64_t sequence = 0; !input.rest().empty(); ++sequence) {
    const auto type = static_cast<wire::MessageType>(input.get<std::uint8_t>() % 17);
    const std::span<const std::uint8_t> body = input.take(input.get<std::uint8_t>() % 64);
    std::vector<std::uint8_t> message(wire::kHeaderBytes);
    message.insert(message.end(), body.begin(), body.end());
    message = wire::with_mac(wire::with_header(type, std::move(message)), key, wire::message_context(1, sequence));
    bytes.insert(bytes.end(), message.begin(), message.end());
  }
  static_cast<void>(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
  pollfd answered{socket.get(), POLLIN, 0};
  static_cast<void>(::poll(&answered, 1, 10));
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
  wire::Key session{};
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
    if (message.sends_ready) session = send_ready(client, message, handle->secret);
    for (int i = 0; message.keeps_open && i < 50; ++i) accept();
    if (!accepted.empty()) resume(input, *handle, session);
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

  SendComm* send = nullptr;
  bool failed = false;
  bool shows_secret = false;
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
    IncomingMessage first;
    bool has_come = false;
    await("connect sends a hello", [&] {
      if (connect()) return true;
      const Result<bool> received = first.receive(socket);
      has_come = received && *received;
      return !received || *received;
    });
    if (has_come) {
      require(first.authenticate(wire::hello_key(handle.secret)), "a hello shows the secret");
      wire::Mac hello_mac = first.mac();
      const bool is_right = input.get<std::uint8_t>() % 8 != 1;
      if (!is_right) hello_mac[input.get<std::uint8_t>() % hello_mac.size()] ^= 1;
      PeerMessage message = make_message(input, wire::MessageType::kAccept, handle.secret, hello_mac);
      message.has_secret = message.has_secret && is_right;
      shows_secret = message.has_secret;
      send_message(socket, message, connect);
      for (int i = 0; message.keeps_open && i < 50; ++i) connect();
    }
  }
  listener.reset();  // a connector that retries its TCP connection is refused from here on
  await("connect ends", connect);
  require(send == nullptr || shows_secret, "connect succeeds only with a reply that shows the secret");
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
