// The plugin must find this program's system calls before the C library's.
//: program handshake_ends export_dynamic link=conformance_harness,libdl,wire
//:   + define=LOG_LINES={source}/tests/log_lines.txt
//:   + sources=handshake_roles.cc,main.cc,kill_points.cc,surviving_peer.cc,lifecycle/process_resources.cc
//: test handshake-{} args='--pause 100' VERBATIM_VERBS_LIBRARY={counted_verbs}
//:   death filter=*PeerAtEveryStep*
// Stopping a process also stops the thread of softverbs in it, possibly during a transfer, which no real device does.
// The inline engine has no thread.
//:   stop filter=*StoppedPeers* SOFTVERBS_ENGINE=inline

// Kills a peer process at every kill point of the handshake and of the first message, on either side. Checks which
// errors and warnings the surviving process gets, that it can still connect, and that nothing leaks.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kill_points.h"
#include "process.h"
#include "roles.h"
#include "support/log_lines.h"
#include "surviving_peer.h"

namespace conformance {
namespace {

using nccl::Result;

constexpr int kDeathVersion = 12;
constexpr long kMaxKillPoints = 500;  // more kill points than a peer has

class PeerAtEveryStep : public SurvivingPeer {
 protected:
  // A connect to a peer that was killed before is repeated until this deadline.
  void SetUp() override {
    setenv("VERBATIM_CONNECT_TIMEOUT_S", "5", 1);
    SurvivingPeer::SetUp();
  }
  void TearDown() override {
    unsetenv("VERBATIM_CONNECT_TIMEOUT_S");
    SurvivingPeer::TearDown();
  }

  // Kills peers at their first, second, ... kill point, until a peer completes. `run` starts a peer with `words` after
  // its role, and returns how the peer ended.
  void at_every_kill_point(const std::function<Exit(void* context, const std::string& words)>& run) {
    finalize(new_context());  // the verbs library opens some resources once per process
    long killed = 0;
    while (killed < kMaxKillPoints) {
      bool completed = false;
      run_role_once([&](void* context) {
        const Exit exit = run(context, " " + std::to_string(SIGKILL) + " " + std::to_string(killed + 1));
        completed = exit.status == 0;
        EXPECT_TRUE(completed || exit.status == 128 + SIGKILL) << exit.output;
        EXPECT_NE(completed, parse_kill_point(exit.output).has_value()) << exit.output;
      });
      if (HasFailure()) FAIL() << "at kill point " << killed + 1;
      if (completed) break;
      ++killed;
    }
    std::printf("killed at %ld points\n", killed);
    EXPECT_GT(killed, 15);
    EXPECT_LT(killed, kMaxKillPoints);
  }

