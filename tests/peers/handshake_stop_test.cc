//: in handshake_ends

// Stops peer processes, one in each state of the handshake, all at the same time. No call of the surviving process
// blocks, and a healthy peer can connect. Each stopped peer is given up after VERBATIM_CONNECT_TIMEOUT_S or
// VERBATIM_KEEPALIVE_S, with a warning that names it. When the peers run again, each of them gets an error with a
// warning.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <list>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "kill_points.h"
#include "process.h"
#include "roles.h"
#include "support/log_lines.h"
#include "support/wait.h"
#include "surviving_peer.h"

namespace conformance {
namespace {

using nccl::Result;

constexpr int kStopVersion = 12;
// All peers must have stopped before the first of them is given up. They are started before the time counts.
constexpr int kConnectTimeout = verbatim::test::scaled(5);
constexpr int kStatus = kFailedResult + static_cast<int>(Result::kRemoteError);

// Where a peer is stopped, the result and warning of the surviving process, and the possible warnings of the peer after
// it runs again: which of the case's lines in tests/log_lines.txt; empty: no warning.
struct Stop {
  const char* point;
  Result result;
  const char* line;
  const char* peer_lines;
};

struct Stopped {
  Stopped(const std::string& side, const Stop& what)
      : stop(what), peer(side + " " + std::to_string(SIGSTOP) + " " + what.point, kStopVersion) {}

  const Stop& stop;
  Process peer;
};

// Whether the line contains the peer's process ID.
bool names(const std::string& line, const Process& peer) {
  const std::string pid = "(pid " + std::to_string(peer.pid());
  return line.find(pid + ")") != std::string::npos || line.find(pid + ",") != std::string::npos;
}

class StoppedPeers : public SurvivingPeer {
 protected:
  void SetUp() override {
    setenv("VERBATIM_CONNECT_TIMEOUT_S", std::to_string(kConnectTimeout).c_str(), 1);
    setenv("VERBATIM_KEEPALIVE_S", "4", 1);
    SurvivingPeer::SetUp();
    finalize(new_context());  // the verbs library opens some resources once per process
  }
  void TearDown() override {
    for (const char* name : {"VERBATIM_CONNECT_TIMEOUT_S", "VERBATIM_KEEPALIVE_S"}) unsetenv(name);
    SurvivingPeer::TearDown();
  }

