#include "softverbs/engine/datagrams.h"

#include <endian.h>
#include <netinet/ip.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "softverbs/engine/objects.h"
#include "softverbs/engine/process.h"
#include "softverbs/engine/qp.h"
#include "softverbs/engine/responder.h"
#include "softverbs/faults/faults.h"
#include "softverbs/host/device_attributes.h"

namespace verbatim::softverbs {
namespace {

constexpr std::uint32_t kPrivilegedQkey = 1U << 31;
constexpr std::uint8_t kIbTransport = 0x1b;  // next header of a GRH
constexpr unsigned kIpv6 = 6;
constexpr std::size_t kIpv4Offset = 20;  // in the 40 bytes of the GRH: an IPv4 header is at their end
constexpr std::uint64_t kIpv4HeaderBytes = 20;
// Bytes around the payload of a packet.
constexpr std::uint64_t kUdpBytes = 8;
constexpr std::uint64_t kTransportBytes = 12 + 8;  // BTH and DETH
constexpr std::uint64_t kImmediateBytes = 4;
constexpr std::uint64_t kInvariantCrcBytes = 4;

bool is_ipv4(const ibv_gid& gid) {
  constexpr std::uint8_t kPrefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.raw, kPrefix, sizeof kPrefix) == 0;
}

std::uint32_t ipv4_of(const ibv_gid& gid) {
  std::uint32_t address = 0;  // in network byte order
  std::memcpy(&address, gid.raw + 12, sizeof address);
  return address;
}

ibv_gid gid_of(std::uint32_t ipv4) {
  ibv_gid gid{};
  gid.raw[10] = gid.raw[11] = 0xff;
  std::memcpy(gid.raw + 12, &ipv4, sizeof ipv4);
  return gid;
}

// The checksum of a header whose checksum field is 0.
std::uint16_t ipv4_checksum(const iphdr& header) {
  std::uint16_t words[sizeof header / sizeof(std::uint16_t)];
  std::memcpy(words, &header, sizeof header);
  std::uint32_t sum = 0;
  for (const std::uint16_t word : words) sum += word;
  while (sum > 0xffff) sum = (sum & 0xffff) + (sum >> 16);
  return static_cast<std::uint16_t>(~sum);
}

bool is_valid(const iphdr& header) {
  iphdr checked = header;
  checked.check = 0;
  return header.version == 4 && header.ihl == 5 && header.check == ipv4_checksum(checked);
}

void fill_ipv4(const SharedGid& source, const ibv_global_route& route, std::uint64_t bytes, ibv_grh& grh) {
  iphdr header{};
  header.version = 4;
  header.ihl = 5;
  header.tos = route.traffic_class;
  header.tot_len = htobe16(static_cast<std::uint16_t>(kIpv4HeaderBytes + kUdpBytes + bytes));
  header.frag_off = htobe16(IP_DF);
  header.ttl = route.hop_limit;
  header.protocol = IPPROTO_UDP;
  header.saddr = ipv4_of(source.gid);
  header.daddr = ipv4_of(route.dgid);
  header.check = ipv4_checksum(header);
  std::memcpy(reinterpret_cast<std::byte*>(&grh) + kIpv4Offset, &header, sizeof header);
}

// The header of the network layer as the receiver gets it: of InfiniBand and RoCE v1 the GRH, of RoCE v2 the IP header.
ibv_grh network_header(const SharedGid& source, const ibv_global_route& route, const Packets& packets) {
  const std::uint64_t padded = round_up(packets.message_bytes, 4);
  const std::uint64_t imm = packets.opcode == IBV_WR_SEND_WITH_IMM ? kImmediateBytes : 0;
  const std::uint64_t bytes = kTransportBytes + imm + padded + kInvariantCrcBytes;
  const bool is_v2 = source.type == IBV_GID_TYPE_ROCE_V2;
  ibv_grh grh{};
  if (is_v2 && is_ipv4(source.gid)) {
    fill_ipv4(source, route, bytes, grh);
    return grh;
  }
  grh.version_tclass_flow =
      htobe32(kIpv6 << 28 | std::uint32_t{route.traffic_class} << 20 | (route.flow_label & 0xfffffU));
  grh.paylen = htobe16(static_cast<std::uint16_t>(bytes + (is_v2 ? kUdpBytes : 0)));
  grh.next_hdr = is_v2 ? std::uint8_t{IPPROTO_UDP} : kIbTransport;
  grh.hop_limit = route.hop_limit;
  grh.sgid = source.gid;
  grh.dgid = route.dgid;
  return grh;
}

// On RoCE, a completion has the type of the packet in place of the service level, as the standard demands (A17.4.5.1)
// and the adapters of NVIDIA do: 0 for RoCE v1; with RoCE v2 bit 3, and 1 for IPv6 or 2 for IPv4. UCX reads it.
std::uint8_t packet_type(const SharedGid& source) {
  if (source.type != IBV_GID_TYPE_ROCE_V2) return 0;
  return is_ipv4(source.gid) ? 8 | 2 : 8 | 1;
}

// nullopt: the packet cannot be built. The GID that the address handle names was removed, or the addresses of both ends
// are of different families.
std::optional<DatagramHeader> header_of(const Qp& qp, const DatagramAddress& to, const Packets& packets,
                                        const SharedPort& target) {
  const SharedPort& port = qp.process->segment().ports[qp.shared->device];
  DatagramHeader header{};
  header.qkey = (to.qkey & kPrivilegedQkey) != 0 ? qp.shared->qkey.load(std::memory_order_relaxed) : to.qkey;
  header.sl = to.path.sl;
  // Between subnets the router forwards it, which has the FLID of the port that sent it.
  header.slid = static_cast<std::uint16_t>(port.subnet == target.subnet ? port.lid : port.flid);
  header.has_grh = to.path.is_global != 0;
  if (!header.has_grh) return header;
  const SharedGid& source = port.gids()[to.path.grh.sgid_index];
  if (source.valid == 0 || (port.ethernet != 0 && is_ipv4(source.gid) != is_ipv4(to.path.grh.dgid)))
    return std::nullopt;
  if (port.ethernet != 0) header.sl = packet_type(source);
  header.grh = network_header(source, to.path.grh, packets);
  return header;
}

// The index of a GID of the port; -1: it does not have it.
int find_gid(const SharedPort& port, const ibv_gid& gid, std::uint32_t type) {
  const SharedGid* const gids = port.gids();
  for (std::uint32_t index = 0; index < kGidTableLength; ++index) {
    const SharedGid& entry = gids[index];
    if (entry.valid != 0 && entry.type == type && std::memcmp(&entry.gid, &gid, sizeof gid) == 0) {
      return static_cast<int>(index);
    }
  }
  return -1;
}

}  // namespace

