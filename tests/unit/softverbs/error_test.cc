// Failures: which end reports them, with which status, in which order, and which QPs and memory they do not affect.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cerrno>
#include <ctime>
#include <thread>

#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

// 16.8 ms per attempt, two attempts: a peer that does not respond is given up after 34 ms to 0.14 s plus scheduling
// delays.
constexpr Timers kTwoAttempts{.timeout = 12, .retry_count = 1};

class RequestFailure : public testing::Test {
 protected:
  using Clock = std::chrono::steady_clock;

  SendOptions at(std::uint64_t wr_id, const Region& region, std::size_t offset = 0) {
    return {.wr_id = wr_id, .remote_addr = region.address(offset), .rkey = region.mr->rkey};
  }

  // Posts one request from a to b and expects this failure at a. The caller checks b.
  void expect_failure(Endpoint& a, ibv_wc_status status, ibv_wr_opcode opcode, std::vector<ibv_sge> sges,
                      SendOptions options) {
    options.wr_id = 4711;
    ASSERT_EQ(post(a.qp(), opcode, std::move(sges), options), 0);
    const ibv_wc wc = poll_one(a.send_cq());
    EXPECT_EQ(a.state(), IBV_QPS_ERR);  // the state changes before the completion can be polled
    EXPECT_EQ(wc.wr_id, 4711U);
    EXPECT_EQ(wc.status, status) << verbs().wc_status_str(wc.status);
    EXPECT_EQ(wc.qp_num, a.qp()->qp_num);
  }

  // The same for an RDMA request that b rejects: b fails as well, and an asynchronous event reports it.
  void expect_refused(ibv_wc_status status, ibv_event_type event_type, ibv_wr_opcode opcode, std::vector<ibv_sge> sges,
                      const SendOptions& options, const EndpointOptions& target_options = {}) {
    Endpoint a(device);
    Endpoint b(device, target_options);
    connect(a, b);
    ASSERT_EQ(post_recv(b.qp(), {spare.sge()}, 1), 0);
    ASSERT_EQ(post_recv(b.qp(), {spare.sge()}, 2), 0);
    expect_failure(a, status, opcode, std::move(sges), options);
    for (const std::uint64_t wr_id : {1U, 2U}) {
      const ibv_wc wc = poll_one(b.recv_cq());
      EXPECT_EQ(wc.wr_id, wr_id);
      EXPECT_EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
    }
    EXPECT_EQ(b.state(), IBV_QPS_ERR);
    EXPECT_EQ(expect_async_event(device.context.get(), event_type).qp, b.qp());
  }

  void expect_access_error(ibv_wr_opcode opcode, std::vector<ibv_sge> sges, const SendOptions& options,
                           const EndpointOptions& target_options = {}) {
    expect_refused(IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR, opcode, std::move(sges), options, target_options);
  }

  Device device = open_device();
  Region source{device.pd.get(), 4096};
  Region target{device.pd.get(), 4096};
  Region spare{device.pd.get(), 64};
};

class LocalKey : public RequestFailure {
 protected:
  // An invalid local element fails the request at the requester and does not affect the peer.
  void expect_protection_error(ibv_wr_opcode opcode, std::vector<ibv_sge> sges) {
    Endpoint a(device);
    Endpoint b(device);
    connect(a, b);
    ASSERT_EQ(post_recv(b.qp(), {target.sge()}), 0);
    expect_failure(a, IBV_WC_LOC_PROT_ERR, opcode, std::move(sges), at(0, target));
    EXPECT_EQ(b.state(), IBV_QPS_RTS);
    EXPECT_TRUE(stays_empty(b.recv_cq(), 1ms));
  }
  ibv_sge with_key(std::uint32_t lkey) { return {source.address(), 16, lkey}; }
};

TEST_F(LocalKey, Unknown_IsProtectionError) {
  for (const ibv_wr_opcode opcode : {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE_WITH_IMM}) {
    SCOPED_TRACE(opcode);
    expect_protection_error(opcode, {with_key(source.mr->lkey ^ 0x00555500)});
    expect_protection_error(opcode, {with_key(source.mr->lkey ^ 1)});  // only the variant part of the key differs
  }
}

