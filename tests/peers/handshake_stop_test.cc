// Peer processes that are stopped, one in each state of the handshake, all at once: no call of the survivor waits for
// them, whoever is sound gets through, each is given up after VERBATIM_CONNECT_TIMEOUT_S or VERBATIM_KEEPALIVE_S and
// named; and once they run again, each is told.
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
#include "surviving_peer.h"

namespace conformance {
namespace {

using nccl::Result;

constexpr int kStopVersion = 12;
constexpr int kStatus = kAnswered + static_cast<int>(Result::kRemoteError);

// A place, what the survivor's end comes to there and says, and what the peer says when it runs again: one of these.
struct Stop {
  const char* place;
  Result result;
  std::string line;  // empty: none
  std::vector<std::string> peer_lines;
};

const std::string kPath =
    "Path: HOST softverbs0:1 GID 3 ::ffff:10.77.0.1 QP # to HOST softverbs0:1 GID 3 ::ffff:10.77.0.1 QP #, MTU 4096, "
    "TC 0, SL 0, timeout 4.29 s, 7 retries (34.4 s in all), T old, carried 0 messages, 0 bytes";
const std::string kReadyFailed =
    "connecting verbatim_softverbs0 of HOST to the peer HOST (pid #) at 127.0.0.1:# failed: ";
const std::string kNoAccept = "waiting for the peer's accept: Connection timed out";
const std::string kNoReady = "waiting for the peer to finish the handshake: Connection timed out";
const std::string kBusy =
    ": its application makes no calls for this connection, or its host does not answer. Next: look at WHO first: its "
    "process may be busy or stopped; VERBATIM_CONNECT_TIMEOUT_S waits longer";
const std::string kSilent =
    "nothing has been heard from the peer HOST (pid #) for 1.5 s (VERBATIM_KEEPALIVE_S): its host answers, the process "
    "is stopped or hangs";
const std::string kReported = "the peer HOST (pid #) reported: ";
const std::string kLookThere = ". Next: look at HOST (pid #) first: its log says more. ";

struct Stopped {
  Stopped(const std::string& side, const Stop& what)
      : stop(what), peer(side + " " + std::to_string(SIGSTOP) + " " + what.place, kStopVersion) {}

  const Stop& stop;
  Process peer;
};

// A line that names the peer by its process, whatever follows.
bool names(const std::string& line, const Process& peer) {
  const std::string pid = "(pid " + std::to_string(peer.pid());
  return line.find(pid + ")") != std::string::npos || line.find(pid + ",") != std::string::npos;
}

class StoppedPeers : public SurvivingPeer {
 protected:
  void SetUp() override {
    setenv("VERBATIM_CONNECT_TIMEOUT_S", "3", 1);
    setenv("VERBATIM_KEEPALIVE_S", "2", 1);
    SurvivingPeer::SetUp();
    finalize(new_context());  // what the verbs library opens once
  }
  void TearDown() override {
    for (const char* name : {"VERBATIM_CONNECT_TIMEOUT_S", "VERBATIM_KEEPALIVE_S"}) unsetenv(name);
    SurvivingPeer::TearDown();
  }