Result<Ah*> create_ah(Context& context, ibv_pd* pd, const ibv_ah_attr& path) {
  Process& process = *context.process;
  if (!is_path_valid(process.segment().ports[context.device], path)) return system_error("create_ah", EINVAL);
  ObjectCounters& counters = process.objects(ObjectKind::kAh);
  if (counters.alive.get() >= std::uint64_t{kMaxAhs}) return system_error("create_ah", ENOMEM);
  auto ah = std::make_unique<Ah>();
  ah->context = pd->context;
  ah->pd = pd;
  ah->path = path;
  static_cast<Pd*>(pd)->users.fetch_add(1, std::memory_order_relaxed);
  counters.count_created();
  return ah.release();
}

void destroy_ah(Ah& ah) {
  static_cast<Pd*>(ah.pd)->users.fetch_sub(1, std::memory_order_release);
  context_of(ah.context).process->objects(ObjectKind::kAh).count_destroyed();
  delete &ah;
}

int init_ah_from_wc(const Context& context, std::uint8_t port_number, const ibv_wc& completion, const void* received,
                    ibv_ah_attr& path) {
  if (port_number != kPortNumber) return EINVAL;
  const SharedPort& port = context.process->segment().ports[context.device];
  path = {};
  path.dlid = completion.slid;
  path.sl = completion.sl;
  path.src_path_bits = completion.dlid_path_bits;
  path.port_num = port_number;
  if ((completion.wc_flags & IBV_WC_GRH) == 0) return 0;
  path.is_global = 1;
  ibv_grh grh{};
  std::memcpy(&grh, received, sizeof grh);
  iphdr ipv4{};
  std::memcpy(&ipv4, static_cast<const std::byte*>(received) + kIpv4Offset, sizeof ipv4);
  const std::uint32_t flow = be32toh(grh.version_tclass_flow);
  int index = -1;
  if (port.ethernet != 0 && is_valid(ipv4)) {
    index = find_gid(port, gid_of(ipv4.daddr), IBV_GID_TYPE_ROCE_V2);
    path.grh.dgid = gid_of(ipv4.saddr);
    path.grh.hop_limit = ipv4.ttl;
    path.grh.traffic_class = ipv4.tos;
  } else if (flow >> 28 == kIpv6 && (grh.next_hdr == IPPROTO_UDP || grh.next_hdr == kIbTransport)) {
    const std::uint32_t type = grh.next_hdr == IPPROTO_UDP ? std::uint32_t{IBV_GID_TYPE_ROCE_V2}
                               : port.ethernet != 0        ? std::uint32_t{IBV_GID_TYPE_ROCE_V1}
                                                           : std::uint32_t{IBV_GID_TYPE_IB};
    index = find_gid(port, grh.dgid, type);
    path.grh.dgid = grh.sgid;
    path.grh.hop_limit = grh.hop_limit;
    path.grh.traffic_class = static_cast<std::uint8_t>(flow >> 20);
    path.grh.flow_label = flow & 0xfffffU;
  } else {
    return EPROTONOSUPPORT;
  }
  if (index < 0) return ENOENT;
  path.grh.sgid_index = static_cast<std::uint8_t>(index);
  return 0;
}

