// Arithmetic of the QP order that net/connect/endpoint_pool.h describes: slots, blocks and the ring of identities. No
// verbs and no clock. Peers are known by their identity, because NCCL passes no ranks to net plugins: a peer is one
// communicator of one process on one NIC.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/config.h"
#include "wire/handle.h"

namespace verbatim {

// "host-process-device-context" in hexadecimal digits.
std::string to_string(const wire::PeerIdentity& peer);

// The order of ring(self): the identities above `self` in rising order, then those below it in rising order.
bool precedes_in_ring(const wire::PeerIdentity& self, const wire::PeerIdentity& a, const wire::PeerIdentity& b);

// The connections in one direction that setNetAttr or VERBATIM_QP_POOL announces. 0: nothing is announced.
struct AnnouncedFlows {
  unsigned peers = 0;
  unsigned flows = 0;       // connections to each peer
  bool collective = false;  // rings and trees; else sends and receives

  bool known() const { return peers != 0 && flows != 0; }
};

// QPs of a connection, within `bounds`: the more connections are announced, the fewer.
unsigned choose_qps(const QpRange& bounds, const AnnouncedFlows& announced);

// How many slots a block has: `flows` connections to each of `peers` peers.
struct BlockShape {
  unsigned peers = 0;
  unsigned flows = 0;

  bool operator==(const BlockShape&) const = default;
};

// The block for announced flows with `qps` QPs a connection and at most `max_qps` in the block: first the flows are
// reduced, then the peers. Empty when not even one connection fits. Blocks of collective connections have one peer:
// NCCL announces four peers even for a ring, where each direction has one.
BlockShape choose_block_shape(const AnnouncedFlows& announced, std::size_t qps, std::size_t max_qps);

// A rectangle of slots.
struct QpBlock {
  std::uint32_t number = 0;
  std::uint32_t first_peer = 0;
  std::uint32_t first_flow = 0;
  BlockShape shape;
};

// The place of one connection. QP j of the q QPs of the connection has the position first_position(q) + j * peers.
struct QpSlot {
  QpBlock block;
  std::uint32_t peer = 0;  // both are relative to the block
  std::uint32_t flow = 0;

  std::uint32_t index() const { return flow * block.shape.peers + peer; }
  std::uint32_t first_position(std::size_t qps) const {
    return flow * static_cast<std::uint32_t>(qps) * block.shape.peers + peer;
  }
};

// Assigns slots in the order of the calls.
class QpPlanner {
 public:
  // The next slot of `peer`. Where no block has it, a block of `shape` (not empty) with `next_number` begins there; for
  // a further flow of a known peer it has the same peers as the block of the flow before.
  QpSlot assign(const wire::PeerIdentity& peer, const BlockShape& shape, std::uint32_t next_number);

 private:
  struct Peer {
    std::uint32_t index = 0;
    std::uint32_t flows = 0;  // that have a slot
  };

  const QpBlock* find(std::uint32_t peer, std::uint32_t flow) const;

  std::map<wire::PeerIdentity, Peer> peers_;
  std::vector<QpBlock> blocks_;
};

}  // namespace verbatim
