// The monitor with two devices of two ports each. Events of a port concern the connections of that port, events of a
// device those of both; a device that hangs in a verb delays no connection of the other device. The devices are fake
// verbs: a device of softverbs has one port and does not hang.
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "connected_comms.h"
#include "hang.h"
#include "net/monitor/monitor.h"
#include "support/log_lines.h"
#include "support/state_reader.h"
#include "unit/support/fake_verbs.h"
#include "unit/support/log_capture.h"
#include "unit/support/peer_socket.h"

namespace verbatim {
namespace {

// What the verbs below use: one test at a time.
struct PortEvents {
  std::mutex mutex;
  std::map<const ibv_context*, std::deque<ibv_async_event>> pending;
  std::map<const ibv_context*, int> errors;  // errno of a device that was removed
  int empty_reads = 0;
  Hang hang;
  decltype(&ibv_query_qp) query_qp = nullptr;
  decltype(&ibv_destroy_qp) destroy_qp = nullptr;
};
PortEvents* g_port_events = nullptr;

int pop_port_event(ibv_context* context, ibv_async_event* event) {
  g_port_events->hang.enter("get_async_event", context);
  const std::lock_guard lock(g_port_events->mutex);
  std::deque<ibv_async_event>& pending = g_port_events->pending[context];
  if (pending.empty()) {
    ++g_port_events->empty_reads;
    errno = g_port_events->errors.contains(context) ? g_port_events->errors[context] : EAGAIN;
    return -1;
  }
  *event = pending.front();
  pending.pop_front();
  return 0;
}
int query_qp_or_hang(ibv_qp* qp, ibv_qp_attr* attributes, int mask, ibv_qp_init_attr* init) {
  g_port_events->hang.enter("query_qp", qp->context);
  return g_port_events->query_qp(qp, attributes, mask, init);
}
int destroy_qp_or_hang(ibv_qp* qp) {
  g_port_events->hang.enter("destroy_qp", qp->context);
  return g_port_events->destroy_qp(qp);
}
int fail_poll_cq(ibv_cq*, int, ibv_wc*) {
  return -1;
}

int poll_empty_cq(ibv_cq*, int, ibv_wc*) {
  return 0;
}

class MonitorPortTest : public ::testing::Test {
 protected:
  explicit MonitorPortTest(MonitorSettings settings = {}) : settings_(std::move(settings)) {}

  void SetUp() override {
    g_port_events = &events_;
    fake_.table.get_async_event = pop_port_event;
    events_.query_qp = std::exchange(fake_.table.query_qp, query_qp_or_hang);
    events_.destroy_qp = std::exchange(fake_.table.destroy_qp, destroy_qp_or_hang);
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
    Result<std::unique_ptr<Monitor>> monitor = Monitor::start(devices_, settings_);
    ASSERT_TRUE(monitor);
    monitor_ = std::move(*monitor);
    first_ = watched({&ports_[0]});
    second_ = watched({&ports_[1]});
    second_too_ = watched({&ports_[1]});
    both_ = watched({&ports_[0], &ports_[1]});
    other_ = watched({&ports_[3]});
  }
  void TearDown() override {
    events_.hang.end();
    for (const std::unique_ptr<RecvComm>& comm : comms_) {
      if (comm != nullptr) monitor_->unwatch(*comm);
    }
    for (const std::unique_ptr<Device>& device : devices_) monitor_->drain(device.get(), true);
    monitor_.reset();
    EXPECT_FALSE(events_.hang.expired());
    for (const std::unique_ptr<Device>& device : devices_) device->context()->async_fd = -1;
    comms_.clear();
  }

  // A connection over these ports. Its owner is its first device.
  RecvComm* watched(const std::vector<const Port*>& ports) {
    std::unique_ptr<RecvComm> comm = link_.make_recv_comm(ports, ports.size());
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    peer_ends_.emplace_back(UniqueFd(ends[1]), 1U);
    comm->channel().set_socket(UniqueFd(ends[0]), {});
    EXPECT_TRUE(monitor_->watch(*comm, ports.front()->device));
    return comms_.emplace_back(std::move(comm)).get();
  }

