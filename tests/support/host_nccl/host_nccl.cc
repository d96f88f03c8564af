// The part of NCCL's interface that the tools use, between processes of one host over sockets. The sends and receives
// of a pair of ranks match in posting order. A receive whose length differs from its send fails, and so does a transfer
// to a rank without a connection. A put writes to the other process's memory, which both have mapped.
//
//   HOST_NCCL_FLIP=N  flips one bit in the data of the process's N-th receive or put, counted from 1
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "base/random.h"
#include "base/unique_fd.h"

namespace {

using verbatim::UniqueFd;

constexpr int kSuccess = 0;
constexpr int kSystemError = 2;
constexpr int kInvalidUsage = 5;
constexpr int kVersion = 22907;

struct UniqueId {
  char internal[128];
};

struct Message {
  std::string header;  // length of the data as the sender announces it
  char* data;
  std::size_t bytes;
  std::size_t done = 0;  // bytes of header and data that were transferred
};

struct Peer {
  UniqueFd socket;
  std::deque<Message> sends;
  std::deque<Message> receives;
};

// Memory of ncclMemAlloc, or the signals of a communicator: another process can map it.
struct Shared {
  char* data = nullptr;
  std::size_t bytes = 0;
  UniqueFd file;
};

struct Window {
  std::vector<char*> peers;  // where the memory of each rank is in this process
};

struct Comm {
  std::vector<Peer> peers;
  int rank = 0;
  Shared own_signals = {};                 // by source: the signals so far
  std::vector<char*> signals = {};         // by rank: its signals
  std::vector<std::uint64_t> waited = {};  // by source: the signals that were waited for
};

struct Group {
  int depth = 0;
  std::vector<Comm*> comms;
};
Group group;
int received;  // receives and puts of all comms so far
std::vector<Shared> allocations;

sockaddr_un address_of(const UniqueId& id, int rank, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const int n =
      std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "host-nccl-%.64s-%d", id.internal, rank);
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<std::size_t>(n));
  return address;
}

// Each rank connects to all lower ranks and accepts connections from all higher ranks.
bool connect_peers(Comm& comm, const UniqueId& id) {
  socklen_t length = 0;
  const sockaddr_un own = address_of(id, comm.rank, length);
  const UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto ranks = static_cast<int>(comm.peers.size());
  if (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&own), length) != 0 ||
      ::listen(listener.get(), ranks) != 0) {
    return false;
  }
  for (int rank = 0; rank < comm.rank; ++rank) {
    const sockaddr_un other = address_of(id, rank, length);
    UniqueFd& socket = comm.peers[static_cast<std::size_t>(rank)].socket;
    socket.reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&other), length) != 0) ::usleep(1000);
    if (::write(socket.get(), &comm.rank, sizeof comm.rank) != sizeof comm.rank) return false;
  }
  for (int i = comm.rank + 1; i < ranks; ++i) {
    UniqueFd socket(::accept(listener.get(), nullptr, nullptr));
    int rank = -1;
    if (::read(socket.get(), &rank, sizeof rank) != sizeof rank || rank < 0 || rank >= ranks) return false;
    comm.peers[static_cast<std::size_t>(rank)].socket = std::move(socket);
  }
  return true;
}

