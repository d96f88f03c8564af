// The part of NCCL's interface that the tools use, between processes of one host over sockets. The sends and receives
// of a pair of ranks match in posting order. A receive whose length differs from its send fails, and so does a transfer
// to a rank without a connection.
//
//   HOST_NCCL_FLIP=N  flips one bit in the data of the process's N-th receive, counted from 1
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
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

struct Comm {
  std::vector<Peer> peers;
  int rank = 0;
};

struct Group {
  int depth = 0;
  std::vector<Comm*> comms;
};
Group group;
int received;  // receives of all comms so far

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

void corrupt_if_requested(const Message& message) {
  const char* const nth = std::getenv("HOST_NCCL_FLIP");
  if (nth == nullptr || ++received != std::atoi(nth)) return;
  message.data[message.bytes / 2] = static_cast<char>(message.data[message.bytes / 2] ^ 4);
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
          if (queue == &peer.receives) corrupt_if_requested(first);
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
}
