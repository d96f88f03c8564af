// The connections of one rank: made, registered and closed from the service thread, as NCCL's service thread does.
#pragma once

#include <array>
#include <cstddef>
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

// A piece of memory that a rank sends from or receives into.
struct Piece {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

struct Connection {
  Flow flow{};
  std::size_t flow_index = 0;
  bool sends = false;
  int device = 0;
  void* comm = nullptr;
  std::vector<void*> mhandles = {};  // of register_memory()'s pieces; null for an empty one

  std::string to_string() const;  // "send to rank 3, channel 0"
};

// What the rank that receives over a connection tells the one that sends.
using Handle = std::array<char, nccl::kNetHandleMaxBytes>;

class Connections {
 public:
  // A connection for each end of `flows` that is at `rank`; channels go round the plugin's `devices`.
  Connections(netapi::Plugin& plugin, void* context, int devices, const std::vector<Flow>& flows, int rank);

  // All four run on the service thread. listen() answers with the handles of the incoming flows in their order.
  std::vector<Handle> listen();
  // Polls every connect and accept until all stand. `handles` has one for each flow, in the order of `flows`.
  void establish(std::vector<Handle>& handles);
  void register_memory(const std::vector<Piece>& memory);
  void close();

  const Connection& find(std::size_t flow, bool sends) const;
  const std::vector<Connection>& all() const { return connections_; }

 private:
  bool establish_once(std::vector<Handle>& handles);

  netapi::Plugin& plugin_;
  void* const context_;
  std::vector<Connection> connections_;
  std::vector<void*> listens_;  // of the receiving connections, by the same index
};

// One handle for each flow, of those that every rank's listen() answered with.
std::vector<Handle> exchange_handles(CoordinatorConnection& link, const std::vector<Flow>& flows,
                                     const std::vector<Handle>& own);

}  // namespace verbatim::ranks
