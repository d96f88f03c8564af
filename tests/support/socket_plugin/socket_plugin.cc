// A minimal net plugin over TCP sockets of one host. The tools are tested with it where there is no RDMA device, which
// also shows that they work with any plugin. Exports v6 and v12.
//
// With SOCKET_PLUGIN_CUDA=flush it takes memory of type CUDA, which the CPU must be able to access (host-cuda). As on a
// NIC, data that was received into such memory can be read only after a flush: the plugin writes it when a flush is
// done. With SOCKET_PLUGIN_CUDA=lose flushes do not write it.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "nccl/net_v12.h"
#include "nccl/net_v6.h"

namespace {

using nccl::Result;
using verbatim::UniqueFd;

constexpr std::size_t kMaxRecvs = 8;
constexpr int kFlushPolls = 3;         // of test, before a flush is done
constexpr std::size_t kMaxQueued = 8;  // requests; small, so that isend and irecv often return no request

char device_name[] = "socket0";
// The handles of registrations.
char host_memory;
char cuda_memory;

std::string_view cuda_setting() {
  const char* const value = std::getenv("SOCKET_PLUGIN_CUDA");
  return value == nullptr ? "" : value;
}

struct Header {
  std::uint64_t bytes;
  std::int64_t tag;
};

struct Member {
  char* data;
  std::size_t capacity;  // for a send: its size
  int tag;
  std::size_t bytes = 0;
  bool matched = false;
  char* target = nullptr;            // CUDA memory, written by a flush
  std::vector<char> unflushed = {};  // its data
};

struct Comm;
struct Request {
  Comm* comm;
  std::vector<Member> members;
  std::size_t complete = 0;  // members
  int flush_polls = 0;       // of a flush: its members are those of completed receives
  bool is_flush = false;
};

struct Comm {
  Comm(UniqueFd fd, bool sending) : socket(std::move(fd)), sends(sending) {}

  UniqueFd socket;
  const bool sends;
  std::deque<Request*> queue = {};  // incomplete requests in posting order; test frees them
  Header header = {};
  std::size_t header_bytes = 0;
  Member* member = nullptr;  // the member whose payload is being transferred
  std::size_t payload_bytes = 0;
  std::vector<Member> unflushed = {};  // received into CUDA memory since the last flush
};

nccl::DebugLogger logger = nullptr;

Result warn(const char* what) {
  if (logger != nullptr) {
    logger(nccl::DebugLogLevel::kWarn, nccl::kLogNet, __FILE__, __LINE__, "socket plugin: %s: %s", what,
           std::strerror(errno));
  }
  return Result::kSystemError;
}

enum class Moved : std::uint8_t { kAll, kSome, kFailed };

// Calls `move` until `bytes` are transferred or the socket would block.
template <typename Move>
Moved move_bytes(const Move& move, std::size_t& done, std::size_t bytes) {
  while (done < bytes) {
    const ssize_t n = move(done, bytes - done);
    if (n < 0 && errno == EAGAIN) return Moved::kSome;
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Moved::kFailed;
    done += static_cast<std::size_t>(n);
  }
  return Moved::kAll;
}

Moved move_part(Comm& comm, void* data, std::size_t& done, std::size_t bytes) {
  const int fd = comm.socket.get();
  auto* const at = static_cast<char*>(data);
  if (comm.sends) {
    return move_bytes([&](std::size_t from, std::size_t n) { return ::send(fd, at + from, n, MSG_NOSIGNAL); }, done,
                      bytes);
  }
  return move_bytes([&](std::size_t from, std::size_t n) { return ::recv(fd, at + from, n, 0); }, done, bytes);
}

// The member that matches the header; null when no member does.
Member* match(Comm& comm, Request& request) {
  if (comm.sends) return &request.members[0];
  for (Member& member : request.members) {
    if (!member.matched && member.tag == comm.header.tag && member.capacity >= comm.header.bytes) return &member;
  }
  return nullptr;
}

Result progress(Comm& comm) {
  while (!comm.queue.empty()) {
    Request& request = *comm.queue.front();
    if (comm.sends) comm.header = {request.members[0].capacity, request.members[0].tag};
    Moved moved = move_part(comm, &comm.header, comm.header_bytes, sizeof comm.header);
    if (moved == Moved::kAll) {
      if (comm.member == nullptr) comm.member = match(comm, request);
      if (comm.member == nullptr) return warn("a message without a matching receive");
      comm.member->matched = true;
      moved = move_part(comm, comm.member->data, comm.payload_bytes, comm.header.bytes);
    }
    if (moved == Moved::kFailed) return warn(comm.sends ? "send" : "receive");
    if (moved == Moved::kSome) return Result::kSuccess;
    std::exchange(comm.member, nullptr)->bytes = comm.header.bytes;
    comm.header_bytes = comm.payload_bytes = 0;
    if (++request.complete == request.members.size()) comm.queue.pop_front();
  }
  return Result::kSuccess;
}

Result devices(int* count) {
  *count = 1;
  return Result::kSuccess;
}

template <typename Properties>
Result properties(int /*device*/, Properties* out) {
  *out = {};
  out->name = device_name;
  out->ptrSupport = nccl::kPtrHost | (cuda_setting().empty() ? 0 : nccl::kPtrCuda);
  out->speed = 10'000;
  out->maxComms = 65'536;
  out->maxRecvs = kMaxRecvs;
  if constexpr (requires { out->maxP2pBytes; }) {
    out->vProps = {1, {0}};
    out->maxP2pBytes = std::size_t{1} << 30;
    out->railId = out->planeId = nccl::kNetIdUndefined;
  }
  return Result::kSuccess;
}

Result listen(int /*device*/, void* handle, void** listen_comm) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd || ::bind(fd.get(), any, bytes) != 0 || ::listen(fd.get(), 16) != 0 ||
      ::getsockname(fd.get(), any, &bytes) != 0) {
    return warn("listen");
  }
  std::memcpy(handle, &address, sizeof address);
  *listen_comm = new UniqueFd(std::move(fd));
  return Result::kSuccess;
}

