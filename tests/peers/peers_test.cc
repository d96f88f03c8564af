//: program peers sources=main.cc,roles.cc link=conformance_harness
//: test peers-{completion} completion=imm,atomic VERBATIM_VERBS_LIBRARY={softverbs} VERBATIM_COMPLETION={completion}

// Which errors and warnings a process gets when its peer process is killed, stopped, late or fails, and how soon.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>

#include "conformance.h"
#include "process.h"
#include "roles.h"

namespace conformance {
namespace {

constexpr int kVersion = 12;

class Peers : public Conformance {
 protected:
  void TearDown() override {
    for (const char* name :
         {"VERBATIM_KEEPALIVE_S", "VERBATIM_STALL_WARN_S", "VERBATIM_TIMEOUT", "VERBATIM_RETRY_CNT"}) {
      unsetenv(name);
    }
    Conformance::TearDown();
  }

  // Connects to a peer that accepts, registers memory, and waits until the peer reports that it is ready.
  void connect(Process& peer) {
    Handle handle;
    ASSERT_TRUE(peer.read(handle.bytes, sizeof handle.bytes)) << "no handle from the other process";
    void* const own = context();
    service().run([&] {
      eventually([&] {
        EXPECT_OK(net().connect(own, 0, handle.bytes, &comm_));
        return HasFailure() || comm_ != nullptr;
      });
    });
    ASSERT_NE(comm_, nullptr);
    ASSERT_OK(net().reg_mr(comm_, memory_.data(), memory_.size(), nccl::kPtrHost, &mhandle_));
    ASSERT_NO_FATAL_FAILURE(await_ready(peer));
  }
  static void await_ready(Process& peer) {
    char byte = 0;
    ASSERT_TRUE(peer.read(&byte, 1));
  }
  nccl::Result isend(std::size_t bytes, int tag, void** request) {
    return net().isend(comm_, memory_.data(), bytes, tag, mhandle_, request);
  }
  // Calls isend until it returns an error. The message must match no receive.
  nccl::Result error_of_isend(std::size_t bytes, int tag) {
    nccl::Result result = nccl::Result::kSuccess;
    eventually([&] {
      void* request = nullptr;
      result = isend(bytes, tag, &request);
      EXPECT_EQ(request, nullptr);
      return result != nccl::Result::kSuccess;
    });
    return result;
  }
  // The same with a tag that matches no receive.
  nccl::Result send_until_error() { return error_of_isend(kBytes, kTag + 1); }
  // Checks that the fastest of five attempts takes less than 5 s. A busy machine delays some attempts; a wait in the
  // plugin would delay all, for the keepalive (300 s) or the transport (34 s).
  void within_seconds(const char* what, const std::function<Clock::duration()>& attempt) {
    constexpr int kAttempts = 5;
    constexpr Clock::duration kSoon = 5s;
    Clock::duration best = Clock::duration::max();
    for (int i = 0; i < kAttempts && best >= kSoon && !HasFatalFailure(); ++i) {
      const Clock::duration took = attempt();
      std::printf("%s: detected after %.3f s\n", what, std::chrono::duration<double>(took).count());
      best = std::min(best, took);
    }
    EXPECT_LT(best, kSoon);
  }
  // Kills the peer. Returns the time from its death until a call returns the error.
  Clock::duration detect_death(Process& peer) {
    peer.kill();
    EXPECT_EQ(peer.wait().status, 128 + SIGKILL);
    const auto begin = Clock::now();
    EXPECT_EQ(send_until_error(), nccl::Result::kRemoteError);
    const auto exit = Clock::now();
    expect_warning("ended without closing");
    close();
    return exit - begin;
  }
  // Kills the peer while a message to it is not read.
  void detect_death_before_reading(const std::string& warning) {
    Process peer("idles", kVersion);
    ASSERT_NO_FATAL_FAILURE(connect(peer));
    const int fd = side_channel();
    ASSERT_NO_FATAL_FAILURE(peer.stop());
    ASSERT_EQ(::send(fd, "x", 1, MSG_NOSIGNAL), 1);
    peer.kill();
    EXPECT_EQ(peer.wait().status, 128 + SIGKILL);
    const auto begin = Clock::now();
    EXPECT_EQ(send_until_error(), nccl::Result::kRemoteError);
    std::printf("detected after %.3f s\n", std::chrono::duration<double>(Clock::now() - begin).count());
    expect_warning(warning);
    close();
  }
  // Repeats `call` until the plugin logs a warning, and returns the warning.
  std::string warning_while(const std::function<void()>& call) {
    std::vector<std::string> lines;
    EXPECT_TRUE(eventually([&] {
      call();
      lines = take_warnings();
      return !lines.empty();
    }));
    return lines.empty() ? std::string() : lines[0];
  }
  std::string warning_while_sending() {
    return warning_while([&] {
      void* request = nullptr;
      EXPECT_OK(isend(kBytes, kTag, &request));
    });
  }
  void expect_warning(const std::string& text) {
    const std::vector<std::string> lines = take_warnings();
    ASSERT_EQ(lines.size(), 1U);
    EXPECT_NE(lines[0].find(text), std::string::npos) << lines[0];
  }
  void detect_death_with_worker(int version) {
    within_seconds("killed, with a worker", [&] {
      Process peer("idles-with-worker", version);
      connect(peer);
      pid_t worker = 0;
      EXPECT_TRUE(peer.read(&worker, sizeof worker));
      EXPECT_GT(worker, 0);
      const std::shared_ptr<void> kill_worker(
          nullptr, [worker](void*) { EXPECT_TRUE(worker <= 0 || ::kill(worker, SIGKILL) == 0); });
      return HasFailure() ? kDeadline : detect_death(peer);
    });
  }
  static bool is_connected(int fd) {
    sockaddr_in peer{};
    socklen_t bytes = sizeof peer;
    return ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &bytes) == 0 && peer.sin_family == AF_INET;
  }
  // The descriptor of the only TCP connection of this process; -1 if there is another number of them.
  static int side_channel() {
    std::vector<int> found;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      const int fd = std::atoi(entry.path().filename().c_str());
      if (is_connected(fd)) found.push_back(fd);
    }
    EXPECT_EQ(found.size(), 1U);
    return found.size() == 1 ? found[0] : -1;
  }
  void close() {
    EXPECT_OK(net().dereg_mr(comm_, mhandle_));
    EXPECT_OK(net().close_send(comm_));
  }

