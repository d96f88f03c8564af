// Two ends of one connection inside this process, over the verbs library that the environment names.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "net/context/context.h"
#include "net/transfer/recv_comm.h"
#include "net/transfer/send_comm.h"
#include "support/shows.h"
#include "support/wait.h"

namespace verbatim {

// One member of a grouped receive.
struct RecvBuffer {
  void* data;
  std::size_t bytes;
  int tag;
  MemoryHandle* memory;
};

class ConnectedComms {
 public:
  static constexpr auto kPatience = test::kPatience;

  // Environment variables must be set before.
  explicit ConnectedComms(int traffic_class = -1) {
    Result<Context*> context = open_context(traffic_class);
    EXPECT_TRUE(context);
    if (context) context_ = *context;
  }
  ~ConnectedComms() {
    if (context_ != nullptr) close_context(context_);
  }
  ConnectedComms(const ConnectedComms&) = delete;
  ConnectedComms& operator=(const ConnectedComms&) = delete;

  // A receiving end that is not connected: `qps` QPs over these ports, no side channel. nullptr after a failed
  // expectation.
  std::unique_ptr<RecvComm> make_recv_comm(const std::vector<const Port*>& ports, std::size_t qps) const {
    wire::Hello peer;
    peer.qps.resize(qps);
    const Config& config = context_->config();
    Result<Endpoint> endpoint = Endpoint::create(ports, RecvComm::endpoint_sizes(config, ports, peer), config);
    EXPECT_TRUE(endpoint);
    if (!endpoint) return nullptr;
    Result<std::unique_ptr<RecvComm>> comm = RecvComm::create(context_->comm_settings(), std::move(*endpoint), peer);
    EXPECT_TRUE(comm);
    return comm ? std::move(*comm) : nullptr;
  }

  // The ports of the receiving end, after connect.
  std::vector<const Port*> ports() const {
    const std::span<const Port* const> used = recv_->endpoint().ports();
    return {used.begin(), used.end()};
  }

  // Asks again and again whether `condition` holds: that it did in time.
  template <typename Condition>
  static bool eventually(Condition condition, const test::SourceLine& line = test::SourceLine::here()) {
    constexpr int kPollsWithoutPause = 1000;
    test::Wait patience(kPatience);
    for (int polls = 1; !condition(); ++polls) {
      if (::testing::Test::HasFatalFailure()) return false;
      if (patience.is_over()) {
        patience.print_report(line);
        return false;
      }
      if (polls > kPollsWithoutPause) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return true;
  }

  // Repeats `call` until `comm` has failed: that it did in time.
  template <typename Call>
  static bool fails(const Comm& comm, Call call, const test::SourceLine& line = test::SourceLine::here()) {
    return eventually(
        [&] {
          // Not error(): the monitor may fail the comm between two calls.
          if (comm.failure_text() == nullptr) call();
          return comm.failure_text() != nullptr;
        },
        line);
  }
  // The same by its progress alone.
  template <typename C>
  static bool fails(C& comm, const test::SourceLine& line = test::SourceLine::here()) {
    return fails(
        comm, [&] { comm.progress(); }, line);
  }

  void connect(std::size_t from = 0, std::size_t to = 0, int traffic_class = -1) {
    ASSERT_NE(context_, nullptr);
    std::array<std::uint8_t, wire::kHandleBytes> handle{};
    Result<ListenComm*> listen = context_->listen(to, handle);
    ASSERT_TRUE(listen);
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while ((send_ == nullptr || recv_ == nullptr) && std::chrono::steady_clock::now() < end) {
      if (send_ == nullptr) {
        Result<SendComm*> send = context_->connect(from, handle, traffic_class);
        ASSERT_TRUE(send);
        send_ = *send;
      }
      if (recv_ == nullptr) {
        Result<RecvComm*> recv = context_->accept(**listen);
        ASSERT_TRUE(recv);
        recv_ = *recv;
      }
    }
    ASSERT_NE(send_, nullptr);
    ASSERT_NE(recv_, nullptr);
    context_->close(**listen);
  }

  Context& context() { return *context_; }
  SendComm& send() { return *send_; }
  RecvComm& recv() { return *recv_; }

  template <typename T>
  std::unique_ptr<MemoryHandle> reg(Comm& comm, std::vector<T>& buffer, MemoryType type = MemoryType::kHost) {
    Result<std::unique_ptr<MemoryHandle>> handle =
        comm.register_memory({.address = buffer.data(), .bytes = buffer.size() * sizeof(T), .type = type});
    EXPECT_TRUE(handle);
    return handle ? std::move(*handle) : nullptr;
  }

  // nullptr: not yet, or the comm has failed.
  Request* isend(const void* data, std::size_t bytes, int tag, const MemoryKeys& memory) {
    void* request = nullptr;
    const ErrorKind result = send().isend(data, bytes, tag, &memory, nullptr, &request);
    EXPECT_EQ(result == ErrorKind::kNone, send().error() == nullptr);
    return static_cast<Request*>(request);
  }
  Request* irecv(std::span<const RecvBuffer> buffers, bool optional_completion = false) {
    void* data[wire::kMaxGroup];
    std::size_t sizes[wire::kMaxGroup];
    int tags[wire::kMaxGroup];
    void* handles[wire::kMaxGroup];
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      data[i] = buffers[i].data;
      sizes[i] = buffers[i].bytes;
      tags[i] = buffers[i].tag;
      handles[i] = buffers[i].memory;
    }
    void* request = optional_completion ? kOptionalCompletion : nullptr;
    const ErrorKind result = recv().irecv(static_cast<int>(buffers.size()), data, sizes, tags, handles, &request);
    EXPECT_EQ(result == ErrorKind::kNone, recv().error() == nullptr);
    return static_cast<Request*>(request);
  }
  // Takes back a request that is done: the sizes that test reports.
  std::array<int, wire::kMaxGroup> is_completed(Request* request) {
    if (auto known = tested_.extract(request)) return known.mapped();
    EXPECT_TRUE(test(request));
    return tested_.extract(request).mapped();
  }

