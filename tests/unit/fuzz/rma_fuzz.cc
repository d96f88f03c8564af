// Fuzzes what a rank of an RMA communicator reads from another one, which is hostile, over softverbs and TCP: the
// handshake, the offers of QPs, registrations and the end. The other rank is a thread of this program. It sends the
// messages of a correct rank; the input changes fields and bytes, and drops, repeats, truncates and splits messages. In
// every case each collective call ends, with success or an error; a rank without the secrets does not connect, and a
// connection of others than ranks does not keep a correct rank out; puts stay within what the other rank has
// registered.
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "base/log.h"
#include "base/socket.h"
#include "base/unique_fd.h"
#include "channel/incoming_message.h"
#include "fuzz.h"
#include "rma/context_posting.h"
#include "rma/instance.h"
#include "wire/authentication.h"
#include "wire/handle.h"
#include "wire/notice.h"
#include "wire/rma.h"

namespace {

using namespace verbatim;
using fuzz::require;

constexpr std::uint32_t kRanks = 2;
constexpr std::size_t kMemoryBytes = 4096;
constexpr int kRestMs = 30;            // how long a hostile rank keeps its connection without sending
constexpr int kMaxHandshakeMs = 5000;  // until the other end sends or has ended
alignas(kMemoryBytes) std::array<std::byte, kMemoryBytes> g_memory;

using Bytes = std::vector<std::uint8_t>;
using HandleBytes = std::array<std::uint8_t, wire::kHandleBytes>;

// Changes a message as the input says. False: it is not changed.
bool change_bytes(fuzz::Input& input, std::uint8_t flags, Bytes& message) {
  const Bytes before = message;
  for (int i = flags & 3; i > 0 && !message.empty(); --i) {
    message[input.get<std::uint16_t>() % message.size()] = input.get<std::uint8_t>();
  }
  if ((flags & 4) != 0) message.resize(input.get<std::uint16_t>() % (message.size() + 1));
  if ((flags & 8) != 0) {
    const std::span<const std::uint8_t> more = input.take(input.get<std::uint8_t>() % 64);
    message.insert(message.end(), more.begin(), more.end());
  }
  return message != before;
}

// Of the fuzzed rank.
const wire::KeyPair& keys() {
  static const wire::KeyPair made = *wire::make_key_pair();
  return made;
}

Bytes hello(fuzz::Input& input, wire::MessageType type, wire::RmaHello hello) {
  const auto fields = input.get<std::uint8_t>();
  if ((fields & 1) != 0) hello.listen.bytes[input.get<std::uint8_t>() % hello.listen.bytes.size()] ^= 1;
  if ((fields & 2) != 0) hello.ranks = input.get<std::uint32_t>();
  if ((fields & 4) != 0) hello.rank = input.get<std::uint8_t>() % 4;
  if ((fields & 8) != 0) {
    const std::span<const std::uint8_t> text = input.take(input.get<std::uint8_t>() % 80);
    hello.host.assign(text.begin(), text.end());
  }
  if ((fields & 16) != 0) type = static_cast<wire::MessageType>(input.get<std::uint8_t>() % 8);
  if ((fields & 32) != 0) hello.key[0] = input.get<std::uint8_t>();
  return wire::encode_rma_hello(type, hello);
}

wire::RmaOfferedLane offered_lane(fuzz::Input& input, std::uint32_t contexts, unsigned fields) {
  wire::RmaOfferedLane lane;
  lane.roce_version = 2;
  lane.device.gid = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, 1};
  lane.device.max_message_bytes = 1 << 30;
  lane.device.speed_mbps = 100'000;
  lane.device.link_layer = 2;  // Ethernet
  lane.device.mtu = 5;
  lane.device.port = 1;
  lane.device.gid_index = 3;
  lane.device.responder_reads = 16;
  lane.device.name = "softverbs0";
  lane.qps.resize(contexts, {.number = 1});
  if ((fields & 4) != 0) lane.qps.resize(input.get<std::uint8_t>() % 8);
  if ((fields & 8) != 0) lane.device.max_message_bytes = input.get<std::uint32_t>();
  if ((fields & 16) != 0) {
    lane.device.mtu = input.get<std::uint8_t>() % 8;
    lane.device.link_layer = input.get<std::uint8_t>() % 4;
    lane.device.responder_reads = input.get<std::uint8_t>();
    lane.roce_version = input.get<std::uint8_t>() % 4;
  }
  for (wire::HelloQp& qp : lane.qps) {
    if ((fields & 32) == 0) break;
    qp.number = input.get<std::uint32_t>();
    qp.has_ece = (qp.number & 1) != 0;
    if (qp.has_ece) qp.ece = {input.get<std::uint32_t>(), input.get<std::uint32_t>(), input.get<std::uint32_t>()};
  }
  return lane;
}

