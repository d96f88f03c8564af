// The prefill side of one family on one rank: holds the source blocks, and sends each request's to the decode ranks
// that announce where they want them. Runs on a thread of its own; other families have theirs.
#pragma once

#include <array>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "verbatim-kv/channel.h"
#include "verbatim-kv/rank_context.h"
#include "verbatim-kv/stats.h"
#include "workload/kv/block_pool.h"

namespace verbatim::kv {

class Prefill {
 public:
  // `channels`: one to each decode rank, in their order.
  Prefill(const RankContext& world, const Family& family, std::vector<Channel> channels);

  // Until every decode rank has said bye. Throws Failure.
  void run();
  // After run(): canaries, then the connections.
  void check();
  void close();
  FamilyStats& stats() { return stats_; }

 private:
  // What this rank holds of a request, until all decode ranks that share it are done.
  struct Source {
    std::vector<std::uint32_t> blocks = {};
    std::uint32_t parts_done = 0;
  };
  struct Announced {
    Attempt which;
    std::uint32_t generation;
    bool staged;
    BlockList list;
  };
  // One accepted try of a request.
  struct Outgoing {
    Attempt which;
    bool staged = false;
    std::vector<std::uint32_t> source = {};
    std::vector<std::uint32_t> destination = {};
    std::size_t total = 0;  // messages
    std::uint32_t first_tag = 0;
    std::size_t posted = 0;
    std::size_t completed = 0;
    std::size_t kill_at = ~std::size_t{0};  // messages after which the connection goes away
    std::uint64_t not_before_ns = 0;
    std::uint32_t crc = 0;
  };
  struct Sent {
    void* request;
    Outgoing* owner;
  };
  // The connection to one decode rank.
  struct Lane {
    std::uint32_t decode = 0;
    Channel channel = {};
    std::uint32_t generation = 0;
    std::array<char, nccl::kNetHandleMaxBytes> handle = {};
    bool connecting = false;
    void* comm = nullptr;
    std::vector<void*> mhandles = {};
    FamilyDescription peer = {};
    std::optional<RegisteredFamily> peers = {};  // of `peer`
    std::unique_ptr<BlockReservations> claims = nullptr;
    std::list<Outgoing> outgoing = {};  // in the order in which both ends go
    std::deque<Sent> sent = {};
    std::uint32_t next_tag = 0;
    bool bye = false;
  };

  bool take_messages(Lane& lane);
  void open(Lane& lane, Reader reader);
  bool poll_connect(Lane& lane);
  bool retry_waiting();
  bool answer(Lane& lane, const Announced& announced);
  std::optional<Rejection> validate(Lane& lane, const Announced& announced, const BlockList& own);
  void reject(Lane& lane, const Attempt& which, const Rejection& refusal);
  bool provide(const Request& request, Source& source);
  void forget(Lane& lane, std::uint32_t request);
  void finish_part(Lane& lane, std::uint32_t request);
  bool post(Lane& lane);
  bool complete(Lane& lane);
  bool copy_staged(Lane& lane);
  void notify(Lane& lane, const Outgoing& outgoing);
  void drop_connection(Lane& lane);
  void fail(Lane& lane, const std::string& why);

  const Request& request_of(std::uint32_t id) const;
  std::size_t part_offset(const Lane& lane) const;
  std::byte* piece(const Lane& lane, const Outgoing& outgoing, std::size_t message) const;
  std::uint32_t crc_of(const Lane& lane, const Outgoing& outgoing) const;

  const RankContext& context_;
  const Family& family_;
  const RegisteredFamily own_;
  const Contents contents_;
  const Faults faults_;
  const std::size_t part_bytes_;
  std::vector<std::size_t> intervals_;  // of each layer
  BlockPool pool_;
  std::vector<Lane> lanes_;
  std::map<std::uint32_t, Source> sources_;
  std::deque<std::pair<Lane*, Announced>> waiting_;  // for source blocks
  FamilyStats stats_;
};

}  // namespace verbatim::kv
