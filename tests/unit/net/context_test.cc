// What a communicator's context promises beside data: settings that reach the QPs, deadlines, and orderly ends.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <thread>

#include "connected_comms.h"
#include "net/context/forecast.h"
#include "support/log_lines.h"
#include "support/scratch_directory.h"
#include "unit/support/log_capture.h"

namespace verbatim {
namespace {

class ContextTest : public ::testing::Test {
 protected:
  void TearDown() override {
    for (const char* name : {"VERBATIM_TC", "VERBATIM_CTS_TC", "VERBATIM_SL", "VERBATIM_CONNECT_TIMEOUT_S",
                             "VERBATIM_CLOSE_TIMEOUT_MS", "VERBATIM_QPS_PER_CONNECTION"}) {
      ::unsetenv(name);
    }
  }

  static ibv_qp_attr attributes(Comm& comm) {
    const EndpointQp& end = comm.endpoint().qps()[0];
    ibv_qp_attr answer{};
    ibv_qp_init_attr made{};
    const Verbs& verbs = comm.endpoint().ports()[0]->device->verbs();
    EXPECT_EQ(verbs.query_qp(end.qp.get(), &answer, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU, &made), 0);
    return answer;
  }

  // Leaves a context with one comm aborted and one closed whose peer stays open. Returns how long that took from the
  // first close on.
  static std::chrono::steady_clock::duration end_with_a_comm_aborted(bool serves_process) {
    Result<Context*> other = open_context(-1);
    EXPECT_TRUE(other);
    std::chrono::steady_clock::time_point begin;
    {
      ConnectedComms link;
      link.connect();
      if (serves_process) link.context().set_process_wide();
      std::array<std::uint8_t, wire::kHandleBytes> handle{};
      Result<ListenComm*> listen = (*other)->listen(0, handle);
      EXPECT_TRUE(listen);
      SendComm* send = nullptr;
      RecvComm* recv = nullptr;
      const auto end = std::chrono::steady_clock::now() + ConnectedComms::kPatience;
      while ((send == nullptr || recv == nullptr) && std::chrono::steady_clock::now() < end) {
        if (send == nullptr) {
          const Result<SendComm*> connected = link.context().connect(0, handle, -1);
          if (connected) send = *connected;
        }
        if (recv == nullptr) {
          const Result<RecvComm*> accepted = (*other)->accept(**listen);
          if (accepted) recv = *accepted;
        }
      }
      EXPECT_TRUE(send != nullptr && recv != nullptr);

      Buffers buffers(link, 8);
      EXPECT_NE(link.posted([&] { return buffers.irecv(8); }), nullptr);
      begin = std::chrono::steady_clock::now();
      link.context().close(link.recv());
      link.context().close(*send);
    }
    const auto took = std::chrono::steady_clock::now() - begin;
    close_context(*other);
    return took;
  }