int set_datagram_address(Qp& qp, std::uint32_t slot, ibv_ah* ah, std::uint32_t qpn, std::uint32_t qkey) {
  if (ah == nullptr || ah->pd != qp.pd || qpn > k24Bits) return EINVAL;
  qp.datagrams->addresses[slot] = {static_cast<Ah*>(ah)->path, qpn, qkey, true};
  return 0;
}

Attempt transmit_datagram(Qp& qp, const Packets& packets, Spans& local) {
  Faults* const faults = softverbs::faults();
  Requester& requester = qp.requester;
  // The standard demands that such a request sends nothing and completes without an error (C10-93.1.1).
  if (packets.message_bytes > requester.mtu_bytes) return {Outcome::kLost};
  Datagrams& datagrams = *qp.datagrams;
  const DatagramAddress& to = datagrams.addresses[requester.sent & qp.sends.mask];
  requester.route = {};
  requester.dest_qpn = to.qpn;
  requester.path = to.path;
  if (const Outcome found = find_peer(qp); found != Outcome::kDone) return {found};
  const Route& route = requester.route;
  if (datagrams.targets.size() <= requester.peer_slot) datagrams.targets.resize(requester.peer_slot + std::size_t{1});
  datagrams.targets[requester.peer_slot] = route.process;
  const Incarnation me = qp.process->me();
  if (!route.qp->lock.lock_within(me, kYieldsForPeerLock)) return {Outcome::kBusy};
  Response response = Response::kNoResponse;
  if (route.qp->qpn.load(std::memory_order_relaxed) == to.qpn && !is_unreachable(qp, faults)) {
    const std::optional<DatagramHeader> header =
        header_of(qp, to, packets, route.process->segment().ports[route.qp->device]);
    if (header) response = receive_datagram(*route.process, me, route.index, packets, *header, local);
  }
  route.qp->lock.unlock(me);
  if (response == Response::kSourceFault) return attempt_of(response);
  if (response != Response::kAck) return {Outcome::kLost};
  return {.outcome = Outcome::kDone, .packets = 1};
}

}  // namespace verbatim::softverbs
