// The decode side of one family in --mode put. It announces the destination blocks of requests; a request's signal
// word alone says that its blocks have arrived.
#pragma once

#include <list>
#include <vector>

#include "verbatim-kv/channel.h"
#include "verbatim-kv/put_side.h"
#include "workload/kv/block_pool.h"

namespace verbatim::kv {

class PutDecode final : public PutSide {
 public:
  // `channels` has one for each prefill rank. Blocks below `reserved` hold prefixes and are never used as destinations.
  // `words` are this rank's signal words, all 0.
  PutDecode(const PutContext& context, const Family& family, std::vector<Channel> channels, std::size_t reserved,
            const std::uint64_t* words);

  bool finished() const override { return finished_; }
  bool step(bool poll_sockets) override;
  void check() override;

 private:
  // A request in flight.
  struct Incoming {
    const Request* request;
    std::uint32_t slot;  // of its signal word
    std::size_t first;   // number of blocks that were hits and are not sent
    std::vector<std::uint32_t> blocks;
    std::size_t total;  // number of puts
    std::uint64_t begin_ns;
  };

  bool handle_messages(Channel& channel);
  bool start_requests();
  void announce(Incoming incoming);
  std::optional<Rejection> validate(const Incoming& incoming, const BlockList& list);
  bool receive_signals();
  void serve(const Incoming& incoming);
  void check_content(const Incoming& incoming);
  void reject(const Incoming& incoming);
  void end(const Incoming& incoming);
  void finish();
  void check_clock() const;
  void add_wrong(std::uint64_t wrong, const std::string& what);

  std::uint64_t word(std::size_t index) const { return __atomic_load_n(words_ + index, __ATOMIC_ACQUIRE); }
  BlockShare share_of(const Incoming& incoming) const;
  std::size_t next_request(std::size_t from) const;

  const PutContext& context_;
  const Family& family_;
  const RegisteredFamily own_;
  const Contents contents_;
  const Faults faults_;
  const std::uint64_t* const words_;
  const std::size_t part_bytes_;
  const std::uint32_t engine_;
  const std::uint32_t part_;
  BlockPool pool_;
  BlockReservations reservations_;
  std::vector<Channel> channels_;
  std::vector<std::uint64_t> expected_;    // values of the signal words
  std::vector<std::uint32_t> free_slots_;  // of signal words
  std::list<Incoming> in_flight_;
  std::size_t next_ = 0;  // index of the request to start next
  std::uint64_t begin_ns_ = 0;
  std::uint64_t progress_ns_ = 0;
  bool timed_ = false;  // the warm-up has ended
  std::uint64_t timed_from_ns_ = 0;
  bool finished_ = false;
};

}  // namespace verbatim::kv