TEST_F(LocalKey, RangeBeyondRegion_IsProtectionError) {
  for (const ibv_wr_opcode opcode : {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
    SCOPED_TRACE(opcode);
    expect_protection_error(opcode, {{source.address() + 1, 4096, source.mr->lkey}});
    expect_protection_error(opcode, {{source.address() - 1, 16, source.mr->lkey}});
    expect_protection_error(opcode, {{source.address() + 4096, 1, source.mr->lkey}});
    expect_protection_error(opcode, {{~std::uint64_t{0} - 7, 16, source.mr->lkey}});  // wraps around
  }
}

TEST_F(LocalKey, UnknownInSecondSge_IsProtectionError) {
  expect_protection_error(IBV_WR_SEND, {source.sge(0, 16), with_key(0x12345678)});
}

TEST_F(LocalKey, OfAnotherPd_IsProtectionError) {
  const Pd other = alloc_pd(device);
  const Region other_domain(other.get(), 64);
  expect_protection_error(IBV_WR_RDMA_WRITE, {other_domain.sge()});
  expect_protection_error(IBV_WR_SEND, {other_domain.sge()});
}

TEST_F(LocalKey, ReadIntoReadOnlyRegion_IsProtectionError) {
  const Region read_only(device.pd.get(), 64, 0, IBV_ACCESS_REMOTE_READ);
  expect_protection_error(IBV_WR_RDMA_READ, {read_only.sge()});
  EXPECT_EQ(read_only.buffer.untouched_outside(0, 0), "");
}

TEST_F(LocalKey, AfterDeregistration_IsProtectionError) {
  std::uint32_t lkey = 0;
  {
    const Mr deregistered = reg_mr(device.pd.get(), source.buffer.data(), 64);
    lkey = deregistered->lkey;
  }
  expect_protection_error(IBV_WR_RDMA_WRITE, {with_key(lkey)});
}

class ReceiveBuffer : public RequestFailure {
 protected:
  // A SEND into an invalid receive fails both ends: with `local` at b, with `remote` at a. Other posted receives are
  // flushed.
  void expect_bad_receive(std::vector<ibv_sge> receive, ibv_wc_status local, ibv_wc_status remote,
                          std::size_t length = 64) {
    Endpoint a(device);
    Endpoint b(device);
    connect(a, b);
    ASSERT_EQ(post_recv(b.qp(), std::move(receive), 1), 0);
    ASSERT_EQ(post_recv(b.qp(), {spare.sge()}, 2), 0);
    expect_failure(a, remote, IBV_WR_SEND, {source.sge(0, length)}, {});
    ibv_wc wc = poll_one(b.recv_cq());
    EXPECT_EQ(wc.wr_id, 1U);
    EXPECT_EQ(wc.status, local) << verbs().wc_status_str(wc.status);
    EXPECT_EQ(wc.qp_num, b.qp()->qp_num);
    wc = poll_one(b.recv_cq());
    EXPECT_EQ(wc.wr_id, 2U);
    EXPECT_EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
    EXPECT_EQ(b.state(), IBV_QPS_ERR);
  }
};

TEST_F(ReceiveBuffer, UnknownKey_FailsBothEnds) {
  expect_bad_receive({{target.address(), 64, 0x12345678}}, IBV_WC_LOC_PROT_ERR, IBV_WC_REM_OP_ERR);
}

TEST_F(ReceiveBuffer, RangeBeyondRegion_FailsBothEnds) {
  expect_bad_receive({{target.address() + 4096 - 63, 64, target.mr->lkey}}, IBV_WC_LOC_PROT_ERR, IBV_WC_REM_OP_ERR);
  EXPECT_EQ(target.buffer.untouched_outside(4096 - 63, 63), "");
}

TEST_F(ReceiveBuffer, WithoutLocalWrite_FailsBothEnds) {
  const Region read_only(device.pd.get(), 64, 0, IBV_ACCESS_REMOTE_READ);
  expect_bad_receive({read_only.sge()}, IBV_WC_LOC_PROT_ERR, IBV_WC_REM_OP_ERR);
  EXPECT_EQ(read_only.buffer.untouched_outside(0, 0), "");
}

TEST_F(ReceiveBuffer, OfAnotherPd_FailsBothEnds) {
  const Pd other = alloc_pd(device);
  const Region other_domain(other.get(), 64);
  expect_bad_receive({other_domain.sge()}, IBV_WC_LOC_PROT_ERR, IBV_WC_REM_OP_ERR);
}

TEST_F(ReceiveBuffer, OneByteTooSmall_FailsBothEnds) {
  expect_bad_receive({target.sge(100, 63)}, IBV_WC_LOC_LEN_ERR, IBV_WC_REM_INV_REQ_ERR);
  EXPECT_EQ(target.buffer.untouched_outside(100, 63), "");
}

TEST_F(ReceiveBuffer, SgeListTooSmall_FailsBothEnds) {
  expect_bad_receive({target.sge(0, 10), target.sge(100, 53)}, IBV_WC_LOC_LEN_ERR, IBV_WC_REM_INV_REQ_ERR);
}

TEST_F(ReceiveBuffer, NoSgeForALongMessage_FailsBothEnds) {
  expect_bad_receive({}, IBV_WC_LOC_LEN_ERR, IBV_WC_REM_INV_REQ_ERR, 4096);
}

class RemoteKey : public RequestFailure {};

TEST_F(RemoteKey, Unknown_IsAccessError) {
  for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE_WITH_IMM}) {
    SCOPED_TRACE(opcode);
    SendOptions options = at(0, target);
    options.rkey ^= 0x00555500;
    expect_access_error(opcode, {source.sge(0, 16)}, options);
    options = at(0, target);
    options.rkey ^= 1;
    expect_access_error(opcode, {source.sge(0, 16)}, options);
  }
  EXPECT_EQ(target.buffer.untouched_outside(0, 0), "");
}