  Memory memory_{2 * kBytes};
  void* comm_ = nullptr;
  void* mhandle_ = nullptr;
};
ONE_VERSION(Peers, kVersion);

TEST_P(Peers, PeerKilled_NextCallFails) {
  within_seconds("killed", [&] {
    Process peer("idles", kVersion);
    connect(peer);
    return HasFailure() ? kDeadline : detect_death(peer);
  });
}

TEST_P(Peers, PeerKilledWithForkedChild_NextCallFails) {
  detect_death_with_worker(kVersion);
}

// A reset says nothing about the peer. The side channel is made again, with the same descriptor number, and the end of
// file on it is the death of the peer.
TEST_P(Peers, PeerKilledAfterReset_NextCallFails) {
  within_seconds("killed after a reset", [&] {
    Process peer("idles", kVersion);
    connect(peer);
    const int fd = side_channel();
    const sockaddr none{.sa_family = AF_UNSPEC, .sa_data = {}};
    // Not by libc's function: ThreadSanitizer would take the descriptor for a new one.
    EXPECT_EQ(::syscall(SYS_connect, fd, &none, sizeof none), 0);
    const std::string line = warning_while_sending();
    EXPECT_NE(line.find("ended with "), std::string::npos) << line;
    EXPECT_NE(line.find("; data goes on by RDMA"), std::string::npos) << line;
    EXPECT_TRUE(eventually([&] { return is_connected(fd); }));
    std::this_thread::sleep_for(kQuiet);  // the peer reads what this end sends first
    return HasFailure() ? kDeadline : detect_death(peer);
  });
}

