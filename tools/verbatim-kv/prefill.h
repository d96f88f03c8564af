// The prefill side of one family on one rank. It holds the source blocks and sends each request's blocks to the decode
// ranks that announce their destination. It runs on a thread of its own; it shares nothing with other families.
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
  // `channels` has one for each decode rank.
  Prefill(const RankContext& context, const Family& family, std::vector<Channel> channels);

  // Returns when every decode rank has sent kFinished. Throws Failure.
  void run();
  // Called after run(): check() verifies the canaries of free blocks, close() closes the connections.
  void check();
  void close();
  FamilyStats& stats() { return stats_; }

 private:
  // The source blocks of a request, held until all decode ranks that share the request are done.
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
  // An accepted attempt of a request.
  struct Outgoing {
    Attempt which;
    bool staged = false;
    std::vector<std::uint32_t> source = {};
    std::vector<std::uint32_t> destination = {};
    std::size_t total = 0;  // number of messages
    std::uint32_t first_tag = 0;
    std::size_t posted = 0;
    std::size_t completed = 0;
    std::size_t kill_at = ~std::size_t{0};  // number of messages after which the injected kill closes the connection
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
    std::optional<RegisteredFamily> peer_family = {};  // refers to `peer`
    std::unique_ptr<BlockReservations> reservations = nullptr;
    std::list<Outgoing> outgoing = {};  // in the order in which both ends post
    std::deque<Sent> sent = {};
    std::uint32_t next_tag = 0;
    bool finished = false;  // the decode rank has no more requests
  };

  bool handle_messages(Lane& lane);
  void open(Lane& lane, Reader reader);
  bool poll_connect(Lane& lane);
  bool retry_waiting();
  bool handle_announcement(Lane& lane, const Announced& announced);
  std::optional<Rejection> validate(Lane& lane, const Announced& announced, const BlockList& own);
  void reject(Lane& lane, const Attempt& which, const Rejection& rejection);
  bool allocate_source(const Request& request, Source& source);
  void remove_outgoing(Lane& lane, std::uint32_t request);
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
  std::vector<std::size_t> intervals_;  // by layer: index of its registration
  BlockPool pool_;
  std::vector<Lane> lanes_;
  std::map<std::uint32_t, Source> sources_;
  std::deque<std::pair<Lane*, Announced>> waiting_;  // announcements without free source blocks
  FamilyStats stats_;
};

}  // namespace verbatim::kv
