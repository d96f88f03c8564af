// Completion queues and channels: which work requests give completions, in which order, and which events they raise.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <thread>

#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

class CompletionQueue : public testing::Test {
 protected:
  SendOptions to_target(std::uint64_t wr_id, unsigned flags) {
    return {.wr_id = wr_id, .flags = flags, .remote_addr = target.address(), .rkey = target.mr->rkey};
  }
  int write(Endpoint& from, std::uint64_t wr_id, unsigned flags = IBV_SEND_SIGNALED) {
    return post(from.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, 32)}, to_target(wr_id, flags));
  }

  Device device = open_device();
  Region source{device.pd.get(), 4096};
  Region target{device.pd.get(), 4096};
};

TEST_F(CompletionQueue, UnsignaledWork_GivesNoCompletion) {
  Endpoint a(device);
  Endpoint b(device);
  connect(a, b);
  for (std::uint64_t i = 0; i < 32; ++i) ASSERT_EQ(write(a, i, i % 4 == 3 ? unsigned{IBV_SEND_SIGNALED} : 0U), 0);
  for (std::uint64_t i = 3; i < 32; i += 4) {
    const ibv_wc wc = poll_one(a.send_cq());
    EXPECT_EQ(wc.wr_id, i);
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  }
  EXPECT_TRUE(stays_empty(a.send_cq()));
}

TEST_F(CompletionQueue, SqSigAll_SignalsEveryRequest) {
  Endpoint a(device, {.signal_all = true});
  Endpoint b(device);
  connect(a, b);
  for (std::uint64_t i = 0; i < 8; ++i) ASSERT_EQ(write(a, i, 0), 0);
  for (std::uint64_t i = 0; i < 8; ++i) EXPECT_EQ(poll_one(a.send_cq()).wr_id, i);
}

TEST_F(CompletionQueue, MixedOpcodes_CompleteInPostingOrder) {
  Endpoint a(device);
  Endpoint b(device);
  connect(a, b);
  constexpr ibv_wr_opcode kKinds[] = {IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_SEND, IBV_WR_RDMA_WRITE_WITH_IMM};
  for (std::uint64_t i = 0; i < 20; ++i) ASSERT_EQ(post_recv(b.qp(), {target.sge(64, 64)}, i), 0);
  for (std::uint64_t i = 0; i < 40; ++i) {
    ASSERT_EQ(post(a.qp(), kKinds[i % 4], {source.sge(0, 40)}, to_target(i, IBV_SEND_SIGNALED)), 0);
  }
  for (std::uint64_t i = 0; i < 40; ++i) {
    const ibv_wc wc = poll_one(a.send_cq());
    EXPECT_EQ(wc.wr_id, i);
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  }
  for (std::uint64_t i = 0; i < 20; ++i) {
    const ibv_wc wc = poll_one(b.recv_cq());
    EXPECT_EQ(wc.wr_id, i);
    EXPECT_EQ(wc.opcode, i % 2 == 0 ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM);
  }
}

TEST_F(CompletionQueue, PsnWrapAround_DoesNotFail) {
  Endpoint a(device, {.psn = 0xFFFFF8});
  Endpoint b(device);
  connect(a, b);
  source.fill(1);
  for (std::uint64_t i = 0; i < 16; ++i) {  // first messages of one packet, then of several packets
    const std::size_t length = i < 12 ? 32 : source.buffer.size();
    ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, length)}, to_target(i, IBV_SEND_SIGNALED)), 0);
    const ibv_wc wc = poll_one(a.send_cq());
    ASSERT_EQ(wc.wr_id, i);
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
  }
  EXPECT_EQ(find_wrong_byte(target.buffer.bytes(), 1), std::nullopt);
}

TEST_F(CompletionQueue, Poll_ReturnsAtMostTheRequestedCount) {
  Endpoint a(device);
  Endpoint b(device);
  connect(a, b);
  for (std::uint64_t i = 0; i < 10; ++i) ASSERT_EQ(write(a, i), 0);
  EXPECT_EQ(poll(a.send_cq(), 3).back().wr_id, 2U);
  ibv_wc wcs[16];
  ibv_wc none{};
  std::size_t got = 3;
  EXPECT_EQ(ibv_poll_cq(a.send_cq(), 0, &none), 0);
  while (got < 10) {
    const int polled = ibv_poll_cq(a.send_cq(), 4, wcs);
    ASSERT_GE(polled, 0);
    ASSERT_LE(polled, 4);
    for (int i = 0; i < polled; ++i) EXPECT_EQ(wcs[i].wr_id, got++);
  }
}

TEST_F(CompletionQueue, OneCq_ServesManyQps) {
  const Cq cq = create_cq(device);
  const EndpointOptions shared{.send_cq = cq.get(), .recv_cq = cq.get()};
  Endpoint a(device, shared);
  Endpoint b(device, shared);
  connect(a, b);
  ASSERT_EQ(post_recv(b.qp(), {target.sge()}, 1), 0);
  ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {source.sge(0, 8)}, {.wr_id = 2}), 0);
  std::uint64_t by_qp[2] = {};
  for (const ibv_wc& wc : poll(cq.get(), 2)) by_qp[wc.qp_num == a.qp()->qp_num ? 0 : 1] = wc.wr_id;
  EXPECT_EQ(by_qp[0], 2U);
  EXPECT_EQ(by_qp[1], 1U);
}