TEST_F(RemoteKey, RangeBeyondRegion_IsAccessError) {
  for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
    SCOPED_TRACE(opcode);
    expect_access_error(opcode, {source.sge()}, at(0, target, 1));
    expect_access_error(opcode, {source.sge(0, 1)}, at(0, target, 4096));
    SendOptions options = at(0, target);
    options.remote_addr -= 1;
    expect_access_error(opcode, {source.sge(0, 16)}, options);
    options.remote_addr = ~std::uint64_t{0} - 7;  // wraps around
    expect_access_error(opcode, {source.sge(0, 16)}, options);
  }
  EXPECT_EQ(target.buffer.untouched_outside(0, 0), "");
  EXPECT_EQ(source.buffer.untouched_outside(0, 0), "");  // no READ wrote into it
}

TEST_F(RemoteKey, RegionWithoutPermission_IsAccessError) {
  const Region local(device.pd.get(), 64, 0, IBV_ACCESS_LOCAL_WRITE);
  const Region readable(device.pd.get(), 64, 0, IBV_ACCESS_REMOTE_READ);
  const Region writable(device.pd.get(), 64, 0, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  expect_access_error(IBV_WR_RDMA_WRITE, {source.sge(0, 16)}, at(0, local));
  expect_access_error(IBV_WR_RDMA_READ, {source.sge(0, 16)}, at(0, local));
  expect_access_error(IBV_WR_RDMA_WRITE, {source.sge(0, 16)}, at(0, readable));
  expect_access_error(IBV_WR_RDMA_READ, {source.sge(0, 16)}, at(0, writable));
  for (const Region* region : {&local, &readable, &writable}) EXPECT_EQ(region->buffer.untouched_outside(0, 0), "");
  Endpoint a(device);
  Endpoint b(device);
  connect(a, b);
  ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_READ, {source.sge(0, 16)}, at(1, readable)), 0);
  ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, 16)}, at(2, writable)), 0);
  EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
}

TEST_F(RemoteKey, OfAnotherPd_IsAccessError) {
  const Pd other = alloc_pd(device);
  const Region other_domain(other.get(), 64);
  expect_access_error(IBV_WR_RDMA_WRITE, {source.sge(0, 16)}, at(0, other_domain));
  expect_access_error(IBV_WR_RDMA_READ, {source.sge(0, 16)}, at(0, other_domain));
  EXPECT_EQ(other_domain.buffer.untouched_outside(0, 0), "");
}

