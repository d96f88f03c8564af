#include "ranks/connections.h"

#include <sched.h>

#include <cstring>

#include "ranks/failure.h"
#include "ranks/loaded_plugin.h"

namespace verbatim::ranks {

std::string Connection::to_string() const {
  return (sends ? "send to rank " + std::to_string(flow.destination)
                : "receive from rank " + std::to_string(flow.source)) +
         ", channel " + std::to_string(flow.channel);
}

Connections::Connections(netapi::Plugin& plugin, void* context, int devices, const std::vector<Flow>& flows, int rank,
                         int first_device)
    : plugin_(plugin), context_(context), first_device_(first_device) {
  for (std::size_t index = 0; index < flows.size(); ++index) {
    const Flow& flow = flows[index];
    const int device = flow.channel % devices;
    if (flow.source == rank) connections_.push_back({flow, index, true, device});
    if (flow.destination == rank) connections_.push_back({flow, index, false, device});
  }
  listens_.resize(connections_.size());
}

std::vector<Handle> Connections::listen() {
  std::vector<Handle> handles;
  for (std::size_t i = 0; i < connections_.size(); ++i) {
    if (connections_[i].sends) continue;
    Handle& handle = handles.emplace_back();
    require(plugin_.listen(context_, first_device_ + connections_[i].device, handle.data(), &listens_[i]), "listen");
    if (listens_[i] == nullptr) throw Failure("listen returned success but no comm");
  }
  return handles;
}

void Connections::establish(std::vector<Handle>& handles) {
  while (!establish_once(handles)) sched_yield();
}

bool Connections::establish_once(std::vector<Handle>& handles) {
  bool all = true;
  for (std::size_t i = 0; i < connections_.size(); ++i) {
    Connection& connection = connections_[i];
    if (connection.comm != nullptr) continue;
    if (connection.sends) {
      require(plugin_.connect(context_, first_device_ + connection.device, handles[connection.flow_index].data(),
                              &connection.comm),
              "connect (" + connection.to_string() + ")");
    } else {
      require(plugin_.accept(listens_[i], &connection.comm), "accept (" + connection.to_string() + ")");
      if (connection.comm != nullptr) {
        require(plugin_.close_listen(listens_[i]), "closeListen");
        listens_[i] = nullptr;
      }
    }
    all = all && connection.comm != nullptr;
  }
  return all;
}

void Connections::register_memory(const std::vector<Piece>& memory, const RegisterPiece& register_piece) {
  for (Connection& connection : connections_) {
    connection.mhandles.resize(memory.size());
    for (std::size_t i = 0; i < memory.size(); ++i) {
      if (memory[i].bytes > 0) connection.mhandles[i] = register_piece(connection, memory[i]);
    }
  }
}

void Connections::close() {
  for (Connection& connection : connections_) {
    for (void*& mhandle : connection.mhandles) {
      if (mhandle == nullptr) continue;
      require(plugin_.dereg_mr(connection.comm, mhandle), "deregMr");
      mhandle = nullptr;
    }
    require(connection.sends ? plugin_.close_send(connection.comm) : plugin_.close_recv(connection.comm),
            "close (" + connection.to_string() + ")");
    connection.comm = nullptr;
  }
}

const Connection& Connections::find(std::size_t flow, bool sends) const {
  for (const Connection& connection : connections_) {
    if (connection.flow_index == flow && connection.sends == sends) return connection;
  }
  throw Failure("no connection for flow " + std::to_string(flow));
}

std::vector<Handle> exchange_handles(CoordinatorConnection& coordinator, const std::vector<Flow>& flows,
                                     const std::vector<Handle>& own) {
  std::string bytes;
  for (const Handle& handle : own) bytes.append(handle.data(), handle.size());
  const std::vector<std::string> all = coordinator.all_gather(bytes);
  std::vector<std::size_t> consumed(all.size());
  std::vector<Handle> handles(flows.size());
  for (std::size_t i = 0; i < flows.size(); ++i) {
    const auto from = static_cast<std::size_t>(flows[i].destination);
    if (all[from].size() < consumed[from] + sizeof(Handle))
      throw Failure("the ranks have different options: the number of connections differs");
    std::memcpy(handles[i].data(), all[from].data() + consumed[from], sizeof(Handle));
    consumed[from] += sizeof(Handle);
  }
  return handles;
}

}  // namespace verbatim::ranks
