//: in softverbs_fault_test

// Faults of devices and ports: link down and up, unreachable peers, fatal errors, frozen devices, changed GID tables,
// registration limits; and their effects on the program and its peers.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "base/unique_fd.h"
#include "qp_pair_fixture.h"
#include "support/verbs_peer.h"

namespace verbatim::test {
namespace {

// 16.8 ms per attempt, two attempts.
constexpr Timers kTwoAttempts{.timeout = 12, .retry_count = 1};
// 0.27 s per attempt, eight attempts.
constexpr Timers kLongTimeout{.timeout = 16, .retry_count = 7};

ibv_wc_status write_from(Endpoint& endpoint, const SendOptions& options) {
  EXPECT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {}, options), 0);
  return poll_one(endpoint.send_cq()).status;
}

// Polls while it waits, because the inline engine applies timed faults only during verbs.
void expect_event(const Pair& pair, ibv_event_type type) {
  for (const Stopwatch stopwatch;
       stopwatch.elapsed() < kCompletionTimeout && !readable(pair.device.context->async_fd, 1ms);) {
    EXPECT_TRUE(stays_empty(pair.a.send_cq(), 1ms));
  }
  expect_async_event(pair.device.context.get(), type);
}

ibv_port_state port_state(const Device& device) {
  ibv_port_attr attributes{};
  EXPECT_EQ(query_port(device.context.get(), 1, &attributes), 0);
  return attributes.state;
}

TEST(LinkDown, ForATime_IsReported_AndTrafficResumes) {
  with_faults("link-down device=0 after=2 for=700ms", [] {
    Pair pair(kLongTimeout);
    EXPECT_EQ(write_from(pair.a, pair.to_target()), IBV_WC_SUCCESS);
    EXPECT_EQ(write_from(pair.a, pair.to_target()), IBV_WC_SUCCESS);
    EXPECT_FALSE(readable(pair.device.context->async_fd, 0ms));
    EXPECT_EQ(port_state(pair.device), IBV_PORT_ACTIVE);
    const Stopwatch stopwatch;
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {}, pair.to_target()), 0);
    EXPECT_EQ(expect_async_event(pair.device.context.get(), IBV_EVENT_PORT_ERR).port_num, 1);
    if (stopwatch.elapsed() < 600ms) {
      EXPECT_EQ(port_state(pair.device), IBV_PORT_DOWN);
    }
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);  // by a later attempt
    EXPECT_GE(stopwatch.elapsed(), 700ms);
    EXPECT_EQ(expect_async_event(pair.device.context.get(), IBV_EVENT_PORT_ACTIVE).port_num, 1);
    EXPECT_EQ(port_state(pair.device), IBV_PORT_ACTIVE);
  });
}

TEST(LinkDown, AtATime_RaisesPortEvents) {
  with_faults("link-down at=100ms; link-up at=200ms", [] {
    const Pair pair;
    expect_event(pair, IBV_EVENT_PORT_ERR);
    expect_event(pair, IBV_EVENT_PORT_ACTIVE);
    EXPECT_EQ(port_state(pair.device), IBV_PORT_ACTIVE);
  });
}

TEST(LinkDown, WithoutEnd_EndsInRetryExceeded) {
  with_faults("link-down device=0 after=1", [] {
    Pair pair(kTwoAttempts);
    EXPECT_EQ(write_from(pair.a, pair.to_target()), IBV_WC_SUCCESS);
    EXPECT_EQ(write_from(pair.a, pair.to_target()), IBV_WC_RETRY_EXC_ERR);
    EXPECT_EQ(port_state(pair.device), IBV_PORT_DOWN);
    EXPECT_EQ(pair.b.state(), IBV_QPS_RTS);
  });
}

TEST(LinkDown, OfOneDevice_DoesNotAffectOthers) {
  with_faults("link-down device=1", [] {
    int count = 0;
    ibv_device** const list = verbs().get_device_list(&count);
    ASSERT_GE(count, 2);
    const Context other(verbs().open_device(list[1]));
    verbs().free_device_list(list);
    ibv_port_attr attributes{};
    ASSERT_EQ(query_port(other.get(), 1, &attributes), 0);
    EXPECT_EQ(attributes.state, IBV_PORT_DOWN);
    Pair pair(kTwoAttempts);
    EXPECT_EQ(write_from(pair.a, pair.to_target()), IBV_WC_SUCCESS);
  });
}

