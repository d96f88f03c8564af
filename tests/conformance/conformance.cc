#include "conformance.h"

#include <sched.h>

#include <algorithm>
#include <ostream>
#include <utility>

#include "merged_plugin.h"
#include "netapi/log.h"

namespace nccl {
void PrintTo(Result result, std::ostream* stream) {
  *stream << netapi::result_name(result);
}
}  // namespace nccl

namespace conformance {

Options& options() {
  static Options only;
  return only;
}

int repetitions(int count) {
  return std::max(1, count / options().shorten);
}

ServiceThread::ServiceThread()
    : thread_([this] {
        std::unique_lock lock(mutex_);
        for (;;) {
          changed_.wait(lock, [this] { return call_ != nullptr || stop_; });
          if (call_ == nullptr) return;
          (*call_)();
          call_ = nullptr;
          ++finished_;
          changed_.notify_all();
        }
      }) {}

ServiceThread::~ServiceThread() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void ServiceThread::run(const std::function<void()>& call) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return call_ == nullptr; });
  call_ = &call;
  const std::uint64_t finished_after_call = finished_ + 1;
  changed_.notify_all();
  changed_.wait(lock, [this, finished_after_call] { return finished_ >= finished_after_call; });
}

TestConnection::TestConnection(Conformance& test, void* send, void* recv)
    : send_comm(send), recv_comm(recv), test_(&test) {}

TestConnection::TestConnection(TestConnection&& other) noexcept
    : send_comm(std::exchange(other.send_comm, nullptr)),
      recv_comm(std::exchange(other.recv_comm, nullptr)),
      test_(other.test_) {}

TestConnection::~TestConnection() {
  close_send();
  close_recv();
}

void TestConnection::close_send() {
  if (send_comm == nullptr) return;
  test_->service().run([&] { EXPECT_OK(test_->net().close_send(std::exchange(send_comm, nullptr))); });
}

void TestConnection::close_recv() {
  if (recv_comm == nullptr) return;
  test_->service().run([&] { EXPECT_OK(test_->net().close_recv(std::exchange(recv_comm, nullptr))); });
}

Registration::Registration(Conformance& test, void* comm, void* data, std::size_t size, int type)
    : test_(&test), comm_(comm) {
  test_->service().run([&] { EXPECT_OK(test_->net().reg_mr(comm, data, size, type, &mhandle_)); });
  EXPECT_NE(mhandle_, nullptr);
}

Registration::Registration(Registration&& other) noexcept
    : test_(other.test_), comm_(other.comm_), mhandle_(std::exchange(other.mhandle_, nullptr)) {}

Registration::~Registration() {
  if (mhandle_ == nullptr) return;
  test_->service().run([&] { EXPECT_OK(test_->net().dereg_mr(comm_, mhandle_)); });
}

void Conformance::SetUp() {
  netapi::set_log_callback([warnings = warnings_](const netapi::LogLine& line) {
    if (line.level != nccl::DebugLogLevel::kWarn) return;
    const std::lock_guard lock(warnings->mutex);
    warnings->lines.push_back(line.text);
  });
  netapi::Opened opened = open_plugin(options().plugin, version());
  ASSERT_NE(opened.plugin, nullptr) << opened.error;
  plugin_ = std::move(opened.plugin);
}

void Conformance::TearDown() {
  while (!contexts_.empty()) finalize(contexts_.back());
  plugin_.reset();
  netapi::set_log_callback({});
  for (const std::string& line : take_warnings()) ADD_FAILURE() << "unexpected warning: " << line;
}

void* Conformance::context() {
  if (contexts_.empty()) new_context();
  return contexts_.empty() ? nullptr : contexts_.front();
}