  // Returns when the monitor has read the event and logged it.
  void raise(std::size_t device, ibv_event_type type, int port_num = 0) {
    ibv_async_event event{};
    event.event_type = type;
    event.element.port_num = port_num;
    {
      const std::lock_guard lock(events_.mutex);
      events_.pending[devices_[device]->context()].push_back(event);
    }
    const auto empty_reads = [&] {
      const std::lock_guard lock(events_.mutex);
      return events_.empty_reads;
    };
    const int before = empty_reads();
    make_readable(device);
    // Twice: the first empty read may have begun before the event was there.
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      std::this_thread::yield();
      return empty_reads() >= before + 2;
    }));
    std::uint64_t count = 0;
    ASSERT_EQ(::read(event_fds_[device].get(), &count, sizeof count), static_cast<ssize_t>(sizeof count));
  }
  void make_readable(std::size_t device) const {
    const std::uint64_t one = 1;
    ASSERT_EQ(::write(event_fds_[device].get(), &one, sizeof one), static_cast<ssize_t>(sizeof one));
  }

  static bool has_comm_event(const RecvComm* comm) { return (comm->slow_path_flags() & Comm::kCommEvents) != 0; }
  bool any_has_comm_event() const {
    return std::any_of(comms_.begin(), comms_.end(), [](const auto& comm) { return has_comm_event(comm.get()); });
  }

  std::size_t index_of(const RecvComm* comm) const {
    const auto found = std::find_if(comms_.begin(), comms_.end(), [&](const auto& one) { return one.get() == comm; });
    return static_cast<std::size_t>(found - comms_.begin());
  }
  void send(const RecvComm* comm, const wire::Notice& notice) { ASSERT_TRUE(peer_ends_[index_of(comm)].say(notice)); }
  // The body of the next message of that type, which the peer of `comm` receives; empty: it has not come.
  std::vector<std::uint8_t> receive(const RecvComm* comm, wire::MessageType type) {
    test::PeerSocket& peer = peer_ends_[index_of(comm)];
    std::vector<std::uint8_t> body;
    const bool received = ConnectedComms::eventually([&] {
      std::this_thread::yield();
      const auto message = peer.receive();
      if (!message || !*message || (*message)->type != type) return false;
      body.assign((*message)->body.begin(), (*message)->body.end());
      return true;
    });
    EXPECT_TRUE(received) << "no message of type " << static_cast<int>(type);
    return body;
  }

  ConnectedComms link_;  // its context is the comms'
  FakeVerbs fake_;
  PortEvents events_;
  std::vector<UniqueFd> event_fds_;
  std::vector<std::unique_ptr<Device>> devices_;
  Port ports_[4];
  const MonitorSettings settings_;
  std::unique_ptr<Monitor> monitor_;
  std::vector<test::PeerSocket> peer_ends_;  // of the comms at the same index
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
  ASSERT_NO_FATAL_FAILURE(raise(0, IBV_EVENT_PORT_ERR, 2));
  ASSERT_NO_FATAL_FAILURE(raise(1, IBV_EVENT_PORT_ERR, 1));
  ASSERT_NO_FATAL_FAILURE(raise(0, IBV_EVENT_PORT_ACTIVE, 2));
  ASSERT_NO_FATAL_FAILURE(raise(0, IBV_EVENT_PORT_ERR, 1));
  std::vector<std::string> lines = log.warnings();
  for (std::string& line : lines) line = std::regex_replace(line, std::regex("after [0-9.e-]+ (s|ms)"), "after T");
  test::expect_log_lines(lines);
  EXPECT_FALSE(any_has_comm_event()) << "they wait";
}

TEST_F(MonitorPortTest, GidChange_CountsConnectionsOfThatPort) {
  const LogCapture log;
  fake_.devices()[0]->ports[1].gids[0] = fake_gid("::ffff:10.0.0.9", IBV_GID_TYPE_ROCE_V2);
  ASSERT_NO_FATAL_FAILURE(raise(0, IBV_EVENT_GID_CHANGE, 1));
  EXPECT_TRUE(log.warnings().empty());
  ASSERT_NO_FATAL_FAILURE(raise(0, IBV_EVENT_GID_CHANGE, 2));
  test::expect_log_lines(log.warnings());
  EXPECT_FALSE(any_has_comm_event());
}

TEST_F(MonitorPortTest, DeviceFatal_FailsConnectionsOfBothPorts) {
  const LogCapture log;
  ASSERT_NO_FATAL_FAILURE(raise(0, IBV_EVENT_DEVICE_FATAL));
  test::expect_log_lines(log.warnings());
  for (const RecvComm* comm : {first_, second_, second_too_, both_}) EXPECT_TRUE(has_comm_event(comm));
  EXPECT_FALSE(has_comm_event(other_));
}

