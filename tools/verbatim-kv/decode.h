// The decode side of one family on one rank. It announces the destination blocks of requests, receives the data into
// them, and uses the fallback stages when a transfer fails. It runs on a thread of its own; it shares nothing with
// other families.
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
  // `channels` has one for each prefill rank. Blocks below `reserved` hold prefixes and are never used as destinations.
  // `group` is the maximum number of members of a receive.
  Decode(const RankContext& context, const Family& family, std::vector<Channel> channels, std::size_t reserved,
         std::size_t group);

  // Returns when all requests have ended. Throws Failure.
  void run();
  // Called after run(): check() verifies the canaries of free blocks, close() closes the connections.
  void check();
  void close();
  FamilyStats& stats() { return stats_; }

 private:
  struct Lane;
  // A request in flight.
  struct Incoming {
    const Request* request;
    Lane* lane;
    std::size_t first;  // number of blocks that were hits and are not sent
    std::vector<std::uint32_t> blocks;
    std::size_t total;  // number of messages
    std::uint64_t begin_ns;
    FallbackStage stage = FallbackStage::kDirect;
    std::uint32_t attempt = 0;
    bool announced = false;
    bool reserved = false;  // its blocks are reserved in reservations_
    bool accepted = false;
    std::uint32_t first_tag = 0;
    std::size_t posted = 0;
    std::size_t received = 0;
    std::optional<Notification> notification = {};
    std::uint64_t progress_ns = 0;  // time of the last progress
    std::uint64_t failed_ns = 0;    // time of the first failure; 0: none

    Attempt which() const { return {request->id, attempt}; }
  };
  struct Group {
    void* request;  // the receive, later its flush (null: none)
    Incoming* owner;
    std::size_t first;  // the first member's message
    std::size_t members;
  };
  //            kOpened and accepted
  //   kOpening --------------------> kReady
  //      ^ |                         | |  an operation failed, the peer reported a failure, or a timeout passed:
  //      | | failure or timeout      | |  the kMaxFailures-th time in a row
  //      | +--------> kDead <--------+ |
  //      +-----------------------------+  before that
  enum class LaneState : std::uint8_t { kOpening, kReady, kDead };
  // The connection from one prefill rank.
  struct Lane {
    std::uint32_t prefill = 0;
    Channel channel = {};
    LaneState state = LaneState::kOpening;
    std::uint32_t generation = 0;
    std::uint32_t failures = 0;  // since the last request that was served
    void* listen_comm = nullptr;
    void* comm = nullptr;
    std::vector<void*> mhandles = {};
    bool opened = false;  // the peer has reported that it is connected
    std::uint64_t opening_ns = 0;
    std::uint64_t progress_ns = 0;
    FamilyDescription peer = {};
    std::optional<RegisteredFamily> peer_family = {};  // refers to `peer`
    std::deque<Incoming*> accepted = {};               // in the order in which both ends post
    std::deque<Group> groups = {};
    std::size_t flushing = 0;  // the first groups, whose data has arrived and whose flush may be outstanding
  };

  void open(Lane& lane);
  bool poll_accept(Lane& lane);
  bool handle_messages(Lane& lane);
  void handle(Lane& lane, const Channel::Message& message);
  bool start_requests();
  bool announce(Incoming& incoming);
  std::optional<Rejection> validate(Incoming& incoming, const BlockList& list);
  void accept(Lane& lane, Reader reader);
  void receive_staged(Lane& lane, Reader reader);
  bool post(Lane& lane);
  bool complete(Lane& lane);
  bool complete_receives(Lane& lane);
  nccl::Result start_flush(const Lane& lane, Group& group, int* sizes);
  bool check_clocks();
  void finish_if_complete(Incoming& incoming);
  void reject(Incoming& incoming, const char* found_by, const Rejection& rejection);
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
  void* mhandle(const Lane& lane, const Incoming& incoming, std::size_t message) const;
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
  std::vector<std::size_t> intervals_;  // by layer: index of its registration
  BlockPool pool_;
  BlockReservations reservations_;
  std::vector<bool> lost_;  // blocks that may still be written by a failed transfer: never used or checked again
  std::vector<Lane> lanes_;
  std::list<Incoming> in_flight_;
  std::size_t next_ = 0;  // index of the request to start next
  std::uint64_t begin_ns_ = 0;
  bool timed_ = false;  // the warm-up has ended
  std::uint64_t timed_from_ns_ = 0;
  FamilyStats stats_;
};

}  // namespace verbatim::kv