TEST_F(RemoteKey, AfterDeregistration_IsAccessError) {
  SendOptions options = at(0, target);
  {
    const Mr deregistered = reg_mr(device.pd.get(), target.buffer.data(), 64);
    options.rkey = deregistered->rkey;
  }
  expect_access_error(IBV_WR_RDMA_WRITE, {source.sge(0, 16)}, options);
  EXPECT_EQ(target.buffer.untouched_outside(0, 0), "");
}

TEST_F(RemoteKey, QpWithoutPermission_IsInvalidRequest) {
  const EndpointOptions no_write{.access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ};
  const EndpointOptions no_read{.access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE};
  expect_refused(IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR, IBV_WR_RDMA_WRITE, {source.sge(0, 16)}, at(0, target),
                 no_write);
  expect_refused(IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR, IBV_WR_RDMA_READ, {source.sge(0, 16)}, at(0, target),
                 no_read);
  EXPECT_EQ(target.buffer.untouched_outside(0, 0), "");
}

class ReceiverNotReady : public RequestFailure {};

TEST_F(ReceiverNotReady, WithoutRetries_FailsAtOnce_AndPeerStaysUsable) {
  for (const ibv_wr_opcode opcode : {IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM}) {
    Endpoint a(device, {.timers = {.rnr_retry = 0}});
    Endpoint b(device);
    connect(a, b);
    expect_failure(a, IBV_WC_RNR_RETRY_EXC_ERR, opcode, {source.sge(0, 16)}, at(0, target));
    EXPECT_EQ(b.state(), IBV_QPS_RTS);
    a.to_reset();
    b.to_reset();
    connect(a, b);
    ASSERT_EQ(post_recv(b.qp(), {spare.sge()}), 0);
    ASSERT_EQ(post(a.qp(), opcode, {source.sge(0, 16)}, at(1, target)), 0);
    EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
  }
}

TEST_F(ReceiverNotReady, Retries_WaitForThePeersRnrTimer) {
  Endpoint a(device, {.timers = {.rnr_retry = 2}});
  Endpoint b(device, {.timers = {.min_rnr_timer = 20}});  // 10.24 ms
  connect(a, b);
  const auto start = Clock::now();
  expect_failure(a, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WR_SEND, {source.sge(0, 16)}, {});
  EXPECT_GE(Clock::now() - start, 20ms);
}

TEST_F(ReceiverNotReady, ReceivePostedInTime_Completes) {
  Endpoint a(device, {.timers = {.rnr_retry = 6}});
  Endpoint b(device, {.timers = {.min_rnr_timer = 30}});  // 0.33 s, six times
  connect(a, b);
  source.fill(5);
  ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {source.sge(0, 64)}), 0);
  EXPECT_TRUE(stays_empty(a.send_cq(), 20ms));
  ASSERT_EQ(post_recv(b.qp(), {target.sge()}), 0);
  EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(poll_one(b.recv_cq()).byte_len, 64U);
  EXPECT_EQ(find_wrong_byte(target.bytes(0, 64), 5), std::nullopt);
}

TEST_F(ReceiverNotReady, RetryCountSeven_RetriesForEver) {
  Endpoint a(device, {.timers = {.rnr_retry = 7}});
  Endpoint b(device, {.timers = {.min_rnr_timer = 1}});  // 10 us: many more than seven attempts
  connect(a, b);
  for (std::uint64_t i = 0; i < 3; ++i) {
    ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE_WITH_IMM, {source.sge(0, 16)}, at(i, target)), 0);
  }
  EXPECT_TRUE(stays_empty(a.send_cq(), 50ms));
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_EQ(post_recv(b.qp(), {}, i), 0);
  for (std::uint64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(poll_one(b.recv_cq()).wr_id, i);
    EXPECT_EQ(poll_one(a.send_cq()).wr_id, i);
  }
}