TEST_F(MonitorPortTest, SecondDeviceOfConnectionFails_IsNamed) {
  RecvComm* const merged = watched({&ports_[0], &ports_[2]});
  for (const auto& device : devices_) device->context()->ops.poll_cq = poll_empty_cq;
  ASSERT_NO_FATAL_FAILURE(raise(1, IBV_EVENT_DEVICE_FATAL));
  ASSERT_TRUE(has_comm_event(merged));
  EXPECT_TRUE(ConnectedComms::fails(*merged));
  ASSERT_NE(merged->failure(), nullptr);
  EXPECT_TRUE(merged->failure()->what.starts_with("mlx5_1 on ")) << merged->failure()->what;
  EXPECT_EQ(merged->failure()->path->local.device, "mlx5_1");
}

TEST_F(MonitorPortTest, PollOfSecondDeviceFails_IsNamed) {
  RecvComm* const merged = watched({&ports_[0], &ports_[2]});
  devices_[0]->context()->ops.poll_cq = poll_empty_cq;
  devices_[1]->context()->ops.poll_cq = fail_poll_cq;
  EXPECT_TRUE(ConnectedComms::fails(*merged));
  ASSERT_NE(merged->failure(), nullptr);
  EXPECT_EQ(merged->failure()->path->local.device, "mlx5_1");
}

TEST_F(MonitorPortTest, DeviceRemoved_FailsConnectionsOfBothPorts) {
  const LogCapture log;
  {
    const std::lock_guard lock(events_.mutex);
    events_.errors[devices_[0]->context()] = ENODEV;
  }
  ASSERT_NO_FATAL_FAILURE(make_readable(0));
  EXPECT_TRUE(ConnectedComms::eventually([&] {
    std::this_thread::yield();
    return has_comm_event(first_) && has_comm_event(second_) && has_comm_event(second_too_) && has_comm_event(both_);
  }));
  test::expect_log_lines(log.warnings());
  EXPECT_FALSE(has_comm_event(other_));
}

// Verbs that the monitor calls on the first device.
class HangingDevice : public MonitorPortTest, public ::testing::WithParamInterface<const char*> {
 protected:
  using MonitorPortTest::MonitorPortTest;

  // The monitor calls the verb, which does not return.
  void hang() {
    const std::string verb = GetParam();
    events_.hang.begin(verb, devices_[0]->context());
    if (verb == "get_async_event") {
      make_readable(0);
    } else if (verb == "query_qp") {
      send(first_, wire::Notice::status_query(1));
    } else {
      monitor_->close_gracefully(std::move(comms_[index_of(first_)]), 0);
    }
    ASSERT_TRUE(ConnectedComms::eventually([&] {
      std::this_thread::yield();
      return events_.hang.entered();
    }));
  }
};

class HangingDeviceKeepalive : public HangingDevice {
 protected:
  HangingDeviceKeepalive() : HangingDevice({.keepalive_ns = 4 * kNanosecondsPerSecond}) {}
};

INSTANTIATE_TEST_SUITE_P(, HangingDevice, ::testing::Values("get_async_event", "query_qp", "destroy_qp"),
                         [](const auto& verb) { return std::string(verb.param); });
INSTANTIATE_TEST_SUITE_P(, HangingDeviceKeepalive, ::testing::Values("get_async_event", "query_qp", "destroy_qp"),
                         [](const auto& verb) { return std::string(verb.param); });

TEST_P(HangingDeviceKeepalive, OtherDevice_IsPinged) {
  ASSERT_NO_FATAL_FAILURE(hang());
  for (int i = 0; i < 2; ++i) {
    receive(other_, wire::MessageType::kPing);
    send(other_, wire::Notice::without_body(wire::MessageType::kPong));
  }
  EXPECT_FALSE(has_comm_event(other_));
}

TEST_P(HangingDevice, FailureOnOtherDevice_IsReportedToPeer) {
  ASSERT_NO_FATAL_FAILURE(hang());
  const LogCapture log;
  devices_[1]->context()->ops.poll_cq = fail_poll_cq;
  other_->progress();
  ASSERT_NE(other_->error(), nullptr);
  std::vector<std::uint8_t> body = receive(other_, wire::MessageType::kFailed);
  const std::optional<wire::FailureNotice> failed = wire::decode_failure(body);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->kind, ErrorKind::kSystem);
}

