// The paths of the fabric behind a port (SOFTVERBS_PATHS). A switch hashes the packets of each QP over them, as with
// ECMP. A path has no rate: which one a QP uses is only reported.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "softverbs/host/layout.h"

namespace verbatim::softverbs {

// The UDP source port of RoCE v2 packets with this GRH flow label: one of the upper quarter of the port numbers, with
// the low 14 bits of the label XOR its high 6 bits. It is that of Linux (rdma_flow_label_to_udp_sport in
// include/rdma/ib_verbs.h) and rdma-core (ibv_flow_label_to_udp_sport).
std::uint16_t udp_source_port(std::uint32_t flow_label);

// The flow label of a QP whose address has none: the product of both QP numbers, folded to 20 bits. It is that of Linux
// (rdma_calc_flow_label).
std::uint32_t default_flow_label(std::uint32_t qpn, std::uint32_t dest_qpn);

// The hash of the switches: the CRC-32 of Ethernet without the inversions, so that it is linear over GF(2). Headers
// that differ only in the low three bits of the last byte have hashes that differ in their low three bits: eight
// consecutive UDP source ports from a multiple of 8 on reach all of 2, 4 or 8 paths.
std::uint32_t path_hash(std::span<const std::uint8_t> header);

struct PathChoice {
  std::uint32_t path;
  std::uint16_t udp_source_port;  // 0: the packets have none
};

// RoCE v2: by both addresses and the UDP source port. InfiniBand: by both LIDs, so that all QPs between two ports use
// one path. RoCE v1 has no UDP header: by both addresses.
PathChoice choose_path(const SharedPort& port, const ibv_ah_attr& address, std::uint32_t qpn, std::uint32_t dest_qpn,
                       std::uint32_t paths);

}  // namespace verbatim::softverbs