// A QP that was destroyed or reset while it waited for a retry causes no further work.
TEST_F(ReceiverNotReady, DestroyedOrResetWhileWaiting_UsesNoProcessorTime) {
  const auto cpu_time = [] {
    timespec now{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
  };
  Endpoint b(device, {.timers = {.min_rnr_timer = 26}});  // 81.92 ms
  for (const bool destroyed : {true, false}) {
    Endpoint a(device);
    connect(a, b);
    ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {source.sge(0, 16)}), 0);
    EXPECT_TRUE(stays_empty(a.send_cq(), 20ms));  // now the QP waits for its RNR timer
    destroyed ? a.destroy() : a.to_reset();
    std::this_thread::sleep_for(150ms);
    const auto before = cpu_time();
    std::this_thread::sleep_for(300ms);
    EXPECT_LT(cpu_time() - before, 30ms);
    b.to_reset();
  }
}

TEST_F(ReceiverNotReady, LaterRequests_DoNotOvertake) {
  Endpoint a(device);
  Endpoint b(device);
  connect(a, b);
  source.fill(6);
  ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {source.sge(0, 16)}), 0);
  ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, 64)}, at(1, target)), 0);
  EXPECT_TRUE(stays_empty(a.send_cq(), 10ms));
  EXPECT_EQ(target.buffer.untouched_outside(0, 0), "");  // the WRITE must not overtake the SEND
  ASSERT_EQ(post_recv(b.qp(), {spare.sge()}), 0);
  EXPECT_EQ(poll_one(a.send_cq()).opcode, IBV_WC_SEND);
  EXPECT_EQ(poll_one(a.send_cq()).opcode, IBV_WC_RDMA_WRITE);
  EXPECT_EQ(find_wrong_byte(target.bytes(0, 64), 6), std::nullopt);
}

class NoResponse : public RequestFailure {
 protected:
  void expect_retry_exceeded(Endpoint& a) {
    const auto start = Clock::now();
    expect_failure(a, IBV_WC_RETRY_EXC_ERR, IBV_WR_RDMA_WRITE, {source.sge(0, 16)}, at(0, target));
    EXPECT_GE(Clock::now() - start, 33ms);
    EXPECT_EQ(target.buffer.untouched_outside(0, 0), "");
  }
};

TEST_F(NoResponse, PeerInInit_EndsInRetryExceeded) {
  Endpoint a(device, {.timers = kTwoAttempts});
  Endpoint b(device);
  a.connect(b.address());
  b.to_init();
  expect_retry_exceeded(a);
  EXPECT_EQ(b.state(), IBV_QPS_INIT);
}

TEST_F(NoResponse, PeerConnectedInTime_Completes) {
  Endpoint a(device);
  Endpoint b(device);
  a.connect(b.address());
  ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, 16)}, at(3, target)), 0);
  EXPECT_TRUE(stays_empty(a.send_cq(), 10ms));
  b.connect(a.address());
  EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
}

TEST_F(NoResponse, TimeoutZero_WaitsForEver) {
  Endpoint a(device, {.timers = {.timeout = 0, .retry_count = 1}});
  Endpoint b(device);
  a.connect(b.address());
  ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, 16)}, at(3, target)), 0);
  EXPECT_TRUE(stays_empty(a.send_cq(), 100ms));
  a.to_error();
  EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_WR_FLUSH_ERR);
}

TEST_F(NoResponse, UnknownQpNumber_EndsInRetryExceeded) {
  Endpoint a(device, {.timers = kTwoAttempts});
  Address unknown = a.address();
  unknown.qp_num ^= 0x7F0F0F;
  a.connect(unknown);
  expect_retry_exceeded(a);
}

TEST_F(NoResponse, UnknownAddress_EndsInRetryExceeded) {
  Endpoint a(device, {.timers = kTwoAttempts});
  Endpoint b(device);
  Address unknown = b.address();
  unknown.lid = static_cast<std::uint16_t>(unknown.lid ^ 0x1F00);
  unknown.gid.raw[14] = static_cast<std::uint8_t>(unknown.gid.raw[14] ^ 0xAA);
  a.to_init();
  b.connect(a.address());
  ibv_qp_attr attr = a.rtr_attr(unknown);
  if (verbs().modify_qp(a.qp(), &attr, kRtrMask) != 0) return;  // a device may detect here that there is no route
  a.to_rts();
  expect_retry_exceeded(a);
}

