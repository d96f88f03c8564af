// The decode side of one family on one rank: has a number of requests in flight, says where each one's blocks belong,
// receives them there, and climbs the ladder when that fails. Runs on a thread of its own; other families have theirs.
#pragma once

#include <array>
#include <deque>
#include <list>
#include <optional>
#include <vector>

#include "verbatim-kv/channel.h"
#include "verbatim-kv/rank_context.h"
#include "verbatim-kv/stats.h"
#include "workload/kv/block_pool.h"

namespace verbatim::kv {

class Decode {
 public:
  // `channels`: one to each prefill rank, in their order. Blocks below `reserved` belong to prefixes that are there
  // already. `group`: members of a receive at most.
  Decode(const RankContext& world, const Family& family, std::vector<Channel> channels, std::size_t reserved,
         std::size_t group);

  // Until all requests are done with. Throws Failure.
  void run();
  // After run(): canaries, then the connections.
  void check();
  void close();
  FamilyStats& stats() { return stats_; }

 private:
  struct Lane;
  // A request in flight.
  struct Incoming {
    const Request* request;
    Lane* lane;
    std::size_t first;  // blocks before it were hits
    std::vector<std::uint32_t> blocks;
    std::size_t total;  // messages
    std::uint64_t begin_ns;
    FallbackStage stage = FallbackStage::kDirect;
    std::uint32_t attempt = 0;
    bool announced = false;
    bool claimed = false;
    bool accepted = false;
    std::uint32_t first_tag = 0;
    std::size_t posted = 0;
    std::size_t received = 0;
    std::optional<Notification> notification = {};
    std::uint64_t moved_ns = 0;   // when there was progress last
    std::uint64_t failed_ns = 0;  // when it failed first; 0: not yet

    Attempt which() const { return {request->id, attempt}; }
  };
  struct Group {
    void* request;
    Incoming* owner;
    std::size_t members;
  };
  //            kOpened and accepted
  //   kOpening --------------------> kReady
  //      ^ |                           | an operation, the peer or the clock says that it failed
  //      | | time is up, or failed     |
  //      | v  too often                |
  //      | kDead                       |
  //      +-----------------------------+
  enum class LaneState : std::uint8_t { kOpening, kReady, kDead };
  // The connection from one prefill rank.
  struct Lane {
    std::uint32_t prefill = 0;
    Channel channel = {};
    LaneState state = LaneState::kOpening;
    std::uint32_t generation = 0;
    std::uint32_t failures = 0;  // since a request came through
    void* listen_comm = nullptr;
    void* comm = nullptr;
    std::vector<void*> mhandles = {};
    bool opened = false;  // the peer says so
    std::uint64_t opening_ns = 0;
    std::uint64_t moved_ns = 0;
    FamilyDescription peer = {};
    std::optional<RegisteredFamily> peers = {};  // of `peer`
    std::deque<Incoming*> accepted = {};         // in the order in which both ends go
    std::deque<Group> groups = {};
  };

  void open(Lane& lane);
  bool poll_accept(Lane& lane);
  bool take_messages(Lane& lane);
  void take(Lane& lane, const Channel::Message& message);
  bool start_requests();
  bool announce(Incoming& incoming);
  std::optional<Rejection> validate(Incoming& incoming, const BlockList& list);
  void accept(Lane& lane, Reader reader);
  void take_staged(Lane& lane, Reader reader);
  bool post(Lane& lane);
  bool complete(Lane& lane);
  bool check_clocks();
  void finish_if_complete(Incoming& incoming);
  void reject(Incoming& incoming, const char* found_by, const Rejection& refusal);
  void serve(Incoming& incoming);
  void give_up_request(Incoming& incoming);
  void finish(Incoming& incoming);
  void drop_connection(Lane& lane);
  void fail(Lane& lane, const std::string& why);
  void fall_back(Incoming& incoming, bool connection);
  void announce_waiting(Lane& lane);

  Incoming* find(const Lane& lane, const Attempt& which);
  BlockShare share_of(const Incoming& incoming) const;
  std::byte* piece(const Incoming& incoming, std::size_t message) const;
  std::size_t next_request(std::size_t from) const;

  const RankContext& context_;
  const Family& family_;
  const RegisteredFamily own_;
  const Contents contents_;
  const Faults faults_;
  const std::size_t part_bytes_;
  const std::uint32_t engine_;
  const std::uint32_t part_;
  const std::size_t group_;
  std::vector<std::size_t> intervals_;  // of each layer
  BlockPool pool_;
  BlockReservations reservations_;
  std::vector<bool> lost_;  // blocks whose content is unknown: nobody looks at them again
  std::vector<Lane> lanes_;
  std::list<Incoming> in_flight_;
  std::size_t next_ = 0;  // the request to start next
  std::uint64_t begin_ns_ = 0;
  bool timed_ = false;  // the warm-up is over
  std::uint64_t timed_from_ns_ = 0;
  FamilyStats stats_;
};

}  // namespace verbatim::kv