  // The first of the lines that is the peer's, or nothing.
  static std::string take_line(std::vector<std::string>& lines, const std::function<bool(const std::string&)>& is_its) {
    const auto found = std::find_if(lines.begin(), lines.end(), is_its);
    if (found == lines.end()) return "";
    const std::string line = fixed(*found);
    lines.erase(found);
    return line;
  }
  // Lets the peer go on: it is told, says so in one line, and ends in good order.
  static void go_on(Stopped& one) {
    ASSERT_TRUE(has_changed_state(one.peer, WSTOPPED));
    ASSERT_EQ(::kill(one.peer.pid(), SIGCONT), 0);
    const Exit exit = one.peer.wait();
    EXPECT_EQ(exit.status, one.stop.peer_lines.empty() ? 0 : kStatus) << exit.output;
    EXPECT_EQ(parse_kill_point(exit.output).value_or(KillPoint{}).place, one.stop.place);
    std::vector<std::string> lines;
    std::istringstream text(exit.output);
    for (std::string line; std::getline(text, line);) {
      if (line.find("Verbatim") != std::string::npos) lines.push_back(fixed(line));
    }
    ASSERT_EQ(lines.size(), one.stop.peer_lines.empty() ? 0U : 1U) << exit.output;
    if (lines.empty()) return;
    const std::vector<std::string>& expected = one.stop.peer_lines;
    EXPECT_NE(std::find(expected.begin(), expected.end(), lines[0]), expected.end()) << lines[0];
  }
};
ONE_VERSION(StoppedPeers, kStopVersion);

TEST_P(StoppedPeers, StoppedWhileAccepting_TimeOutAndAreNamed) {
  const std::string busy = kConnectFailed + kNoAccept + kBusy;
  const std::vector<std::string> too_late = {kAcceptFailed + kWentFirst};
  const std::string silent = kSilent + kLookThere + kPath;
  const std::vector<std::string> accused = {kReported + kSilent + kLookThere + kPath};
  const std::vector<Stop> stops = {
      {"at the start", Result::kRemoteError, busy, too_late},
      {"after accept4 1", Result::kRemoteError, busy, too_late},
      {"after recv 1", Result::kRemoteError, busy, too_late},
      {"before ibv_modify_qp 2", Result::kRemoteError, busy, too_late},
      {"before send 1", Result::kRemoteError, busy, too_late},
      {"in the middle of send 1", Result::kRemoteError, busy, too_late},
      {"after send 1", Result::kRemoteError, silent, accused},
      {"after recv 3", Result::kRemoteError, silent, accused},
      {"before ibv_post_send 1", Result::kRemoteError, silent, accused},
      {"after ibv_post_send 1", Result::kSuccess, "", {}},  // the devices need nobody any more
  };
  struct Mine {
    Handle handle;
    Made made;
    std::unique_ptr<Exchange> exchange;
    bool stopped = false;
    bool not_yet = false;  // was the answer while it was stopped
    bool over = false;
  };
  std::list<Stopped> peers;
  for (const Stop& stop : stops) peers.emplace_back("accepts", stop);
  std::vector<Mine> ends(stops.size());
  auto end = ends.begin();
  for (Stopped& one : peers) {
    Handle& handle = (end++)->handle;
    ASSERT_TRUE(one.peer.read(handle.bytes, sizeof handle.bytes));
  }
  run_role_once([&](void* own) {
    EXPECT_TRUE(eventually([&] {
      bool all = true;
      auto peer = peers.begin();
      for (Mine& mine : ends) {
        Stopped& one = *peer++;
        if (mine.over) continue;
        if (!mine.stopped) mine.stopped = has_changed_state(one.peer, WSTOPPED);
        if (mine.made.comm == nullptr) {
          mine.made = connect(own, mine.handle);
          mine.over = mine.made.result != Result::kSuccess;
          if (mine.made.comm != nullptr) mine.exchange = std::make_unique<Exchange>(net(), mine.made.comm, true);
        } else {
          mine.over = mine.exchange->step();
          mine.made.result = mine.exchange->result();
        }
        mine.not_yet = mine.not_yet || (mine.stopped && !mine.over);
        all = all && mine.over;
      }
      return all;
    }));
    for (Mine& mine : ends) mine.exchange.reset();
  });
  std::vector<std::string> lines = take_warnings();
  end = ends.begin();
  for (Stopped& one : peers) {
    SCOPED_TRACE(one.stop.place);
    const Mine& mine = *end++;
    EXPECT_EQ(mine.made.result, one.stop.result);
    EXPECT_TRUE(mine.not_yet || one.stop.result == Result::kSuccess);
    // Before it has introduced itself the peer has but an address.
    const auto is_its = [&](const std::string& line) {
      return mine.made.comm != nullptr ? names(line, one.peer)
                                       : line.find(address_of(mine.handle)) != std::string::npos;
    };
    EXPECT_EQ(take_line(lines, is_its), one.stop.line);
    go_on(one);
  }
  EXPECT_TRUE(lines.empty()) << lines[0];
}

// All of them at one listen, where a sound peer gets through meanwhile.
TEST_P(StoppedPeers, StoppedWhileConnecting_TimeOutAndAreNamed) {
  const std::vector<std::string> too_late = {kConnectFailed + kUnanswered, kConnectFailed + kRefused,
                                             kConnectFailed + kNoAccept + kBusy};
  const std::string busy = kAcceptFailed + kNoReady + kBusy;
  const std::string given_up = kReported + kNoReady + kLookThere + kPath;
  // Its last word may not reach us any more.
  const std::vector<std::string> told = {
      kReadyFailed + "TCP-END: " + kNoReady + ". Next: look at HOST (pid #) first: its log says more", given_up};
  const std::string silent = kSilent + kLookThere + kPath;
  const std::vector<std::string> accused = {kReported + kSilent + kLookThere + kPath};
  const std::vector<Stop> stops = {
      {"after connect 1", Result::kSuccess, "", too_late},
      {"before send 1", Result::kSuccess, "", too_late},
      {"in the middle of send 1", Result::kSuccess, "", too_late},
      {"after send 1", Result::kRemoteError, busy, told},
      {"before ibv_modify_qp 2", Result::kRemoteError, busy, told},
      {"before send 2", Result::kRemoteError, busy, told},
      {"in the middle of send 2", Result::kRemoteError, busy, {given_up}},
      {"after send 2", Result::kRemoteError, silent, accused},
      {"before ibv_post_send 1", Result::kRemoteError, silent, accused},
  };
  const std::size_t to_refuse = 4;
  const std::size_t to_stand = 3;  // with the sound one
  Process sound("supplies", kStopVersion);
  std::list<Stopped> peers;
  for (const Stop& stop : stops) peers.emplace_back("connects", stop);
  run_role_once([&](void* own) {
    Handle handle;
    void* const listen_comm = listen(own, handle);
    for (Stopped& one : peers) EXPECT_TRUE(one.peer.write(handle.bytes, sizeof handle.bytes));
    EXPECT_TRUE(sound.write(handle.bytes, sizeof handle.bytes));
    std::size_t refused = 0;
    bool all_stopped = false;
    bool not_yet = false;
    std::list<Exchange> exchanges;
    EXPECT_TRUE(eventually([&] {
      const Made made = accept(listen_comm);
      if (made.result != Result::kSuccess) {
        EXPECT_EQ(made.result, Result::kRemoteError);
        ++refused;
      }
      if (made.comm != nullptr) exchanges.emplace_back(net(), made.comm, false);
      bool over = refused == to_refuse && exchanges.size() == to_stand;
      for (Exchange& one : exchanges) over = one.step() && over;
      if (!all_stopped) {
        all_stopped = std::all_of(peers.begin(), peers.end(),
                                  [](const Stopped& one) { return has_changed_state(one.peer, WSTOPPED); });
      } else {
        not_yet = not_yet || (refused == 0 && !made);
      }
      return over;
    }));
    EXPECT_TRUE(not_yet);
    EXPECT_EQ(refused, to_refuse);
    EXPECT_EQ(std::count_if(exchanges.begin(), exchanges.end(),
                            [](const Exchange& one) { return one.result() == Result::kSuccess; }),
              1);
    exchanges.clear();
    EXPECT_OK(net().close_listen(listen_comm));
  });
  std::vector<std::string> lines = take_warnings();
  for (Stopped& one : peers) {
    SCOPED_TRACE(one.stop.place);
    EXPECT_EQ(take_line(lines, [&](const std::string& line) { return names(line, one.peer); }), one.stop.line);
    go_on(one);
  }
  EXPECT_TRUE(lines.empty()) << lines[0];
}

}  // namespace
}  // namespace conformance
