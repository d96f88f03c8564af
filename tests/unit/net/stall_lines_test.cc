//: program unit_net_lines sources=support/child.cc link=net,verbs_headers,gtest
//:   + define=LOG_LINES={source}/tests/log_lines.txt
// Halves, because their cases wait for deadlines one after the other.
//: test unit-net-lines shards=2 priority=5 timeout=300

// The whole line of each end that waits, for each cause of a stall. The connections are over softverbs, whose faults
// delay or drop messages; each runs in a child process of its own.
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <regex>
#include <string>
#include <thread>

#include "child_lines.h"
#include "connected_comms.h"
#include "support/child.h"
#include "support/log_lines.h"
#include "unit/support/log_capture.h"

namespace verbatim {
namespace {

using Clock = std::chrono::steady_clock;

// What an application does counts as recent for a quarter of VERBATIM_STALL_WARN_S. When the system has not scheduled
// the test's thread for so long, another report is correct, and the case is repeated.
constexpr const char* kWarnSeconds = "2";
constexpr auto kLongestPause = std::chrono::milliseconds(300);
constexpr int kMaxTries = 20;
constexpr std::string_view kNotScheduled = "not scheduled";

// A connection with 64 bytes at each end.
struct StallEnds {
  explicit StallEnds(MemoryType type) {
    link.connect();
    source_memory = link.reg(link.send(), source);
    target_memory = link.reg(link.recv(), target, type);
  }
  Request* irecv(int tag = 0) {
    const RecvBuffer buffer{target.data(), target.size(), tag, target_memory.get()};
    return link.irecv({&buffer, 1});
  }
  Request* isend(int tag = 0) { return link.isend(source.data(), source.size(), tag, *source_memory); }
  // Posts both, without waiting for them.
  void post() {
    receive = irecv();
    send = link.posted([&] { return isend(); });
  }
  void test_receive() {
    int done = 0;
    RecvComm::test(*receive, &done, nullptr);
  }
  void test_flush() {
    int done = 0;
    RecvComm::test_flush(*flush, &done);
  }

  ConnectedComms link;
  std::vector<std::uint8_t> source = std::vector<std::uint8_t>(64);
  std::vector<std::uint8_t> target = std::vector<std::uint8_t>(64);
  std::unique_ptr<MemoryHandle> source_memory;
  std::unique_ptr<MemoryHandle> target_memory;
  Request* receive = nullptr;
  Request* send = nullptr;
  Request* flush = nullptr;
};

// Drives a connection in a child until so many warnings are logged, and writes them to stderr.
void drive_until_warning(const LogCapture& log, std::size_t lines, const std::function<void()>& drive) {
  Clock::duration longest{};
  Clock::time_point last = Clock::now();
  EXPECT_TRUE(ConnectedComms::eventually([&] {
    drive();
    const Clock::time_point now = Clock::now();
    longest = std::max(longest, now - std::exchange(last, now));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return log.warnings().size() >= lines;
  }));
  if (longest > kLongestPause)
    std::fprintf(stderr, "%.*s\n", static_cast<int>(kNotScheduled.size()), kNotScheduled.data());
  for (const std::string& line : log.warnings()) std::fprintf(stderr, "verbatim: %s\n", line.c_str());
}

// The lines of a child that was scheduled in time, in alphabetical order: the order of the two ends varies.
Lines lines_of(test::Variables variables, const std::function<void()>& body) {
  variables.emplace_back("VERBATIM_TIMEOUT", "31");  // hours: what a fault delays does not time out
  for (int tries = 1;; ++tries) {
    const std::string output = test::check_in_child(variables, body);
    if (tries < kMaxTries && !testing::Test::HasFailure() && output.find(kNotScheduled) != std::string::npos) continue;
    Lines lines = warnings_of(output);
    std::sort(lines.begin(), lines.end());
    return lines;
  }
}

test::Variables warning(const std::string& faults) {
  test::Variables variables = with_faults(faults);
  variables.emplace_back("VERBATIM_STALL_WARN_S", kWarnSeconds);
  return variables;
}

struct Case {
  std::string faults = "seed=1";
  std::function<void(StallEnds&)> begin = [](StallEnds&) {};
  std::function<void(StallEnds&)> drive;
  std::size_t lines = 1;
  MemoryType type = MemoryType::kHost;
};

Lines stalled(const Case& one) {
  return lines_of(warning(one.faults), [&] {
    StallEnds ends(one.type);
    one.begin(ends);
    const LogCapture log;
    drive_until_warning(log, one.lines, [&] { one.drive(ends); });
  });
}

TEST(StallLine, ReceiveNotPosted_NamesReceiver) {
  test::expect_log_lines(stalled({.drive = [](StallEnds& ends) { ends.isend(); }}));
}

// What holds for one connection mostly holds for the others, whose lines are information.
TEST(StallLine, SeveralConnectionsToOnePeer_OneIsWarning) {
  test::expect_log_lines(lines_of(warning("seed=1"), [] {
    StallEnds ends(MemoryType::kHost);
    StallEnds others(MemoryType::kHost);
    const LogCapture log;
    const auto is_stall = [](const std::string& line) { return line.starts_with("stalled for "); };
    drive_until_warning(log, 1, [&] {
      ends.isend();
      others.isend();
    });
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      ends.isend();
      others.isend();
      return std::ranges::any_of(log.infos(), is_stall);
    }));
  }));
}

