// What a requester sends to the responder of its peer.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

namespace verbatim::softverbs {

struct Qp;

// One step of a message: a run of packets.
struct Packets {
  ibv_wr_opcode opcode;
  std::uint32_t source_qpn;
  std::uint32_t psn;    // of the first
  std::uint32_t count;  // packets in this step, 1 for an empty message
  std::uint32_t mtu_bytes;
  std::uint64_t message_bytes;  // of the whole message
  std::uint64_t offset;         // of this step in it
  std::uint64_t bytes;          // of this step
  std::uint64_t remote_address;
  std::uint64_t compare_add;
  std::uint64_t swap;
  std::uint32_t rkey;
  std::uint32_t imm;
  std::uint32_t target_resets;  // SharedQp::resets of the peer's QP when the copy of a WRITE began
  bool solicited;
  bool is_deferred;  // a WRITE whose payload place_payload() places later
  Qp* sender;        // of a WRITE whose copy may be begun only; nullptr: it must be in memory when the step ends

  bool is_first() const { return offset == 0; }
  bool is_last() const { return offset + bytes == message_bytes; }
};

// What a datagram carries besides its payload.
struct DatagramHeader {
  std::uint32_t qkey;
  std::uint16_t slid;
  std::uint8_t sl;
  bool has_grh;
  ibv_grh grh;  // or an IP header, for RoCE v2
};

}  // namespace verbatim::softverbs
