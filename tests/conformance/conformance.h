// The fixture of the suite: loads one plugin by path and calls one of its tables from the same threads as NCCL: a
// service thread for listen, connect, accept, registration and close, and a progress thread (the test's thread) for
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
#include "support/wait.h"
#include "traffic.h"

namespace conformance {

struct Options {
  std::string plugin;                           // path of the library under test
  std::size_t largest = std::size_t{64} << 20;  // bytes of the largest message
  std::chrono::microseconds pause{0};           // sleep when there was no progress
  int shorten = 1;                              // divides the number of repetitions
};
Options& options();
// `count` divided by --shorten, at least 1.
int repetitions(int count);

// A thread that runs calls one after the other.
class ServiceThread {
 public:
  ServiceThread();
  ~ServiceThread();
  ServiceThread(const ServiceThread&) = delete;
  ServiceThread& operator=(const ServiceThread&) = delete;

  // Returns when the call has returned. Any thread may call it.
  void run(const std::function<void()>& call);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void()>* call_ = nullptr;
  std::uint64_t finished_ = 0;  // number of finished calls
  bool stop_ = false;
  std::thread thread_;  // last, because the thread uses the other members
};

struct End {
  void* context = nullptr;
  int device = 0;
};

struct Handle {
  alignas(8) unsigned char bytes[nccl::kNetHandleMaxBytes] = {};
};

class Conformance;

// A connection: its send comm and receive comm. The destructor closes both.
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

// A registration on one comm. The destructor deregisters it. It must not outlive the comm.
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

// One send and the member that receives it. Sends and members with equal tags match in their order.
struct Piece {
  std::size_t size;
  std::size_t capacity;
  int tag;
};
// The members of one irecv. `order` is the order of the sends (empty: the order of the pieces).
struct Group {
  std::vector<Piece> pieces;
  std::vector<std::size_t> order;
};
struct Layout {
  std::size_t send_offset = 0;  // offset of the buffers from a page boundary
  std::size_t recv_offset = 0;
  std::size_t gap = 64;              // poisoned bytes between buffers
  Clock::duration receiver_delay{};  // from the first call of isend to the first irecv
  Clock::duration sender_delay{};    // from the first call of irecv to the first isend
  int recv_type = nccl::kPtrHost;    // memory type of the receiver's registration
};

class Conformance : public ::testing::TestWithParam<int> {
 public:
  int version() const { return GetParam(); }
  netapi::Plugin& net() { return *plugin_; }
  ServiceThread& service() { return service_; }

  // The first context (null up to v10), created if necessary. TearDown finalizes it.
  void* context();
  // Another context.
  void* new_context();
  void finalize(void* context);
  void forget_contexts() { contexts_.clear(); }  // for tests that finalize their contexts
  int device_count();
  netapi::Properties properties(int device);
  std::size_t max_recvs();

  void* listen(End end, Handle& handle);
  // Null comms after an error or when the deadline has passed.
  TestConnection connect(void* listen_comm, End sender, Handle& handle);
  TestConnection link(End sender, End receiver);
  TestConnection link();  // both ends on device 0 of context()

  // Sends all groups over the link, and checks the sizes and all bytes at both ends.
  void exchange(TestConnection& link, const std::vector<Group>& groups, const Layout& layout = {});
  void exchange_one(TestConnection& link, std::size_t size, const Layout& layout = {}) {
    exchange(link, {{{{size, size, 0}}, {}}}, layout);
  }

  // Returns and removes the warnings that the plugin has logged. TearDown fails the test if any are left.
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

// Called when there was no progress: yields the processor, or sleeps (--pause).
void rest();

// Calls `poll` until it returns true. False when the time limit has passed, and a line on stderr then.
bool eventually(const std::function<bool()>& poll, Clock::duration limit = kDeadline,
                const verbatim::test::SourceLine& line = verbatim::test::SourceLine::here());

std::string version_name(const ::testing::TestParamInfo<int>& info);

#define EVERY_VERSION(suite) INSTANTIATE_TEST_SUITE_P(Net, suite, ::testing::Range(6, 13), ::conformance::version_name)
#define ONE_VERSION(suite, version) \
  INSTANTIATE_TEST_SUITE_P(Net, suite, ::testing::Values(version), ::conformance::version_name)

#define EXPECT_OK(call) EXPECT_EQ(call, nccl::Result::kSuccess)
#define ASSERT_OK(call) ASSERT_EQ(call, nccl::Result::kSuccess)

}  // namespace conformance

namespace nccl {
// GoogleTest prints a Result with this function.
void PrintTo(Result result, std::ostream* stream);
}  // namespace nccl