// Transfers as many bytes as possible without blocking. Returns 1 when it transferred bytes, 0 when none, -1 on
// failure.
int transfer(int socket, Message& message, bool sends) {
  const std::size_t head = message.header.size();
  int moved = 0;
  while (message.done < head + message.bytes) {
    char* const at = message.done < head ? message.header.data() + message.done : message.data + (message.done - head);
    const std::size_t rest = message.done < head ? head - message.done : head + message.bytes - message.done;
    std::uint64_t announced = 0;
    const ssize_t n =
        sends ? ::send(socket, at, rest, MSG_DONTWAIT | MSG_NOSIGNAL) : ::recv(socket, at, rest, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return moved;
    if (n <= 0) return -1;
    message.done += static_cast<std::size_t>(n);
    moved = 1;
    if (sends || message.done < head) continue;
    std::memcpy(&announced, message.header.data(), sizeof announced);
    if (announced != message.bytes) return -1;
  }
  return 1;
}

void corrupt_if_requested(char* data, std::size_t bytes) {
  const char* const nth = std::getenv("HOST_NCCL_FLIP");
  if (nth == nullptr || ++received != std::atoi(nth)) return;
  data[bytes / 2] = static_cast<char>(data[bytes / 2] ^ 4);
}

int run(Comm& comm) {
  for (;;) {
    bool all = true;
    bool moved = false;
    for (Peer& peer : comm.peers) {
      for (std::deque<Message>* const queue : {&peer.sends, &peer.receives}) {
        if (queue->empty()) continue;
        if (!peer.socket) return kInvalidUsage;
        const int result = transfer(peer.socket.get(), queue->front(), queue == &peer.sends);
        if (result < 0) return kSystemError;
        moved = moved || result > 0;
        const Message& first = queue->front();
        if (first.done == first.header.size() + first.bytes) {
          if (queue == &peer.receives) corrupt_if_requested(first.data, first.bytes);
          queue->pop_front();
        }
        all = all && queue->empty();
      }
    }
    if (all) return kSuccess;
    if (!moved) ::usleep(100);
  }
}

int add(Comm* comm, int peer, void* data, std::size_t bytes, bool sends) {
  if (group.depth == 0 || peer < 0 || static_cast<std::size_t>(peer) >= comm->peers.size()) return kInvalidUsage;
  const std::uint64_t length = bytes;
  std::string header(reinterpret_cast<const char*>(&length), sizeof length);
  Peer& to = comm->peers[static_cast<std::size_t>(peer)];
  (sends ? to.sends : to.receives).push_back({header, static_cast<char*>(data), bytes});
  group.comms.push_back(comm);
  return kSuccess;
}

char* map_file(int file, std::size_t bytes) {
  void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return data == MAP_FAILED ? nullptr : static_cast<char*>(data);
}

bool allocate_shared(std::size_t bytes, Shared& shared) {
  shared.bytes = bytes;
  shared.file.reset(::memfd_create("host-nccl", MFD_CLOEXEC));
  if (!shared.file || ::ftruncate(shared.file.get(), static_cast<off_t>(bytes)) != 0) return false;
  shared.data = map_file(shared.file.get(), bytes);
  return shared.data != nullptr;
}

// Tells all ranks of this rank's memory, and maps theirs: by rank. Collective.
bool map_all(Comm& comm, const Shared& own, std::vector<char*>& mapped) {
  struct Place {
    int process;
    int file;
    std::size_t bytes;
  };
  const Place place{::getpid(), own.file.get(), own.bytes};
  for (const Peer& peer : comm.peers) {
    if (peer.socket && ::write(peer.socket.get(), &place, sizeof place) != sizeof place) return false;
  }
  mapped.assign(comm.peers.size(), own.data);
  for (std::size_t rank = 0; rank < comm.peers.size(); ++rank) {
    if (!comm.peers[rank].socket) continue;
    Place other{};
    if (::recv(comm.peers[rank].socket.get(), &other, sizeof other, MSG_WAITALL) != sizeof other) return false;
    const std::string path = "/proc/" + std::to_string(other.process) + "/fd/" + std::to_string(other.file);
    const UniqueFd file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    mapped[rank] = file ? map_file(file.get(), other.bytes) : nullptr;
    if (mapped[rank] == nullptr) return false;
  }
  return true;
}

std::uint64_t* signal_of(char* signals, int source) {
  return reinterpret_cast<std::uint64_t*>(signals) + source;
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  *version = kVersion;
  return kSuccess;
}
int ncclGetUniqueId(UniqueId* id) {
  std::uint64_t number = 0;
  if (!verbatim::fill_random(std::as_writable_bytes(std::span(&number, 1)))) return kSystemError;
  *id = {};
  std::snprintf(id->internal, sizeof id->internal, "%016llx", static_cast<unsigned long long>(number));
  return kSuccess;
}
int ncclCommInitRank(void** comm, int ranks, UniqueId id, int rank) {
  auto* const created = new Comm;
  created->peers.resize(static_cast<std::size_t>(ranks));
  created->rank = rank;
  *comm = created;
  return connect_peers(*created, id) ? kSuccess : kSystemError;
}
int ncclCommDestroy(void* comm) {
  delete static_cast<Comm*>(comm);
  return kSuccess;
}
int ncclCommGetAsyncError(void*, int* error) {
  *error = kSuccess;
  return kSuccess;
}
const char* ncclGetErrorString(int result) {
  return result == kInvalidUsage ? "invalid usage" : "system error";
}
int ncclGroupStart() {
  ++group.depth;
  return kSuccess;
}
int ncclGroupEnd() {
  if (--group.depth > 0) return kSuccess;
  int result = kSuccess;
  for (Comm* const comm : group.comms) {
    if (result == kSuccess) result = run(*comm);
  }
  group.comms.clear();
  return result;
}
int ncclSend(const void* data, std::size_t count, int, int peer, void* comm, void*) {
  return add(static_cast<Comm*>(comm), peer, const_cast<void*>(data), count, true);
}
int ncclRecv(void* data, std::size_t count, int, int peer, void* comm, void*) {
  return add(static_cast<Comm*>(comm), peer, data, count, false);
}
int ncclMemAlloc(void** data, std::size_t bytes) {
  if (!allocate_shared(bytes, allocations.emplace_back())) return kSystemError;
  *data = allocations.back().data;
  return kSuccess;
}
int ncclMemFree(void* data) {
  const auto is_at = [data](const Shared& shared) { return shared.data == data; };
  const auto found = std::find_if(allocations.begin(), allocations.end(), is_at);
  if (found == allocations.end()) return kInvalidUsage;
  ::munmap(data, found->bytes);
  allocations.erase(found);
  return kSuccess;
}
// The window must be the whole of an allocation.
int ncclCommWindowRegister(void* comm, void* data, std::size_t, void** window, int) {
  auto& own = *static_cast<Comm*>(comm);
  if (own.signals.empty()) {
    own.waited.resize(own.peers.size());
    if (!allocate_shared(own.peers.size() * sizeof(std::uint64_t), own.own_signals)) return kSystemError;
    if (!map_all(own, own.own_signals, own.signals)) return kSystemError;
  }
  const auto is_at = [data](const Shared& shared) { return shared.data == data; };
  const auto found = std::find_if(allocations.begin(), allocations.end(), is_at);
  if (found == allocations.end()) return kInvalidUsage;
  auto* const created = new Window;
  *window = created;
  return map_all(own, *found, created->peers) ? kSuccess : kSystemError;
}
int ncclCommWindowDeregister(void*, void* window) {
  delete static_cast<Window*>(window);
  return kSuccess;
}
int ncclPutSignal(const void* data, std::size_t count, int, int peer, void* window, std::size_t offset, int signal,
                  int context, unsigned flags, void* comm, void*) {
  if (signal != 0 || context != 0 || flags != 0) return kInvalidUsage;
  auto& own = *static_cast<Comm*>(comm);
  char* const target = static_cast<Window*>(window)->peers[static_cast<std::size_t>(peer)] + offset;
  std::memcpy(target, data, count);
  corrupt_if_requested(target, count);
  __atomic_fetch_add(signal_of(own.signals[static_cast<std::size_t>(peer)], own.rank), 1, __ATOMIC_RELEASE);
  return kSuccess;
}
struct WaitDescription {
  int count;
  int peer;
  int signal;
  int context;
};
int ncclWaitSignal(int count, WaitDescription* descriptions, void* comm, void*) {
  auto& own = *static_cast<Comm*>(comm);
  for (const WaitDescription& one : std::span(descriptions, static_cast<std::size_t>(count))) {
    std::uint64_t& waited = own.waited[static_cast<std::size_t>(one.peer)];
    waited += static_cast<std::uint64_t>(one.count);
    while (__atomic_load_n(signal_of(own.own_signals.data, one.peer), __ATOMIC_ACQUIRE) < waited) ::usleep(20);
  }
  return kSuccess;
}
}
