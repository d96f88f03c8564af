// New QPs for the lanes of a comm that are down (failover.h), so that they come back.
//
//   sender                                              receiver
//   kPause    hold-down, and the port's link is up
//   kMaking   QPs in INIT                               kIdle
//   kOffered                       --kLaneOffer-->      kPause   until the port's link is up
//                                                       kMaking  QPs in RTS, connected to those of the offer
//                                                       kReady   the data path adopts them and posts receives
//   kMaking   QPs to RTS           <--kLaneAnswer--     kIdle    messages may arrive
//   kReady    the data path adopts them; a WRITE of 0 bytes on each QP shows that it works, then messages use it
//   kAdopted                       --kLaneAnswer-->              CTS entries may use it
//
// An end that loses the lane while the other one still makes QPs declares it down as any other lane. The sender then
// begins again, with the next round. It also does when what it has offered may not be true any more; the receiver
// discards its QPs for the offer before. The QPs that a lane had before are destroyed when the new ones are adopted:
// until then their number identifies late completions.
//
// Three threads: the data path's, the monitor, and that of DeviceCalls, which alone calls verbs.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/config.h"
#include "base/mutex.h"
#include "net/transfer/endpoint.h"
#include "wire/notice.h"

namespace verbatim {

// The QPs of one lane, in the order of their indexes in the endpoint.
struct LaneQps {
  std::vector<EndpointQp> qps;
  UniqueQp flush_qp;        // of a receiver whose flushes leave out this lane's port
  wire::LaneAddress local;  // this end, and the peer's
  wire::LaneAddress remote;
};

// How long the lanes of a port cannot be used yet, because of its link. 0: they can.
std::uint64_t port_pause_ns(const Port& port, std::uint64_t now);

// After a work request that was refused: whether the port's link is down, or goes down in a moment.
bool link_goes_down(const Port& port);

class LaneRenewal {
 public:
  // How long the link of a port must be up before its lanes are used again: it may go down again at once.
  static constexpr std::uint64_t kHoldDownNs = 500 * kNanosecondsPerMillisecond;

  LaneRenewal(std::size_t lanes, bool sends) : count_(lanes), sends_(sends) {}

  // ---- data path

  // Both ends have declared the lane down in `round`. `unused`: before it carried a message. Throws std::bad_alloc.
  void lane_down(std::size_t lane, std::uint32_t round, bool unused) VERBATIM_EXCLUDES(mutex_);
  // The round in which QPs of the lane can be adopted.
  std::optional<std::uint32_t> ready(std::size_t lane) const VERBATIM_EXCLUDES(mutex_);
  // Those of this round; nullopt: not any more.
  std::optional<LaneQps> adopt(std::size_t lane, std::uint32_t round) VERBATIM_EXCLUDES(mutex_);
  // To be destroyed by renew().
  void retire(LaneQps qps) VERBATIM_EXCLUDES(mutex_);

  // ---- monitor

  // An offer or an answer of the peer. False: no such lane, or no memory.
  bool receive(const wire::LaneAddress& address) VERBATIM_EXCLUDES(mutex_);
  // The peer has declared the lane down in a round that this end has not adopted.
  void cancel(std::size_t lane, std::uint32_t round) VERBATIM_EXCLUDES(mutex_);
  // The link of a port has come up, or its addresses have changed: an offer may not be true any more.
  void look_again() VERBATIM_EXCLUDES(mutex_);
  // Whether all lanes only wait for the peer, or one for an application that makes no calls, here or there. Then a comm
  // without a lane can wait: the peer knows better. Else both ends might wait for each other. `hears_peer`: over the
  // side channel; else the peer may have ended.
  bool waits_for_others(bool hears_peer) const VERBATIM_EXCLUDES(mutex_);
  // When renew() has something to do; kNever: nothing.
  std::uint64_t due_ns() const VERBATIM_EXCLUDES(mutex_);

  // ---- DeviceCalls

  // What renew() needs of the comm. Does not change while the lane is down.
  struct Subject {
    const Endpoint& endpoint;
    const Config& config;
    std::span<const std::uint8_t> qps;  // of the lane
    bool flush;                         // make a QP for flushes too
  };
  enum class Outcome : std::uint8_t { kNothing, kOffer, kReady };
  // Makes or connects the QPs of a lane if it is time. With kOffer, `offer` is to be sent. Destroys what is retired.
  Outcome renew(std::size_t lane, const Subject& subject, wire::LaneAddress& offer) VERBATIM_EXCLUDES(mutex_);
  // After an exception in renew().
  void give_up(std::size_t lane) VERBATIM_EXCLUDES(mutex_);

 private:
  enum class Step : std::uint8_t { kIdle, kPause, kMaking, kOffered, kReady, kAdopted };
  struct Lane {
    Step step = Step::kIdle;
    bool cancelled = false;     // while kMaking
    std::uint8_t failures = 0;  // in succession, of rounds that carried no message
    std::uint32_t round = 0;    // of `qps`, or of the last ones
    std::uint64_t due_ns = 0;   // of kPause and kOffered
    LaneQps qps;
    wire::LaneAddress remote;  // the peer's last offer or answer
  };

  bool allocate() VERBATIM_REQUIRES(mutex_);
  // The QPs that are made, or being made, will not be used. The next ones are made from `due_ns` on.
  void discard(Lane& lane, std::uint64_t due_ns) VERBATIM_REQUIRES(mutex_);
  // Whether the peer's address is there that the next step needs.
  bool has_remote(const Lane& lane) const;

  const std::size_t count_;
  const bool sends_;
  mutable Mutex mutex_;
  // Allocated with the first lane that is down: most connections never have one.
  std::unique_ptr<Lane[]> lanes_ VERBATIM_GUARDED_BY(mutex_);
  std::vector<LaneQps> retired_ VERBATIM_GUARDED_BY(mutex_);
};

}  // namespace verbatim
