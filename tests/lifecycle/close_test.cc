// Closing: close returns at once, a graceful close does not harm the peer's last message, and no wait is longer than
// its deadline.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>

#include "conformance.h"
#include "process.h"
#include "process_resources.h"
#include "roles.h"

namespace conformance {
namespace {

constexpr int kSenderFailed = 10;

std::chrono::milliseconds close_timeout() {
  return std::chrono::milliseconds(std::atoi(getenv("VERBATIM_CLOSE_TIMEOUT_MS")));
}

template <typename Call>
Clock::duration time_of(Call&& call) {
  const auto start = Clock::now();
  call();
  return Clock::now() - start;
}

class Closing : public Conformance {};
INSTANTIATE_TEST_SUITE_P(Net, Closing, ::testing::Values(8, 12), version_name);

// The exit status of role "close-at-once": the acknowledgement of a message is lost and its receiver closes.
int status_with(int version, const char* fault, const char* close_timeout_ms, const char* timeout,
                const char* retries) {
  Process process("close-at-once", version,
                  {{"SOFTVERBS_FAULTS", fault},
                   {"VERBATIM_CLOSE_TIMEOUT_MS", close_timeout_ms},
                   {"VERBATIM_TIMEOUT", timeout},
                   {"VERBATIM_RETRY_CNT", retries}});
  const Exit end = process.wait();
  if (end.status != 0) std::cout << end.output;
  return end.status;
}

TEST_P(Closing, LastAckLost_SenderCompletes) {
  EXPECT_EQ(status_with(version(), "drop-ack op=write_imm nth=1", "10000", "17", "2"), 0);
  EXPECT_EQ(status_with(version(), "drop-ack op=write_imm nth=1 times=2", "10000", "17", "2"), 0);
}

// Why a closed comm keeps its QPs: if they are destroyed, the receiver cannot acknowledge the retransmission. It comes
// after 2.1 s, which is longer than the receiver needs to close.
TEST_P(Closing, LastAckLostWithoutDelayedDestroy_SenderFails) {
  EXPECT_EQ(status_with(version(), "drop-ack op=write_imm nth=1", "0", "19", "1"), kSenderFailed);
}

// With a close timeout of ten minutes, no QP is destroyed in these tests because of the timeout.
class ClosingWithLongTimeout : public Closing {
 protected:
  void SetUp() override {
    const std::string before = getenv("VERBATIM_CLOSE_TIMEOUT_MS");
    setenv("VERBATIM_CLOSE_TIMEOUT_MS", "600000", 1);
    Closing::SetUp();
    context();
    setenv("VERBATIM_CLOSE_TIMEOUT_MS", before.c_str(), 1);
  }
};
INSTANTIATE_TEST_SUITE_P(Net, ClosingWithLongTimeout, ::testing::Values(8, 12), version_name);

TEST_P(ClosingWithLongTimeout, GracefulClose_QpLivesUntilPeerCloses) {
  TestConnection link = this->link();
  exchange_one(link, 1000);
  ASSERT_EQ(verbs_alive("qp"), 2);
  const Clock::duration took = time_of([&] { link.close_recv(); });
  EXPECT_LT(took, kDeadline);
  EXPECT_EQ(verbs_alive("qp"), 2) << "the closed end keeps its QP until the peer closes";
  link.close_send();
  std::printf("closeRecv took %.3f ms\n", std::chrono::duration<double, std::milli>(took).count());
  EXPECT_TRUE(eventually([] { return verbs_alive("qp") == 0; }));
}

TEST_P(Closing, PeerStaysOpen_QpLivesUntilDeadline) {
  TestConnection link = this->link();
  exchange_one(link, 1000);
  const auto start = Clock::now();
  link.close_send();
  EXPECT_TRUE(eventually([] { return verbs_alive("qp") == 1; }));
  EXPECT_GE(Clock::now() - start, close_timeout());
}

// After close, outstanding operations must not access the caller's buffers any more.
TEST_P(ClosingWithLongTimeout, OutstandingOperations_QpIsDestroyedAtOnce) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  Memory target(1000);
  {
    const Registration mr(*this, link.recv_comm, target.data(), target.size());
    Traffic traffic(net());
    traffic.recv(link.recv_comm, {{target.data(), target.size(), 0, mr.get()}});
    ASSERT_TRUE(traffic.step());
    ASSERT_EQ(traffic.posted(), 1U);
    ASSERT_EQ(verbs_alive("qp"), 2);
    link.close_recv();
    EXPECT_EQ(verbs_alive("qp"), 1);
  }
}

class ClosingContexts : public Conformance {};
INSTANTIATE_TEST_SUITE_P(Net, ClosingContexts, ::testing::Values(11, 12), version_name);

TEST_P(ClosingContexts, ClosedConnectionWaiting_FinalizeWaitsForDeadline) {
  void* const first = new_context();
  void* const second = new_context();
  TestConnection link = this->link({first, 0}, {second, 0});
  exchange_one(link, 1000);
  const Clock::duration waited = time_of([&] {
    link.close_recv();
    finalize(second);
  });
  EXPECT_GE(waited, close_timeout());
  EXPECT_LT(waited, close_timeout() + 10s);
  EXPECT_EQ(verbs_alive("qp"), 1);
}

// The context of the connecting side is finalized during its peer's accept, or that of the listening side during its
// peer's connect.
TEST_P(ClosingContexts, FinalizeDuringConnect_PeerGetsError) {
  for (const bool finalizes_connecting : {true, false}) {
    void* const listening = new_context();
    void* const connecting = new_context();
    Handle handle;
    void* const listen_comm = listen({listening, 0}, handle);
    ASSERT_NE(listen_comm, nullptr);
    void* send_comm = nullptr;
    void* recv_comm = nullptr;
    ASSERT_TRUE(eventually([&] {
      EXPECT_OK(net().connect(connecting, 0, handle.bytes, &send_comm));
      EXPECT_OK(net().accept(listen_comm, &recv_comm));
      return HasFailure() || verbs_alive("qp") == 2;
    }));
    ASSERT_EQ(send_comm, nullptr);
    ASSERT_EQ(recv_comm, nullptr);
    finalize(finalizes_connecting ? connecting : listening);
    // The listening side has sent its hello already: connect may return a comm first, and then isend must fail.
    EXPECT_TRUE(eventually([&] {
      void* request = nullptr;
      const nccl::Result result = finalizes_connecting   ? net().accept(listen_comm, &recv_comm)
                                  : send_comm == nullptr ? net().connect(connecting, 0, handle.bytes, &send_comm)
                                                         : net().isend(send_comm, nullptr, 0, 0, nullptr, &request);
      return result == nccl::Result::kRemoteError;
    }));
    EXPECT_FALSE(take_warnings().empty());
    finalize(finalizes_connecting ? listening : connecting);
    EXPECT_EQ(verbs_alive("qp"), 0);
  }
}

}  // namespace