Bytes offer_body(fuzz::Input& input, std::uint32_t contexts, std::uint8_t ports) {
  wire::RmaOffer offer;
  offer.contexts = contexts;
  const auto fields = input.get<std::uint8_t>();
  if ((fields & 1) != 0) offer.contexts = input.get<std::uint16_t>();
  if ((fields & 2) != 0) offer.rank_stride = input.get<std::uint8_t>() % 4;
  if ((fields & 64) != 0) offer.psn = input.get<std::uint32_t>();
  for (std::uint8_t lane = 0; lane < ports; ++lane) offer.lanes.push_back(offered_lane(input, contexts, fields));
  return wire::encode_rma_offer(offer);
}

Bytes bytes_of(const wire::Notice& notice) {
  return {notice.bytes().begin(), notice.bytes().end()};
}

// What the input makes of the messages of a correct rank after the handshake.
struct Script {
  std::vector<Bytes> messages;
  std::uint64_t registered = kMemoryBytes;  // bytes that the registration says
  bool connects = false;                    // the first message, which ends connect, is that of a correct rank
};

Script make_script(fuzz::Input& input, std::uint32_t contexts) {
  Script script;
  constexpr wire::RmaCall kCalls[] = {wire::RmaCall::kReady, wire::RmaCall::kOffer, wire::RmaCall::kConnected,
                                      wire::RmaCall::kRegister};
  std::uint32_t sequence = 0;
  std::uint64_t number = 0;
  const bool acknowledges = input.get<std::uint8_t>() % 2 == 0;
  std::uint8_t ports = 1;
  for (const wire::RmaCall call : kCalls) {
    wire::RmaExchange exchange{.call = call, .sequence = sequence++, .body = {}};
    const auto flags = input.get<std::uint8_t>();
    if (sequence == 1) {  // the first one
      if ((flags & 16) != 0) ports = input.get<std::uint8_t>() % 4;
      exchange.body = {ports};
    }
    if (call == wire::RmaCall::kOffer) exchange.body = offer_body(input, contexts, ports);
    if (call == wire::RmaCall::kRegister) {
      wire::RmaRegistration registration{reinterpret_cast<std::uint64_t>(g_memory.data()), kMemoryBytes, {1}};
      if ((flags & 16) != 0) registration.address = input.get<std::uint64_t>();
      if ((flags & 16) != 0) registration.bytes = input.get<std::uint64_t>();
      script.registered = registration.bytes;
      exchange.body = wire::encode_rma_registration(registration);
    }
    if ((flags & 32) != 0) {
      exchange.call = static_cast<wire::RmaCall>(input.get<std::uint8_t>() % 6);
      exchange.outcome = static_cast<wire::RmaOutcome>(input.get<std::uint8_t>() % 4);
      exchange.sequence += input.get<std::uint8_t>() % 3U;
    }
    Bytes message = wire::encode_rma_exchange(exchange);
    if (change_bytes(input, flags, message)) script.registered = UINT64_MAX;  // not known
    if (script.messages.empty() && exchange.sequence == 0) {
      script.connects = (flags & (32 | 64)) == 0 && ports != 0 && message == wire::encode_rma_exchange(exchange);
    }
    for (int copies = (flags & 64) == 0 ? 1 : input.get<std::uint8_t>() % 20; copies > 0; --copies) {
      if (acknowledges) script.messages.push_back(bytes_of(wire::Notice::ack({0, number++})));
      script.messages.push_back(message);
    }
    if ((flags & 128) != 0) {
      script.messages.push_back(bytes_of(wire::Notice::failed(ErrorKind::kRemote, "fuzz\n\x7f")));
    }
    // It repeats a message, or says that it has received some.
    if (flags % 7 == 1) {
      number = input.get<std::uint8_t>() % 4;
      script.messages.push_back(bytes_of(wire::Notice::ack({input.get<std::uint8_t>() % 4U, number})));
    }
  }
  const auto end = input.get<std::uint8_t>();
  if ((end & 2) != 0) {
    const std::uint32_t lane = input.get<std::uint8_t>() % 4;
    for (unsigned more = 1 + (end >> 2U) % 4U; more > 0; --more) {
      const auto step = static_cast<wire::RmaLaneStep>(input.get<std::uint8_t>() % 4);
      script.messages.push_back(wire::encode_rma_lane({.step = step,
                                                       .set = end % 3U,
                                                       .lane = lane,
                                                       .round = input.get<std::uint8_t>() % 3U,
                                                       .psns = {input.get<std::uint32_t>(), 0}}));
    }
  }
  if ((end & 1) != 0) script.messages.push_back(bytes_of(wire::Notice::without_body(wire::MessageType::kClose)));
  return script;
}

