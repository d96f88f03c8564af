// The connections of one rank. The service thread establishes, registers and closes them, as NCCL's proxy service
// thread does.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "nccl/types.h"
#include "netapi/plugin.h"
#include "ranks/coordinator_connection.h"

namespace verbatim::ranks {

// One connection of the job.
struct Flow {
  int source;
  int destination;
  int channel;
};

// A range of memory that a rank sends from or receives into.
struct Piece {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

struct Connection {
  Flow flow{};
  std::size_t flow_index = 0;
  bool sends = false;
  int device = 0;  // from 0
  void* comm = nullptr;
  std::vector<void*> mhandles = {};  // one for each range of register_memory(); null for an empty range

  std::string to_string() const;  // "send to rank 3, channel 0"
};

// The handle of a listen comm, which the receiving rank passes to the sending rank.
using Handle = std::array<char, nccl::kNetHandleMaxBytes>;

class Connections {
 public:
  // Creates one connection for each end of `flows` at `rank`. Channels are assigned round robin to so many devices, of
  // which the plugin knows the first by the index `first_device`.
  Connections(netapi::Plugin& plugin, void* context, int devices, const std::vector<Flow>& flows, int rank,
              int first_device = 0);

  // The next four functions run on the service thread. listen() returns the handles of the incoming flows in their
  // order.
  std::vector<Handle> listen();
  // Polls connect and accept until all connections are established. `handles` has one for each flow, in the order of
  // `flows`.
  void establish(std::vector<Handle>& handles);
  // Calls `register_piece`, which returns the handle, for each connection and range that is not empty.
  using RegisterPiece = std::function<void*(const Connection&, const Piece&)>;
  void register_memory(const std::vector<Piece>& memory, const RegisterPiece& register_piece);
  void close();

  const Connection& find(std::size_t flow, bool sends) const;
  const std::vector<Connection>& all() const { return connections_; }

 private:
  bool establish_once(std::vector<Handle>& handles);

  netapi::Plugin& plugin_;
  void* const context_;
  const int first_device_;
  std::vector<Connection> connections_;
  std::vector<void*> listens_;  // the listen comms; same index as connections_, null for a sending connection
};

// Gathers the handles that listen() returned on every rank and returns one for each flow.
std::vector<Handle> exchange_handles(CoordinatorConnection& coordinator, const std::vector<Flow>& flows,
                                     const std::vector<Handle>& own);

}  // namespace verbatim::ranks
