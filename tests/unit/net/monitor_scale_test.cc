// The work of the monitor with many connections: how often it looks at one of them. Prints processor and wall time too.
// For another number of connections, each with two descriptors: MONITORED_CONNECTIONS=9900.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "connected_comms.h"
#include "net/monitor/monitor.h"
#include "unit/support/fake_verbs.h"
#include "unit/support/peer_socket.h"

namespace verbatim {
namespace {

using Clock = std::chrono::steady_clock;

std::size_t connections() {
  const char* const wanted = std::getenv("MONITORED_CONNECTIONS");
  return wanted != nullptr ? std::strtoul(wanted, nullptr, 10) : 1000;
}

double processor_seconds() {
  timespec used{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

class MonitorScale : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kIdlePeriodNs = kNanosecondsPerSecond;

  void SetUp() override {
    rlimit descriptors{};
    ::getrlimit(RLIMIT_NOFILE, &descriptors);
    descriptors.rlim_cur = descriptors.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &descriptors);
    fake_.table.get_async_event = [](ibv_context*, ibv_async_event*) {
      errno = EAGAIN;
      return -1;
    };
    FakeDevice& fake = fake_.add_device("mlx5_0");
    fake.attributes.max_cqe = 100000;
    fake.attributes.max_qp_wr = 4096;
    fake.attributes.max_sge = 4;
    fake.add_roce_port();
    Result<std::unique_ptr<Device>> device = Device::open(fake_.table, nullptr, &fake.device, false);
    ASSERT_TRUE(device);
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    event_ends_[0] = UniqueFd(ends[0]);
    event_ends_[1] = UniqueFd(ends[1]);
    (*device)->context()->async_fd = ends[0];
    devices_.push_back(std::move(*device));
    port_.device = devices_[0].get();
    port_.port_num = 1;
    port_.link_layer = IBV_LINK_LAYER_ETHERNET;
    port_.active_mtu = IBV_MTU_4096;
    port_.max_msg_bytes = std::uint64_t{1} << 30;
    port_.gid = {0, fake_gid("::ffff:10.0.0.1", 0).gid, RoceVersion::kV2};
    Result<std::unique_ptr<Monitor>> monitor = Monitor::start(
        devices_,
        {.keepalive_ns = 300 * kNanosecondsPerSecond, .stalls = {.warn_ns = 8 * kIdlePeriodNs, .fail_ns = 0}});
    ASSERT_TRUE(monitor);
    monitor_ = std::move(*monitor);
    for (std::size_t i = 0; i < connections(); ++i) ASSERT_NO_FATAL_FAILURE(add());
  }
  void TearDown() override {
    for (const std::unique_ptr<RecvComm>& comm : comms_) {
      if (comm != nullptr) monitor_->unwatch(*comm);
    }
    if (monitor_ != nullptr) monitor_->drain(this, true);
    monitor_.reset();
    for (const std::unique_ptr<Device>& device : devices_) device->context()->async_fd = -1;
    comms_.clear();
  }

  void add() {
    std::unique_ptr<RecvComm> comm = link_.make_recv_comm({&port_}, 1);
    ASSERT_NE(comm, nullptr);
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    peer_ends_.emplace_back(UniqueFd(ends[1]), 1U);
    comm->channel().set_socket(UniqueFd(ends[0]), {});
    ASSERT_TRUE(monitor_->watch(*comm, this));
    comms_.push_back(std::move(comm));
  }

  ConnectedComms link_;  // its context provides the settings
  FakeVerbs fake_;
  std::vector<std::unique_ptr<Device>> devices_;
  UniqueFd event_ends_[2];
  Port port_;
  std::vector<test::PeerSocket> peer_ends_;
  std::vector<std::unique_ptr<RecvComm>> comms_;
  std::unique_ptr<Monitor> monitor_;
};

// One visit for the close of this end, one for that of the peer, and one if a close is read before the other is sent;
// the rest is for checks of stalls.
TEST_F(MonitorScale, AllClosed_EachIsVisitedAFewTimes) {
  const std::size_t count = comms_.size();
  const std::uint64_t visits_before = monitor_->visits();
  const auto begin = Clock::now();
  const double processor_before = processor_seconds();
  for (std::unique_ptr<RecvComm>& comm : comms_) {
    monitor_->close_gracefully(std::move(comm), 600 * kNanosecondsPerSecond);
  }
  for (test::PeerSocket& peer : peer_ends_) ASSERT_TRUE(peer.say(wire::MessageType::kClose));
  monitor_->drain(this, false);
  const auto took = Clock::now() - begin;
  const std::uint64_t visits = monitor_->visits() - visits_before;
  std::printf("%zu connections closed in %.0f ms, %.0f ms of processor time, %.1f visits for each\n", count,
              std::chrono::duration<double, std::milli>(took).count(), 1000 * (processor_seconds() - processor_before),
              static_cast<double>(visits) / static_cast<double>(count));
  const auto idle_checks = static_cast<std::uint64_t>(took / std::chrono::nanoseconds(kIdlePeriodNs)) + 1;
  EXPECT_LE(visits, count * (4 + idle_checks));
}

// What happens on one connection visits no other.
TEST_F(MonitorScale, OneConnectionBusy_OthersAreNotVisited) {
  constexpr int kPings = 500;
  const std::size_t count = comms_.size();
  const std::uint64_t visits_before = monitor_->visits();
  const auto begin = Clock::now();
  for (int i = 0; i < kPings; ++i) {
    ASSERT_TRUE(peer_ends_[0].say(wire::MessageType::kPing));
    pollfd answer{peer_ends_[0].socket().get(), POLLIN, 0};
    ASSERT_EQ(::poll(&answer, 1, 20'000), 1);
    std::uint8_t bytes[64];
    ASSERT_GT(::recv(peer_ends_[0].socket().get(), bytes, sizeof bytes, 0), 0);
  }
  const auto took = Clock::now() - begin;
  const std::uint64_t visits = monitor_->visits() - visits_before;
  const auto idle_checks = static_cast<std::uint64_t>(took / std::chrono::nanoseconds(kIdlePeriodNs)) + 1;
  std::printf("%d pings on one of %zu connections: %llu visits\n", kPings, count,
              static_cast<unsigned long long>(visits));
  EXPECT_LE(visits, 2 * kPings + idle_checks * count);
}

TEST_F(MonitorScale, AllIdle_EachIsVisitedOncePerPeriod) {
  constexpr auto kTime = std::chrono::seconds(4);
  const std::size_t count = comms_.size();
  const std::uint64_t visits_before = monitor_->visits();
  const double processor_before = processor_seconds();
  const auto begin = Clock::now();
  std::this_thread::sleep_for(kTime);
  const auto took = Clock::now() - begin;
  const double used = processor_seconds() - processor_before;
  const std::uint64_t visits = monitor_->visits() - visits_before;
  const auto idle_checks = static_cast<std::uint64_t>(took / std::chrono::nanoseconds(kIdlePeriodNs)) + 1;
  std::printf("%zu idle connections, checked every %.2f s: %.3f %% of a core\n", count,
              static_cast<double>(kIdlePeriodNs) / 1e9, 100 * used / std::chrono::duration<double>(took).count());
  EXPECT_LE(visits, idle_checks * count);
  EXPECT_GE(visits, count);  // the monitor may have had no processor in some of the periods
}

}  // namespace
}  // namespace verbatim
