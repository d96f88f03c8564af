#include "softverbs/fabric/paths.h"

#include <array>

namespace verbatim::softverbs {
namespace {

constexpr std::uint32_t kFlowLabelMask = 0xfffff;
constexpr std::uint32_t kFirstUdpSourcePort = 0xc000;
constexpr std::uint32_t kReversedPolynomial = 0xedb88320;

// The fields of a packet that switches hash.
class Header {
 public:
  void add(const ibv_gid& gid) {
    for (const std::uint8_t byte : gid.raw) bytes_[size_++] = byte;
  }
  void add(std::uint32_t number) {  // 16 bits
    bytes_[size_++] = static_cast<std::uint8_t>(number >> 8);
    bytes_[size_++] = static_cast<std::uint8_t>(number);
  }
  std::uint32_t hash() const { return path_hash({bytes_.data(), size_}); }

 private:
  std::array<std::uint8_t, 2 * sizeof(ibv_gid) + sizeof(std::uint16_t)> bytes_{};
  std::size_t size_ = 0;
};

}  // namespace

std::uint16_t udp_source_port(std::uint32_t flow_label) {
  const std::uint32_t label = flow_label & kFlowLabelMask;
  return static_cast<std::uint16_t>(kFirstUdpSourcePort | ((label ^ label >> 14) & 0x3fff));
}

std::uint32_t default_flow_label(std::uint32_t qpn, std::uint32_t dest_qpn) {
  std::uint64_t folded = std::uint64_t{qpn} * dest_qpn;
  folded ^= folded >> 20;
  folded ^= folded >> 40;
  return static_cast<std::uint32_t>(folded) & kFlowLabelMask;
}

std::uint32_t path_hash(std::span<const std::uint8_t> header) {
  std::uint32_t hash = 0;
  for (const std::uint8_t byte : header) {
    hash ^= byte;
    for (int bit = 0; bit < 8; ++bit) hash = (hash & 1) != 0 ? hash >> 1 ^ kReversedPolynomial : hash >> 1;
  }
  return hash;
}

PathChoice choose_path(const SharedPort& port, const ibv_ah_attr& address, std::uint32_t qpn, std::uint32_t dest_qpn,
                       std::uint32_t paths) {
  Header header;
  if (port.ethernet == 0) {
    header.add(port.lid);
    header.add(address.dlid);
    return {header.hash() % paths, 0};
  }
  const ibv_global_route& grh = address.grh;
  const SharedGid& source = port.gids()[grh.sgid_index];
  header.add(source.gid);
  header.add(grh.dgid);
  if (source.type != IBV_GID_TYPE_ROCE_V2) return {header.hash() % paths, 0};
  const std::uint32_t label = grh.flow_label != 0 ? grh.flow_label : default_flow_label(qpn, dest_qpn);
  const std::uint16_t source_port = udp_source_port(label);
  header.add(source_port);
  return {header.hash() % paths, source_port};
}

}  // namespace verbatim::softverbs