// A device need not support resizing. If it does, the queue keeps its completions; if not, the queue is unchanged.
TEST_F(CompletionQueue, Resize_KeepsTheContents) {
  const Cq cq = create_cq(device, 16);
  const int entries = cq->cqe;
  Endpoint a(device, {.send_wr = 200, .send_cq = cq.get()});
  Endpoint b(device);
  connect(a, b);
  for (std::uint64_t i = 0; i < 10; ++i) ASSERT_EQ(write(a, i), 0);
  EXPECT_EQ(poll(cq.get(), 3).back().wr_id, 2U);
  const int error = verbs().resize_cq(cq.get(), 200);
  std::uint64_t posted = 10;
  if (error == 0) {
    EXPECT_GE(cq->cqe, 200);
    for (; posted < 150; ++posted) ASSERT_EQ(write(a, posted), 0);
  } else {
    EXPECT_EQ(error, EOPNOTSUPP);
    EXPECT_EQ(cq->cqe, entries);
  }
  for (std::uint64_t i = 3; i < posted; ++i) ASSERT_EQ(poll_one(cq.get()).wr_id, i);
}

// Requests that were posted before the call still need their entries.
TEST_F(CompletionQueue, ResizeBelowThePostedSends_IsRefused) {
  for (int round = 0; round < 50; ++round) {
    const Cq cq = create_cq(device, 16);
    Endpoint a(device, {.send_cq = cq.get()});
    Endpoint b(device);
    connect(a, b);
    for (std::uint64_t i = 0; i < 10; ++i) ASSERT_EQ(write(a, i), 0);
    const int error = verbs().resize_cq(cq.get(), 1);
    ASSERT_TRUE(error == EINVAL || error == EOPNOTSUPP) << error;
    EXPECT_EQ(poll(cq.get(), 10).size(), 10U);
  }
}

TEST_F(CompletionQueue, Overrun_RaisesCqError) {
  const Cq cq = create_cq(device, 1);
  const auto entries = static_cast<unsigned>(cq->cqe);
  Endpoint a(device, {.send_wr = entries + 8, .send_cq = cq.get()});
  Endpoint b(device);
  connect(a, b);
  for (unsigned i = 0; i < entries + 2; ++i) {
    if (write(a, i) != 0) break;  // the QP fails when its CQ overruns
  }
  // Events of the QPs may come first. A device without a thread works during polls.
  std::optional<ibv_async_event> event;
  const auto end = std::chrono::steady_clock::now() + kCompletionTimeout;
  while ((!event || event->event_type != IBV_EVENT_CQ_ERR) && std::chrono::steady_clock::now() < end) {
    EXPECT_TRUE(stays_empty(b.recv_cq(), 1ms));
    event = next_async_event(device.context.get(), 1ms);
  }
  ASSERT_TRUE(event);
  ASSERT_EQ(event->event_type, IBV_EVENT_CQ_ERR);
  EXPECT_EQ(event->element.cq, cq.get());
}

class CompletionChannel : public CompletionQueue {
 protected:
  void SetUp() override { connect(a, b); }

  // The CQ of the next completion event, which is acknowledged; null when there is no event.
  ibv_cq* next_event(Milliseconds timeout = kCompletionTimeout) {
    if (!readable(channel->fd, timeout)) return nullptr;
    ibv_cq* event_cq = nullptr;
    void* context = nullptr;
    EXPECT_EQ(verbs().get_cq_event(channel.get(), &event_cq, &context), 0);
    EXPECT_EQ(context, &tag);
    verbs().ack_cq_events(event_cq, 1);
    return event_cq;
  }

  static constexpr Milliseconds kBriefly{20};
  int tag = 0;
  Channel channel{verbs().create_comp_channel(device.context.get())};
  Cq cq = create_cq(device, 64, channel.get(), &tag);
  Endpoint a{device, {.send_cq = cq.get()}};
  Endpoint b{device, {.recv_cq = cq.get()}};
};

TEST_F(CompletionChannel, ArmedCq_GivesOneEvent) {
  EXPECT_EQ(cq->channel, channel.get());
  EXPECT_EQ(cq->cq_context, &tag);
  ASSERT_EQ(ibv_req_notify_cq(cq.get(), 0), 0);
  EXPECT_EQ(next_event(kBriefly), nullptr);  // nothing has completed
  ASSERT_EQ(write(a, 1), 0);
  EXPECT_EQ(next_event(), cq.get());
  ASSERT_EQ(write(a, 2), 0);
  EXPECT_EQ(poll_one(cq.get()).wr_id, 1U);
  EXPECT_EQ(poll_one(cq.get()).wr_id, 2U);
  EXPECT_EQ(next_event(kBriefly), nullptr);  // the CQ was not armed again
  ASSERT_EQ(ibv_req_notify_cq(cq.get(), 0), 0);
  ASSERT_EQ(write(a, 3), 0);
  EXPECT_EQ(next_event(), cq.get());
}

