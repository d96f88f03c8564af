// Events of one port of a device that has two: what they say is counted over connections of that port alone, and what
// ends the device ends those of both. The devices and their events are the test's: softverbs' have one port each.
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <map>
#include <mutex>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "connected_comms.h"
#include "net/monitor/monitor.h"
#include "support/fake_verbs.h"
#include "support/log_capture.h"

namespace verbatim {
namespace {

// What get_async_event answers with, by device: one test at a time.
struct PortEvents {
  std::mutex mutex;
  std::map<const ibv_context*, std::deque<ibv_async_event>> waiting;
  std::map<const ibv_context*, int> errors;  // of a device that is gone
  int empty_reads = 0;
};
PortEvents* g_port_events = nullptr;

int take_port_event(ibv_context* context, ibv_async_event* event) {
  const std::lock_guard lock(g_port_events->mutex);
  std::deque<ibv_async_event>& waiting = g_port_events->waiting[context];
  if (waiting.empty()) {
    ++g_port_events->empty_reads;
    errno = g_port_events->errors.contains(context) ? g_port_events->errors[context] : EAGAIN;
    return -1;
  }
  *event = waiting.front();
  waiting.pop_front();
  return 0;
}

class MonitorPortTest : public ::testing::Test {
 protected:
  void SetUp() override {
    g_port_events = &events_;
    fake_.table.get_async_event = take_port_event;
    fake_.table.ack_async_event = [](ibv_async_event*) {};
    fake_.table.event_type_str = [](ibv_event_type) { return "a text"; };
    for (const char* name : {"mlx5_0", "mlx5_1"}) {
      FakeDevice& fake = fake_.add_device(name);
      fake.attributes.max_cqe = 100000;
      fake.attributes.max_qp_wr = 4096;
      fake.attributes.max_sge = 4;
      for (int port = 0; port < 2; ++port) fake.add_roce_port();
      Result<std::unique_ptr<Device>> device = Device::open(fake_.table, nullptr, &fake.device, false);
      ASSERT_TRUE(device);
      event_fds_.emplace_back(::eventfd(0, EFD_SEMAPHORE));
      (*device)->context()->async_fd = event_fds_.back().get();
      devices_.push_back(std::move(*device));
    }
    for (std::size_t i = 0; i < 4; ++i) {
      ports_[i].device = devices_[i / 2].get();
      ports_[i].port_num = static_cast<std::uint8_t>(1 + i % 2);
      ports_[i].link_layer = IBV_LINK_LAYER_ETHERNET;
      ports_[i].active_mtu = IBV_MTU_4096;
      ports_[i].max_msg_bytes = std::uint64_t{1} << 30;
      ports_[i].gid = {0, fake_gid("::ffff:10.0.0.1", 0).gid, RoceVersion::kV2};
    }
    Result<std::unique_ptr<Monitor>> control = Monitor::start(devices_);
    ASSERT_TRUE(control);
    control_ = std::move(*control);
    first_ = watched({&ports_[0]});
    second_ = watched({&ports_[1]});
    second_too_ = watched({&ports_[1]});
    both_ = watched({&ports_[0], &ports_[1]});
    other_ = watched({&ports_[3]});
  }
  void TearDown() override {
    for (const std::unique_ptr<RecvComm>& comm : comms_) control_->unwatch(*comm);
    control_.reset();
    for (const std::unique_ptr<Device>& device : devices_) device->context()->async_fd = -1;
    comms_.clear();
  }

  // A connection over these ports.
  RecvComm* watched(const std::vector<const Port*>& ports) {
    wire::Hello peer;
    peer.qps.resize(ports.size());
    const Config& config = link_.context().config();
    Result<Endpoint> endpoint = Endpoint::create(ports, RecvComm::endpoint_sizes(config, ports, peer), config);
    EXPECT_TRUE(endpoint);
    Result<std::unique_ptr<RecvComm>> comm =
        RecvComm::create(link_.context().comm_settings(), std::move(*endpoint), peer);
    EXPECT_TRUE(comm);
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    peer_ends_.emplace_back(ends[1]);
    (*comm)->set_side_channel(UniqueFd(ends[0]));
    EXPECT_TRUE(control_->watch(**comm, this));
    return comms_.emplace_back(std::move(*comm)).get();
  }

  // Returns when the control thread has heard it, and said what it has to say.
  void happen(std::size_t device, ibv_event_type type, int port_num = 0) {
    ibv_async_event event{};
    event.event_type = type;
    event.element.port_num = port_num;
    {
      const std::lock_guard lock(events_.mutex);
      events_.waiting[devices_[device]->context()].push_back(event);
    }
    ring(device);
  }
  void ring(std::size_t device) {
    const auto asked = [&] {
      const std::lock_guard lock(events_.mutex);
      return events_.empty_reads;
    };
    const int before = asked();
    const std::uint64_t one = 1;
    ASSERT_EQ(::write(event_fds_[device].get(), &one, sizeof one), static_cast<ssize_t>(sizeof one));
    // Twice: what came just before may have been found by a look that had begun.
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      std::this_thread::yield();
      return asked() >= before + 2;
    }));
    std::uint64_t rung = 0;
    ASSERT_EQ(::read(event_fds_[device].get(), &rung, sizeof rung), static_cast<ssize_t>(sizeof rung));
  }

  static bool told(const RecvComm* comm) { return (comm->slow_path_flags() & Comm::kSignals) != 0; }
  bool anyone_told() const {
    return std::any_of(comms_.begin(), comms_.end(), [](const auto& comm) { return told(comm.get()); });
  }

  ConnectedComms link_;  // its context is the comms'
  FakeVerbs fake_;
  PortEvents events_;
  std::vector<UniqueFd> event_fds_;
  std::vector<std::unique_ptr<Device>> devices_;
  Port ports_[4];
  std::unique_ptr<Monitor> control_;
  std::vector<UniqueFd> peer_ends_;
  std::vector<std::unique_ptr<RecvComm>> comms_;
  RecvComm* first_ = nullptr;
  RecvComm* second_ = nullptr;
  RecvComm* second_too_ = nullptr;
  RecvComm* both_ = nullptr;
  RecvComm* other_ = nullptr;
};

