// Ranks within this process, each on a device of its own as far as there are enough devices, and the connections
// between them. They are requested as NCCL does: each rank requests its peers in turn, all connections to one peer in a
// row.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "netapi/plugin.h"

namespace verbatim::perf::qp_order {

struct JobShape {
  int ranks = 2;
  int flows = 1;
  bool rotate = true;
  bool only_from_first = false;  // only rank 0 has connections to others
  // Peers that setNetAttr announces, from table version 11 on. -1: the number of other ranks; 0: no announcement.
  int announced_peers = -1;
};

struct JobConnection {
  int from = 0;
  int to = 0;
  int flow = 0;
  void* send = nullptr;
  void* recv = nullptr;
};

class Job {
 public:
  // Up to table version 10 a loaded plugin has one context. If there are more ranks than devices, further ranks load
  // copies of the plugin, which are stored in `scratch`. Throws Failure, like all functions here.
  Job(const std::string& plugin, int api_version, const JobShape& shape, const std::string& scratch);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  int api_version() const;
  // The table of the rank's copy of the plugin.
  netapi::Plugin& plugin(int rank) { return *plugins_[location(rank).plugin]; }
  // The rank's identity as VERBATIM_QP_DUMP writes it.
  const std::string& identity(int rank) const { return identities_[static_cast<std::size_t>(rank)]; }
  int device(int rank) const { return location(rank).device; }

  void connect();
  std::vector<JobConnection>& connections() { return connections_; }
  void close();

 private:
  struct RankLocation {
    std::size_t plugin = 0;
    int device = 0;
    void* context = nullptr;
  };
  struct Attempt {
    JobConnection* connection = nullptr;
    alignas(8) std::array<unsigned char, nccl::kNetHandleMaxBytes> handle{};
    void* listen = nullptr;
  };

  const RankLocation& location(int rank) const { return locations_[static_cast<std::size_t>(rank)]; }
  void read_identity(int rank);
  void announce(int rank);
  void request(Attempt& attempt);
  bool advance(Attempt& attempt);

  const JobShape shape_;
  std::vector<std::unique_ptr<netapi::Plugin>> plugins_;
  std::vector<RankLocation> locations_;
  std::vector<std::string> identities_;
  std::vector<JobConnection> connections_;
};

}  // namespace verbatim::perf::qp_order
