#include "verbatim-perf/connections.h"

#include <sched.h>

#include "netapi/log.h"
#include "verbatim-perf/failure.h"

namespace verbatim::perf {

void require(nccl::Result result, const std::string& what) {
  if (result == nccl::Result::kSuccess) return;
  throw Failure(what + ": " + netapi::result_name(result));
}

std::string Connection::to_string() const {
  return (sends ? "send to rank " + std::to_string(flow.destination)
                : "receive from rank " + std::to_string(flow.source)) +
         ", channel " + std::to_string(flow.channel);
}

Connections::Connections(netapi::Plugin& plugin, void* context, int devices, const std::vector<Flow>& flows, int rank)
    : plugin_(plugin), context_(context) {
  for (std::size_t index = 0; index < flows.size(); ++index) {
    const Flow& flow = flows[index];
    const int device = flow.channel % devices;
    if (flow.source == rank) connections_.push_back({flow, index, true, device, nullptr, {}});
    if (flow.destination == rank) connections_.push_back({flow, index, false, device, nullptr, {}});
  }
  listens_.resize(connections_.size());
}

std::vector<Handle> Connections::listen() {
  std::vector<Handle> handles;
  for (std::size_t i = 0; i < connections_.size(); ++i) {
    if (connections_[i].sends) continue;
    Handle& handle = handles.emplace_back();
    require(plugin_.listen(context_, connections_[i].device, handle.data(), &listens_[i]), "listen");
    if (listens_[i] == nullptr) throw Failure("listen answered success without a comm");
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
      require(plugin_.connect(context_, connection.device, handles[connection.flow_index].data(), &connection.comm),
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

void Connections::register_memory(const Memory& memory) {
  for (Connection& connection : connections_) {
    for (std::size_t i = 0; i < kBuffers; ++i) {
      const Memory::Piece& piece = memory.buffers[i];
      if (piece.bytes == 0) continue;
      require(plugin_.reg_mr(connection.comm, piece.data, piece.bytes, nccl::kPtrHost, &connection.mhandles[i]),
              "regMr of " + std::to_string(piece.bytes) + " bytes (" + connection.to_string() + ")");
    }
  }
}

void Connections::close() {
  for (Connection& connection : connections_) {
    for (std::size_t i = 0; i < kBuffers; ++i) {
      if (connection.mhandles[i] == nullptr) continue;
      require(plugin_.dereg_mr(connection.comm, connection.mhandles[i]), "deregMr");
      connection.mhandles[i] = nullptr;
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

}  // namespace verbatim::perf
