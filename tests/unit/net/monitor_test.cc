// Which comms an event of a device concerns. The device is one of softverbs, the events are made by the test.
#include "net/monitor/monitor.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>

#include "connected_comms.h"
#include "unit/support/log_capture.h"
#include "unit/support/peer_socket.h"
#include "verbs/device_inventory.h"

namespace verbatim {
namespace {

// What the verbs below return: one test at a time.
struct Events {
  std::mutex mutex;
  std::deque<ibv_async_event> pending;
  int error = EAGAIN;  // when none is pending
  int empty_reads = 0;
  std::vector<ibv_qp*> qps_created;
  decltype(&ibv_create_qp) create_qp = nullptr;
  decltype(&ibv_query_qp) query_qp = nullptr;
  std::atomic<bool> hangs{false};  // query_qp
  std::atomic<int> hanging{0};
};
Events* g_events = nullptr;

int pop_event(ibv_context*, ibv_async_event* event) {
  const std::lock_guard lock(g_events->mutex);
  if (g_events->pending.empty()) {
    ++g_events->empty_reads;
    errno = g_events->error;
    return -1;
  }
  *event = g_events->pending.front();
  g_events->pending.pop_front();
  return 0;
}

void ignore_event(ibv_async_event*) {}

ibv_qp* record_qp(ibv_pd* pd, ibv_qp_init_attr* wanted) {
  ibv_qp* const qp = g_events->create_qp(pd, wanted);
  g_events->qps_created.push_back(qp);
  return qp;
}

int query_qp_unless_hanging(ibv_qp* qp, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init) {
  if (g_events->hangs) {
    ++g_events->hanging;
    g_events->hangs.wait(true);
  }
  return g_events->query_qp(qp, attr, mask, init);
}

class MonitorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<const Verbs>> verbs = Verbs::load(std::getenv("VERBATIM_VERBS_LIBRARY"));
    ASSERT_TRUE(verbs);
    verbs_ = **verbs;
    events_.create_qp = verbs_.create_qp;
    verbs_.create_qp = record_qp;
    events_.query_qp = std::exchange(verbs_.query_qp, query_qp_unless_hanging);
    verbs_.get_async_event = pop_event;
    verbs_.ack_async_event = ignore_event;
    g_events = &events_;
    Result<std::shared_ptr<const DeviceSurvey>> inventory = DeviceSurvey::open(verbs_, nullptr, Config(), "");
    ASSERT_TRUE(inventory);
    inventory_ = std::move(*inventory);
    event_fd_ = UniqueFd(::eventfd(0, EFD_SEMAPHORE));
    own_fd_ = std::exchange(device().context()->async_fd, event_fd_.get());
    Result<std::unique_ptr<Monitor>> monitor = Monitor::start(inventory_->devices);
    ASSERT_TRUE(monitor);
    monitor_ = std::move(*monitor);
    comm_ = make_comm();
    ASSERT_NE(comm_, nullptr);
  }

  void TearDown() override {
    if (watched_) monitor_->unwatch(*comm_);
    monitor_.reset();
    if (inventory_ != nullptr) device().context()->async_fd = own_fd_;
  }

  const Device& device() const { return *inventory_->devices[0]; }

  std::unique_ptr<RecvComm> make_comm() {
    std::unique_ptr<RecvComm> comm = link_.make_recv_comm({&inventory_->ports[0]}, 2);
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    peer_ends_.emplace_back(UniqueFd(ends[1]), 1U);
    if (comm != nullptr) comm->channel().set_socket(UniqueFd(ends[0]), {});
    return comm;
  }

  void watch() {
    ASSERT_TRUE(monitor_->watch(*comm_, this));
    watched_ = true;
  }