void* Conformance::new_context() {
  void* made = nullptr;
  const nccl::Result result = net().init(0x1234'5678'9abc'def0, {}, &made);
  EXPECT_OK(result);
  if (result != nccl::Result::kSuccess) return nullptr;
  if (version() >= 11) {
    EXPECT_NE(made, nullptr);
  }
  contexts_.push_back(made);
  return made;
}

void Conformance::finalize(void* context) {
  contexts_.erase(std::find(contexts_.begin(), contexts_.end(), context));
  EXPECT_OK(net().finalize(context));
}

int Conformance::device_count() {
  context();
  int count = 0;
  EXPECT_OK(net().devices(&count));
  return count;
}

netapi::Properties Conformance::properties(int device) {
  context();
  netapi::Properties result;
  EXPECT_OK(net().properties(device, &result));
  return result;
}

std::size_t Conformance::max_recvs() {
  return static_cast<std::size_t>(std::max(1, properties(0).max_recvs));
}

void* Conformance::listen(End end, Handle& handle) {
  void* listen_comm = nullptr;
  service_.run([&] { EXPECT_OK(net().listen(end.context, end.device, handle.bytes, &listen_comm)); });
  EXPECT_NE(listen_comm, nullptr);
  return listen_comm;
}

TestConnection Conformance::connect(void* listen_comm, End sender, Handle& handle) {
  TestConnection link(*this, nullptr, nullptr);
  bool failed = false;
  service_.run([&] {
    eventually([&] {
      if (link.send_comm == nullptr) {
        const nccl::Result result = net().connect(sender.context, sender.device, handle.bytes, &link.send_comm);
        EXPECT_OK(result);
        failed = result != nccl::Result::kSuccess;
      }
      if (link.recv_comm == nullptr && !failed) {
        const nccl::Result result = net().accept(listen_comm, &link.recv_comm);
        EXPECT_OK(result);
        failed = result != nccl::Result::kSuccess;
      }
      return failed || link;
    });
  });
  EXPECT_TRUE(link) << "not connected: send comm " << link.send_comm << ", receive comm " << link.recv_comm;
  return link;
}

TestConnection Conformance::link(End sender, End receiver) {
  Handle handle;
  void* const listen_comm = listen(receiver, handle);
  if (listen_comm == nullptr) return {*this, nullptr, nullptr};
  TestConnection link = connect(listen_comm, sender, handle);
  service_.run([&] { EXPECT_OK(net().close_listen(listen_comm)); });
  return link;
}

TestConnection Conformance::link() {
  const End end{context(), 0};
  return link(end, end);
}

void Conformance::exchange(TestConnection& link, const std::vector<Group>& groups, const Layout& layout) {
  ASSERT_TRUE(link);
  std::size_t send_bytes = layout.gap;
  std::size_t recv_bytes = layout.gap;
  for (const Group& group : groups) {
    for (const Piece& piece : group.pieces) {
      send_bytes += piece.size + layout.gap;
      recv_bytes += piece.capacity + layout.gap;
    }
  }
  Memory source(std::max<std::size_t>(send_bytes, 1), layout.send_offset);
  Memory target(std::max<std::size_t>(recv_bytes, 1), layout.recv_offset);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size(), layout.recv_type);
  ASSERT_NE(source_mr.get(), nullptr);
  ASSERT_NE(target_mr.get(), nullptr);

  struct Expectation {
    const Operation* operation;
    std::vector<int> sizes;
  };
  Traffic traffic(net());
  std::vector<Expectation> expected;
  std::vector<Part> sends;
  std::vector<std::vector<Part>> recvs;
  std::vector<std::vector<int>> recv_sizes;
  std::size_t send_at = layout.gap;
  std::size_t recv_at = layout.gap;
  std::uint64_t seed = 1;
  for (const Group& group : groups) {
    std::vector<std::size_t> member_at;
    std::vector<Part> members;
    for (const Piece& piece : group.pieces) {
      member_at.push_back(recv_at);
      members.push_back({target.data() + recv_at, piece.capacity, piece.tag, target_mr.get()});
      recv_at += piece.capacity + layout.gap;
    }
    std::vector<std::size_t> order = group.order;
    for (std::size_t i = order.size(); i < group.pieces.size(); ++i) order.push_back(i);
    std::vector<bool> matched(members.size(), false);
    std::vector<int> sizes(members.size(), -1);
    for (const std::size_t from : order) {
      const Piece& piece = group.pieces[from];
      std::size_t member = 0;
      while (matched[member] || group.pieces[member].tag != piece.tag) ++member;
      matched[member] = true;
      ASSERT_LE(piece.size, group.pieces[member].capacity)
          << "the net interface forbids a send larger than its receive";
      sizes[member] = static_cast<int>(piece.size);
      source.write(send_at, piece.size, seed);
      target.expect(member_at[member], piece.size, seed);
      sends.push_back({source.data() + send_at, piece.size, piece.tag, source_mr.get()});
      send_at += piece.size + layout.gap;
      ++seed;
    }
    recvs.push_back(std::move(members));
    recv_sizes.push_back(std::move(sizes));
  }

  const auto add_sends = [&] {
    for (const Part& part : sends) {
      expected.push_back({&traffic.send(link.send_comm, part), {static_cast<int>(part.size)}});
    }
  };
  if (layout.receiver_delay > Clock::duration::zero()) {
    add_sends();
    ASSERT_TRUE(traffic.run_for(layout.receiver_delay));
    ASSERT_EQ(traffic.open(), sends.size()) << "a send was done before its receive was posted";
  }
  for (std::size_t i = 0; i < recvs.size(); ++i) {
    expected.push_back({&traffic.recv(link.recv_comm, std::move(recvs[i])), std::move(recv_sizes[i])});
  }
  if (layout.receiver_delay == Clock::duration::zero()) {
    if (layout.sender_delay > Clock::duration::zero()) {
      ASSERT_TRUE(traffic.run_for(layout.sender_delay));
      ASSERT_EQ(traffic.open(), recvs.size()) << "a receive was done before anything was sent";
    }
    add_sends();
  }
  ASSERT_TRUE(traffic.run());
  for (const Expectation& expectation : expected) {
    EXPECT_EQ(expectation.operation->sizes, expectation.sizes) << (expectation.operation->is_send ? "send" : "receive");
  }
  EXPECT_TRUE(source.intact()) << "at the sender";
  EXPECT_TRUE(target.intact()) << "at the receiver";
}

std::vector<std::string> Conformance::take_warnings() {
  const std::lock_guard lock(warnings_->mutex);
  return std::exchange(warnings_->lines, {});
}

void rest() {
  if (options().pause.count() > 0) {
    std::this_thread::sleep_for(options().pause);
  } else {
    sched_yield();
  }
}

bool eventually(const std::function<bool()>& poll, Clock::duration limit, const verbatim::test::SourceLine& line) {
  verbatim::test::Wait wait(limit);
  while (!poll()) {
    if (wait.is_over()) {
      wait.print_report(line);
      return false;
    }
    if (options().pause.count() > 0) {
      rest();
    } else {
      wait.rest();
    }
  }
  return true;
}

std::string version_name(const ::testing::TestParamInfo<int>& info) {
  return std::string("v").append(std::to_string(info.param));
}

}  // namespace conformance