  // The only warning, which must contain `name`; empty when there is no warning. Beside it a process that was killed
  // before it had read everything may have reset the side channel.
  std::string only_line(const std::string& name) {
    std::vector<std::string> lines = take_warnings();
    std::erase_if(lines, [&](const std::string& line) {
      return line.find(name + " ended with Connection reset by peer; data goes on") != std::string::npos;
    });
    if (lines.empty()) return "";
    EXPECT_EQ(lines.size(), 1U) << lines[1];
    EXPECT_NE(lines[0].find(name), std::string::npos) << lines[0];
    return normalize_line(lines[0]);
  }
  // Checks the result of an established connection whose peer was killed: an error and its warning. After the first
  // post the message may also have arrived.
  void check_killed(Result result, const KillPoint& last, pid_t peer) {
    const std::string line = only_line("(pid " + std::to_string(peer) + ")");
    if (last.posted > 0 && result == Result::kSuccess) {
      EXPECT_EQ(line, "");
    } else {
      EXPECT_EQ(result, Result::kRemoteError);
      verbatim::test::expect_log_lines({line}, "when connected");
    }
  }
};
ONE_VERSION(PeerAtEveryStep, kDeathVersion);

// A peer that was killed before it had sent its complete hello causes no warning. The listen comm serves the next peer
// in every case.
TEST_P(PeerAtEveryStep, KilledWhileConnecting_IsReported) {
  Process healthy("sends-to-each", kDeathVersion);
  at_every_kill_point([&](void* context, const std::string& words) {
    Handle handle;
    void* const listen_comm = listen(context, handle);
    Process peer("connects" + words, kDeathVersion);
    const pid_t pid = peer.pid();
    const std::string name = "(pid " + std::to_string(pid) + ", 127.0.0.1:";
    EXPECT_TRUE(peer.write(handle.bytes, sizeof handle.bytes));
    Attempt attempt;
    EXPECT_TRUE(eventually([&] { return (attempt = accept(listen_comm)) || has_changed_state(peer, WEXITED); }));
    Result result = attempt.comm != nullptr ? exchange(attempt.comm, false) : Result::kSuccess;
    const Exit exit = peer.wait();
    const KillPoint last = parse_kill_point(exit.output).value_or(KillPoint{.sent = 2, .posted = 1, .name = "the end"});
    SCOPED_TRACE("killed " + last.name + ": " + exit.output);
    if (!attempt && last.sent > 0) {
      EXPECT_TRUE(eventually([&] { return static_cast<bool>(attempt = accept(listen_comm)); }));
      if (attempt.comm != nullptr) result = exchange(attempt.comm, false);
    }
    if (last.sent == 0) {
      EXPECT_FALSE(attempt);
      EXPECT_EQ(only_line(name), "");
    } else if (last.sent == 1) {
      EXPECT_EQ(attempt.result, Result::kRemoteError);
      verbatim::test::expect_log_lines({only_line(name)}, "after its hello");
    } else {
      EXPECT_NE(attempt.comm, nullptr);
      check_killed(result, last, pid);
    }
    EXPECT_TRUE(healthy.write(handle.bytes, sizeof handle.bytes));
    attempt = {};
    EXPECT_TRUE(eventually([&] { return static_cast<bool>(attempt = accept(listen_comm)); }));
    EXPECT_OK(attempt.result);
    if (attempt.comm != nullptr) {
      EXPECT_OK(exchange(attempt.comm, false));
    }
    EXPECT_OK(net().close_listen(listen_comm));
    return exit;
  });
}

TEST_P(PeerAtEveryStep, KilledWhileAccepting_IsReported) {
  at_every_kill_point([&](void* context, const std::string& words) {
    Process peer("accepts" + words, kDeathVersion);
    const pid_t pid = peer.pid();
    Listening listening;
    EXPECT_TRUE(read_listening(peer, listening));
    Attempt attempt;
    EXPECT_TRUE(eventually([&] { return static_cast<bool>(attempt = connect(context, listening.handle)); }));
    const Result result = attempt.comm != nullptr ? exchange(attempt.comm, true) : Result::kSuccess;
    const Exit exit = peer.wait();
    const KillPoint last = parse_kill_point(exit.output).value_or(KillPoint{.sent = 1, .posted = 1, .name = "the end"});
    SCOPED_TRACE("killed " + last.name + ": " + exit.output);
    if (last.sent == 0) {
      EXPECT_EQ(attempt.result, Result::kRemoteError);
      const std::string line = only_line(listening.address());
      // The reply is incomplete when the peer was killed in the middle of it. Otherwise connect may have tried again,
      // and was refused.
      const bool has_begun = last.name.starts_with("in the middle of send");
      const std::vector<std::string> again = verbatim::test::log_lines("connected again");
      if (std::find(again.begin(), again.end(), line) == again.end()) {
        verbatim::test::expect_log_lines({line}, has_begun ? "in its reply" : "before its reply");
      }
    } else {
      EXPECT_NE(attempt.comm, nullptr);
      check_killed(result, last, pid);
    }
    TestConnection again = link();
    exchange_one(again, kBytes);
    return exit;
  });
}

// The application closes its listen comm before the last step of the handshake. The warning says that the peer gave up,
// and not that it died.
TEST_P(PeerAtEveryStep, ListenClosedBeforeEstablished_IsReportedAsAbort) {
  finalize(new_context());
  run_role_once([&](void* context) {
    Handle handle;
    void* const listen_comm = listen(context, handle);
    Attempt attempt;
    EXPECT_TRUE(eventually([&] { return (attempt = connect(context, handle)) || accept(listen_comm); }));
    EXPECT_OK(net().close_listen(listen_comm));
    ASSERT_NE(attempt.comm, nullptr);
    EXPECT_EQ(exchange(attempt.comm, true), Result::kRemoteError);
    const std::string pid = "(pid " + std::to_string(::getpid()) + ")";
    const std::string expected = "the peer HOST (pid #) aborted the connection: ";
    EXPECT_EQ(only_line(pid).substr(0, expected.size()), expected);
  });
}

}  // namespace
}  // namespace conformance
