// Many QPs and many threads: any thread may call any verb at any time.
#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>

#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

class Concurrency : public testing::Test {
 protected:
  Device device = open_device();
};

void join_all(std::vector<std::thread>& threads) {
  for (std::thread& thread : threads) thread.join();
}

TEST_F(Concurrency, HundredsOfQps_TransferWithoutMixing) {
  constexpr std::size_t kPairs = 256;
  constexpr std::size_t kBytes = 512;
  const Region source(device.pd.get(), kPairs * kBytes);
  const Region target(device.pd.get(), kPairs * kBytes);
  source.fill(1);
  const Cq send_cq = create_cq(device, 2 * kPairs);
  const Cq recv_cq = create_cq(device, 2 * kPairs);
  const EndpointOptions options{.send_wr = 4, .recv_wr = 4, .send_cq = send_cq.get(), .recv_cq = recv_cq.get()};
  std::vector<std::unique_ptr<Endpoint>> senders;
  std::vector<std::unique_ptr<Endpoint>> receivers;
  std::set<std::uint32_t> numbers;
  for (std::size_t i = 0; i < kPairs; ++i) {
    senders.push_back(std::make_unique<Endpoint>(device, options));
    receivers.push_back(std::make_unique<Endpoint>(device, options));
    connect(*senders.back(), *receivers.back());
    numbers.insert(senders.back()->qp()->qp_num);
    numbers.insert(receivers.back()->qp()->qp_num);
  }
  EXPECT_EQ(numbers.size(), 2 * kPairs);
  for (std::size_t i = 0; i < kPairs; ++i) {
    ASSERT_EQ(post_recv(receivers[i]->qp(), {target.sge(i * kBytes, kBytes)}, i), 0);
  }
  for (std::size_t i = kPairs; i-- > 0;) {
    ASSERT_EQ(post(senders[i]->qp(), IBV_WR_SEND, {source.sge(i * kBytes, kBytes)}, {.wr_id = i}), 0);
  }
  std::set<std::uint64_t> received;
  for (const ibv_wc& wc : poll(recv_cq.get(), kPairs)) {
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.qp_num, receivers[wc.wr_id]->qp()->qp_num);
    received.insert(wc.wr_id);
  }
  EXPECT_EQ(received.size(), kPairs);
  EXPECT_EQ(poll(send_cq.get(), kPairs).size(), kPairs);
  EXPECT_EQ(find_wrong_byte(target.buffer.bytes(), 1), std::nullopt);
}

TEST_F(Concurrency, ThreadsWithOwnQps_TransferCorrectly) {
  constexpr std::uint64_t kThreads = 6;
  constexpr std::uint64_t kMessages = 300;
  std::vector<std::thread> threads;
  std::atomic<std::uint64_t> correct{0};
  for (std::uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const Region source(device.pd.get(), 8192);
      const Region target(device.pd.get(), 8192);
      Endpoint a(device);
      Endpoint b(device);
      connect(a, b);
      for (std::uint64_t i = 0; i < kMessages; ++i) {
        const std::size_t size = 1 + (i * 977) % 8192;
        fill_pattern(source.bytes(0, size), t * kMessages + i);
        EXPECT_EQ(post_recv(b.qp(), {target.sge()}, i), 0);
        EXPECT_EQ(post(a.qp(), IBV_WR_SEND, {source.sge(0, size)}, {.wr_id = i}), 0);
        const ibv_wc received = poll_one(b.recv_cq());
        const ibv_wc sent = poll_one(a.send_cq());
        const bool whole = find_wrong_byte(target.bytes(0, size), t * kMessages + i) == std::nullopt;
        if (received.wr_id == i && received.byte_len == size && sent.wr_id == i && whole) ++correct;
      }
    });
  }
  join_all(threads);
  EXPECT_EQ(correct, kThreads * kMessages);
}

TEST_F(Concurrency, ThreadsSharingOneQp_TransferCorrectly) {
  constexpr std::uint64_t kThreads = 4;
  constexpr std::uint64_t kMessages = 500;
  const Cq cq = create_cq(device, kThreads * kMessages);
  const Region source(device.pd.get(), kThreads * kMessages * 8);
  const Region target(device.pd.get(), kThreads * kMessages * 8);
  source.fill(2);
  Endpoint a(device, {.send_wr = 128, .send_cq = cq.get()});
  Endpoint b(device);
  connect(a, b);
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = t; i < kThreads * kMessages; i += kThreads) {
        ibv_sge sge = source.sge(8 * i, 8);
        ibv_send_wr wr{};
        wr.wr_id = i;
        wr.sg_list = &sge;
        wr.num_sge = 1;
        wr.opcode = IBV_WR_RDMA_WRITE;
        wr.send_flags = IBV_SEND_SIGNALED;
        wr.wr.rdma.remote_addr = target.address(8 * i);
        wr.wr.rdma.rkey = target.mr->rkey;
        ibv_send_wr* bad = nullptr;
        int result = 0;
        while ((result = ibv_post_send(a.qp(), &wr, &bad)) == ENOMEM)
          sched_yield();  // the queue is full until the poller polls
        ASSERT_EQ(result, 0);
      }
    });
  }
  std::set<std::uint64_t> completed;
  std::vector<std::uint64_t> last(kThreads, 0);
  for (const ibv_wc& wc : poll(cq.get(), kThreads * kMessages)) {
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_GE(wc.wr_id, last[wc.wr_id % kThreads]);  // one thread's requests keep their order
    last[wc.wr_id % kThreads] = wc.wr_id;
    completed.insert(wc.wr_id);
  }
  join_all(threads);
  EXPECT_EQ(completed.size(), kThreads * kMessages);
  EXPECT_EQ(find_wrong_byte(target.buffer.bytes(), 2), std::nullopt);
}