// The first request has a later PSN than the peer expects: it is never executed, whatever the peer responds.
TEST_F(NoResponse, PeerExpectsEarlierPsn_EndsInRetryExceeded) {
  Endpoint a(device, {.timers = kTwoAttempts});
  Endpoint b(device);
  a.connect(b.address());
  Address early = a.address();
  early.psn = (early.psn - 100) & 0xFFFFFF;
  b.connect(early);
  expect_failure(a, IBV_WC_RETRY_EXC_ERR, IBV_WR_RDMA_WRITE, {source.sge(0, 16)}, at(0, target));
  EXPECT_EQ(target.buffer.untouched_outside(0, 0), "");
}

TEST_F(NoResponse, PeerDestroyed_EndsInRetryExceeded) {
  Endpoint a(device, {.timers = kTwoAttempts});
  Endpoint b(device);
  connect(a, b);
  b.destroy();
  expect_retry_exceeded(a);
}

TEST_F(NoResponse, PeerInErrorState_EndsInRetryExceeded) {
  Endpoint a(device, {.timers = kTwoAttempts});
  Endpoint b(device);
  connect(a, b);
  b.to_error();
  expect_retry_exceeded(a);
}

TEST_F(NoResponse, PeerReset_EndsInRetryExceeded) {
  Endpoint a(device, {.timers = kTwoAttempts});
  Endpoint b(device);
  connect(a, b);
  b.to_reset();
  expect_retry_exceeded(a);
}

TEST_F(RequestFailure, MessageBeyondPortLimit_IsLengthError) {
  const auto pieces = static_cast<std::size_t>(device.attr.max_sge);
  const std::size_t piece_bytes = device.port.max_msg_sz / pieces + 4096;  // every element refers to the same bytes
  if (piece_bytes > std::size_t{256} << 20) GTEST_SKIP() << "a message beyond the limit would need too much memory";
  void* const memory = mmap(nullptr, piece_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  {
    const Mr mr = reg_mr(device.pd.get(), memory, piece_bytes);
    Endpoint a(device, {.send_sge = static_cast<unsigned>(pieces)});
    Endpoint b(device);
    connect(a, b);
    const ibv_sge piece{reinterpret_cast<std::uint64_t>(memory), static_cast<std::uint32_t>(piece_bytes), mr->lkey};
    expect_failure(a, IBV_WC_LOC_LEN_ERR, IBV_WR_SEND, std::vector<ibv_sge>(pieces, piece), {});
    EXPECT_EQ(b.state(), IBV_QPS_RTS);
  }
  munmap(memory, piece_bytes);
}

class Flush : public RequestFailure {};

// Signaled success, unsignaled success, a failure, then all later requests: they complete in order, also unsignaled
// ones, on both queues.
TEST_F(Flush, AfterFirstError_KeepsPostingOrder) {
  Endpoint a(device);
  Endpoint b(device);
  connect(a, b);
  for (std::uint64_t i = 0; i < 3; ++i) {
    ASSERT_EQ(post_recv(a.qp(), {spare.sge()}, 100 + i), 0);
    ASSERT_EQ(post_recv(b.qp(), {spare.sge()}, 200 + i), 0);
  }
  ibv_sge sge = source.sge(0, 16);
  ibv_send_wr wrs[6] = {};
  for (std::size_t i = 0; i < 6; ++i) {
    wrs[i].wr_id = i;
    wrs[i].next = i < 5 ? &wrs[i + 1] : nullptr;
    wrs[i].sg_list = &sge;
    wrs[i].num_sge = 1;
    wrs[i].opcode = IBV_WR_RDMA_WRITE;
    wrs[i].send_flags = i == 1 || i == 2 || i == 4 ? 0U : unsigned{IBV_SEND_SIGNALED};
    wrs[i].wr.rdma.remote_addr = target.address(64 * i);
    wrs[i].wr.rdma.rkey = i == 2 ? target.mr->rkey ^ 0x00555500 : target.mr->rkey;
  }
  ibv_send_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_send(a.qp(), wrs, &bad), 0);
  const struct {
    std::uint64_t wr_id;
    ibv_wc_status status;
  } expected[] = {{0, IBV_WC_SUCCESS},
                  {2, IBV_WC_REM_ACCESS_ERR},
                  {3, IBV_WC_WR_FLUSH_ERR},
                  {4, IBV_WC_WR_FLUSH_ERR},
                  {5, IBV_WC_WR_FLUSH_ERR}};
  for (const auto& step : expected) {
    const ibv_wc wc = poll_one(a.send_cq());
    EXPECT_EQ(wc.wr_id, step.wr_id);
    EXPECT_EQ(wc.status, step.status) << step.wr_id;
    EXPECT_EQ(wc.qp_num, a.qp()->qp_num);
  }
  for (std::uint64_t i = 0; i < 3; ++i) {
    const ibv_wc at_a = poll_one(a.recv_cq());
    EXPECT_EQ(at_a.wr_id, 100 + i);
    EXPECT_EQ(at_a.status, IBV_WC_WR_FLUSH_ERR);
    const ibv_wc at_b = poll_one(b.recv_cq());
    EXPECT_EQ(at_b.wr_id, 200 + i);
    EXPECT_EQ(at_b.status, IBV_WC_WR_FLUSH_ERR);
  }
  EXPECT_EQ(a.state(), IBV_QPS_ERR);
  EXPECT_EQ(b.state(), IBV_QPS_ERR);
  EXPECT_TRUE(stays_empty(a.send_cq()));
  for (const std::byte byte : target.bytes(64 * 2, 64 * 4)) ASSERT_EQ(byte, GuardedBuffer::kPoison);
}