// The kernel resets the connection of a process that is killed before it has read everything. Its QPs answer nothing.
TEST_P(Peers, PeerKilledBeforeItReads_NicDoesNotAnswer) {
  setenv("VERBATIM_TIMEOUT", "14", 1);  // 67 ms
  setenv("VERBATIM_RETRY_CNT", "3", 1);
  ASSERT_NO_FATAL_FAILURE(detect_death_before_reading(
      "is lost: its side channel ended with Connection reset by peer, and its NIC does not answer"));
}

// The transport needs 8.6 s: the refused listener counts too, and two timeouts without an answer.
TEST_P(Peers, PeerKilledBeforeItReads_ListenerRefuses) {
  setenv("VERBATIM_TIMEOUT", "18", 1);  // 1.07 s
  ASSERT_NO_FATAL_FAILURE(detect_death_before_reading("ended without closing"));
}

// Tables up to v10 have another init function.
class PeersOfOlderTables : public Peers {};
ONE_VERSION(PeersOfOlderTables, 10);

TEST_P(PeersOfOlderTables, PeerKilledWithForkedChild_NextCallFails) {
  detect_death_with_worker(10);
}

// A receive was posted and nothing is outstanding: an isend to the dead peer must not wait for the transport's timeout.
TEST_P(Peers, PeerKilledWithReceivePosted_SendFails) {
  within_seconds("killed, with a receive", [&] {
    Process peer("receives", kVersion);
    connect(peer);
    if (HasFailure()) return Clock::duration(kDeadline);
    peer.kill();
    EXPECT_EQ(peer.wait().status, 128 + SIGKILL);
    std::this_thread::sleep_for(kQuiet);
    const auto begin = Clock::now();
    nccl::Result result = nccl::Result::kSuccess;
    eventually([&] {
      void* request = nullptr;
      result = isend(kBytes, kTag, &request);
      if (request == nullptr) return result != nccl::Result::kSuccess;
      int done = 0;  // the isend was posted before the death was detected
      return eventually([&] {
        result = net().test(request, &done, nullptr);
        return result != nccl::Result::kSuccess || done != 0;
      });
    });
    const Clock::duration took = Clock::now() - begin;
    EXPECT_EQ(result, nccl::Result::kRemoteError);
    EXPECT_EQ(take_warnings().size(), 1U);
    close();
    return took;
  });
}

TEST_P(Peers, PeerStopped_KeepaliveFails) {
  setenv("VERBATIM_KEEPALIVE_S", "1", 1);
  Process peer("idles", kVersion);
  ASSERT_NO_FATAL_FAILURE(connect(peer));
  ASSERT_NO_FATAL_FAILURE(peer.stop());
  EXPECT_EQ(send_until_error(), nccl::Result::kRemoteError);
  expect_warning("(pid " + std::to_string(peer.pid()) +
                 ") has sent nothing for 0.8 s (VERBATIM_KEEPALIVE_S): its host answers");
  close();
}

// This process fails with a usage error. The peer reports the reason that this process sent.
TEST_P(Peers, PeerFailed_ReasonIsReported) {
  within_seconds("failed", [&] {
    Process peer("receives", kVersion);
    connect(peer);
    if (HasFailure()) return Clock::duration(kDeadline);
    const auto begin = Clock::now();
    EXPECT_EQ(error_of_isend(kBytes + 1, kTag), nccl::Result::kInvalidUsage);
    expect_warning("isend of 1001 bytes");
    await_ready(peer);  // the first byte of the peer's warning
    const Clock::duration took = Clock::now() - begin;
    const Exit exit = peer.wait();
    EXPECT_EQ(exit.status, kFailedResult + static_cast<int>(nccl::Result::kRemoteError)) << exit.output;
    EXPECT_NE(exit.output.find("reported: isend of 1001 bytes"), std::string::npos) << exit.output;
    close();
    return took;
  });
}

