// CUDA's driver and NCCL for a machine without GPUs, as far as verbatim-kv calls them: device memory is the host's, a
// stream has done everything by the time it is asked, and a group's sends and receives go over Unix sockets.
//
//   FAKE_NCCL_FLIP=N  one bit of what the N-th receive of the process delivers is wrong (from 1)
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kFailed = 1;
constexpr int kRetryUs = 1000;
constexpr int kTries = 30'000;

struct UniqueId {
  char internal[128];
};

struct Comm {
  std::string name;
  int rank = 0;
  int listener = -1;
  std::map<int, int> to = {};  // sockets by peer
  std::map<int, int> from = {};
};

struct Operation {
  Comm* comm;
  bool sends;
  int peer;
  char* data;
  std::size_t bytes;
};

std::vector<Operation> group;
int receives = 0;

sockaddr_un address_of(const std::string& name, int rank, socklen_t& bytes) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;  // in the abstract name space: the first byte stays zero
  const std::string text = name + "-" + std::to_string(rank);
  std::memcpy(address.sun_path + 1, text.data(), text.size());
  bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  return address;
}

bool move_all(int socket, char* data, std::size_t bytes, bool sends) {
  while (bytes > 0) {
    const ssize_t n = sends ? ::send(socket, data, bytes, MSG_NOSIGNAL) : ::recv(socket, data, bytes, 0);
    if (n <= 0) return false;
    data += n;
    bytes -= static_cast<std::size_t>(n);
  }
  return true;
}

int connect_to(const Comm& comm, int peer) {
  socklen_t bytes = 0;
  const sockaddr_un address = address_of(comm.name, peer, bytes);
  const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  for (int i = 0; i < kTries; ++i) {
    if (::connect(socket, reinterpret_cast<const sockaddr*>(&address), bytes) == 0) {
      int rank = comm.rank;
      move_all(socket, reinterpret_cast<char*>(&rank), sizeof rank, true);
      return socket;
    }
    usleep(kRetryUs);
  }
  return -1;
}

// Whoever connects says who he is.
int accept_from(Comm& comm, int peer) {
  while (!comm.from.contains(peer)) {
    const int socket = ::accept(comm.listener, nullptr, nullptr);
    int rank = 0;
    if (socket < 0 || !move_all(socket, reinterpret_cast<char*>(&rank), sizeof rank, false)) return -1;
    comm.from[rank] = socket;
  }
  return comm.from[peer];
}

}  // namespace

EXPORT int cuInit(unsigned) {
  return 0;
}
EXPORT int cuDeviceGetCount(int* devices) {
  *devices = 1;
  return 0;
}
EXPORT int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
EXPORT int cuDeviceGetName(char* name, int bytes, int) {
  std::strncpy(name, "host memory", static_cast<std::size_t>(bytes));
  return 0;
}
EXPORT int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = nullptr;
  return 0;
}
EXPORT int cuCtxSetCurrent(void*) {
  return 0;
}
EXPORT int cuMemAlloc_v2(unsigned long long* data, std::size_t bytes) {
  *data = reinterpret_cast<unsigned long long>(std::malloc(bytes));
  return *data == 0 ? kFailed : 0;
}
EXPORT int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, std::size_t bytes, void*) {
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  return 0;
}
EXPORT int cuMemcpyHtoD_v2(unsigned long long to, const void* from, std::size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return 0;
}
EXPORT int cuMemcpyDtoH_v2(void* to, unsigned long long from, std::size_t bytes) {
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return 0;
}
EXPORT int cuStreamCreate(void** stream, unsigned) {
  *stream = nullptr;
  return 0;
}
EXPORT int cuStreamQuery(void*) {
  return 0;
}
EXPORT int cuGetErrorName(int, const char** name) {
  *name = "an error";
  return 0;
}

EXPORT int ncclGetVersion(int* version) {
  *version = 22800;
  return 0;
}
EXPORT int ncclGetUniqueId(UniqueId* id) {
  static int next = 0;
  *id = {};
  const std::string text = "fake-nccl-" + std::to_string(getpid()) + "-" + std::to_string(next++);
  std::memcpy(id->internal, text.data(), text.size());
  return 0;
}
EXPORT int ncclCommInitRank(void** comm, int, UniqueId id, int rank) {
  auto* const own = new Comm{id.internal, rank};
  socklen_t bytes = 0;
  const sockaddr_un address = address_of(own->name, rank, bytes);
  own->listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  *comm = own;
  if (::bind(own->listener, reinterpret_cast<const sockaddr*>(&address), bytes) != 0) return kFailed;
  return ::listen(own->listener, 64) == 0 ? 0 : kFailed;
}
EXPORT int ncclCommDestroy(void* comm) {
  auto* const own = static_cast<Comm*>(comm);
  ::close(own->listener);
  for (const auto& [peer, socket] : own->to) ::close(socket);
  for (const auto& [peer, socket] : own->from) ::close(socket);
  delete own;
  return 0;
}
EXPORT int ncclCommGetAsyncError(void*, int* error) {
  *error = 0;
  return 0;
}
EXPORT const char* ncclGetErrorString(int) {
  return "a socket failed";
}
EXPORT int ncclGroupStart() {
  group.clear();
  return 0;
}
EXPORT int ncclSend(const void* data, std::size_t count, int, int peer, void* comm, void*) {
  group.push_back({static_cast<Comm*>(comm), true, peer, static_cast<char*>(const_cast<void*>(data)), count});
  return 0;
}
EXPORT int ncclRecv(void* data, std::size_t count, int, int peer, void* comm, void*) {
  group.push_back({static_cast<Comm*>(comm), false, peer, static_cast<char*>(data), count});
  return 0;
}
// All peers at the same time, each one's operations in their order.
EXPORT int ncclGroupEnd() {
  std::map<std::pair<bool, int>, std::vector<Operation>> lanes;
  for (const Operation& operation : group) lanes[{operation.sends, operation.peer}].push_back(operation);
  std::vector<std::thread> threads;
  std::vector<char> failed(lanes.size());
  char* failing = failed.data();
  for (const auto& [which, operations] : lanes) {
    const auto [sends, peer] = which;
    Comm& comm = *operations.front().comm;
    auto& sockets = sends ? comm.to : comm.from;
    if (!sockets.contains(peer)) sockets[peer] = sends ? connect_to(comm, peer) : accept_from(comm, peer);
    threads.emplace_back([&lane = operations, socket = sockets[peer], failing] {
      for (const Operation& operation : lane) {
        if (!move_all(socket, operation.data, operation.bytes, operation.sends)) *failing = 1;
      }
    });
    ++failing;
  }
  for (std::thread& thread : threads) thread.join();
  const char* const flip = std::getenv("FAKE_NCCL_FLIP");
  for (const Operation& operation : group) {
    if (operation.sends || ++receives != (flip == nullptr ? 0 : std::atoi(flip))) continue;
    operation.data[operation.bytes / 2] = static_cast<char>(operation.data[operation.bytes / 2] ^ 4);
  }
  group.clear();
  for (const char one : failed) {
    if (one != 0) return kFailed;
  }
  return 0;
}
