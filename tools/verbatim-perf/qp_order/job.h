// Ranks within this process, every one on a device of its own as far as there are enough, and the connections between
// them: asked for as NCCL asks, each rank for its peers in turn with all connections of one in a row.
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
  bool only_from_first = false;  // connections from rank 0 alone
  // From table version 11 on setNetAttr says what comes: so many peers, -1: as many as there are. 0: nothing.
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
  // Up to table version 10 a process has one context: copies of the plugin in `scratch` make up for devices that are
  // too few. Throws Failure, as all do.
  Job(const std::string& plugin, int api_version, const JobShape& shape, const std::string& scratch);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  int api_version() const;
  // Table and process of a rank.
  netapi::Plugin& plugin(int rank) { return *plugins_[place(rank).plugin]; }
  // Who the rank is to its peers, as VERBATIM_QP_DUMP shows it.
  const std::string& identity(int rank) const { return identities_[static_cast<std::size_t>(rank)]; }
  int device(int rank) const { return place(rank).device; }

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

  const RankLocation& place(int rank) const { return places_[static_cast<std::size_t>(rank)]; }
  void read_identity(int rank);
  void announce(int rank);
  void ask(Attempt& attempt);
  bool advance(Attempt& attempt);

  const JobShape shape_;
  std::vector<std::unique_ptr<netapi::Plugin>> plugins_;
  std::vector<RankLocation> places_;
  std::vector<std::string> identities_;
  std::vector<JobConnection> connections_;
};

}  // namespace verbatim::perf::qp_order
