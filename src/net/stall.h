// Finds connections that have stopped while something is outstanding, and who is to blame. The control thread looks at
// each every second or so and notes when it last saw it move: the data path needs no clock. Pure of clocks and sockets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/clock.h"
#include "wire/notice.h"

namespace verbatim {

enum class Blame : std::uint8_t {
  kNobody,           // nothing is outstanding after all
  kPeerReceives,     // the peer's application has not posted its receive
  kPeerSends,        // the peer's application has not sent
  kPeerDiffers,      // the peer's receive has another tag, or a message of its group is missing
  kOwnApplication,   // it does not ask for what may have come
  kNetwork,          // data was posted and is not acknowledged
  kCts,              // a receive was announced, and the sender has not heard of it
  kCompletion,       // data was acknowledged, and the receiver has not heard of it
  kDevice,           // ours: a flush does not end
  kPeerDoesNotTell,  // whatever it is, the peer answers no question
};

// `mine` and the peer's answer, if there was one. kPolls and kWaits as of late.
Blame blame_for(const wire::View& mine, const std::optional<wire::View>& peer);

// Whether the remedy is on this host.
bool is_ours(Blame blame);

// "the peer NAME is late: its application has not posted the receive", for a blame that is somebody's.
void describe_blame(Blame blame, const char* peer, std::span<char> text);

// What its operator is to look at then: "look at NAME first: ...". `device` is a device of this end.
void describe_next(Blame blame, const char* peer, const char* device, std::span<char> text);

void describe_qp_state(std::uint8_t state, std::span<char> text);
// "7 receives posted (4096 bytes came), 1 not arrived and tested for, ..., QPs in RTS, still for 31.0 s".
void describe_view(const wire::View& view, std::span<char> text);

struct StallSettings {
  std::uint64_t warn_ns = 0;  // 0: never
  std::uint64_t fail_ns = 0;

  // What comes first; the usual time where nothing is wanted: the peers may still ask how it looks to us.
  std::uint64_t first_ns() const;
  // Between two looks, at what waits and at what rests.
  std::uint64_t busy_period_ns() const;
  std::uint64_t idle_period_ns() const;
};

// One connection under watch.
class StallWatch {
 public:
  static constexpr std::uint64_t kAnswerNs = 2 * kNanosecondsPerSecond;

  enum class Step : std::uint8_t { kNothing, kAsk, kReport, kFail, kMovesAgain };

  // `view` as the comm has it now, `waits` and `polls` since the last look. kAsk: the peer is to be asked question(),
  // and whatever it answers be given to hear(). kReport and kFail: blame() says why.
  Step look(const StallSettings& settings, std::uint64_t now, const wire::View& view, bool waits, bool polls);

  std::uint32_t question() const { return question_; }
  // False: an answer to no question.
  bool hear(const wire::View& peer);

  // Whether something is outstanding, as of the last look.
  bool owes() const { return owes_; }
  std::uint64_t still_ns(std::uint64_t now) const { return now - since_ns_; }
  // How long it had stood still before kMovesAgain.
  std::uint64_t stood_ns() const { return stood_ns_; }
  Blame blame() const { return blame_for(mine_, peer_); }
  bool reported() const { return reported_; }
  const wire::View& mine() const { return mine_; }
  const std::optional<wire::View>& peer() const { return peer_; }  // of the last question

 private:
  wire::View mine_;
  std::optional<wire::View> peer_;
  std::uint64_t looked_ns_ = 0;
  std::uint64_t since_ns_ = 0;  // of what is outstanding: since it moved last
  std::uint64_t stood_ns_ = 0;
  std::uint64_t waited_ns_ = 0;  // when the application was last seen to be refused,
  std::uint64_t polled_ns_ = 0;  // and to test in vain
  std::uint64_t asked_ns_ = 0;   // 0: no question is open
  std::uint32_t question_ = 0;
  std::uint32_t settled_members_ = 0;  // receives that the sender is known to have served
  bool owes_ = false;
  bool reported_ = false;
};

}  // namespace verbatim