// The peer's port goes down. This process gets no event and no response.
TEST(LinkDown, OfThePeer_EndsInRetryExceeded) {
  with_faults("", [] {
    const Device device = open_device();
    Endpoint endpoint(device, {.timers = kTwoAttempts});
    setenv("SOFTVERBS_FAULTS", "link-down after=1", 1);
    Peer peer;
    endpoint.connect(peer.address());
    peer.connect(endpoint.address());
    const Region region(device.pd.get(), 64);
    const SendOptions local{.remote_addr = region.address(), .rkey = region.mr->rkey};
    ASSERT_EQ(peer.post(IBV_WR_RDMA_WRITE, 0, 8, local), 0);
    EXPECT_EQ(peer.poll_sent().status, IBV_WC_SUCCESS);
    EXPECT_EQ(write_from(endpoint, peer.target(1)), IBV_WC_SUCCESS);
    ASSERT_EQ(peer.post(IBV_WR_RDMA_WRITE, 0, 8, local), 0);  // this WRITE takes the peer's port down
    EXPECT_EQ(peer.poll_sent().status, IBV_WC_RETRY_EXC_ERR);
    EXPECT_EQ(write_from(endpoint, peer.target(2)), IBV_WC_RETRY_EXC_ERR);
  });
}

TEST(Unreachable, PairOfPorts_LosesBothDirections) {
  with_faults("unreachable device=0 peer=1", [] {
    const Device first = open_device(0);
    const Device second = open_device(1);
    for (const bool forward : {true, false}) {
      Endpoint a(first, {.timers = kTwoAttempts});
      Endpoint b(second, {.timers = kTwoAttempts});
      connect(a, b);
      EXPECT_EQ(write_from(forward ? a : b, {}), IBV_WC_RETRY_EXC_ERR);
    }
    for (const Device* device : {&first, &second}) {
      Endpoint a(*device, {.timers = kTwoAttempts});
      Endpoint b(*device, {.timers = kTwoAttempts});
      connect(a, b);
      EXPECT_EQ(write_from(a, {}), IBV_WC_SUCCESS);
    }
  });
}

TEST(Unreachable, ForATime_TrafficResumes) {
  for (const char* faults : {"unreachable for=100ms", "unreachable; reachable at=100ms"}) {
    with_faults(faults, [] {
      const Stopwatch stopwatch;
      Pair pair(kLongTimeout);
      EXPECT_EQ(write_from(pair.a, pair.to_target()), IBV_WC_SUCCESS);
      EXPECT_GE(stopwatch.elapsed(), 100ms);
    });
  }
}

// Only this process has the clause; messages that the peer sends are lost as well.
TEST(Unreachable, ClauseInOneProcess_AffectsItsPeer) {
  with_faults("unreachable device=0 peer=0", [] {
    const Device device = open_device();
    Endpoint endpoint(device, {.timers = kTwoAttempts});
    unsetenv("SOFTVERBS_FAULTS");
    Peer peer;
    endpoint.connect(peer.address());
    peer.connect(endpoint.address());
    EXPECT_EQ(write_from(endpoint, peer.target(1)), IBV_WC_RETRY_EXC_ERR);
    Endpoint again(device, {.timers = kLongTimeout});
    Peer other;
    again.connect(other.address());
    other.connect(again.address());
    ASSERT_EQ(other.post(IBV_WR_RDMA_WRITE, 0, 0, {}), 0);
    EXPECT_EQ(other.poll_sent().status, IBV_WC_RETRY_EXC_ERR);
  });
}