TEST_F(MonitorPortTest, Connection_UsesOnlyItsPorts) {
  const Device& device = *devices_[0];
  EXPECT_TRUE(first_->uses(device, 1));
  EXPECT_FALSE(first_->uses(device, 2));
  EXPECT_FALSE(second_->uses(device, 1));
  EXPECT_TRUE(second_->uses(device, 2));
  EXPECT_TRUE(second_->uses(device));
  EXPECT_TRUE(both_->uses(device, 1) && both_->uses(device, 2));
  EXPECT_FALSE(other_->uses(device));
  EXPECT_FALSE(other_->uses(device, 2));
}

TEST_F(MonitorPortTest, LinkDown_CountsConnectionsOfThatPort) {
  const LogCapture log;
  ASSERT_NO_FATAL_FAILURE(happen(0, IBV_EVENT_PORT_ERR, 2));
  ASSERT_NO_FATAL_FAILURE(happen(1, IBV_EVENT_PORT_ERR, 1));
  ASSERT_NO_FATAL_FAILURE(happen(0, IBV_EVENT_PORT_ACTIVE, 2));
  ASSERT_NO_FATAL_FAILURE(happen(0, IBV_EVENT_PORT_ERR, 1));
  std::vector<std::string> lines = log.warnings();
  for (std::string& line : lines) line = std::regex_replace(line, std::regex("after [0-9.e-]+ (s|ms)"), "after T");
  const std::string wait = " and wait at most as long as their retries last";
  const std::string settings = " (VERBATIM_TIMEOUT, VERBATIM_RETRY_CNT)";
  EXPECT_EQ(lines, (std::vector<std::string>{
                       "mlx5_0:2: the link is down (port error); 3 connections use it" + wait + settings,
                       "mlx5_1:1: the link is down (port error); 0 connections use it" + wait,
                       "mlx5_0:2: the link is up again after T, outages so far: 1; 3 connections use it",
                       "mlx5_0:1: the link is down (port error); 2 connections use it" + wait + settings}));
  EXPECT_FALSE(anyone_told()) << "they wait";
}

TEST_F(MonitorPortTest, GidChange_CountsConnectionsOfThatPort) {
  const LogCapture log;
  fake_.devices()[0]->ports[1].gids[0] = fake_gid("::ffff:10.0.0.9", IBV_GID_TYPE_ROCE_V2);
  ASSERT_NO_FATAL_FAILURE(happen(0, IBV_EVENT_GID_CHANGE, 1));
  EXPECT_TRUE(log.warnings().empty());
  ASSERT_NO_FATAL_FAILURE(happen(0, IBV_EVENT_GID_CHANGE, 2));
  EXPECT_EQ(log.only_warning(),
            "mlx5_0:2: GID 0 ::ffff:10.0.0.1 is now ::ffff:10.0.0.9 (GID table change); 3 connections were made with "
            "the old one and may fail, new ones take what is there");
  EXPECT_FALSE(anyone_told());
}

TEST_F(MonitorPortTest, DeviceFatal_FailsConnectionsOfBothPorts) {
  const LogCapture log;
  ASSERT_NO_FATAL_FAILURE(happen(0, IBV_EVENT_DEVICE_FATAL));
  EXPECT_EQ(log.only_warning(),
            "mlx5_0: the device has failed (a text); its 4 connections fail. Next: 'dmesg | grep mlx5_0'");
  for (const RecvComm* comm : {first_, second_, second_too_, both_}) EXPECT_TRUE(told(comm));
  EXPECT_FALSE(told(other_));
}

TEST_F(MonitorPortTest, DeviceRemoved_FailsConnectionsOfBothPorts) {
  const LogCapture log;
  {
    const std::lock_guard lock(events_.mutex);
    events_.errors[devices_[0]->context()] = ENODEV;
  }
  const std::uint64_t one = 1;
  ASSERT_EQ(::write(event_fds_[0].get(), &one, sizeof one), static_cast<ssize_t>(sizeof one));
  EXPECT_TRUE(ConnectedComms::eventually([&] {
    std::this_thread::yield();
    return told(first_) && told(second_) && told(second_too_) && told(both_);
  }));
  EXPECT_EQ(log.only_warning(),
            "mlx5_0: the device is gone, no more events can be read: No such device; its 4 connections fail. Next: "
            "'dmesg | grep mlx5_0'");
  EXPECT_FALSE(told(other_));
}

}  // namespace
}  // namespace verbatim