UniqueFd tcp_socket() {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  require(!!socket, "socket succeeds");
  // A close of this socket sends a reset, so that no port remains in TIME_WAIT.
  const linger none{.l_onoff = 1, .l_linger = 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &none, sizeof none);
  return socket;
}

// The rank that the fuzzed one speaks to.
class HostileRank {
 public:
  HostileRank(fuzz::Input& input, const wire::Handle& other, std::uint32_t rank, std::uint32_t contexts)
      : other_(other), rank_(rank), listener_(tcp_socket()) {
    sockaddr_in local{};
    local.sin_family = AF_INET;
    local.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    require(::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&local), sizeof local) == 0, "bind succeeds");
    require(::listen(listener_.get(), 4) == 0, "listen succeeds");
    const Result<sockaddr_storage> address = local_address(listener_);
    require(!!address, "the listener has an address");
    handle_.address = *address;
    handle_.secret.fill(0x5e);
    const wire::MessageType type = rank_ == 0 ? wire::MessageType::kConnect : wire::MessageType::kAccept;
    const wire::Secret& secret = rank_ == 0 ? other_.secret : handle_.secret;
    key_ = wire::hello_key(secret);
    wire::RmaHello own{.listen = wire::listen_id(secret),
                       .key = keys().sent,
                       .ranks = kRanks,
                       .rank = rank_,
                       .pid = 7,
                       .host = "fuzz"};
    const auto flags = input.get<std::uint8_t>();
    first_ = hello(input, type, own);
    change_bytes(input, flags, first_);
    if ((flags & 32) != 0) unknown_count_ += input.get<std::uint8_t>();
    piece_ = (flags & 16) != 0 ? 1 + input.get<std::uint8_t>() % 32 : std::size_t{1} << 20;
    script_ = make_script(input, contexts);
    unsigned_ = input.get<std::uint8_t>();
    has_mac_ = input.get<std::uint8_t>() % 4 != 1 && first_.size() >= wire::kHeaderBytes;
    wrong_context_ = input.get<std::uint8_t>() % 4 == 1 ? 1 : 0;
    if (has_mac_ && rank_ == 0) first_ = wire::with_mac(std::move(first_), key_);
    is_correct_ = first_ == wire::with_mac(wire::encode_rma_hello(type, own), key_);
    own.attempt = is_correct_ ? 0 : 1;  // the first one may have used up its attempt number
    own.addresses = {wire::to_address(handle_.address)};
    correct_ = wire::with_mac(wire::encode_rma_hello(type, own), key_);
  }

  const wire::Handle& handle() const { return handle_; }
  std::uint64_t registered() const { return script_.registered; }
  // Whether its handshake can succeed: rank 0 connects again as a correct rank.
  bool has_secret() const { return rank_ == 0 || (has_mac_ && wrong_context_ == 0); }

  // Whether the other end must connect: a connection without its secret came before that of a correct rank.
  bool must_connect() const {
    const bool begins_right = unsigned_ == 0 || unsigned_ > 2;  // an acknowledgement may come first
    return rank_ == 0 && script_.connects && begins_right && !may_be_taken();
  }

  void begin() {
    thread_ = std::thread([this] { rank_ == 0 ? connect() : accept(); });
  }
  // The fuzzed rank makes no more calls.
  void end() {
    over_ = true;
    thread_.join();
  }

 private:
  // Whether the first message of rank 0 shows the secret of the listen that it names.
  bool may_be_taken() const {
    const wire::ListenId id = wire::listen_id(other_.secret);
    return has_mac_ && first_.size() >= wire::kHeaderBytes + sizeof id &&
           std::equal(id.bytes.begin(), id.bytes.end(), first_.begin() + wire::kHeaderBytes);
  }
  // Rank 0 connects to rank 1. A first message that is not that of a rank comes over one or more connections. A correct
  // one follows, over another connection.
  void connect() {
    std::vector<UniqueFd> unknown(is_correct_ ? 0 : unknown_count_);  // they stay open
    if (!unknown.empty()) {
      for (UniqueFd& one : unknown) {
        one = connected();
        send(one, first_);
      }
      wait_until_readable(unknown.back(), kRestMs);
      if (may_be_taken()) {  // one of them may be taken for the rank
        for (const UniqueFd& one : unknown) ::shutdown(one.get(), SHUT_WR);
      }
    }
    listener_.reset();  // a channel that is lost for a wrong MAC ends at once
    const UniqueFd socket = connected();
    send(socket, correct_);
    if (!wait_until_readable(socket, kMaxHandshakeMs)) return;
    IncomingMessage reply;
    const Result<bool> received = reply.receive(socket);  // it comes in one piece
    if (!received || !*received || !reply.authenticate(key_, wire::mac_of(correct_))) return;
    play(socket, session_of(reply.body(), wire::mac_of(correct_), reply.mac()));
  }
  UniqueFd connected() const {
    UniqueFd socket = tcp_socket();
    static_cast<void>(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&other_.address), sizeof(sockaddr_in)));
    return socket;
  }
  void accept() {
    wait_until_readable(listener_, kMaxHandshakeMs);
    if (over_) return;
    const UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    listener_.reset();  // as above
    wait_until_readable(socket, kMaxHandshakeMs);
    if (over_) return;
    IncomingMessage hello;
    const Result<bool> received = hello.receive(socket);  // it comes in one piece
    if (!received || !*received) return;
    require(hello.authenticate(key_), "a hello shows the secret");
    wire::Mac context = hello.mac();
    context[0] ^= wrong_context_;
    const Bytes reply = has_mac_ ? wire::with_mac(first_, key_, context) : first_;
    send(socket, reply);
    play(socket, has_mac_ ? session_of(hello.body(), hello.mac(), wire::mac_of(reply)) : wire::Key{});
  }

  // Errors are ignored: the fuzzed rank may have closed the connection.
  void send(const UniqueFd& socket, const Bytes& message) const {
    for (std::size_t at = 0; at < message.size();) {
      const std::size_t count = std::min(piece_, message.size() - at);
      if (::send(socket.get(), message.data() + at, count, MSG_NOSIGNAL) < 0) return;
      at += count;
    }
  }
  // `body`: of the hello of the other rank.
  wire::Key session_of(std::span<const std::uint8_t> body, const wire::Mac& hello, const wire::Mac& reply) const {
    const Result<wire::RmaHello> peer = wire::decode_rma_hello(body);
    require(!!peer, "a hello can be decoded");
    const std::optional<wire::Key> shared = wire::shared_key(keys(), peer->key);
    require(shared.has_value(), "a hello has a public key");
    return wire::session_key(key_, *shared, hello, reply);
  }
  void play(const UniqueFd& socket, const wire::Key& session) {
    const wire::Key key = wire::channel_key(session, 1 - rank_, 0);
    std::uint64_t sequence = 0;
    for (const Bytes& message : script_.messages) {
      const bool has_header = message.size() >= wire::kHeaderBytes;
      const wire::MessageContext context = wire::message_context(1 - rank_, sequence++);
      send(socket, has_header && sequence != unsigned_ ? wire::with_mac(message, key, context) : message);
    }
    for (int i = 0; i < kRestMs && !over_; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ::shutdown(socket.get(), SHUT_WR);
    while (!over_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  bool wait_until_readable(const UniqueFd& socket, int limit_ms) const {
    pollfd waits{socket.get(), POLLIN, 0};
    for (int i = 0; i < limit_ms && !over_ && ::poll(&waits, 1, 1) == 0; ++i) continue;
    return waits.revents != 0;
  }

  const wire::Handle other_;
  const std::uint32_t rank_;
  UniqueFd listener_;
  wire::Handle handle_;
  Bytes correct_;
  wire::Key key_{};  // of the hellos
  Bytes first_;
  bool is_correct_ = false;  // but for the address in the hello that is sent: one that the input changes is not dialled
  bool has_mac_ = false;
  std::uint64_t unsigned_ = 0;      // the message that has no MAC, from 1
  std::uint8_t wrong_context_ = 0;  // changes the MAC of the reply
  std::size_t piece_ = 0;
  std::size_t unknown_count_ = 1;
  Script script_;
  std::atomic<bool> over_{false};
  std::thread thread_;
};

void put_all(rma::CollComm& comm, rma::ContextSet& contexts, const HostileRank& hostile, std::uint32_t peer) {
  const Result<rma::Memory*> memory = comm.register_memory({.address = g_memory.data(), .bytes = g_memory.size()});
  if (!memory) return;
  std::vector<void*> requests;
  const auto keep = [&](void* request) {
    if (request != nullptr) requests.push_back(request);
  };
  void* request = nullptr;
  contexts.put(0, 0, *memory, 64, 64, *memory, peer, &request);
  keep(request);
  contexts.put_signal({0, peer}, {*memory, 0}, 8, {*memory, 128}, {{*memory, 256}, 1}, &request);
  keep(request);
  contexts.get({0, peer}, {*memory, 512}, 64, {*memory, 1024}, &request);
  keep(request);
  if (hostile.registered() < kMemoryBytes) {
    const ErrorKind refused = contexts.put(0, 0, *memory, hostile.registered() + 1, 0, *memory, peer, &request);
    require(refused != ErrorKind::kNone, "a put outside of what the other rank has registered is refused");
  }
  for (int i = 0; i < 20; ++i) {
    std::erase_if(requests, [](void* one) {
      int done = 0;
      const ErrorKind result = rma::ContextSet::test(*static_cast<rma::Request*>(one), &done);
      return done != 0 || result != ErrorKind::kNone;
    });
  }
  contexts.abort();
  Registrations<rma::Memory>::release(*memory);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static rma::Instance* const instance = [] {
    const Result<rma::Instance*> opened = rma::Instance::open();
    require(!!opened, "open succeeds");
    return *opened;
  }();
  set_log_sink([](LogLevel, const char*, int, const char* line) {
    for (const char* at = line; *at != '\0'; ++at) require(*at >= ' ' && *at <= '~', "a log line is printable");
  });
  fuzz::Input input({data, size});
  const auto first = input.get<std::uint8_t>();
  const std::uint32_t rank = first % kRanks;  // of the fuzzed one: 0 connects, 1 accepts
  const std::uint32_t contexts = 1 + first / 2U % 3U;
  HandleBytes own{};
  const Result<rma::ListenComm*> listen = instance->listen(0, own);
  require(!!listen, "listen succeeds");
  HostileRank hostile(input, (*listen)->handle, 1 - rank, contexts);
  HandleBytes other{};
  wire::encode_handle(hostile.handle(), other);
  void* handles[kRanks] = {rank == 0 ? own.data() : other.data(), rank == 0 ? other.data() : own.data()};
  hostile.begin();
  const auto begin = std::chrono::steady_clock::now();
  const Result<rma::CollComm*> comm =
      instance->connect(**listen, static_cast<void* const*>(handles), kRanks, static_cast<int>(rank));
  require(!comm || hostile.has_secret(), "a rank without the secret does not connect");
  require(!!comm || !hostile.must_connect(), "a connection without the secret does not keep a correct rank out");
  if (comm) {
    const Result<rma::ContextSet*> set = (*comm)->create_contexts({.contexts = static_cast<int>(contexts)});
    if (set) put_all(**comm, **set, hostile, 1 - rank);
    if (set) (*comm)->destroy_contexts(**set);
    instance->close(**comm);
  }
  hostile.end();
  instance->close(**listen);
  require(std::chrono::steady_clock::now() - begin < std::chrono::seconds(50), "all calls end");
  return 0;
}