TEST_F(Flush, ModifyToError_FlushesBothQueues) {
  Endpoint a(device);
  Endpoint b(device);
  connect(a, b);
  for (std::uint64_t i = 0; i < 5; ++i) {
    ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {source.sge(0, 16)}, {.wr_id = i, .flags = 0}), 0);  // there is no receive
    ASSERT_EQ(post_recv(a.qp(), {spare.sge()}, 10 + i), 0);
  }
  a.to_error();
  for (std::uint64_t i = 0; i < 5; ++i) {
    const ibv_wc sent = poll_one(a.send_cq());
    EXPECT_EQ(sent.wr_id, i);
    EXPECT_EQ(sent.status, IBV_WC_WR_FLUSH_ERR);
    const ibv_wc received = poll_one(a.recv_cq());
    EXPECT_EQ(received.wr_id, 10 + i);
    EXPECT_EQ(received.status, IBV_WC_WR_FLUSH_ERR);
  }
  EXPECT_EQ(b.state(), IBV_QPS_RTS);
}

TEST_F(Flush, PostInErrorState_IsFlushed) {
  Endpoint a(device);
  Endpoint b(device);
  connect(a, b);
  a.to_error();
  for (std::uint64_t i = 0; i < 200; ++i) {  // more than the depth of the queues, which polling empties
    ASSERT_EQ(post(a.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, 16)}, at(i, target)), 0);
    ASSERT_EQ(post_recv(a.qp(), {spare.sge()}, i), 0);
    const ibv_wc sent = poll_one(a.send_cq());
    EXPECT_EQ(sent.wr_id, i);
    EXPECT_EQ(sent.status, IBV_WC_WR_FLUSH_ERR);
    EXPECT_EQ(poll_one(a.recv_cq()).wr_id, i);
  }
  EXPECT_EQ(target.buffer.untouched_outside(0, 0), "");
}

TEST_F(Flush, OtherQps_AreNotAffected) {
  Endpoint a(device);
  Endpoint b(device);
  Endpoint c(device);
  Endpoint d(device);
  connect(a, b);
  connect(c, d);
  SendOptions bad = at(0, target);
  bad.rkey ^= 0x00555500;
  expect_failure(a, IBV_WC_REM_ACCESS_ERR, IBV_WR_RDMA_WRITE, {source.sge(0, 16)}, bad);
  ASSERT_EQ(post_recv(d.qp(), {spare.sge()}), 0);
  ASSERT_EQ(post(c.qp(), IBV_WR_SEND, {source.sge(0, 16)}), 0);
  EXPECT_EQ(poll_one(c.send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(poll_one(d.recv_cq()).status, IBV_WC_SUCCESS);
}

}  // namespace
}  // namespace verbatim::test