  // Repeats `post` until it yields a request.
  template <typename Post>
  Request* posted(Post post, const test::SourceLine& line = test::SourceLine::here()) {
    Request* request = nullptr;
    const auto post_or_progress = [&] {
      request = post();
      if (request == nullptr) progress();
      return request != nullptr;
    };
    EXPECT_TRUE(eventually(post_or_progress, line)) << "nothing was posted in time";
    return request;
  }

  bool wait(Request* request, const test::SourceLine& line = test::SourceLine::here()) {
    // An arrival word is looked at by the test of its own request alone.
    const auto done = [&] {
      return request->kind == RequestKind::kRecvAtomic ? test(request) : request->state == RequestState::kDone;
    };
    bool is_done = false;
    eventually(
        [&] {
          is_done = done();
          if (!is_done) progress();
          return is_done || failed();
        },
        line);
    return is_done;
  }

  void progress() {
    send_->progress();
    recv_->progress();
  }
  bool failed() const { return send_->error() != nullptr || recv_->error() != nullptr; }

 private:
  bool test(Request* request) {
    std::array<int, wire::kMaxGroup>& sizes = tested_[request];
    const auto test = request->kind == RequestKind::kSend   ? SendComm::test
                      : request->kind == RequestKind::kRecv ? RecvComm::test
                                                            : RecvComm::test_atomic;
    int done = 0;
    test(*request, &done, sizes.data());
    if (done == 0) tested_.erase(request);
    return done == 1;
  }

  std::map<Request*, std::array<int, wire::kMaxGroup>> tested_;  // done, and not yet asked for
  Context* context_ = nullptr;
  SendComm* send_ = nullptr;
  RecvComm* recv_ = nullptr;
};

// A buffer at each end of a connection, registered there.
template <typename T = std::uint8_t>
class Buffers {
 public:
  Buffers(ConnectedComms& link, std::vector<T> content)
      : source(std::move(content)),
        target(source.size()),
        send_memory(link.reg(link.send(), source)),
        recv_memory(link.reg(link.recv(), target)),
        link_(link) {}
  Buffers(ConnectedComms& link, std::size_t count) : Buffers(link, std::vector<T>(count)) {}

  // For so many bytes at the start of the target.
  Request* irecv(std::size_t bytes, int tag = 0, bool optional_completion = false) {
    const RecvBuffer buffer{target.data(), bytes, tag, recv_memory.get()};
    return link_.irecv({&buffer, 1}, optional_completion);
  }
  // So many bytes of the source.
  Request* isend(std::size_t bytes, int tag = 0) { return link_.isend(source.data(), bytes, tag, *send_memory); }
  // After a receive with optional completion: nothing but the bytes says that they are visible.
  bool has_come() const {
    return ConnectedComms::eventually([&] { return test::shows(target, source); });
  }

  std::vector<T> source;
  std::vector<T> target;
  const std::unique_ptr<MemoryHandle> send_memory;
  const std::unique_ptr<MemoryHandle> recv_memory;

 private:
  ConnectedComms& link_;
};

inline std::vector<std::uint8_t> pattern(std::size_t bytes, std::uint64_t seed) {
  std::vector<std::uint8_t> data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::uint8_t>((i + seed) * 0x9e3779b97f4a7c15 >> 56);
  return data;
}

}  // namespace verbatim