TEST_P(Peers, PeerIdle_IsNotReported) {
  setenv("VERBATIM_KEEPALIVE_S", "4", 1);
  setenv("VERBATIM_STALL_WARN_S", "1", 1);
  Process peer("idles", kVersion);
  ASSERT_NO_FATAL_FAILURE(connect(peer));
  std::this_thread::sleep_for(3s);
  EXPECT_TRUE(take_warnings().empty());
  close();
}

TEST_P(Peers, PeerLate_IsNamed) {
  setenv("VERBATIM_STALL_WARN_S", "1", 1);
  Process peer("idles", kVersion);
  ASSERT_NO_FATAL_FAILURE(connect(peer));
  const std::string line = warning_while_sending();
  std::printf("%s\n", line.c_str());
  EXPECT_NE(line.find("(pid " + std::to_string(peer.pid()) + ") is late: its application has not posted"),
            std::string::npos);
  EXPECT_NE(line.find("peer: 0 receives posted"), std::string::npos);
  close();
}

TEST_P(Peers, PeerStopped_IsReportedAsNotAnswering) {
  setenv("VERBATIM_STALL_WARN_S", "1", 1);
  Process peer("idles", kVersion);
  ASSERT_NO_FATAL_FAILURE(connect(peer));
  ASSERT_NO_FATAL_FAILURE(peer.stop());
  const std::string line = warning_while_sending();
  EXPECT_NE(line.find("does not answer"), std::string::npos) << line;
  EXPECT_NE(line.find("peer: no answer"), std::string::npos) << line;
  close();
}

// The sender's messages are lost, and its transport timeout is long. The receiver queries the sender, and both name the
// network as the cause.
TEST_P(Peers, NetworkStalled_IsNamedAtBothEnds) {
  setenv("VERBATIM_STALL_WARN_S", "4", 1);  // an application that has not tested for 1 s counts as late
  Handle handle;
  void* listen_comm = nullptr;
  ASSERT_OK(net().listen(context(), 0, handle.bytes, &listen_comm));
  Process peer("sends", kVersion,
               {{"SOFTVERBS_FAULTS", "drop-request op=write_imm,write,fetch_add count=all times=all"},
                {"VERBATIM_TIMEOUT", "20"}});
  ASSERT_TRUE(peer.write(handle.bytes, sizeof handle.bytes));
  void* recv_comm = nullptr;
  ASSERT_TRUE(eventually([&] {
    EXPECT_OK(net().accept(listen_comm, &recv_comm));
    return HasFailure() || recv_comm != nullptr;
  }));
  ASSERT_OK(net().reg_mr(recv_comm, memory_.data(), memory_.size(), nccl::kPtrHost, &mhandle_));
  void* data = memory_.data();
  std::size_t size = kBytes;
  int tag = kTag;
  void* request = nullptr;
  ASSERT_OK(net().irecv(recv_comm, 1, &data, &size, &tag, &mhandle_, &request));
  const std::string line = warning_while([&] {
    int done = 0;
    EXPECT_OK(net().test(request, &done, nullptr));
  });
  std::printf("%s\n", line.c_str());
  EXPECT_NE(line.find("posted and is not acknowledged"), std::string::npos);
  EXPECT_NE(line.find("(pid " + std::to_string(peer.pid())), std::string::npos);
  ASSERT_NO_FATAL_FAILURE(await_ready(peer));  // the first byte of the peer's warning
  EXPECT_OK(net().dereg_mr(recv_comm, mhandle_));
  EXPECT_OK(net().close_recv(recv_comm));
  EXPECT_OK(net().close_listen(listen_comm));
  const Exit exit = peer.wait();
  EXPECT_EQ(exit.status, kFailedResult + static_cast<int>(nccl::Result::kRemoteError)) << exit.output;
  EXPECT_NE(exit.output.find("posted and is not acknowledged"), std::string::npos) << exit.output;
}

}  // namespace
}  // namespace conformance