TEST(StallLine, SendNotPosted_NamesSender) {
  test::expect_log_lines(stalled({.begin = [](StallEnds& ends) { ends.receive = ends.irecv(); },
                                  .drive = [](StallEnds& ends) { ends.test_receive(); }}));
}

TEST(StallLine, TagsDiffer_NamesBothApplications) {
  test::expect_log_lines(stalled({.begin = [](StallEnds& ends) { ends.receive = ends.irecv(1); },
                                  .drive =
                                      [](StallEnds& ends) {
                                        ends.isend(2);
                                        ends.test_receive();
                                      },
                                  .lines = 2}));
}

TEST(StallLine, TestNotCalled_NamesThisProcess) {
  test::expect_log_lines(stalled(
      {.begin = [](StallEnds& ends) { ends.post(); }, .drive = [](StallEnds& ends) { ends.link.send().progress(); }}));
}

TEST(StallLine, DataNotAcknowledged_NamesNetwork) {
  test::expect_log_lines(stalled({.faults = "delay op=write_imm by=1000s",
                                  .begin = [](StallEnds& ends) { ends.post(); },
                                  .drive =
                                      [](StallEnds& ends) {
                                        int done = 0;
                                        SendComm::test(*ends.send, &done, nullptr);
                                        ends.test_receive();
                                      },
                                  .lines = 2}));
}

TEST(StallLine, CtsNotArrived_NamesNetwork) {
  test::expect_log_lines(stalled({.faults = "delay op=write by=1000s",
                                  .begin = [](StallEnds& ends) { ends.receive = ends.irecv(); },
                                  .drive =
                                      [](StallEnds& ends) {
                                        ends.isend();
                                        ends.test_receive();
                                      },
                                  .lines = 2}));
}

TEST(StallLine, CompletionLost_NamesDevice) {
  test::expect_log_lines(stalled({.faults = "drop-completion op=recv",
                                  .begin = [](StallEnds& ends) { ends.post(); },
                                  .drive =
                                      [](StallEnds& ends) {
                                        ends.link.send().progress();
                                        ends.test_receive();
                                      }}));
}

// A flush of what has come, after which `then` is called.
Lines lines_of_flush(const std::function<void(StallEnds&)>& then) {
  return stalled({.faults = "delay op=read by=1000s",
                  .begin =
                      [&](StallEnds& ends) {
                        ends.post();
                        ASSERT_TRUE(ends.link.wait(ends.receive));
                        ends.link.is_completed(ends.receive);
                        ASSERT_TRUE(ends.link.wait(ends.send));
                        ends.flush = ends.link.recv().iflush(ends.target.data(), *ends.target_memory);
                        ASSERT_NE(ends.flush, nullptr);
                        then(ends);
                      },
                  .drive = [](StallEnds& ends) { ends.test_flush(); },
                  .type = MemoryType::kCuda});
}

TEST(StallLine, FlushNotCompleted_NamesDevice) {
  test::expect_log_lines(lines_of_flush([](StallEnds&) {}));
}

// A sender closes when all has been acknowledged, and the receiver flushes then.
TEST(StallLine, FlushNotCompletedAfterPeerHasClosed_NamesDevice) {
  const auto close = [](StallEnds& ends) {
    ends.source_memory.reset();
    ends.link.context().close(ends.link.send());
  };
  test::expect_log_lines(lines_of_flush(close));
}

// A receiver closes when all has arrived. The completion of the sender is lost.
TEST(StallLine, SendNotCompletedAfterPeerHasClosed_NamesDevice) {
  test::expect_log_lines(stalled({.faults = "drop-completion op=write_imm",
                                  .begin =
                                      [](StallEnds& ends) {
                                        ends.post();
                                        ASSERT_TRUE(ends.link.wait(ends.receive));
                                        ends.link.is_completed(ends.receive);
                                        ends.target_memory.reset();
                                        ends.link.context().close(ends.link.recv());
                                      },
                                  .drive =
                                      [](StallEnds& ends) {
                                        int done = 0;
                                        SendComm::test(*ends.send, &done, nullptr);
                                      }}));
}

// A peer process that is stopped after it has connected.
class StoppedPeer {
 public:
  StoppedPeer() {
    EXPECT_EQ(::pipe(handles_), 0);
    EXPECT_EQ(::pipe(words_), 0);
    pid_ = ::fork();
    if (pid_ == 0) ::_exit(connect_and_wait());
    ::close(words_[1]);  // else read() does not return when the child ends
  }
  ~StoppedPeer() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  StoppedPeer(const StoppedPeer&) = delete;
  StoppedPeer& operator=(const StoppedPeer&) = delete;