  // Returns when the monitor has read this event and all earlier ones.
  void raise(const ibv_async_event& event) {
    {
      const std::lock_guard lock(events_.mutex);
      events_.pending.push_back(event);
    }
    wait_for_events();
  }
  void wait_for_events() {
    const auto empty_reads = [&] {
      const std::lock_guard lock(events_.mutex);
      return events_.empty_reads;
    };
    const int before = empty_reads();
    const std::uint64_t one = 1;
    ASSERT_EQ(::write(event_fd_.get(), &one, sizeof one), static_cast<ssize_t>(sizeof one));
    const auto end = std::chrono::steady_clock::now() + ConnectedComms::kPatience;
    // Twice: the first empty read may have begun before the event was there.
    while (empty_reads() < before + 2 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    ASSERT_GE(empty_reads(), before + 2);
    std::uint64_t count = 0;
    ASSERT_EQ(::read(event_fd_.get(), &count, sizeof count), static_cast<ssize_t>(sizeof count));
  }

  static ibv_async_event about(ibv_qp* qp, ibv_event_type type) {
    ibv_async_event event{};
    event.event_type = type;
    event.element.qp = qp;
    return event;
  }
  static ibv_async_event device_fatal() {
    ibv_async_event event{};
    event.event_type = IBV_EVENT_DEVICE_FATAL;
    return event;
  }
  ibv_qp* own_qp(RecvComm& comm) const { return comm.endpoint().qps()[1].qp.get(); }

  // Whether the comm fails at its next progress because of its device.
  static bool has_failed(RecvComm& comm) {
    comm.progress();
    return comm.error() != nullptr && comm.error()->kind == ErrorKind::kSystem;
  }

  // The event of a QP waits for the completion that names the cause.
  static bool fails(RecvComm& comm) {
    return ConnectedComms::eventually([&] { return has_failed(comm); });
  }

  ConnectedComms link_;  // its context provides the settings
  Verbs verbs_;
  Events events_;
  std::shared_ptr<const DeviceSurvey> inventory_;
  UniqueFd event_fd_;
  int own_fd_ = -1;
  std::vector<test::PeerSocket> peer_ends_;
  std::unique_ptr<RecvComm> comm_;
  bool watched_ = false;
  std::unique_ptr<Monitor> monitor_;
};

TEST_F(MonitorTest, DeviceFatal_FailsItsComms) {
  ASSERT_NO_FATAL_FAILURE(watch());
  EXPECT_FALSE(has_failed(*comm_));
  ASSERT_NO_FATAL_FAILURE(raise(device_fatal()));
  EXPECT_TRUE(has_failed(*comm_));
}

TEST_F(MonitorTest, DeviceFailedBefore_FailsCommWhenWatched) {
  ASSERT_NO_FATAL_FAILURE(raise(device_fatal()));
  ASSERT_NO_FATAL_FAILURE(watch());
  EXPECT_TRUE(has_failed(*comm_));
}

TEST_F(MonitorTest, UnreadableEvents_CountAsDeviceFailure) {
  ASSERT_NO_FATAL_FAILURE(watch());
  const LogCapture log;
  {
    const std::lock_guard lock(events_.mutex);
    events_.error = EIO;
  }
  const std::uint64_t one = 1;
  ASSERT_EQ(::write(event_fd_.get(), &one, sizeof one), static_cast<ssize_t>(sizeof one));
  const auto end = std::chrono::steady_clock::now() + ConnectedComms::kPatience;
  while (!has_failed(*comm_) && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  EXPECT_TRUE(has_failed(*comm_));
  const std::unique_ptr<RecvComm> later = make_comm();
  ASSERT_TRUE(monitor_->watch(*later, this));
  EXPECT_TRUE(has_failed(*later));
  monitor_->unwatch(*later);
}

TEST_F(MonitorTest, QpFatal_FailsOnlyItsComm) {
  ASSERT_NO_FATAL_FAILURE(watch());
  const std::unique_ptr<RecvComm> other = make_comm();
  ASSERT_TRUE(monitor_->watch(*other, this));
  ASSERT_NO_FATAL_FAILURE(raise(about(own_qp(*comm_), IBV_EVENT_QP_FATAL)));
  EXPECT_TRUE(fails(*comm_));
  EXPECT_EQ(other->slow_path_flags() & static_cast<std::uint32_t>(CommEvent::kDeviceFailed), 0U);
  monitor_->unwatch(*other);
}

TEST_F(MonitorTest, QpFailedBefore_FailsCommWhenWatched) {
  const std::unique_ptr<RecvComm> other = make_comm();
  ASSERT_NO_FATAL_FAILURE(raise(about(own_qp(*comm_), IBV_EVENT_QP_FATAL)));
  comm_->abort();  // moves the QPs to the error state, as the event reports
  ASSERT_NO_FATAL_FAILURE(watch());
  EXPECT_TRUE(fails(*comm_));
  ASSERT_TRUE(monitor_->watch(*other, this));
  EXPECT_EQ(other->slow_path_flags() & static_cast<std::uint32_t>(CommEvent::kDeviceFailed), 0U);
  monitor_->unwatch(*other);
}

TEST_F(MonitorTest, FlushQpFatal_FailsItsComm) {
  ASSERT_NO_FATAL_FAILURE(watch());
  std::vector<std::uint8_t> target(64);
  const auto memory = link_.reg(*comm_, target, MemoryType::kCuda);
  ASSERT_NE(memory, nullptr);
  ASSERT_EQ(events_.qps_created.back(), own_qp(*comm_)) << "no flush QP before the first flush";
  ASSERT_NE(comm_->iflush(target.data(), *memory), nullptr);
  ibv_qp* const flush_qp = events_.qps_created.back();
  ASSERT_NE(flush_qp, own_qp(*comm_));
  ASSERT_NO_FATAL_FAILURE(raise(about(flush_qp, IBV_EVENT_QP_FATAL)));
  EXPECT_TRUE(fails(*comm_));
}

TEST_F(MonitorTest, CqError_FailsItsComm) {
  ASSERT_NO_FATAL_FAILURE(watch());
  ibv_async_event event{};
  event.event_type = IBV_EVENT_CQ_ERR;
  event.element.cq = comm_->endpoint().cqs()[0].get();
  ASSERT_NO_FATAL_FAILURE(raise(event));
  EXPECT_TRUE(has_failed(*comm_));
}

TEST_F(MonitorTest, HarmlessEvent_FailsNothing) {
  ASSERT_NO_FATAL_FAILURE(watch());
  ibv_async_event event{};
  event.event_type = IBV_EVENT_PORT_ERR;
  event.element.port_num = 1;
  ASSERT_NO_FATAL_FAILURE(raise(event));
  ASSERT_NO_FATAL_FAILURE(raise(about(own_qp(*comm_), IBV_EVENT_COMM_EST)));
  EXPECT_FALSE(has_failed(*comm_));
}

// A status query of the peer makes the monitor query the QPs.
TEST_F(MonitorTest, HangingDevice_DoesNotDelayOtherComms) {
  ASSERT_NO_FATAL_FAILURE(watch());
  const std::unique_ptr<RecvComm> other = make_comm();
  events_.hangs = true;
  ASSERT_TRUE(peer_ends_[0].say(wire::Notice::status_query(7)));
  EXPECT_TRUE(ConnectedComms::eventually([&] { return events_.hanging != 0; }));
  std::atomic<bool> other_done{false};
  std::atomic<bool> own_done{false};
  std::thread others_owner([&] {
    EXPECT_TRUE(monitor_->watch(*other, this));
    monitor_->unwatch(*other);
    other_done = true;
  });
  std::thread owner([&] {
    monitor_->unwatch(*comm_);
    own_done = true;
  });
  EXPECT_TRUE(ConnectedComms::eventually([&] { return other_done.load(); }));
  EXPECT_FALSE(own_done);  // its QPs are still being queried
  events_.hangs = false;
  events_.hangs.notify_all();
  owner.join();
  watched_ = false;
  others_owner.join();
  std::array<std::uint8_t, wire::kMaxNoticeBytes> answer{};
  EXPECT_GT(::read(peer_ends_[0].socket().get(), answer.data(), answer.size()), 0);
}

// Its own query waits behind that of another comm, and has not begun.
TEST_F(MonitorTest, HangingDevice_DoesNotDelayCloseOfAnotherComm) {
  ASSERT_NO_FATAL_FAILURE(watch());
  const std::unique_ptr<RecvComm> other = make_comm();
  ASSERT_TRUE(monitor_->watch(*other, this));
  events_.hangs = true;
  for (test::PeerSocket& peer : peer_ends_) {
    ASSERT_TRUE(peer.say(wire::Notice::status_query(7)));
    EXPECT_TRUE(ConnectedComms::eventually([&] { return events_.hanging != 0; }));
  }
  // Until the second query has been read.
  EXPECT_TRUE(ConnectedComms::eventually([&] {
    int unread = 0;
    return ::ioctl(other->channel().key(), FIONREAD, &unread) == 0 && unread == 0;
  }));
  std::atomic<bool> done{false};
  std::thread owner([&] {
    monitor_->unwatch(*other);
    done = true;
  });
  EXPECT_TRUE(ConnectedComms::eventually([&] { return done.load(); }));
  events_.hangs = false;
  events_.hangs.notify_all();
  owner.join();
}

// epoll rejects a file, as it rejects a socket beyond the limit of the user.
TEST_F(MonitorTest, UnwatchableComm_IsRejected) {
  comm_->channel().set_socket(UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC)), {});
  const LogCapture log;
  const Status watched = monitor_->watch(*comm_, this);
  ASSERT_FALSE(watched);
  EXPECT_EQ(watched.error().sys_errno, EPERM);
  EXPECT_NE(log.only_warning().find("epoll_ctl"), std::string::npos);
}

}  // namespace
}  // namespace verbatim