void* make_comm(UniqueFd fd, bool sends) {
  const int on = 1;
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return new Comm(std::move(fd), sends);
}

// On loopback connect completes at once, into the listener's backlog. Before that, send returns EAGAIN.
Result connect(int /*device*/, void* handle, void** send_comm) {
  sockaddr_in address{};
  std::memcpy(&address, handle, sizeof address);
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int connected = ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address);
  if (connected != 0 && errno != EINPROGRESS) return warn("connect");
  *send_comm = make_comm(std::move(fd), true);
  return Result::kSuccess;
}

Result accept(void* listen_comm, void** recv_comm) {
  *recv_comm = nullptr;
  UniqueFd fd(::accept4(static_cast<UniqueFd*>(listen_comm)->get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!fd) return errno == EAGAIN ? Result::kSuccess : warn("accept");
  *recv_comm = make_comm(std::move(fd), false);
  return Result::kSuccess;
}

Result reg_mr(int type, void** mhandle) {
  *mhandle = type == nccl::kPtrCuda ? &cuda_memory : &host_memory;
  return Result::kSuccess;
}
Result dereg_mr(void* /*comm*/, void* /*mhandle*/) {
  return Result::kSuccess;
}

Result post(Comm& comm, std::vector<Member> members, void** request) {
  *request = nullptr;
  if (comm.queue.size() < kMaxQueued) {
    auto posted = std::make_unique<Request>(Request{&comm, std::move(members)});
    comm.queue.push_back(posted.get());
    *request = posted.release();
  }
  return progress(comm);
}

Result isend(void* comm, void* data, std::size_t size, int tag, void** request) {
  return post(*static_cast<Comm*>(comm), {{static_cast<char*>(data), size, tag}}, request);
}

template <typename Size>
Result irecv(void* comm, int n, void** data, Size* sizes, int* tags, void** mhandles, void** request) {
  std::vector<Member> members;
  for (int i = 0; i < n; ++i) {
    Member& member =
        members.emplace_back(Member{static_cast<char*>(data[i]), static_cast<std::size_t>(sizes[i]), tags[i]});
    if (mhandles[i] != &cuda_memory) continue;
    member.target = member.data;
    member.unflushed.resize(member.capacity);
    member.data = member.unflushed.data();
  }
  return post(*static_cast<Comm*>(comm), std::move(members), request);
}

Result iflush(void* recv_comm, int /*n*/, void** /*data*/, int* /*sizes*/, void** /*mhandles*/, void** request) {
  auto& comm = *static_cast<Comm*>(recv_comm);
  *request = nullptr;
  if (comm.unflushed.empty()) return Result::kSuccess;
  *request = new Request{&comm, std::exchange(comm.unflushed, {}), 0, kFlushPolls, true};
  return Result::kSuccess;
}

Result test_flush(Request* flush, int* done) {
  *done = --flush->flush_polls == 0 ? 1 : 0;
  if (*done == 0) return Result::kSuccess;
  const bool loses = cuda_setting() == "lose";
  for (const Member& member : flush->members) {
    if (!loses) std::memcpy(member.target, member.unflushed.data(), member.bytes);
  }
  delete flush;
  return Result::kSuccess;
}

Result test(void* request, int* done, int* sizes) {
  auto* const tested = static_cast<Request*>(request);
  if (tested->is_flush) return test_flush(tested, done);
  const Result result = progress(*tested->comm);
  *done = tested->complete == tested->members.size() ? 1 : 0;
  if (*done == 0) return result;
  for (std::size_t i = 0; sizes != nullptr && i < tested->members.size(); ++i) {
    sizes[i] = static_cast<int>(tested->members[i].bytes);
  }
  for (Member& member : tested->members) {
    if (member.target != nullptr) tested->comm->unflushed.push_back(std::move(member));
  }
  delete tested;
  return result;
}

Result close_comm(void* comm) {
  auto* const closed = static_cast<Comm*>(comm);
  for (const Request* const abandoned : closed->queue) delete abandoned;
  delete closed;
  return Result::kSuccess;
}
Result close_listen(void* listen_comm) {
  delete static_cast<UniqueFd*>(listen_comm);
  return Result::kSuccess;
}

nccl::v12::Net table_v12() {
  nccl::v12::Net net{};
  net.name = "Socket-Test";
  net.init = [](void** context, std::uint64_t, nccl::v12::NetCommConfig*, nccl::DebugLogger log,
                nccl::ProfilerCallback) {
    logger = log;
    *context = device_name;
    return Result::kSuccess;
  };
  net.finalize = [](void*) { return Result::kSuccess; };
  net.devices = devices;
  net.getProperties = properties<nccl::v12::NetProperties>;
  net.listen = [](void*, int device, void* handle, void** comm) { return listen(device, handle, comm); };
  net.connect = [](void*, int device, void* handle, void** comm, nccl::NetDeviceHandle**) {
    return connect(device, handle, comm);
  };
  net.accept = [](void* listening, void** comm, nccl::NetDeviceHandle**) { return accept(listening, comm); };
  net.regMr = [](void*, void*, std::size_t, int type, void** mhandle) { return reg_mr(type, mhandle); };
  net.deregMr = dereg_mr;
  net.isend = [](void* comm, void* data, std::size_t size, int tag, void*, void*, void** request) {
    return isend(comm, data, size, tag, request);
  };
  net.irecv = [](void* comm, int n, void** data, std::size_t* sizes, int* tags, void** mhandles, void**,
                 void** request) { return irecv(comm, n, data, sizes, tags, mhandles, request); };
  net.iflush = iflush;
  net.test = test;
  net.closeSend = net.closeRecv = close_comm;
  net.closeListen = close_listen;
  return net;
}

nccl::v6::Net table_v6() {
  nccl::v6::Net net{};
  net.name = "Socket-Test";
  net.init = [](nccl::DebugLogger log) {
    logger = log;
    return Result::kSuccess;
  };
  net.devices = devices;
  net.getProperties = properties<nccl::v6::NetProperties>;
  net.listen = listen;
  net.connect = connect;
  net.accept = accept;
  net.regMr = [](void*, void*, int, int type, void** mhandle) { return reg_mr(type, mhandle); };
  net.deregMr = dereg_mr;
  net.isend = [](void* comm, void* data, int size, int tag, void*, void** request) {
    return isend(comm, data, static_cast<std::size_t>(size), tag, request);
  };
  net.irecv = [](void* comm, int n, void** data, int* sizes, int* tags, void** mhandles, void** request) {
    return irecv(comm, n, data, sizes, tags, mhandles, request);
  };
  net.iflush = iflush;
  net.test = test;
  net.closeSend = net.closeRecv = close_comm;
  net.closeListen = close_listen;
  return net;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT nccl::v6::Net ncclNetPlugin_v6;
EXPORT nccl::v12::Net ncclNetPlugin_v12;
nccl::v6::Net ncclNetPlugin_v6 = table_v6();
nccl::v12::Net ncclNetPlugin_v12 = table_v12();
