#include "verbatim-perf/qp_order/job.h"

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <span>
#include <utility>

#include "ranks/failure.h"
#include "ranks/loaded_plugin.h"
#include "ranks/plugin_log.h"
#include "wire/handle.h"

namespace verbatim::perf::qp_order {
namespace {

constexpr auto kJobTimeout = std::chrono::seconds(120);
constexpr int kFirstWithContexts = 11;
constexpr std::uint32_t kSendOperation = 0x40;

std::string identity_of(std::span<const unsigned char, nccl::kNetHandleMaxBytes> handle) {
  const Result<wire::Handle> decoded = wire::decode_handle(handle);
  if (!decoded) return {};  // the handle of another plugin
  const wire::PeerIdentity& identity = decoded->listener;
  char text[80];
  std::snprintf(text, sizeof text, "%llx-%llx-%llx-%x", static_cast<unsigned long long>(identity.host_id),
                static_cast<unsigned long long>(identity.process_id),
                static_cast<unsigned long long>(identity.device_guid), identity.context);
  return text;
}

}  // namespace

Job::Job(const std::string& path, int api_version, const JobShape& shape, const std::string& scratch)
    : shape_(shape), identities_(static_cast<std::size_t>(shape.ranks)) {
  const auto open = [&](const std::string& file) {
    netapi::Opened opened = netapi::open_plugin(file, api_version);
    if (opened.plugin == nullptr) throw ranks::Failure(opened.error);
    plugins_.push_back(std::move(opened.plugin));
    ranks::choose_log_formatting(plugins_.back()->name());
    void* context = nullptr;
    ranks::require(plugins_.back()->init(1, {}, &context), "init");
    return context;
  };
  void* context = open(path);
  int devices = 0;
  ranks::require(plugins_.front()->devices(&devices), "devices");
  if (devices == 0) throw ranks::Failure("the plugin has no device. Next: run under tools/softverbs");
  for (int rank = 0; rank < shape.ranks; ++rank) {
    const bool more = rank != 0 && (this->api_version() >= kFirstWithContexts || rank % devices == 0);
    if (more && this->api_version() >= kFirstWithContexts) {
      ranks::require(plugins_.front()->init(1, {}, &context), "init");
    } else if (more) {
      const std::string copy = scratch + "/plugin-" + std::to_string(rank) + ".so";
      std::filesystem::copy_file(path, copy, std::filesystem::copy_options::overwrite_existing);
      context = open(copy);
    }
    locations_.push_back({plugins_.size() - 1, rank % devices, context});
    read_identity(rank);
  }
}

Job::~Job() {
  if (api_version() >= kFirstWithContexts) {
    for (const RankLocation& location : locations_) plugins_.front()->finalize(location.context);
  }
}

int Job::api_version() const {
  return plugins_.front()->api_version();
}

void Job::read_identity(int rank) {
  alignas(8) std::array<unsigned char, nccl::kNetHandleMaxBytes> handle{};
  void* listen = nullptr;
  ranks::require(plugin(rank).listen(location(rank).context, location(rank).device, handle.data(), &listen), "listen");
  identities_[static_cast<std::size_t>(rank)] = identity_of(handle);
  ranks::require(plugin(rank).close_listen(listen), "closeListen");
}

void Job::announce(int rank) {
  netapi::Plugin& net = plugin(rank);
  if (shape_.announced_peers == 0 || !net.has_set_net_attr()) return;
  netapi::NetAttr attributes{};
  attributes.sendCommAttr = {
      .maxConcurrentPeers = shape_.announced_peers < 0 ? shape_.ranks - 1 : shape_.announced_peers,
      .minConcurrentPeers = 1,
      .maxFlowsPerPeer = shape_.flows,
      .minFlowsPerPeer = 1};
  attributes.recvCommAttr = attributes.sendCommAttr;
  attributes.op = kSendOperation;
  ranks::require(net.set_net_attr(location(rank).context, attributes), "setNetAttr");
}

void Job::request(Attempt& attempt) {
  JobConnection& connection = *attempt.connection;
  if (connection.send != nullptr) return;
  announce(connection.from);
  const RankLocation& sender = location(connection.from);
  ranks::require(
      plugin(connection.from).connect(sender.context, sender.device, attempt.handle.data(), &connection.send),
      "connect");
}

bool Job::advance(Attempt& attempt) {
  JobConnection& connection = *attempt.connection;
  request(attempt);
  if (connection.recv == nullptr) {
    announce(connection.to);
    ranks::require(plugin(connection.to).accept(attempt.listen, &connection.recv), "accept");
  }
  return connection.send != nullptr && connection.recv != nullptr;
}

void Job::connect() {
  const int n = shape_.ranks;
  for (int from = 0; from < (shape_.only_from_first ? 1 : n); ++from) {
    for (int i = 0; i < n; ++i) {
      const int to = shape_.rotate ? (from + 1 + i) % n : i;
      if (to == from) continue;
      for (int flow = 0; flow < shape_.flows; ++flow) connections_.push_back({.from = from, .to = to, .flow = flow});
    }
  }
  std::vector<Attempt> attempts(connections_.size());
  for (std::size_t i = 0; i < attempts.size(); ++i) {
    Attempt& attempt = attempts[i];
    attempt.connection = &connections_[i];
    const int to = connections_[i].to;
    ranks::require(plugin(to).listen(location(to).context, location(to).device, attempt.handle.data(), &attempt.listen),
                   "listen");
  }
  for (Attempt& attempt : attempts) request(attempt);
  const auto end = std::chrono::steady_clock::now() + kJobTimeout;
  for (bool all = false; !all;) {
    all = true;
    for (Attempt& attempt : attempts) {
      if (attempt.listen == nullptr) continue;
      if (!advance(attempt)) {
        all = false;
        continue;
      }
      ranks::require(plugin(attempt.connection->to).close_listen(std::exchange(attempt.listen, nullptr)),
                     "closeListen");
    }
    if (!all && std::chrono::steady_clock::now() > end)
      throw ranks::Failure("a connection was not established in time");
  }
}

void Job::close() {
  for (JobConnection& connection : connections_) {
    ranks::require(plugin(connection.from).close_send(connection.send), "closeSend");
    ranks::require(plugin(connection.to).close_recv(connection.recv), "closeRecv");
  }
  connections_.clear();
}

}  // namespace verbatim::perf::qp_order
