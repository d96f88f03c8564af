// Closing with outstanding requests, finalize with open comms, and repeated init and loading.
#include <thread>

#include "conformance.h"

namespace conformance {
namespace {

class Lifecycle : public Conformance {};
EVERY_VERSION(Lifecycle);

TEST_P(Lifecycle, InitAndFinalizeRepeated_Works) {
  for (int round = 0; round < 6; ++round) {
    void* const own = new_context();
    {
      TestConnection link = this->link({own, 0}, {own, 0});
      exchange_one(link, 10'000);
    }
    finalize(own);
  }
}

TEST_P(Lifecycle, LoadedAgain_Works) {
  for (int round = 0; round < 4; ++round) {
    {
      TestConnection link = this->link();
      exchange_one(link, 1000);
    }
    TearDown();
    SetUp();
  }
}

// NCCL aborts a communicator by closing its comms, even if requests are outstanding.
TEST_P(Lifecycle, ClosedWithOutstandingRequests_NextConnectionWorks) {
  for (const bool sender_first : {true, false}) {
    TestConnection link = this->link();
    ASSERT_TRUE(link);
    Memory source(100'000);
    Memory target(100'000);
    Registration source_mr(*this, link.send_comm, source.data(), source.size());
    Registration target_mr(*this, link.recv_comm, target.data(), target.size());
    Traffic traffic(net());
    for (std::size_t i = 0; i < 20; ++i) {
      traffic.recv(link.recv_comm, {{target.data(), 100'000, 0, target_mr.get()}});
      if (i < 10) traffic.send(link.send_comm, {source.data(), 100'000, 0, source_mr.get()});
    }
    ASSERT_TRUE(traffic.step());
    ASSERT_TRUE(traffic.step());
    // From here on no request is tested. NCCL deregisters before it closes.
    { const Registration deregistered = std::move(source_mr); }
    { const Registration deregistered = std::move(target_mr); }
    if (sender_first) link.close_send();
    link.close_recv();
    link.close_send();
    take_warnings();
  }
  TestConnection link = this->link();
  exchange_one(link, 1000);
}

// The receiver closes as soon as it has the last message. The sender's request must still complete without an error.
TEST_P(Lifecycle, ReceiverClosesAfterData_SendCompletes) {
  for (int round = 0; round < repetitions(10); ++round) {
    TestConnection link = this->link();
    ASSERT_TRUE(link);
    Memory source(5000);
    Memory target(5000);
    const Registration source_mr(*this, link.send_comm, source.data(), source.size());
    Traffic sends(net());
    {
      const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
      source.write(0, 5000, 1);
      target.expect(0, 5000, 1);
      Traffic recvs(net());
      recvs.recv(link.recv_comm, {{target.data(), 5000, 0, target_mr.get()}});
      sends.send(link.send_comm, {source.data(), 5000, 0, source_mr.get()});
      while (sends.posted() == 0) ASSERT_TRUE(recvs.step() && sends.step());
      ASSERT_TRUE(recvs.run());
      EXPECT_TRUE(target.intact());
    }
    link.close_recv();
    EXPECT_TRUE(sends.run());
  }
}

TEST_P(Lifecycle, SenderClosesAfterSend_ReceiveCompletes) {
  for (int round = 0; round < repetitions(10); ++round) {
    TestConnection link = this->link();
    ASSERT_TRUE(link);
    Memory source(5000);
    Memory target(5000);
    const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
    source.write(0, 5000, 1);
    target.expect(0, 5000, 1);
    Traffic recvs(net());
    recvs.recv(link.recv_comm, {{target.data(), 5000, 0, target_mr.get()}});
    {
      const Registration source_mr(*this, link.send_comm, source.data(), source.size());
      Traffic sends(net());
      sends.send(link.send_comm, {source.data(), 5000, 0, source_mr.get()});
      while (sends.open() > 0) ASSERT_TRUE(sends.step() && recvs.step());
    }
    link.close_send();
    ASSERT_TRUE(recvs.run());
    EXPECT_TRUE(target.intact());
  }
}

// NCCL leaves comms open when set-up fails. From v11 on finalize closes them, up to v10 the unloading of the library.
TEST_P(Lifecycle, CommsNotClosed_FinalizeClosesThem) {
  for (int round = 0; round < 2; ++round) {
    void* const own = new_context();
    Handle unused;
    EXPECT_NE(listen({own, 0}, unused), nullptr);
    TestConnection link = this->link({own, 0}, {own, 0});
    exchange_one(link, 1000);
    link.send_comm = nullptr;
    link.recv_comm = nullptr;
    finalize(own);
    take_warnings();
  }
}

TEST_P(Lifecycle, FinalizeOfNull_Succeeds) {
  if (version() < 11) GTEST_SKIP() << "no finalize in this version";
  context();
  EXPECT_OK(net().finalize(nullptr));
  TestConnection link = this->link();
  exchange_one(link, 1000);
}

// Several ranks in one process, each with its own connection and thread, on one context.
TEST_P(Lifecycle, ManyThreads_ExchangeData) {
  constexpr std::size_t kThreads = 4;
  std::vector<TestConnection> links;
  for (std::size_t i = 0; i < kThreads; ++i) {
    links.push_back(link());
    ASSERT_TRUE(links.back());
  }
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 5; ++round) {
        exchange(links[i], std::vector<Group>(10, {{{1000 + i, 2000, 0}}, {}}));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(Lifecycle, ManyThreads_Connect) {
  const End end{context(), 0};
  constexpr int kThreads = 4;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 3; ++round) {
        Handle handle;
        void* listen_comm = nullptr;
        void* send_comm = nullptr;
        void* recv_comm = nullptr;
        EXPECT_OK(net().listen(end.context, 0, handle.bytes, &listen_comm));
        EXPECT_TRUE(eventually([&] {
          if (send_comm == nullptr) {
            EXPECT_OK(net().connect(end.context, 0, handle.bytes, &send_comm));
          }
          if (recv_comm == nullptr) {
            EXPECT_OK(net().accept(listen_comm, &recv_comm));
          }
          return HasFailure() || (send_comm != nullptr && recv_comm != nullptr);
        }));
        EXPECT_OK(net().close_listen(listen_comm));
        if (send_comm != nullptr) {
          EXPECT_OK(net().close_send(send_comm));
        }
        if (recv_comm != nullptr) {
          EXPECT_OK(net().close_recv(recv_comm));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace conformance
