// A peer process that is killed at every place of the handshake and of the first message, on either side: what the
// survivor is told, that it goes on, and that nothing is left.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kill_points.h"
#include "process.h"
#include "roles.h"
#include "surviving_peer.h"

namespace conformance {
namespace {

using nccl::Result;

constexpr int kDeathVersion = 12;
constexpr long kEndless = 500;  // more places than a life has

// What a survivor says, with words for what differs from run to run.
const std::string kHasEnded =
    "the peer HOST (pid #) ended without closing a connection that has outstanding operations: its process was killed "
    "or crashed, or its host failed. Next: look at HOST (pid #) first: its log says why. ";
const std::string kNothingCarried =
    "Path: HOST softverbs0:1 GID 3 ::ffff:10.77.0.1 QP # to HOST softverbs0:1 GID 3 ::ffff:10.77.0.1 QP #, MTU 4096, "
    "TC 0, SL 0, timeout 4.29 s, 7 retries (34.4 s in all), T old, carried 0 messages, 0 bytes";

class PeerAtEveryStep : public SurvivingPeer {
 protected:
  // Peers are killed at their first, second, ... place, until one gets through. `run` starts a peer with these words
  // behind its role, and answers with what became of it.
  void at_every_place(const std::function<Exit(void* own, const std::string& words)>& run) {
    finalize(new_context());  // what the verbs library opens once
    long killed = 0;
    while (killed < kEndless) {
      bool through = false;
      run_role_once([&](void* own) {
        const Exit exit = run(own, " " + std::to_string(SIGKILL) + " " + std::to_string(killed + 1));
        through = exit.status == 0;
        EXPECT_TRUE(through || exit.status == 128 + SIGKILL) << exit.output;
        EXPECT_NE(through, parse_kill_point(exit.output).has_value()) << exit.output;
      });
      if (HasFailure()) FAIL() << "at place " << killed + 1;
      if (through) break;
      ++killed;
    }
    std::printf("killed at %ld places\n", killed);
    EXPECT_GT(killed, 15);
    EXPECT_LT(killed, kEndless);
  }

  // The only line, which names the peer by `name`; empty: there is none.
  std::string the_line(const std::string& name) {
    const std::vector<std::string> lines = take_warnings();
    if (lines.empty()) return "";
    EXPECT_EQ(lines.size(), 1U) << lines[1];
    EXPECT_NE(lines[0].find(name), std::string::npos) << lines[0];
    return fixed(lines[0]);
  }
  // What a standing connection came to whose peer was killed: an error and its line. Once data may be under way the
  // message may also have arrived.
  void check_killed(Result result, const KillPoint& last, pid_t peer) {
    const std::string line = the_line("(pid " + std::to_string(peer) + ")");
    if (last.posted > 0 && result == Result::kSuccess) {
      EXPECT_EQ(line, "");
    } else {
      EXPECT_EQ(result, Result::kRemoteError);
      EXPECT_EQ(line, kHasEnded + kNothingCarried);
    }
  }
};
ONE_VERSION(PeerAtEveryStep, kDeathVersion);

// Without its whole hello it is a stranger, of whom nobody hears; the listen serves the next peer in any case.
TEST_P(PeerAtEveryStep, KilledWhileConnecting_IsReported) {
  Process sound("supplies", kDeathVersion);
  at_every_place([&](void* own, const std::string& words) {
    Handle handle;
    void* const listen_comm = listen(own, handle);
    Process peer("connects" + words, kDeathVersion);
    const pid_t pid = peer.pid();
    const std::string name = "(pid " + std::to_string(pid) + ", 127.0.0.1:";
    EXPECT_TRUE(peer.write(handle.bytes, sizeof handle.bytes));
    Made made;
    EXPECT_TRUE(eventually([&] { return (made = accept(listen_comm)) || has_changed_state(peer, WEXITED); }));
    Result result = made.comm != nullptr ? exchange(made.comm, false) : Result::kSuccess;
    const Exit exit = peer.wait();
    const KillPoint last =
        parse_kill_point(exit.output).value_or(KillPoint{.sent = 2, .posted = 1, .place = "the end"});
    SCOPED_TRACE("killed " + last.place + ": " + exit.output);
    if (!made && last.sent > 0) {
      EXPECT_TRUE(eventually([&] { return static_cast<bool>(made = accept(listen_comm)); }));
      if (made.comm != nullptr) result = exchange(made.comm, false);
    }
    if (last.sent == 0) {
      EXPECT_FALSE(made);
      EXPECT_EQ(the_line(name), "");
    } else if (last.sent == 1) {
      EXPECT_EQ(made.result, Result::kRemoteError);
      EXPECT_EQ(the_line(name), kAcceptFailed + kWentFirst);
    } else {
      EXPECT_NE(made.comm, nullptr);
      check_killed(result, last, pid);
    }
    EXPECT_TRUE(sound.write(handle.bytes, sizeof handle.bytes));
    made = {};
    EXPECT_TRUE(eventually([&] { return static_cast<bool>(made = accept(listen_comm)); }));
    EXPECT_OK(made.result);
    if (made.comm != nullptr) {
      EXPECT_OK(exchange(made.comm, false));
    }
    EXPECT_OK(net().close_listen(listen_comm));
    return exit;
  });
}

TEST_P(PeerAtEveryStep, KilledWhileAccepting_IsReported) {
  at_every_place([&](void* own, const std::string& words) {
    Process peer("accepts" + words, kDeathVersion);
    const pid_t pid = peer.pid();
    Handle handle;
    EXPECT_TRUE(peer.read(handle.bytes, sizeof handle.bytes));
    Made made;
    EXPECT_TRUE(eventually([&] { return static_cast<bool>(made = connect(own, handle)); }));
    const Result result = made.comm != nullptr ? exchange(made.comm, true) : Result::kSuccess;
    const Exit exit = peer.wait();
    const KillPoint last =
        parse_kill_point(exit.output).value_or(KillPoint{.sent = 1, .posted = 1, .place = "the end"});
    SCOPED_TRACE("killed " + last.place + ": " + exit.output);
    if (last.sent == 0) {
      EXPECT_EQ(made.result, Result::kRemoteError);
      const std::string line = the_line(address_of(handle));
      // Of an answer that has begun the rest is missing. Where this end was late, it has knocked again, in vain.
      const bool begun = last.place.starts_with("in the middle of send");
      if (line != kConnectFailed + kRefused) {
        EXPECT_EQ(line, kConnectFailed + (begun ? kWentFirst : kUnanswered));
      }
    } else {
      EXPECT_NE(made.comm, nullptr);
      check_killed(result, last, pid);
    }
    TestConnection again = link();
    exchange_one(again, kBytes);
    return exit;
  });
}

// No death, and told apart from one: the application closes its listen where all but its last step is done.
TEST_P(PeerAtEveryStep, ListenClosedBeforeEstablished_IsReportedAsAbort) {
  finalize(new_context());
  run_role_once([&](void* own) {
    Handle handle;
    void* const listen_comm = listen(own, handle);
    Made made;
    EXPECT_TRUE(eventually([&] { return (made = connect(own, handle)) || accept(listen_comm); }));
    EXPECT_OK(net().close_listen(listen_comm));
    ASSERT_NE(made.comm, nullptr);
    EXPECT_EQ(exchange(made.comm, true), Result::kRemoteError);
    const std::string pid = "(pid " + std::to_string(::getpid()) + ")";
    const std::string expected = "the peer HOST (pid #) aborted the connection: ";
    EXPECT_EQ(the_line(pid).substr(0, expected.size()), expected);
  });
}

}  // namespace
}  // namespace conformance