  // Calls isend, for which nothing was announced, until the comm fails or `limit` is over.
  static bool isend_fails_within(ConnectedComms& link, std::chrono::milliseconds limit) {
    Buffers buffers(link, 8);
    const auto end = std::chrono::steady_clock::now() + limit;
    while (link.send().error() == nullptr && std::chrono::steady_clock::now() < end) {
      EXPECT_EQ(buffers.isend(8), nullptr);
    }
    return link.send().error() != nullptr;
  }
};

// Both ends of one connection are one to send and one to receive.
TEST_F(ContextTest, Forecast_IsWhatConnectionsTake) {
  ::setenv("VERBATIM_QPS_PER_CONNECTION", "3", 1);
  const auto open_descriptors = [] {
    const std::filesystem::directory_iterator found("/proc/self/fd");
    return std::distance(begin(found), end(found));
  };
  ConnectedComms link;
  const auto before = open_descriptors();
  link.connect();
  const Forecast expected = forecast(link.context().config(), 1, 1, {});
  EXPECT_EQ(expected.connections, 2U);
  EXPECT_EQ(expected.qps, 6U);
  EXPECT_EQ(link.ports()[0]->device->live_qps().load(), expected.qps);
  EXPECT_EQ(open_descriptors() - before, static_cast<std::ptrdiff_t>(expected.descriptors));
  const Forecast more = forecast(link.context().config(), 2, 10, {});
  EXPECT_EQ(more.connections, 20U);
  EXPECT_EQ(more.flush_qps, 20U);
  EXPECT_EQ(more.memory_regions, 40U);
  EXPECT_EQ(forecast({}, 1, 0, {}).descriptors, 0U);
}

TEST_F(ContextTest, Connect_LogsWhatBothEndsHaveNegotiated) {
  ::setenv("VERBATIM_QPS_PER_CONNECTION", "3", 1);
  const LogCapture log;
  ConnectedComms link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  const std::string peer = link.send().endpoint().peer_name();
  const std::string negotiated = peer +
                                 ": softverbs0:1 to softverbs0:1, MTU 4096, 3 QPs on 1 lane, completion by "
                                 "immediates";
  const std::vector<std::string> lines = log.infos();
  for (const char* direction : {"send to ", "receive from "}) {
    EXPECT_EQ(std::count(lines.begin(), lines.end(), direction + negotiated), 1) << testing::PrintToString(lines);
  }
}

TEST_F(ContextTest, TrafficClassOfCommunicator_ReachesBothEnds) {
  ConnectedComms link(104);
  ASSERT_NO_FATAL_FAILURE(link.connect());
  for (Comm* comm : {static_cast<Comm*>(&link.send()), static_cast<Comm*>(&link.recv())}) {
    const ibv_qp_attr qp = attributes(*comm);
    EXPECT_EQ(qp.qp_state, IBV_QPS_RTS);
    EXPECT_EQ(qp.ah_attr.grh.traffic_class, 104);
    EXPECT_EQ(qp.ah_attr.sl, 104 & 0xf);  // as in NCCL
  }
}

TEST_F(ContextTest, TrafficClassOfConnect_ReachesBothEnds) {
  ConnectedComms link;  // up to v10 NCCL passes the traffic class to connect only
  ASSERT_NO_FATAL_FAILURE(link.connect(0, 0, 96));
  EXPECT_EQ(attributes(link.send()).ah_attr.grh.traffic_class, 96);
  EXPECT_EQ(attributes(link.recv()).ah_attr.grh.traffic_class, 96);
}

TEST_F(ContextTest, TrafficClassOfUser_OverridesCommunicator) {
  ::setenv("VERBATIM_TC", "32", 1);
  ::setenv("VERBATIM_SL", "3", 1);
  ConnectedComms link(104);
  ASSERT_NO_FATAL_FAILURE(link.connect());
  EXPECT_EQ(attributes(link.send()).ah_attr.grh.traffic_class, 32);
  EXPECT_EQ(attributes(link.recv()).ah_attr.grh.traffic_class, 32);
  EXPECT_EQ(attributes(link.send()).ah_attr.sl, 3);
}

TEST_F(ContextTest, TrafficClassOfCts_ReachesReceiverOnly) {
  ::setenv("VERBATIM_CTS_TC", "40", 1);
  ConnectedComms link(104);
  ASSERT_NO_FATAL_FAILURE(link.connect());
  EXPECT_EQ(attributes(link.send()).ah_attr.grh.traffic_class, 104);
  EXPECT_EQ(attributes(link.recv()).ah_attr.grh.traffic_class, 40);
}

TEST_F(ContextTest, TrafficClassOutOfRange_IsRejected) {
  const Result<Context*> refused = open_context(256);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().kind, ErrorKind::kUsage);
}

TEST_F(ContextTest, OperatorsKey_IsReadFromAFile) {
  const ScratchDirectory directory;
  const std::string path = directory.path() / "key";
  ::setenv("VERBATIM_PSK_FILE", path.c_str(), 1);
  const auto refusal = [&path] {
    const LogCapture log;
    const Result<Context*> refused = open_context(-1);
    EXPECT_FALSE(refused);
    EXPECT_TRUE(refused || refused.error().kind == ErrorKind::kUsage);
    return test::replaced(log.only_warning(), path, "FILE");
  };
  std::vector<std::string> lines = {refusal()};
  const auto write = [&](std::size_t bytes) { std::ofstream(path) << std::string(bytes, 'k'); };
  write(15);
  lines.push_back(refusal());
  write(4097);
  lines.push_back(refusal());
  for (const std::size_t bytes : {16U, 4096U}) {
    write(bytes);
    ConnectedComms link;
    ASSERT_NO_FATAL_FAILURE(link.connect());
    write(17);
    const std::string changed = "is not what it was when the first communicator of this process was made";
    EXPECT_NE(refusal().find(changed), std::string::npos);
  }
  std::filesystem::remove(path);
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  lines.push_back(refusal());
  test::expect_log_lines(lines);
  ::unsetenv("VERBATIM_PSK_FILE");
}

// From the first communicator that a process makes to the end of the last one it has one key pair.
TEST_F(ContextTest, KeyPair_IsAnotherOneAfterTheLastCommunicatorHasEnded) {
  const auto key_of_connection = [] {
    ConnectedComms link;
    link.connect();
    if (HasFatalFailure()) return wire::PublicKey{};
    EXPECT_EQ(link.send().endpoint().remote().key, link.recv().endpoint().remote().key);
    return link.recv().endpoint().remote().key;
  };
  wire::PublicKey first{};
  {
    const ConnectedComms stays;
    first = key_of_connection();
    EXPECT_EQ(key_of_connection(), first);
  }
  EXPECT_NE(key_of_connection(), first);
}

TEST_F(ContextTest, EachListen_HasASecretOfItsOwn) {
  std::set<wire::Secret> known{wire::Secret{}};
  for (int init = 0; init < 2; ++init) {
    ConnectedComms link;
    for (int i = 0; i < 2; ++i) {
      std::array<std::uint8_t, wire::kHandleBytes> bytes{};
      ASSERT_TRUE(link.context().listen(0, bytes));
      const Result<wire::Handle> handle = wire::decode_handle(bytes);
      ASSERT_TRUE(handle);
      EXPECT_TRUE(known.insert(handle->secret).second);
    }
  }
}

TEST_F(ContextTest, ConnectWithoutAccept_TimesOut) {
  ::setenv("VERBATIM_CONNECT_TIMEOUT_S", "1", 1);
  ConnectedComms link;
  std::array<std::uint8_t, wire::kHandleBytes> handle{};
  Result<ListenComm*> listen = link.context().listen(0, handle);
  ASSERT_TRUE(listen);
  const auto begin = std::chrono::steady_clock::now();
  Result<SendComm*> comm = link.context().connect(0, handle, -1);
  while (comm && std::chrono::steady_clock::now() < begin + ConnectedComms::kPatience) {
    ASSERT_EQ(*comm, nullptr);
    comm = link.context().connect(0, handle, -1);
  }
  ASSERT_FALSE(comm);
  EXPECT_EQ(comm.error().sys_errno, ETIMEDOUT);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
  EXPECT_EQ(wire::load_connect_token(handle), 0U);  // the handle can be tried again
}

TEST_F(ContextTest, BothEndsClosed_FinalizeDoesNotWaitForDeadline) {
  ::setenv("VERBATIM_CLOSE_TIMEOUT_MS", "60000", 1);
  const auto begin = std::chrono::steady_clock::now();
  {
    ConnectedComms link;
    ASSERT_NO_FATAL_FAILURE(link.connect());
    link.context().close(link.recv());
    link.context().close(link.send());
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

TEST_F(ContextTest, CloseWhilePeerStaysOpen_EndsAtDeadline) {
  ::setenv("VERBATIM_CLOSE_TIMEOUT_MS", "300", 1);
  Result<Context*> other = open_context(-1);
  ASSERT_TRUE(other);
  const auto begin = std::chrono::steady_clock::now();
  {
    ConnectedComms link;
    ASSERT_NO_FATAL_FAILURE(link.connect());
    link.context().close(link.recv());
    EXPECT_FALSE(link.context().idle());  // the sender is still there
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  close_context(*other);
}

TEST_F(ContextTest, ReceiverClosed_SenderFailsWithRemoteError) {
  ConnectedComms link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  EXPECT_FALSE(isend_fails_within(link, std::chrono::milliseconds(300)));  // a late receiver is no error
  link.context().close(link.recv());
  ASSERT_TRUE(isend_fails_within(link, ConnectedComms::kPatience));
  EXPECT_EQ(link.send().error()->kind, ErrorKind::kRemote);
}

TEST_F(ContextTest, SenderClosed_ReceiverFailsWithRemoteError) {
  ConnectedComms link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  Buffers buffers(link, 8);
  ASSERT_NE(link.posted([&] { return buffers.irecv(8); }), nullptr);
  link.context().close(link.send());
  ASSERT_TRUE(link.fails(link.recv()));
  EXPECT_EQ(link.recv().error()->kind, ErrorKind::kRemote);
}

TEST_F(ContextTest, MessageBeforePeerClosed_IsDelivered) {
  ConnectedComms link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  Buffers buffers(link, pattern(5000, 1));
  Request* receive = link.posted([&] { return buffers.irecv(5000); });
  Request* send = link.posted([&] { return buffers.isend(5000); });
  ASSERT_TRUE(link.wait(send));
  link.is_completed(send);
  link.context().close(link.send());
  EXPECT_TRUE(link.eventually([&] {
    link.recv().progress();
    return receive->state == RequestState::kDone;
  }));
  EXPECT_EQ(link.recv().error(), nullptr);
  EXPECT_EQ(buffers.target, buffers.source) << "wrong bytes";
}

// More messages than one look at the completion queue takes in, and a receiver that was away for longer than what is
// under way may take.
TEST_F(ContextTest, ManyMessagesBeforePeerClosed_AreDelivered) {
  constexpr std::size_t kMessages = 40;
  constexpr std::size_t kBytes = 8;
  ConnectedComms link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  Buffers buffers(link, pattern(kBytes, 1));
  std::vector<Request*> receives;
  std::vector<Request*> sends;
  for (std::size_t i = 0; i < kMessages; ++i) {
    receives.push_back(buffers.irecv(kBytes));
    ASSERT_NE(receives.back(), nullptr);
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (sends.size() < kMessages && std::chrono::steady_clock::now() < end) {
    if (Request* send = buffers.isend(kBytes)) sends.push_back(send);
    link.send().progress();
  }
  ASSERT_EQ(sends.size(), kMessages);
  for (Request* send : sends) {
    while (send->state != RequestState::kDone && std::chrono::steady_clock::now() < end) link.send().progress();
    ASSERT_EQ(send->state, RequestState::kDone);
    link.is_completed(send);
  }
  link.context().close(link.send());
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  link.recv().progress();
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  for (Request* receive : receives) {
    while (receive->state != RequestState::kDone && link.recv().error() == nullptr &&
           std::chrono::steady_clock::now() < end) {
      link.recv().progress();
    }
    EXPECT_EQ(receive->state, RequestState::kDone);
  }
  EXPECT_EQ(link.recv().error(), nullptr);
}

TEST_F(ContextTest, CloseWithOutstandingOperation_AbortsAtOnce) {
  ::setenv("VERBATIM_CLOSE_TIMEOUT_MS", "60000", 1);
  const auto begin = std::chrono::steady_clock::now();
  {
    ConnectedComms link;
    ASSERT_NO_FATAL_FAILURE(link.connect());
    Buffers buffers(link, 8);
    ASSERT_NE(link.posted([&] { return buffers.irecv(8); }), nullptr);
    EXPECT_FALSE(link.recv().all_done());
    link.context().close(link.recv());
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

TEST_F(ContextTest, AbortedComm_FinalizeDoesNotWait) {
  ::setenv("VERBATIM_CLOSE_TIMEOUT_MS", "60000", 1);
  EXPECT_LT(end_with_a_comm_aborted(false), std::chrono::seconds(20));
}

TEST_F(ContextTest, AbortedCommInProcessContext_OtherPeersAreWaitedFor) {
  ::setenv("VERBATIM_CLOSE_TIMEOUT_MS", "1000", 1);
  EXPECT_GE(end_with_a_comm_aborted(true), std::chrono::milliseconds(1000));
}

}  // namespace
}  // namespace verbatim
