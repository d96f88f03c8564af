// The fixture of the suite: one plugin, loaded by path, driven through one of its tables with the threads that NCCL
// has: a service thread for listen, connect, accept, registration and close, a progress thread (the test's own) for
// data.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "memory.h"
#include "netapi/plugin.h"
#include "traffic.h"

namespace conformance {

struct Options {
  std::string plugin;                           // path of the library under test
  std::size_t largest = std::size_t{64} << 20;  // message, in bytes
  std::chrono::microseconds pause{0};           // when nothing has moved
  int shorten = 1;                              // repetitions are divided by this
};
Options& options();
// Of so many times that a test does something, those that --shorten leaves.
int repetitions(int count);

// Runs calls one after the other on a thread of its own.
class ServiceThread {
 public:
  ServiceThread();
  ~ServiceThread();
  ServiceThread(const ServiceThread&) = delete;
  ServiceThread& operator=(const ServiceThread&) = delete;

  // Returns when the call has returned. Any thread.
  void run(const std::function<void()>& call);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void()>* call_ = nullptr;
  std::uint64_t finished_ = 0;  // calls so far
  bool stop_ = false;
  std::thread thread_;  // last: starts when all else is there
};

struct End {
  void* context = nullptr;
  int device = 0;
};

struct Handle {
  alignas(8) unsigned char bytes[nccl::kNetHandleMaxBytes] = {};
};

class Conformance;

// A connection: its sending and its receiving end, closed with it.
class TestConnection {
 public:
  TestConnection(Conformance& test, void* send_comm, void* recv_comm);
  ~TestConnection();
  TestConnection(TestConnection&& other) noexcept;
  TestConnection(const TestConnection&) = delete;
  TestConnection& operator=(const TestConnection&) = delete;
  TestConnection& operator=(TestConnection&&) = delete;

  explicit operator bool() const { return send_comm != nullptr && recv_comm != nullptr; }
  void close_send();
  void close_recv();

  void* send_comm;
  void* recv_comm;

 private:
  Conformance* test_;
};

// A registration on one comm, given back with it. Must not outlive the comm.
class Registration {
 public:
  Registration(Conformance& test, void* comm, void* data, std::size_t size, int type = nccl::kPtrHost);
  ~Registration();
  Registration(Registration&& other) noexcept;
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;
  Registration& operator=(Registration&&) = delete;

  void* get() const { return mhandle_; }

 private:
  Conformance* test_;
  void* comm_;
  void* mhandle_ = nullptr;
};

// One send and the member that receives it. Where a group has equal tags, sends match members in the order of both.
struct Piece {
  std::size_t size;
  std::size_t capacity;
  int tag;
};
// What one irecv posts; `order` is the order of the sends (empty: that of the pieces).
struct Group {
  std::vector<Piece> pieces;
  std::vector<std::size_t> order;
};
struct Layout {
  std::size_t send_offset = 0;  // of the buffers from a page boundary
  std::size_t recv_offset = 0;
  std::size_t gap = 64;              // poisoned bytes between neighbours
  Clock::duration receiver_delay{};  // how long the sends are there before the first receive
  Clock::duration sender_delay{};    // and the other way round
  int recv_type = nccl::kPtrHost;    // of the registration
};

class Conformance : public ::testing::TestWithParam<int> {
 public:
  int version() const { return GetParam(); }
  netapi::Plugin& net() { return *plugin_; }
  ServiceThread& service() { return service_; }

  // A context as init made it (null up to v10), finalized at the end of the test.
  void* context();
  // One more.
  void* new_context();
  void finalize(void* context);
  void forget_contexts() { contexts_.clear(); }  // finalized by the test itself
  int device_count();
  netapi::Properties properties(int device);
  std::size_t max_recvs();

  void* listen(End end, Handle& handle);
  // Null when there was an error or no answer in time.
  TestConnection connect(void* listen_comm, End sender, Handle& handle);
  TestConnection link(End sender, End receiver);
  TestConnection link();  // on device 0 of the test's context

  // Sends all groups over the link and checks sizes and every byte on both sides.
  void exchange(TestConnection& link, const std::vector<Group>& groups, const Layout& layout = {});
  void exchange_one(TestConnection& link, std::size_t size, const Layout& layout = {}) {
    exchange(link, {{{{size, size, 0}}, {}}}, layout);
  }

  // Lines that the plugin has logged as warnings so far. A test that expects some takes them.
  std::vector<std::string> take_warnings();

 protected:
  void SetUp() override;
  void TearDown() override;

 private:
  struct Warnings {
    std::mutex mutex;
    std::vector<std::string> lines;
  };
  std::shared_ptr<Warnings> warnings_ = std::make_shared<Warnings>();
  ServiceThread service_;
  std::unique_ptr<netapi::Plugin> plugin_;
  std::vector<void*> contexts_;
};

// When nothing has moved: lets others run, or sleeps (--pause).
void rest();

// Calls `poll` until it answers true or the time is over.
bool eventually(const std::function<bool()>& poll, Clock::duration limit = kDeadline);

std::string version_name(const ::testing::TestParamInfo<int>& info);

#define EVERY_VERSION(suite) INSTANTIATE_TEST_SUITE_P(Net, suite, ::testing::Range(6, 13), ::conformance::version_name)
#define ONE_VERSION(suite, version) \
  INSTANTIATE_TEST_SUITE_P(Net, suite, ::testing::Values(version), ::conformance::version_name)

#define EXPECT_OK(call) EXPECT_EQ(call, nccl::Result::kSuccess)
#define ASSERT_OK(call) ASSERT_EQ(call, nccl::Result::kSuccess)

}  // namespace conformance

namespace nccl {
// How GoogleTest prints a result.
void PrintTo(Result result, std::ostream* stream);
}  // namespace nccl
