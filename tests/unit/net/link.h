// Two ends of one connection inside this process, over the verbs library that the environment names.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <vector>

#include "net/net.h"
#include "net/recv_comm.h"
#include "net/send_comm.h"

namespace verbatim {

// One member of a grouped receive.
struct RecvBuffer {
  void* data;
  std::size_t bytes;
  int tag;
  MemoryHandle* memory;
};

class Link {
 public:
  static constexpr auto kPatience = std::chrono::seconds(20);

  // Environment variables must be set before.
  explicit Link(int traffic_class = -1) {
    Result<Context*> context = open_context(traffic_class);
    EXPECT_TRUE(context);
    if (context) context_ = *context;
  }
  ~Link() {
    if (context_ != nullptr) close_context(context_);
  }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

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
    const ErrorKind result = send().isend(data, bytes, tag, memory, &request);
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
    const ErrorKind result =
        recv().irecv<std::size_t>(static_cast<int>(buffers.size()), data, sizes, tags, handles, &request);
    EXPECT_EQ(result == ErrorKind::kNone, recv().error() == nullptr);
    return static_cast<Request*>(request);
  }
  // Takes back a request that is done: the sizes that test reports.
  std::array<int, wire::kMaxGroup> taken_back(Request* request) {
    if (auto known = tested_.extract(request)) return known.mapped();
    EXPECT_TRUE(test(request));
    return tested_.extract(request).mapped();
  }

  // Repeats `post` until it yields a request.
  template <typename Post>
  Request* posted(Post post) {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (std::chrono::steady_clock::now() < end) {
      if (Request* request = post()) return request;
      send_->progress();
      recv_->progress();
    }
    ADD_FAILURE() << "nothing was posted in time";
    return nullptr;
  }

  bool wait(Request* request) {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    // An arrival word is looked at by the test of its own request alone.
    const auto done = [&] {
      return request->kind == RequestKind::kRecvAtomic ? test(request) : request->state == RequestState::kDone;
    };
    bool is_done = done();
    while (!is_done && std::chrono::steady_clock::now() < end) {
      send_->progress();
      recv_->progress();
      if (send_->error() != nullptr || recv_->error() != nullptr) break;
      is_done = done();
    }
    return is_done;
  }

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

inline std::vector<std::uint8_t> pattern(std::size_t bytes, std::uint64_t seed) {
  std::vector<std::uint8_t> data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::uint8_t>((i + seed) * 0x9e3779b97f4a7c15 >> 56);
  return data;
}

}  // namespace verbatim