TEST(DeviceFatal, Queues_AreFlushed_AndEventIsRaised) {
  with_faults("device-fatal device=0 after=1", [] {
    const Device other_device = open_device(1);
    Endpoint c(other_device);
    Endpoint d(other_device);
    connect(c, d);
    Pair pair(kLongTimeout);
    ASSERT_EQ(post_recv(pair.b.qp(), {pair.target.sge()}, 7), 0);
    EXPECT_EQ(write_from(pair.a, pair.to_target()), IBV_WC_SUCCESS);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {}, pair.to_target(8)), 0);
    const ibv_wc received = poll_one(pair.b.recv_cq());
    EXPECT_EQ(received.wr_id, 7U);
    EXPECT_EQ(received.status, IBV_WC_WR_FLUSH_ERR);
    poll_one(pair.a.send_cq());  // sent before or flushed
    expect_async_event(pair.device.context.get(), IBV_EVENT_DEVICE_FATAL);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {}, pair.to_target(9)), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_WR_FLUSH_ERR);
    EXPECT_EQ(write_from(c, {}), IBV_WC_SUCCESS);
  });
}

TEST(Freeze, ForATime_DelaysWithoutLoss) {
  with_faults("freeze after=1 for=300ms", [] {
    Pair pair({.timeout = 10, .retry_count = 0});  // 4.2 ms, much less than the freeze
    EXPECT_EQ(write_from(pair.a, pair.to_target()), IBV_WC_SUCCESS);
    const Stopwatch stopwatch;
    EXPECT_EQ(write_from(pair.a, pair.to_target()), IBV_WC_SUCCESS);
    EXPECT_GE(stopwatch.elapsed(), 300ms);
    EXPECT_FALSE(readable(pair.device.context->async_fd, 0ms));
  });
}

TEST(Freeze, OfThePeer_EndsInRetryExceeded) {
  with_faults("", [] {
    const Device device = open_device();
    Endpoint endpoint(device, {.timers = kTwoAttempts});
    setenv("SOFTVERBS_FAULTS", "freeze after=1", 1);
    Peer peer;
    endpoint.connect(peer.address());
    peer.connect(endpoint.address());
    ASSERT_EQ(peer.post(IBV_WR_RDMA_WRITE, 0, 0, {}), 0);
    EXPECT_EQ(peer.poll_sent().status, IBV_WC_SUCCESS);
    EXPECT_EQ(write_from(endpoint, peer.target(1)), IBV_WC_SUCCESS);
    ASSERT_EQ(peer.post(IBV_WR_RDMA_WRITE, 0, 0, {}), 0);
    ASSERT_EQ(peer.post_recv(0, 0, 1), 0);  // the peer's program is not frozen
    // Repeats until the peer's device thread has applied the fault.
    ibv_wc_status status = IBV_WC_SUCCESS;
    for (const Stopwatch stopwatch; status == IBV_WC_SUCCESS && stopwatch.elapsed() < kCompletionTimeout;) {
      status = write_from(endpoint, peer.target(2));
    }
    EXPECT_EQ(status, IBV_WC_RETRY_EXC_ERR);
  });
}

ibv_gid gid_of(const char* ipv4) {
  ibv_gid gid{};
  gid.raw[10] = gid.raw[11] = 0xff;
  inet_pton(AF_INET, ipv4, &gid.raw[12]);
  return gid;
}

TEST(GidChange, AddedGid_IsReported) {
  with_faults("gid device=0 index=5 address=10.9.8.7 type=rocev2 at=100ms", [] {
    const Pair pair;
    ibv_gid gid{};
    ASSERT_EQ(verbs().query_gid(pair.device.context.get(), 1, 5, &gid), 0);
    expect_event(pair, IBV_EVENT_GID_CHANGE);
    ASSERT_EQ(verbs().query_gid(pair.device.context.get(), 1, 5, &gid), 0);
    const ibv_gid expected = gid_of("10.9.8.7");
    EXPECT_EQ(std::memcmp(&gid, &expected, sizeof(gid)), 0);
    ibv_gid_entry entry{};
    ASSERT_EQ(verbs().query_gid_ex(pair.device.context.get(), 1, 5, &entry, 0, sizeof(entry)), 0);
    EXPECT_EQ(entry.gid_type, IBV_GID_TYPE_ROCE_V2);
  });
}

