// The prefill side of one family in --mode put. It validates the destination blocks that decode ranks announce, puts
// each block there from where it lies, and signals with the last one.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "verbatim-kv/channel.h"
#include "verbatim-kv/put_side.h"
#include "workload/kv/block_pool.h"

namespace verbatim::kv {

class PutPrefill final : public PutSide {
 public:
  // `channels` and `peers` have one entry for each decode rank. `words` names the signal words of all ranks.
  PutPrefill(const PutContext& context, const Family& family, std::vector<Channel> channels,
             std::vector<FamilyDescription> peers, void* words);

  bool finished() const override;
  bool step(bool poll_sockets) override;
  void check() override;

 private:
  // The source blocks of a request, held until all decode ranks that share the request are done.
  struct Source {
    std::vector<std::uint32_t> blocks = {};
    std::uint32_t parts_done = 0;
  };
  struct Announced {
    std::uint32_t request;
    std::uint32_t slot;
    BlockList list;
  };
  struct Outgoing {
    std::uint32_t request;
    std::uint32_t slot;
    std::vector<std::uint32_t> source;
    std::vector<std::uint32_t> destination;
    std::size_t total;  // number of puts
    std::size_t posted = 0;
    std::size_t completed = 0;
    bool arrived = false;  // the decode side has everything
  };
  struct Sent {
    void* request;
    Outgoing* owner;
  };
  struct Lane {
    std::uint32_t decode = 0;
    Channel channel = {};
    FamilyDescription peer = {};
    std::optional<RegisteredFamily> peer_family = {};  // refers to `peer`
    std::vector<std::size_t> peer_intervals = {};      // by layer
    std::unique_ptr<BlockReservations> reservations = nullptr;
    std::list<Outgoing> outgoing = {};
    std::deque<Sent> sent = {};
    bool finished = false;  // the decode rank has no more requests
  };

  bool handle_messages(Lane& lane);
  bool retry_waiting();
  bool handle_announcement(Lane& lane, const Announced& announced);
  std::optional<Rejection> validate(Lane& lane, const Announced& announced, const BlockList& own);
  bool allocate_source(const Request& request, Source& source);
  bool post(Lane& lane);
  void start(Lane& lane, Outgoing& outgoing);
  bool complete(Lane& lane);
  void handle_done(Lane& lane, std::uint32_t request);
  void finish_part(std::uint32_t request);
  const Request& request_of(std::uint32_t id) const;

  const PutContext& context_;
  const Family& family_;
  const RegisteredFamily own_;
  const Contents contents_;
  void* const words_;
  const std::size_t part_bytes_;
  const std::size_t most_puts_;         // outstanding to one decode rank
  std::vector<std::size_t> intervals_;  // by layer: index of its registration
  BlockPool pool_;
  std::vector<Lane> lanes_;
  std::map<std::uint32_t, Source> sources_;
  std::deque<std::pair<Lane*, Announced>> waiting_;  // announcements without free source blocks
};

}  // namespace verbatim::kv