TEST_F(CompletionChannel, UnarmedCq_GivesNoEvent) {
  ASSERT_EQ(write(a, 1), 0);
  EXPECT_EQ(poll_one(cq.get()).wr_id, 1U);
  EXPECT_EQ(next_event(kBriefly), nullptr);
}

TEST_F(CompletionChannel, CompletionBeforeArming_GivesNoEvent) {
  ASSERT_EQ(write(a, 1), 0);
  ASSERT_EQ(write(a, 2), 0);
  EXPECT_EQ(poll_one(cq.get()).wr_id, 1U);
  EXPECT_EQ(poll_one(cq.get()).wr_id, 2U);
  ASSERT_EQ(ibv_req_notify_cq(cq.get(), 0), 0);
  EXPECT_EQ(next_event(kBriefly), nullptr);
  ASSERT_EQ(write(a, 3), 0);
  EXPECT_EQ(next_event(), cq.get());
}

TEST_F(CompletionChannel, SolicitedOnly_IgnoresUnsolicited) {
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_EQ(post_recv(b.qp(), {target.sge()}, i), 0);
  ASSERT_EQ(ibv_req_notify_cq(cq.get(), 1), 0);
  ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {source.sge(0, 8)}, {.flags = 0}), 0);
  EXPECT_EQ(poll_one(cq.get()).wr_id, 0U);
  EXPECT_EQ(next_event(kBriefly), nullptr);
  ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {source.sge(0, 8)}, {.flags = IBV_SEND_SOLICITED}), 0);
  EXPECT_EQ(next_event(), cq.get());
  EXPECT_EQ(poll_one(cq.get()).wr_id, 1U);
}

TEST_F(CompletionChannel, SolicitedOnly_GivesEventForError) {
  ASSERT_EQ(post_recv(b.qp(), {target.sge()}, 9), 0);
  ASSERT_EQ(ibv_req_notify_cq(cq.get(), 1), 0);
  b.to_error();
  EXPECT_EQ(next_event(), cq.get());
  EXPECT_EQ(poll_one(cq.get()).status, IBV_WC_WR_FLUSH_ERR);
}

TEST_F(CompletionChannel, NonBlockingChannelWithoutEvent_ReturnsEagain) {
  ASSERT_EQ(fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK), 0);
  ibv_cq* event_cq = nullptr;
  void* context = nullptr;
  errno = 0;
  EXPECT_EQ(verbs().get_cq_event(channel.get(), &event_cq, &context), -1);
  EXPECT_EQ(errno, EAGAIN);
}

TEST_F(CompletionChannel, OneChannel_ServesSeveralCqs) {
  const Cq second = create_cq(device, 16, channel.get(), &tag);
  Endpoint c(device, {.send_cq = second.get()});
  Endpoint d(device);
  connect(c, d);
  ASSERT_EQ(ibv_req_notify_cq(cq.get(), 0), 0);
  ASSERT_EQ(ibv_req_notify_cq(second.get(), 0), 0);
  ASSERT_EQ(write(c, 1), 0);
  EXPECT_EQ(next_event(), second.get());
  ASSERT_EQ(write(a, 1), 0);
  EXPECT_EQ(next_event(), cq.get());
}

TEST_F(CompletionChannel, DestroyCq_WaitsForAcknowledgements) {
  Cq second = create_cq(device, 16, channel.get(), &tag);
  {
    Endpoint c(device, {.send_cq = second.get()});
    Endpoint d(device);
    connect(c, d);
    ASSERT_EQ(ibv_req_notify_cq(second.get(), 0), 0);
    ASSERT_EQ(write(c, 1), 0);
    EXPECT_EQ(poll_one(second.get()).wr_id, 1U);
  }
  ibv_cq* event_cq = nullptr;
  void* context = nullptr;
  ASSERT_TRUE(readable(channel->fd, kCompletionTimeout));
  ASSERT_EQ(verbs().get_cq_event(channel.get(), &event_cq, &context), 0);
  ASSERT_EQ(event_cq, second.get());
  std::atomic<bool> destroyed{false};
  std::thread destroyer([&] {
    second.reset();
    destroyed = true;
  });
  std::this_thread::sleep_for(30ms);
  EXPECT_FALSE(destroyed);
  verbs().ack_cq_events(event_cq, 1);
  destroyer.join();
}

TEST_F(CompletionChannel, Event_WakesABlockedThread) {
  ASSERT_EQ(ibv_req_notify_cq(cq.get(), 0), 0);
  ibv_cq* event_cq = nullptr;
  std::thread waiter([&] {
    void* context = nullptr;
    if (verbs().get_cq_event(channel.get(), &event_cq, &context) == 0) verbs().ack_cq_events(event_cq, 1);
  });
  std::this_thread::sleep_for(10ms);
  EXPECT_EQ(write(a, 1), 0);
  waiter.join();
  EXPECT_EQ(event_cq, cq.get());
}

}  // namespace
}  // namespace verbatim::test
