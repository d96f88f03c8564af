// A hostile peer in the handshake, over softverbs and TCP: what a stranger says to a listen, and what somebody answers
// to a connect. It starts from a hello that would do, with fields of the input's own that may well be decoded, spoiled
// bytes, another type, a lost end, in pieces. Whatever it was, the call comes to an end, nobody connects without the
// secret, and the right peer is served by the same listen.
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

namespace {

using namespace verbatim;
using fuzz::require;

using HandleBytes = std::array<std::uint8_t, wire::kHandleBytes>;

template <typename Poll>
void await(const char* promise, Poll poll) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(50);
  while (!poll()) require(std::chrono::steady_clock::now() < end, promise);
}

std::string text(fuzz::Input& input) {
  const std::span<const std::uint8_t> bytes = input.take(input.get<std::uint8_t>() % 80);
  return {bytes.begin(), bytes.end()};
}

wire::HelloDevice sound_device() {
  wire::HelloDevice device;
  device.gid = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, 1};
  device.max_message_bytes = 1 << 30;
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
  hello.devices = {sound_device()};
  hello.qps = {{.number = 1}};
  const auto fields = input.get<std::uint8_t>();
  if ((fields & 1) != 0) hello.devices.resize(input.get<std::uint8_t>() % (wire::kMaxDevices + 2), sound_device());
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
    device.gid[15] = input.get<std::uint8_t>();
    device.port = input.get<std::uint8_t>();
  }
  if ((fields & 16) != 0) {
    hello.control_address = input.get<std::uint64_t>();
    hello.capabilities = input.get<std::uint32_t>();
  }
  if ((fields & 32) != 0) hello.traffic_class = input.get<std::int16_t>();
  if ((fields & 64) != 0) hello.host = text(input);
  if ((fields & 128) != 0 && !hello.devices.empty()) hello.devices.back().name = text(input);
  return hello;
}

// What is said, and how.
struct PeerMessage {
  std::vector<std::uint8_t> bytes;
  std::size_t piece = 0;
  bool confirms = false;  // the kReady that ends a handshake follows
  bool stays = false;     // until the other end has made up its mind
  bool is_right = true;   // the secret was shown
};

PeerMessage make_message(fuzz::Input& input, wire::MessageType type, const wire::Secret& secret) {
  PeerMessage message;
  const auto manner = input.get<std::uint8_t>();
  message.confirms = (manner & 1) != 0;
  message.stays = (manner & 2) != 0;
  if ((manner & 4) != 0) type = static_cast<wire::MessageType>(input.get<std::uint8_t>() % 12);
  wire::Secret shown = secret;
  if ((manner & 8) != 0) shown[input.get<std::uint8_t>() % shown.size()] ^= 1;
  message.bytes = type == wire::MessageType::kReject ? wire::encode_reject(text(input))
                                                     : wire::encode_hello(type, hello_of(input, shown));
  for (int i = manner >> 4 & 3; i > 0; --i) {
    message.bytes[input.get<std::uint16_t>() % message.bytes.size()] = input.get<std::uint8_t>();
  }
  if ((manner & 64) != 0) message.bytes.resize(input.get<std::uint16_t>() % (message.bytes.size() + 1));
  message.piece = (manner & 128) != 0 ? 1 + input.get<std::uint8_t>() : message.bytes.size();
  const auto shown_at = message.bytes.begin() + wire::kHeaderBytes;
  message.is_right =
      message.bytes.size() >= wire::kHeaderBytes + secret.size() && std::equal(secret.begin(), secret.end(), shown_at);
  return message;
}

// Says it, piece by piece; `poll` is called after each. Whoever listens may have hung up.
template <typename Poll>
void send_message(const UniqueFd& socket, const PeerMessage& message, Poll poll) {
  std::vector<std::uint8_t> all = message.bytes;
  const std::vector<std::uint8_t> ready = wire::encode_ready();
  if (message.confirms) all.insert(all.end(), ready.begin(), ready.end());
  for (std::size_t at = 0; at < all.size();) {
    const std::size_t count = std::min(std::max<std::size_t>(message.piece, 1), all.size() - at);
    static_cast<void>(::send(socket.get(), all.data() + at, count, MSG_NOSIGNAL));
    at += count;
    poll();
  }
}

UniqueFd tcp_socket() {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  require(!!socket, "a socket");
  // Hundreds of ports in TIME_WAIT serve nobody.
  const linger none{.l_onoff = 1, .l_linger = 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &none, sizeof none);
  return socket;
}

void test_accept(Context& context, fuzz::Input& input) {
  HandleBytes bytes{};
  Result<ListenComm*> listen = context.listen(0, bytes);
  require(!!listen, "a listen opens");
  const Result<wire::Handle> handle = wire::decode_handle(bytes);
  require(!!handle, "a handle is one");
  const PeerMessage message = make_message(input, wire::MessageType::kConnect, handle->secret);
  std::vector<RecvComm*> made;
  bool refused = false;
  const auto accept = [&] {
    const Result<RecvComm*> comm = context.accept(**listen);
    if (!comm) refused = true;
    if (comm && *comm != nullptr) made.push_back(*comm);
    return refused || !made.empty();
  };
  {
    UniqueFd client = tcp_socket();
    require(::connect(client.get(), reinterpret_cast<const sockaddr*>(&handle->address), sizeof(sockaddr_in)) == 0,
            "everybody may knock");
    send_message(client, message, accept);
    for (int i = 0; message.stays && i < 50; ++i) accept();
  }
  for (int i = 0; i < 50; ++i) accept();
  require(message.is_right || (made.empty() && !refused), "a stranger is no peer");
  SendComm* send = nullptr;
  const std::size_t before = made.size();
  require(before <= 1, "one knock, one connection");
  await("the right peer is served", [&] {
    if (send == nullptr) {
      const Result<SendComm*> comm = context.connect(0, bytes, -1);
      require(!!comm, "the right peer connects");
      send = *comm;
    }
    accept();
    return send != nullptr && made.size() > before;
  });
  context.close(*send);
  for (RecvComm* comm : made) context.close(*comm);
  context.close(**listen);
}

void test_connect(Context& context, fuzz::Input& input) {
  UniqueFd listener = tcp_socket();
  sockaddr_in here{};
  here.sin_family = AF_INET;
  here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  require(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&here), sizeof here) == 0, "a port");
  require(::listen(listener.get(), 1) == 0, "a door");
  const Result<sockaddr_storage> address = local_address(listener);
  require(!!address, "an address");
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
    UniqueFd host;
    await("a connect knocks", [&] {
      if (connect()) return true;
      host = UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      return static_cast<bool>(host);
    });
    send_message(host, message, connect);
    for (int i = 0; message.stays && i < 50; ++i) connect();
  }
  listener.reset();  // who was slow to speak knocks again
  await("a connect comes to an end", connect);
  require(send == nullptr || message.is_right, "nobody else is the peer");
  if (send != nullptr) {
    send->progress();
    context.close(*send);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Context* const context = [] {
    Result<Context*> opened = open_context(-1);
    require(!!opened, "a context opens");
    return *opened;
  }();
  set_log_sink([](LogLevel, const char*, int, const char* line) {
    for (const char* at = line; *at != '\0'; ++at) require(*at >= ' ' && *at <= '~', "a line can be printed");
  });
  fuzz::Input input({data, size});
  if (input.get<std::uint8_t>() % 2 == 0) {
    test_accept(*context, input);
  } else {
    test_connect(*context, input);
  }
  return 0;
}