TEST_F(Concurrency, ThreadsSharingOneCq_GetEachCompletionOnce) {
  constexpr std::uint64_t kPairs = 4;
  constexpr std::uint64_t kMessages = 400;
  const Cq cq = create_cq(device, kPairs * 64);
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  const Region region(device.pd.get(), 4096);
  for (std::uint64_t i = 0; i < kPairs; ++i) {
    endpoints.push_back(std::make_unique<Endpoint>(device, EndpointOptions{.send_cq = cq.get()}));
    endpoints.push_back(std::make_unique<Endpoint>(device));
    connect(*endpoints[2 * i], *endpoints[2 * i + 1]);
  }
  std::atomic<std::uint64_t> completed{0};
  std::atomic<std::uint64_t> failed{0};
  const auto deadline = std::chrono::steady_clock::now() + kCompletionTimeout;
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 2; ++t) {  // two pollers
    threads.emplace_back([&] {
      while (completed + failed < kPairs * kMessages && std::chrono::steady_clock::now() < deadline) {
        ibv_wc wc{};
        const int polled = ibv_poll_cq(cq.get(), 1, &wc);
        if (polled == 1) ++(wc.status == IBV_WC_SUCCESS ? completed : failed);
        if (polled == 0) sched_yield();
      }
    });
  }
  for (std::uint64_t t = 0; t < kPairs; ++t) {
    threads.emplace_back([&, t] {
      ibv_sge sge = region.sge(0, 64);
      ibv_send_wr wr{};
      wr.sg_list = &sge;
      wr.num_sge = 1;
      wr.opcode = IBV_WR_RDMA_WRITE;
      wr.send_flags = IBV_SEND_SIGNALED;
      wr.wr.rdma.remote_addr = region.address(64 + 64 * t);
      wr.wr.rdma.rkey = region.mr->rkey;
      ibv_send_wr* bad = nullptr;
      for (std::uint64_t i = 0; i < kMessages; ++i) {
        int result = 0;
        while ((result = ibv_post_send(endpoints[2 * t]->qp(), &wr, &bad)) == ENOMEM &&
               std::chrono::steady_clock::now() < deadline) {
          sched_yield();
        }
        ASSERT_EQ(result, 0);
      }
    });
  }
  join_all(threads);
  EXPECT_EQ(completed, kPairs * kMessages);
  EXPECT_EQ(failed, 0U);
}

TEST_F(Concurrency, CreateAndDestroyDuringTraffic_DoNotDisturbIt) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      while (!stop) {
        const Region region(device.pd.get(), 4096);
        Endpoint a(device);
        Endpoint b(device);
        connect(a, b);
        EXPECT_EQ(post_recv(b.qp(), {region.sge()}), 0);
        std::this_thread::yield();
      }
    });
  }
  const Region source(device.pd.get(), 65536);
  const Region target(device.pd.get(), 65536);
  Endpoint a(device);
  Endpoint b(device);
  connect(a, b);
  for (std::uint64_t i = 0; i < 200; ++i) {
    fill_pattern(source.buffer.bytes(), i);
    EXPECT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {source.sge()},
                   {.wr_id = i, .remote_addr = target.address(), .rkey = target.mr->rkey}),
              0);
    EXPECT_EQ(poll_one(a.send_cq()).wr_id, i);
    EXPECT_EQ(find_wrong_byte(target.buffer.bytes(), i), std::nullopt);
  }
  stop = true;
  join_all(threads);
}

// After a QP or region was destroyed, outstanding work requests must not write to its memory any more.
TEST_F(Concurrency, DestroyDuringTraffic_WritesNothingAfterwards) {
  constexpr std::size_t kBytes = 1U << 20;
  for (int round = 0; round < 60; ++round) {
    const Region source(device.pd.get(), kBytes);
    source.fill(1);
    Region target(device.pd.get(), kBytes);
    Endpoint a(device);
    Endpoint b(device);
    connect(a, b);
    for (std::uint64_t i = 0; i < 8; ++i) {
      ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {source.sge()},
                     {.wr_id = i, .remote_addr = target.address(), .rkey = target.mr->rkey}),
                0);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(40 * (round / 3)));
    switch (round % 3) {
      case 0:
        a.destroy();
        break;
      case 1:
        b.destroy();
        break;
      default:
        target.mr.reset();
        break;
    }
    if (round % 3 == 0) continue;  // packets that were sent before the destroy may still arrive
    target.buffer.poison();
    std::this_thread::sleep_for(1ms);
    EXPECT_EQ(target.buffer.untouched_outside(0, 0), "") << round;  // no byte changes after the call returned
  }
}

}  // namespace
}  // namespace verbatim::test
