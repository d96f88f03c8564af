// What the ranks of verbatim-info --pairs have found, and what follows from it.
#pragma once

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace verbatim::info {

struct PairPort {
  std::string name;  // of the verbs device and port
  std::string link_layer;
  std::string gid_type;
  unsigned mtu = 0;         // bytes; 0: unknown
  unsigned speed_mbps = 0;  // 0: unknown
};

// A rank of the job: one for each host, as a rule.
struct PairHost {
  std::string name;
  std::string why_no_port;  // set if there is none
  std::vector<PairPort> ports;
};

// How the error of a link begins that was not tested, because one of its ports has failed so often.
inline constexpr const char* kNotTried = "not tried: ";

// From one port to another one, in this direction.
struct PairLink {
  int from = 0;  // index of the host
  int from_port = 0;
  int to = 0;
  int to_port = 0;
  std::string error;      // empty: the link works
  double latency_us = 0;  // half of the time of a message of 8 B and its answer
  double gb_s = 0;        // 10^9 bytes a second
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PairPort, name, link_layer, gid_type, mtu, speed_mbps)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PairHost, name, why_no_port, ports)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PairLink, from, from_port, to, to_port, error, latency_us, gb_s)

struct PairReport {
  std::vector<PairHost> hosts;
  std::vector<PairLink> links;

  // One line each, the worst first: hosts without a port, ports of which most links fail or are slow, other links,
  // ports that differ from the rest. Empty: nothing is wrong.
  std::vector<std::string> findings() const;
  // The findings, then the links that fail or are slow, the worst first, then the medians.
  void print(std::FILE* out) const;
  nlohmann::ordered_json json() const;
};

}  // namespace verbatim::info