  // Removes and returns the first line about the peer, if there is one.
  static std::vector<std::string> take_line(std::vector<std::string>& lines,
                                            const std::function<bool(const std::string&)>& is_about_peer) {
    const auto found = std::find_if(lines.begin(), lines.end(), is_about_peer);
    if (found == lines.end()) return {};
    std::vector<std::string> line = {normalize_line(*found)};
    lines.erase(found);
    return line;
  }
  // Resumes the peer. It must get an error, log one warning, and exit normally.
  static void resume(Stopped& one) {
    ASSERT_TRUE(has_changed_state(one.peer, WSTOPPED));
    ASSERT_EQ(::kill(one.peer.pid(), SIGCONT), 0);
    const Exit exit = one.peer.wait();
    const std::vector<std::string> expected = verbatim::test::log_lines(one.stop.peer_lines);
    EXPECT_EQ(exit.status, expected.empty() ? 0 : kStatus) << exit.output;
    EXPECT_EQ(parse_kill_point(exit.output).value_or(KillPoint{}).name, one.stop.point);
    std::vector<std::string> lines;
    std::istringstream text(exit.output);
    for (std::string line; std::getline(text, line);) {
      if (line.find("Verbatim") != std::string::npos) lines.push_back(normalize_line(line));
    }
    ASSERT_EQ(lines.size(), expected.empty() ? 0U : 1U) << exit.output;
    if (lines.empty()) return;
    EXPECT_NE(std::find(expected.begin(), expected.end(), lines[0]), expected.end()) << lines[0];
  }
};
ONE_VERSION(StoppedPeers, kStopVersion);

TEST_P(StoppedPeers, StoppedWhileAccepting_TimeOutAndAreNamed) {
  const std::vector<Stop> stops = {
      {"at the start", Result::kRemoteError, "busy", "too late"},
      {"after accept4 1", Result::kRemoteError, "busy", "too late"},
      {"after recv 1", Result::kRemoteError, "busy", "too late"},
      {"before ibv_modify_qp 2", Result::kRemoteError, "busy", "too late"},
      {"before send 1", Result::kRemoteError, "busy", "too late"},
      {"in the middle of send 1", Result::kRemoteError, "busy", "too late"},
      {"after send 1", Result::kRemoteError, "keepalive", "reported back"},
      {"after recv 3", Result::kRemoteError, "keepalive", "reported back"},
      {"before ibv_post_send 1", Result::kRemoteError, "keepalive", "reported back"},
      {"after ibv_post_send 1", Result::kSuccess, "", ""},  // the devices complete the message without the process
  };
  struct LocalEnd {
    Listening listening;
    Attempt attempt;
    std::unique_ptr<Exchange> exchange;
    bool stopped = false;
    bool was_pending = false;  // a call returned "not yet" while the peer was stopped
    bool settled = false;
  };
  std::list<Stopped> peers;
  for (const Stop& stop : stops) peers.emplace_back("accepts", stop);
  std::vector<LocalEnd> ends(stops.size());
  auto end = ends.begin();
  for (Stopped& one : peers) {
    ASSERT_TRUE(read_listening(one.peer, (end++)->listening));
  }
  run_role_once([&](void* context) {
    EXPECT_TRUE(eventually([&] {
      bool all = true;
      auto peer = peers.begin();
      for (LocalEnd& local : ends) {
        Stopped& one = *peer++;
        if (local.settled) continue;
        if (!local.stopped) local.stopped = has_changed_state(one.peer, WSTOPPED);
        if (local.attempt.comm == nullptr) {
          local.attempt = connect(context, local.listening.handle);
          local.settled = local.attempt.result != Result::kSuccess;
          if (local.attempt.comm != nullptr)
            local.exchange = std::make_unique<Exchange>(net(), local.attempt.comm, true);
        } else {
          local.settled = local.exchange->step();
          local.attempt.result = local.exchange->result();
        }
        local.was_pending = local.was_pending || (local.stopped && !local.settled);
        all = all && local.settled;
      }
      return all;
    }));
    for (LocalEnd& local : ends) local.exchange.reset();
  });
  std::vector<std::string> lines = take_warnings();
  end = ends.begin();
  for (Stopped& one : peers) {
    SCOPED_TRACE(one.stop.point);
    const LocalEnd& local = *end++;
    EXPECT_EQ(local.attempt.result, one.stop.result);
    EXPECT_TRUE(local.was_pending || one.stop.result == Result::kSuccess);
    // Before the peer has sent its hello, only its address is known.
    const auto is_about_peer = [&](const std::string& line) {
      return local.attempt.comm != nullptr ? names(line, one.peer)
                                           : line.find(local.listening.address()) != std::string::npos;
    };
    EXPECT_EQ(take_line(lines, is_about_peer), verbatim::test::log_lines(one.stop.line));
    resume(one);
  }
  EXPECT_TRUE(lines.empty()) << lines[0];
}

// All peers connect to one listen comm, and a healthy peer connects at the same time.
TEST_P(StoppedPeers, StoppedWhileConnecting_TimeOutAndAreNamed) {
  const std::vector<Stop> stops = {
      {"after connect 1", Result::kSuccess, "", "too late"},
      {"before send 1", Result::kSuccess, "", "too late"},
      {"in the middle of send 1", Result::kSuccess, "", "too late"},
      // The peer's last message may fail, because this process has already closed the connection.
      {"after send 1", Result::kRemoteError, "busy", "notified"},
      {"before ibv_modify_qp 2", Result::kRemoteError, "busy", "notified"},
      {"before send 2", Result::kRemoteError, "busy", "notified"},
      {"in the middle of send 2", Result::kRemoteError, "busy", "given up"},
      {"after send 2", Result::kRemoteError, "keepalive", "reported back"},
      {"before ibv_post_send 1", Result::kRemoteError, "keepalive", "reported back"},
  };
  const std::size_t expected_failures = 4;
  const std::size_t expected_comms = 3;  // including the healthy peer's
  Process healthy("sends-to-each", kStopVersion);
  std::list<Stopped> peers;
  for (const Stop& stop : stops) peers.emplace_back("connects", stop);
  for (Stopped& one : peers) {
    char started = 0;
    ASSERT_TRUE(one.peer.read(&started, 1));
  }
  run_role_once([&](void* context) {
    Handle handle;
    void* const listen_comm = listen(context, handle);
    for (Stopped& one : peers) EXPECT_TRUE(one.peer.write(handle.bytes, sizeof handle.bytes));
    EXPECT_TRUE(healthy.write(handle.bytes, sizeof handle.bytes));
    std::size_t failures = 0;
    bool all_stopped = false;
    bool was_pending = false;
    std::list<Exchange> exchanges;
    EXPECT_TRUE(eventually([&] {
      const Attempt attempt = accept(listen_comm);
      if (attempt.result != Result::kSuccess) {
        EXPECT_EQ(attempt.result, Result::kRemoteError);
        ++failures;
      }
      if (attempt.comm != nullptr) exchanges.emplace_back(net(), attempt.comm, false);
      bool settled = failures == expected_failures && exchanges.size() == expected_comms;
      for (Exchange& one : exchanges) settled = one.step() && settled;
      if (!all_stopped) {
        all_stopped = std::all_of(peers.begin(), peers.end(),
                                  [](const Stopped& one) { return has_changed_state(one.peer, WSTOPPED); });
      } else {
        was_pending = was_pending || (failures == 0 && !attempt);
      }
      return settled;
    }));
    EXPECT_TRUE(was_pending);
    EXPECT_EQ(failures, expected_failures);
    EXPECT_EQ(std::count_if(exchanges.begin(), exchanges.end(),
                            [](const Exchange& one) { return one.result() == Result::kSuccess; }),
              1);
    exchanges.clear();
    EXPECT_OK(net().close_listen(listen_comm));
  });
  std::vector<std::string> lines = take_warnings();
  for (Stopped& one : peers) {
    SCOPED_TRACE(one.stop.point);
    EXPECT_EQ(take_line(lines, [&](const std::string& line) { return names(line, one.peer); }),
              verbatim::test::log_lines(one.stop.line));
    resume(one);
  }
  EXPECT_TRUE(lines.empty()) << lines[0];
}

}  // namespace
}  // namespace conformance