int close_at_once(netapi::Plugin& net, void* context) {
  Connection connection;
  if (!connect_to_itself(net, context, connection)) return 1;
  EXPECT_OK(net.close_listen(connection.listen_comm));
  Memory source(5000);
  Memory target(5000);
  void* mrs[2] = {};
  EXPECT_OK(net.reg_mr(connection.send_comm, source.data(), source.size(), nccl::kPtrHost, &mrs[0]));
  EXPECT_OK(net.reg_mr(connection.recv_comm, target.data(), target.size(), nccl::kPtrHost, &mrs[1]));
  source.write(0, 5000, 1);
  target.expect(0, 5000, 1);
  Traffic recvs(net);
  recvs.recv(connection.recv_comm, {{target.data(), 5000, 0, mrs[1]}});
  if (!recvs.step()) return 1;
  void* request = nullptr;
  const bool posted = eventually([&] {
    EXPECT_OK(net.isend(connection.send_comm, source.data(), 5000, 0, mrs[0], &request));
    return request != nullptr;
  });
  if (!posted || !recvs.run()) return 1;
  EXPECT_TRUE(target.intact());
  EXPECT_OK(net.dereg_mr(connection.recv_comm, mrs[1]));
  EXPECT_OK(net.close_recv(connection.recv_comm));

  int done = 0;
  nccl::Result result = nccl::Result::kSuccess;
  EXPECT_OK(net.test(request, &done, nullptr));
  if (done != 0) {
    std::cout << "the acknowledgement was not lost\n";
    return 1;
  }
  EXPECT_TRUE(eventually([&] {
    result = net.test(request, &done, nullptr);
    return done != 0 || result != nccl::Result::kSuccess;
  }));
  std::cout << "the sender: " << static_cast<int>(result) << "\n";
  EXPECT_OK(net.dereg_mr(connection.send_comm, mrs[0]));
  EXPECT_OK(net.close_send(connection.send_comm));
  EXPECT_OK(net.finalize(context));
  if (::testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed()) return 1;
  return result == nccl::Result::kSuccess ? 0 : kSenderFailed;
}

}  // namespace conformance