  RecvComm* accept(Context& context) {
    Handle handle{};
    const Result<ListenComm*> listen = context.listen(0, handle);
    EXPECT_TRUE(listen);
    EXPECT_EQ(::write(handles_[1], handle.data(), handle.size()), static_cast<ssize_t>(handle.size()));
    RecvComm* accepted = nullptr;
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      Result<RecvComm*> comm = context.accept(**listen);
      EXPECT_TRUE(comm);
      accepted = comm ? *comm : nullptr;
      return accepted != nullptr;
    }));
    char word = 0;
    EXPECT_EQ(::read(words_[0], &word, 1), 1);
    return accepted;
  }
  void stop() const {
    ASSERT_EQ(::kill(pid_, SIGSTOP), 0);
    int status = 0;
    ASSERT_EQ(::waitpid(pid_, &status, WUNTRACED), pid_);
    ASSERT_TRUE(WIFSTOPPED(status));
  }

 private:
  using Handle = std::array<std::uint8_t, wire::kHandleBytes>;

  int connect_and_wait() {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const Result<Context*> context = open_context(-1);
    Handle handle{};
    if (!context || ::read(handles_[0], handle.data(), handle.size()) != static_cast<ssize_t>(handle.size())) return 1;
    const bool connected = ConnectedComms::eventually([&] {
      const Result<SendComm*> comm = (*context)->connect(0, handle, -1);
      return comm && *comm != nullptr;
    });
    if (!connected || ::write(words_[1], "c", 1) != 1) return 1;
    while (true) ::pause();
  }

  int handles_[2]{};
  int words_[2]{};
  pid_t pid_ = -1;
};

void wait_without_progress(Context& context, StoppedPeer& peer) {
  RecvComm* const comm = peer.accept(context);
  ASSERT_NE(comm, nullptr);
  std::vector<std::uint8_t> target(64);
  const Result<std::unique_ptr<MemoryHandle>> memory =
      comm->register_memory({.address = target.data(), .bytes = target.size()});
  ASSERT_TRUE(memory);
  void* data = target.data();
  void* handle = memory->get();
  std::size_t bytes = target.size();
  int tag = 0;
  void* request = nullptr;
  ASSERT_EQ(comm->irecv(1, &data, &bytes, &tag, &handle, &request), ErrorKind::kNone);
  ASSERT_NE(request, nullptr);
  ASSERT_NO_FATAL_FAILURE(peer.stop());
  const LogCapture log;
  drive_until_warning(log, 1, [&] {
    int done = 0;
    RecvComm::test(*static_cast<Request*>(request), &done, nullptr);
  });
}

TEST(StallLine, PeerStopped_IsReportedAsNotAnswering) {
  const Lines lines = lines_of(warning("seed=1"), [] {
    StoppedPeer peer;
    const Result<Context*> context = open_context(-1);
    ASSERT_TRUE(context);
    wait_without_progress(**context, peer);
    close_context(*context);
  });
  test::expect_log_lines(lines);
}

// At level INFO: a warning is only for what is wrong.
TEST(StallLine, StallEnds_IsReported) {
  const Lines lines = lines_of(warning("seed=1"), [] {
    StallEnds ends(MemoryType::kHost);
    ends.receive = ends.irecv();
    const LogCapture log;
    drive_until_warning(log, 1, [&] { ends.test_receive(); });
    ends.send = ends.link.posted([&] { return ends.isend(); });
    ASSERT_TRUE(ends.link.wait(ends.receive));
    const auto recovery = [&] {
      const std::vector<std::string> infos = log.infos();
      const auto found = std::find_if(infos.begin(), infos.end(), [](const std::string& one) {
        return one.find("makes progress again") != std::string::npos;
      });
      return found == infos.end() ? std::string() : *found;
    };
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return !recovery().empty();
    }));
    std::fprintf(stderr, "verbatim: %s\n", recovery().c_str());
    EXPECT_EQ(log.warnings().size(), 1U);
  });
  ASSERT_EQ(lines.size(), 2U) << testing::PrintToString(lines);
  test::expect_log_lines({std::regex_replace(lines[1], std::regex("after [0-9.]+ s"), "after T")});
}

// With VERBATIM_STALL_FAIL_S both ends fail with the cause that one end has found.
TEST(StallLine, StallBeyondFailTime_FailsBothEnds) {
  test::Variables variables = with_faults("seed=1");
  variables.emplace_back("VERBATIM_STALL_WARN_S", "0");
  variables.emplace_back("VERBATIM_STALL_FAIL_S", kWarnSeconds);
  const Lines lines = lines_of(variables, [] {
    StallEnds ends(MemoryType::kHost);
    ends.receive = ends.irecv();
    const LogCapture log;
    drive_until_warning(log, 2, [&] {
      ends.test_receive();
      if (ends.link.recv().error() != nullptr) ends.isend();  // the sender reads its events when it is called
    });
    for (const Error* error : {ends.link.recv().error(), ends.link.send().error()}) {
      ASSERT_NE(error, nullptr);
      EXPECT_EQ(error->kind, ErrorKind::kRemote);
    }
  });
  test::expect_log_lines(lines);
}

}  // namespace
}  // namespace verbatim