// Existing connections continue. A new connection to a removed GID gets no response.
TEST(GidChange, RemovedGid_KeepsConnections_AndIsUnreachableForNewOnes) {
  with_faults("gid device=0 index=0 address=none after=1; gid device=0 index=1 address=none after=1", [] {
    Pair pair(kTwoAttempts);
    EXPECT_EQ(pair.device.gid_index, 1);
    EXPECT_EQ(write_from(pair.a, pair.to_target()), IBV_WC_SUCCESS);
    const Address before = pair.b.address();
    EXPECT_FALSE(readable(pair.device.context->async_fd, 0ms));
    EXPECT_EQ(write_from(pair.a, pair.to_target()), IBV_WC_SUCCESS);
    expect_event(pair, IBV_EVENT_GID_CHANGE);
    expect_event(pair, IBV_EVENT_GID_CHANGE);
    EXPECT_EQ(write_from(pair.a, pair.to_target()), IBV_WC_SUCCESS);
    ibv_gid_entry entry{};
    EXPECT_EQ(verbs().query_gid_ex(pair.device.context.get(), 1, 1, &entry, 0, sizeof(entry)), ENODATA);
    const Device other = open_device(1);
    Endpoint endpoint(other, {.timers = kTwoAttempts});
    endpoint.connect(before);
    EXPECT_EQ(write_from(endpoint, pair.to_target()), IBV_WC_RETRY_EXC_ERR);
  });
}

Mr try_register(const Device& device, std::byte* bytes, std::size_t length) {
  return Mr(verbs().reg_mr(device.pd.get(), bytes, length, IBV_ACCESS_LOCAL_WRITE));
}

TEST(RegistrationLimit, BySize_IsEnforced) {
  with_faults("registration max-bytes=64K errno=EINVAL", [] {
    const Device device = open_device();
    std::vector<std::byte> bytes(65537);
    EXPECT_NE(try_register(device, bytes.data(), 65536), nullptr);
    EXPECT_EQ(try_register(device, bytes.data(), 65537), nullptr);
    EXPECT_EQ(errno, EINVAL);
  });
}

TEST(RegistrationLimit, ByCount_IsEnforced) {
  with_faults("registration max-regions=2", [] {
    const Device device = open_device();
    std::byte bytes[64];
    const Mr first = try_register(device, bytes, 64);
    Mr second = try_register(device, bytes, 64);
    EXPECT_NE(second, nullptr);
    EXPECT_EQ(try_register(device, bytes, 64), nullptr);
    EXPECT_EQ(errno, ENOMEM);
    second.reset();
    EXPECT_NE(try_register(device, bytes, 64), nullptr);
  });
}

TEST(RegistrationLimit, ByLockedMemory_IsEnforced) {
  with_faults("registration max-locked=12K", [] {
    const Device device = open_device();
    const GuardedBuffer pages(3 * 4096);
    const Mr first = try_register(device, pages.data(), 1);  // one byte locks a whole page
    Mr second = try_register(device, pages.data() + 4095, 2);
    EXPECT_NE(first, nullptr);
    EXPECT_NE(second, nullptr);
    EXPECT_EQ(try_register(device, pages.data(), 1), nullptr);
    EXPECT_EQ(errno, ENOMEM);
    second.reset();
    EXPECT_NE(try_register(device, pages.data(), 4097), nullptr);
  });
}

// Deregistration subtracts the same number of locked bytes as registration added, also for a dma-buf.
TEST(RegistrationLimit, LockedMemoryOfDmabuf_IsReleased) {
  ASSERT_EQ(setenv("SOFTVERBS_DMABUF", "1", 1), 0);
  with_faults("registration max-locked=8K", [] {
    const Device device = open_device();
    const UniqueFd file(memfd_create("dmabuf", MFD_CLOEXEC));
    ASSERT_EQ(ftruncate(file.get(), 2 * 4096), 0);
    for (int round = 0; round < 3; ++round) {
      const Mr mr(verbs().reg_dmabuf_mr(device.pd.get(), 4000, 200, 4000, file.get(), kAllAccess));  // two pages
      EXPECT_NE(mr, nullptr) << round;
    }
  });
  unsetenv("SOFTVERBS_DMABUF");
}

}  // namespace
}  // namespace verbatim::test
