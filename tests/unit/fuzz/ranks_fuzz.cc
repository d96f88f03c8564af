// Fuzzes what the tools read from each other while they run several ranks: frames, what is packed in them, and a whole
// coordinator with connections that the input opens, writes to and closes. Some are of correct ranks, some have another
// token, an impossible rank or damaged frames. The coordinator must end, send the parts of an all-gather only to ranks
// that it has accepted, and never mix up their parts.
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/socket.h"
#include "base/unique_fd.h"
#include "fuzz.h"
#include "ranks/coordinator.h"
#include "ranks/failure.h"
#include "ranks/frame.h"

// In place of the one of tools/cli: a job that fails prints why.
void verbatim::cli::print_error(const std::string& what) {
  fuzz::require(!what.empty(), "an error says what failed");
}

namespace {

using namespace verbatim;
using namespace verbatim::ranks;
using fuzz::require;

constexpr std::uint64_t kToken = 0x1122334455667788;
constexpr std::size_t kConnections = 6;
constexpr int kMaxSteps = 60;

std::string text(fuzz::Input& input, std::size_t limit) {
  const std::span<const std::uint8_t> bytes = input.take(input.get<std::uint8_t>() % limit);
  return {bytes.begin(), bytes.end()};
}

// The bytes of a frame.
std::string framed(FrameKind kind, const std::string& payload) {
  int ends[2];
  require(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "socketpair succeeds");
  const UniqueFd reader(ends[0]);
  const UniqueFd writer(ends[1]);
  require(send_frame(writer.get(), kind, payload), "a frame is sent");
  std::string bytes(payload.size() + 64, '\0');
  const ssize_t count = ::recv(reader.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  require(count > 0, "a frame has a header");
  bytes.resize(static_cast<std::size_t>(count));
  return bytes;
}

void test_payloads(fuzz::Input input) {
  const std::string payload(input.rest().begin(), input.rest().end());
  const Reason reason = reason_in(payload);
  require(reason.text.size() <= payload.size(), "the text of a reason is a part of its payload");
  try {
    static_cast<void>(from_bytes<std::uint64_t>(payload));
    require(payload.size() == sizeof(std::uint64_t), "a value has its size");
  } catch (const Failure&) {
  }
  try {
    require(pack(unpack(payload)) == payload, "unpacked parts can be packed again");
  } catch (const Failure&) {
  }
}

// Frames that arrive in pieces, as a socket may deliver them. After a damaged one no other is found.
void test_reader(fuzz::Input input) {
  int ends[2];
  require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0, "socketpair succeeds");
  const UniqueFd socket(ends[0]);
  const UniqueFd writer(ends[1]);
  std::string bytes;
  std::vector<Frame> sent;
  bool damaged = false;
  while (!input.rest().empty()) {
    const auto choice = input.get<std::uint8_t>();
    const Frame frame{static_cast<FrameKind>(choice & 15), text(input, 64)};
    std::string one = framed(frame.kind, frame.payload);
    if ((choice & 0xe0) == 0xe0) {
      one[input.get<std::uint8_t>() % one.size()] = static_cast<char>(input.get<std::uint8_t>());
      damaged = damaged || one != framed(frame.kind, frame.payload);
    }
    if (!damaged) sent.push_back(frame);
    bytes += one;
  }
  FrameReader reader = FrameReader();
  std::size_t received = 0;
  std::size_t piece = 1;
  for (std::size_t at = 0; at < bytes.size(); at += piece, piece = piece * 5 % 63 + 1) {
    static_cast<void>(!::write(writer.get(), bytes.data() + at, std::min(piece, bytes.size() - at)));
    reader.read(socket.get());
    while (const auto frame = reader.next()) {
      if (received < sent.size()) {
        require(frame->kind == sent[received].kind && frame->payload == sent[received].payload,
                "frames arrive as they were sent");
      }
      require(received++ < sent.size() || damaged, "no frame arrives that was not sent");
    }
  }
  require(received >= sent.size(), "all frames arrive");
}

// What one program that connects to the coordinator has done.
struct Connection {
  UniqueFd socket;
  FrameReader reader = FrameReader();
  int rank = -1;                   // of its first correct hello
  bool hello = false;              // it has sent something else than nothing
  std::vector<std::string> parts;  // that it has sent
  bool joined = false;
};

class Job {
 public:
  explicit Job(fuzz::Input input) : input_(input) {
    const auto options = input_.get<std::uint8_t>();
    ranks_ = 1 + options % 4;
    sockaddr_storage any{};
    auto& local = reinterpret_cast<sockaddr_in&>(any);
    local.sin_family = AF_INET;
    local.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto listener = tcp_listen(any);
    require(!!listener, "listen succeeds");
    const auto address = local_address(*listener);
    require(!!address, "the listener has an address");
    address_ = *address;
    listener_ = std::move(*listener);
  }

  void run() {
    const auto begin = std::chrono::steady_clock::now();
    Coordinator coordinator(std::move(listener_), ranks_, kToken, 100);
    tick();  // it waits for a connection before it calls tick()
    const ExitStatus status = coordinator.serve([this] { return tick(); });
    read_answers();
    require(status == ExitStatus::kOk || failed_ || provoked_, "a job fails only if something has happened");
    require(std::chrono::steady_clock::now() - begin < std::chrono::seconds(50), "the coordinator ends");
  }

