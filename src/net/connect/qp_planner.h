// In which order the QPs of a communicator are made. A NIC that serves its send queues by QP number starts with the QPs
// that were made first: so the first QPs of all peers come first, then the second ones, and every process begins with
// another peer. Pure arithmetic: no verbs, no clock. Peers are known by who they are, never by rank.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "wire/handle.h"

namespace verbatim {

// One communicator of one process on one NIC, whichever of its listens: what shares a receiving port.
struct PeerId {
  std::uint64_t host = 0;
  std::uint64_t process = 0;
  std::uint64_t device = 0;
  std::uint32_t context = 0;

  auto operator<=>(const PeerId&) const = default;
};

PeerId peer_id(const wire::PeerIdentity& identity);
// "host-process-device-context" in hexadecimal digits.
std::string to_string(const PeerId& peer);

// What is said of the connections that follow (setNetAttr, or VERBATIM_QP_POOL). 0: nothing is known.
struct Traffic {
  unsigned peers = 0;
  unsigned flows = 0;       // connections to each of them
  bool collective = false;  // of rings and trees, not of sends and receives

  bool known() const { return peers != 0 && flows != 0; }
};

// QPs of a connection within the user's bounds: many peers and connections share what few may have alone.
unsigned choose_qps(const QpRange& bounds, const Traffic& traffic);

// A block: the connections of `peers` peers, `connections` of each, whose QPs are made together.
struct BlockShape {
  unsigned peers = 0;
  unsigned connections = 0;

  bool operator==(const BlockShape&) const = default;
};

// The block for announced traffic of which each connection takes `qps`, within `most_qps`: rows first give way (they
// come in a later block), then columns. Empty when not even one connection fits. Collective connections come in blocks
// of one peer: NCCL announces four there even for a ring, which has one.
BlockShape choose_block_shape(const Traffic& traffic, std::size_t qps, std::size_t max_qps);

// Where a connection belongs. QP j of it has the position (row * qps + j) * peers + column among those of its block.
struct QpPlacement {
  std::uint32_t block = 0;
  std::uint32_t layer = 0;      // a block grows by layers of rows, each made in one go
  std::uint32_t layer_row = 0;  // of the layer's rows
  std::uint32_t row = 0;        // of the block's rows: how many connections this peer had before
  std::uint32_t column = 0;     // how many other peers came before this one
};

// Gives out places in the order of the calls. Without ranks: NCCL asks for its peers in rotated order, each with all of
// its connections, so a peer's column is the number of those seen before it.
class QpPlanner {
 public:
  struct Layer {
    std::uint32_t block;
    unsigned peers;  // columns
    unsigned rows;
  };

  // A peer beyond the columns of its block begins the next block, a connection beyond its rows the next layer, of this
  // shape, which must not be empty.
  QpPlacement assign(const PeerId& peer, const BlockShape& shape);

  const Layer& layer(std::uint32_t index) const { return layers_[index]; }
  std::size_t layers() const { return layers_.size(); }
  // All peers are gone: what comes next starts anew.
  void clear();

 private:
  struct Block {
    unsigned peers = 0;
    unsigned seen = 0;
    unsigned rows = 0;  // of all layers
    std::vector<std::uint32_t> layers = {};
    std::vector<unsigned> first_rows = {};  // of each layer
  };
  struct Peer {
    std::uint32_t block = 0;
    std::uint32_t column = 0;
    std::uint32_t connections = 0;
  };

  void grow(std::uint32_t block, unsigned rows);

  std::map<PeerId, Peer> peers_;
  std::vector<Block> blocks_;
  std::vector<Layer> layers_;
};

// A connection that was gathered with others, and its place among them.
struct GatheredPlacement {
  std::size_t request_index = 0;  // index into what was gathered
  std::uint32_t row = 0;
  std::uint32_t column = 0;
};

// Orders what was gathered by row, then column. Columns follow the order of the requests.
std::vector<GatheredPlacement> order_gathered(std::span<const PeerId> requests);

// The same for callers that do not rotate: columns follow the ring of all identities, `self` included, from `self` on.
std::vector<GatheredPlacement> order_in_ring(std::span<const PeerId> requests, const PeerId& self);

}  // namespace verbatim