TEST_P(HangingDevice, PeerMessageOnOtherDevice_IsAnswered) {
  ASSERT_NO_FATAL_FAILURE(hang());
  send(other_, wire::Notice::without_body(wire::MessageType::kPing));
  receive(other_, wire::MessageType::kPong);
  send(other_, wire::Notice::status_query(7));
  const std::optional<wire::ConnectionStatus> status =
      wire::decode_status_reply(receive(other_, wire::MessageType::kStatusReply));
  ASSERT_TRUE(status);
  EXPECT_EQ(status->id, 7U);
  EXPECT_EQ(status->qp_state, IBV_QPS_INIT);
}

TEST_P(HangingDevice, GracefulCloseOnOtherDevice_Ends) {
  ASSERT_NO_FATAL_FAILURE(hang());
  const int qps = fake_.live("qp");
  const std::size_t index = index_of(other_);
  std::unique_ptr<RecvComm> closing = std::move(comms_[index]);
  monitor_->close_gracefully(std::move(closing), 3600 * kNanosecondsPerSecond);
  ASSERT_TRUE(peer_ends_[index].say(wire::MessageType::kClose));
  monitor_->drain(devices_[1].get(), false);
  EXPECT_EQ(fake_.live("qp"), qps - 1);
}

TEST_P(HangingDevice, NewComm_IsWatched) {
  ASSERT_NO_FATAL_FAILURE(hang());
  RecvComm* const added = watched({&ports_[2]});
  send(added, wire::Notice::without_body(wire::MessageType::kPing));
  receive(added, wire::MessageType::kPong);
  watched({&ports_[1]});  // of the device that hangs: watch() calls no verb
}

TEST_P(HangingDevice, EventOfOtherDevice_IsRead) {
  ASSERT_NO_FATAL_FAILURE(hang());
  const LogCapture log;
  ASSERT_NO_FATAL_FAILURE(raise(1, IBV_EVENT_DEVICE_FATAL));
  EXPECT_TRUE(has_comm_event(other_));
  EXPECT_FALSE(has_comm_event(second_));
}

TEST_P(HangingDevice, HangEnds_ClosesAndEventsGoOn) {
  ASSERT_NO_FATAL_FAILURE(hang());
  const std::string verb = GetParam();
  if (verb != "destroy_qp") monitor_->close_gracefully(std::move(comms_[index_of(first_)]), 0);
  const LogCapture log;
  events_.hang.end();
  monitor_->drain(devices_[0].get(), false);
  if (verb != "get_async_event") {
    ASSERT_NO_FATAL_FAILURE(raise(0, IBV_EVENT_DEVICE_FATAL));
    EXPECT_TRUE(has_comm_event(second_));
  }
}

// A connection whose QPs are on both devices waits; one that uses only the other device does not.
TEST_F(MonitorPortTest, CommOnHangingAndOtherDevice_DelaysOnlyItself) {
  const RecvComm* const mixed = watched({&ports_[2], &ports_[0]});
  events_.hang.begin("query_qp", devices_[0]->context());
  send(mixed, wire::Notice::status_query(1));
  ASSERT_TRUE(ConnectedComms::eventually([&] { return events_.hang.entered(); }));
  send(other_, wire::Notice::status_query(2));
  const std::optional<wire::ConnectionStatus> status =
      wire::decode_status_reply(receive(other_, wire::MessageType::kStatusReply));
  ASSERT_TRUE(status);
  EXPECT_EQ(status->qp_state, IBV_QPS_INIT);
}

class HangingDeviceStatus : public MonitorPortTest {
 protected:
  HangingDeviceStatus()
      : MonitorPortTest({.state_socket = testing::TempDir() + "hang-" + std::to_string(::getpid())}) {}
};

// The peer and the reader of the state get what is known without the device.
TEST_F(HangingDeviceStatus, QueryOfQpState_IsGivenUp) {
  events_.hang.begin("query_qp", devices_[0]->context());
  send(first_, wire::Notice::status_query(7));
  const std::optional<wire::ConnectionStatus> status =
      wire::decode_status_reply(receive(first_, wire::MessageType::kStatusReply));
  ASSERT_TRUE(status);
  EXPECT_EQ(status->id, 7U);
  EXPECT_EQ(status->qp_state, IBV_QPS_UNKNOWN);
  const std::string state = read_state(settings_.state_socket);
  EXPECT_NE(state.find("\"qp_state\":\"unknown\""), std::string::npos) << state;
  EXPECT_NE(state.find("\"qp_state\":\"INIT\""), std::string::npos) << state;
}

}  // namespace
}  // namespace verbatim