 private:
  // A step of the input, and then the end of the job: each rank that is missing connects, and all leave.
  std::optional<ProcessExit> tick() {
    read_answers();
    // The coordinator waits until a socket is readable.
    acted_ = false;
    while (!acted_ && !input_.rest().empty() && steps_++ < kMaxSteps) step();
    if (acted_) return std::nullopt;
    for (Connection& connection : connections_) connection = {};
    const int rank = ending_++ % ranks_;
    Connection& connection = connections_[0];
    open(connection);
    send(connection, framed(FrameKind::kHello, to_bytes(Hello{kToken, static_cast<std::uint32_t>(rank),
                                                              static_cast<std::uint32_t>(ranks_)})));
    failed_ = true;
    acted_ = true;
    return ProcessExit{"the input has ended", true};
  }

  void step() {
    const auto operation = input_.get<std::uint8_t>();
    Connection& connection = connections_[(operation >> 3) % kConnections];
    if (!connection.socket) open(connection);
    switch (operation & 7) {
      case 0:
      case 1: {  // mostly a correct hello
        const auto fields = input_.get<std::uint8_t>();
        Hello hello{kToken, static_cast<std::uint32_t>(fields & 3), static_cast<std::uint32_t>(ranks_)};
        if ((fields & 0x90) == 0x90) hello.token ^= input_.get<std::uint8_t>();
        if ((fields & 0xa0) == 0xa0) hello.rank = input_.get<std::uint32_t>();
        if ((fields & 0xc0) == 0xc0) hello.ranks = input_.get<std::uint32_t>();
        provoked_ = true;
        if (!connection.hello && hello.token == kToken) connection.rank = static_cast<int>(hello.rank);
        connection.hello = true;
        return send(connection, framed(FrameKind::kHello, to_bytes(hello)));
      }
      case 2:
      case 3:
        connection.parts.push_back(text(input_, 32));
        return send(connection, framed(FrameKind::kGather, connection.parts.back()));
      case 4:
        return send(connection, framed(FrameKind::kFinished, {}));
      case 5: {
        const Reason reason{static_cast<ExitStatus>(input_.get<std::uint8_t>() % 4), text(input_, 32)};
        provoked_ = true;
        return send(connection, framed(FrameKind::kFail, to_payload(reason)));
      }
      case 6: {
        const auto kind = static_cast<FrameKind>(input_.get<std::uint8_t>() % 12);
        std::string bytes = framed(kind, text(input_, 64));
        const auto flags = input_.get<std::uint8_t>();
        if ((flags & 1) != 0) bytes[input_.get<std::uint8_t>() % bytes.size()] ^= 0x41;
        if ((flags & 2) != 0) bytes.resize(input_.get<std::uint8_t>() % (bytes.size() + 1));
        provoked_ = true;
        connection.hello = true;
        connection.parts.clear();
        connection.rank = -1;
        return send(connection, bytes);
      }
      default:
        provoked_ = true;
        acted_ = true;
        connection = {};
        return;
    }
  }

  void open(Connection& connection) {
    acted_ = true;
    connection = {};
    connection.socket = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    require(!!connection.socket, "socket succeeds");
    // A close of this socket sends a reset, so that no port remains in TIME_WAIT.
    const linger none{.l_onoff = 1, .l_linger = 0};
    ::setsockopt(connection.socket.get(), SOL_SOCKET, SO_LINGER, &none, sizeof none);
    static_cast<void>(
        ::connect(connection.socket.get(), reinterpret_cast<const sockaddr*>(&address_), sizeof(sockaddr_in)));
  }
  // Errors are ignored: the coordinator may have closed the connection.
  void send(const Connection& connection, const std::string& bytes) {
    acted_ = acted_ || !bytes.empty();
    static_cast<void>(::send(connection.socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
  }

  void read_answers() {
    for (Connection& connection : connections_) {
      if (!connection.socket) continue;
      const FrameReader::State state = connection.reader.read(connection.socket.get());
      while (const auto frame = connection.reader.next()) check(connection, *frame);
      if (state == FrameReader::State::kClosed) connection = {};
    }
  }
  void check(Connection& connection, const Frame& frame) {
    switch (frame.kind) {
      case FrameKind::kWelcome:
        require(!connection.joined, "a rank is accepted once");
        connection.joined = true;
        require(connection.rank < ranks_, "only ranks of the job are accepted");
        return;
      case FrameKind::kGathered: {
        const std::vector<std::string> parts = unpack(frame.payload);
        require(connection.joined, "only a rank that was accepted gets the parts of the others");
        require(parts.size() == static_cast<std::size_t>(ranks_), "each rank has a part");
        if (connection.rank < 0) return;  // it has sent damaged frames
        require(std::ranges::count(connection.parts, parts[static_cast<std::size_t>(connection.rank)]) > 0,
                "the part of a rank is one that it has sent");
        return;
      }
      case FrameKind::kAbort:
      case FrameKind::kRefused:
      case FrameKind::kBusy:
        return;
      default:
        require(false, "the coordinator sends only frames of a coordinator");
    }
  }

  fuzz::Input input_;
  int ranks_ = 1;
  sockaddr_storage address_{};
  UniqueFd listener_;
  std::array<Connection, kConnections> connections_;
  int steps_ = 0;
  bool acted_ = false;  // in this step the coordinator has got something
  int ending_ = 0;
  bool failed_ = false;
  bool provoked_ = false;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const fuzz::Input input({data + 1, size - 1});
  switch (data[0] % 4) {
    case 0:
      test_payloads(input);
      break;
    case 1:
      test_reader(input);
      break;
    default:
      Job(input).run();
      break;
  }
  return 0;
}
