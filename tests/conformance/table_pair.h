// A connection of a process with itself through the plugin's table v12. For tests in a forked child (support/child.h):
// each child loads the plugin and softverbs anew, with its own faults.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "netapi/log.h"
#include "netapi/plugin.h"
#include "traffic.h"

namespace conformance {

class TablePair {
 public:
  static constexpr int kMerged = -1;  // devices 0 and 1 as one

  // The plugin is CONFORMANCE_PLUGIN, and its warnings go to stderr. `device`: of both ends.
  explicit TablePair(int device) {
    netapi::set_log_callback([](const netapi::LogLine& line) {
      if (line.level == nccl::DebugLogLevel::kWarn) std::fprintf(stderr, "%s\n", line.text.c_str());
    });
    netapi::Opened opened = netapi::open_plugin(std::getenv("CONFORMANCE_PLUGIN"), 12);
    EXPECT_NE(opened.plugin, nullptr) << opened.error;
    if (opened.plugin == nullptr) return;
    net_ = std::move(opened.plugin);
    EXPECT_EQ(net_->init(1, {}, &context_), nccl::Result::kSuccess);
    if (device == kMerged) {
      EXPECT_EQ(net_->make_vdevice({0, 1}, &device), nccl::Result::kSuccess);
    }
    if (context_ != nullptr) connect(device);
  }
  ~TablePair() {
    if (send_comm != nullptr) net_->close_send(send_comm);
    if (recv_comm != nullptr) net_->close_recv(recv_comm);
    if (context_ != nullptr) net_->finalize(context_);
  }
  TablePair(const TablePair&) = delete;
  TablePair& operator=(const TablePair&) = delete;

  explicit operator bool() const { return send_comm != nullptr && recv_comm != nullptr; }

  // Registered until the comm is closed, so the memory must live longer than this object.
  void* reg(void* comm, std::vector<std::uint8_t>& memory, int type = nccl::kPtrHost) {
    void* handle = nullptr;
    EXPECT_EQ(net_->reg_mr(comm, memory.data(), memory.size(), type, &handle), nccl::Result::kSuccess);
    return handle;
  }

  // Returns when the receiver has announced a buffer for it. nullptr: an error, or none in time.
  void* isend_when_possible(std::span<std::uint8_t> data, int tag, void* handle) {
    void* request = nullptr;
    eventually([&] {
      result_ = net_->isend(send_comm, data.data(), data.size(), tag, handle, &request);
      return request != nullptr || result_ != nccl::Result::kSuccess;
    });
    return request;
  }
  struct Buffer {
    std::span<std::uint8_t> data;
    int tag;
    void* handle;
  };
  // nullptr: not now, or an error.
  void* irecv(const std::vector<Buffer>& buffers, bool optional_completion = false) {
    std::vector<void*> data;
    std::vector<std::size_t> sizes;
    std::vector<int> tags;
    std::vector<void*> handles;
    for (const Buffer& buffer : buffers) {
      data.push_back(buffer.data.data());
      sizes.push_back(buffer.data.size());
      tags.push_back(buffer.tag);
      handles.push_back(buffer.handle);
    }
    void* request = nullptr;
    if (optional_completion) request = reinterpret_cast<void*>(nccl::kNetOptionalRecvCompletion);
    result_ = net_->irecv(recv_comm, static_cast<int>(buffers.size()), data.data(), sizes.data(), tags.data(),
                          handles.data(), &request);
    return request;
  }
  // Tests all of them in turn. False: an error, a request that is nullptr, or not done in time.
  bool wait_for_all(std::vector<void*> requests) {
    if (std::ranges::count(requests, nullptr) != 0) return false;
    return eventually([&] {
             std::erase_if(requests,
                           [&](void* request) { return result_ == nccl::Result::kSuccess && is_done(request); });
             return requests.empty() || result_ != nccl::Result::kSuccess;
           }) &&
           result_ == nccl::Result::kSuccess;
  }
  bool wait(void* request) { return wait_for_all({request}); }
  // Sends one message and waits for both ends, which are polled in turn.
  bool exchange(std::span<std::uint8_t> from, void* send_handle, std::span<std::uint8_t> to, void* recv_handle) {
    void* receive = nullptr;
    void* send = nullptr;
    bool received = false;
    bool sent = false;
    return eventually([&] {
             if (receive == nullptr) {
               receive = irecv({{to, 0, recv_handle}});
             } else if (!received) {
               received = is_done(receive);
             }
             if (result_ != nccl::Result::kSuccess) return true;
             if (send == nullptr) {
               result_ = net_->isend(send_comm, from.data(), from.size(), 0, send_handle, &send);
             } else if (!sent) {
               sent = is_done(send);
             }
             return (received && sent) || result_ != nccl::Result::kSuccess;
           }) &&
           result_ == nccl::Result::kSuccess;
  }
  bool flush(std::vector<std::uint8_t>& target, void* handle) {
    void* data = target.data();
    int size = static_cast<int>(target.size());
    void* request = nullptr;
    EXPECT_EQ(net_->iflush(recv_comm, 1, &data, &size, &handle, &request), nccl::Result::kSuccess);
    return wait(request);
  }

  // Calls `poll` until it returns true; false at the deadline.
  static bool eventually(const std::function<bool()>& poll) {
    verbatim::test::Wait patience(kDeadline);
    while (!poll()) {
      if (patience.is_over()) {
        patience.print_report(verbatim::test::SourceLine::here());
        return false;
      }
      patience.rest();
    }
    return true;
  }

  void* send_comm = nullptr;
  void* recv_comm = nullptr;

 private:
  bool is_done(void* request) {
    int done = 0;
    std::array<int, netapi::kMaxGroup> sizes{};
    result_ = net_->test(request, &done, sizes.data());
    return done != 0;
  }

  void connect(int device) {
    alignas(8) unsigned char handle[nccl::kNetHandleMaxBytes] = {};
    void* listen_comm = nullptr;
    EXPECT_EQ(net_->listen(context_, device, handle, &listen_comm), nccl::Result::kSuccess);
    if (listen_comm == nullptr) return;
    eventually([&] {
      if (send_comm == nullptr) result_ = net_->connect(context_, device, handle, &send_comm);
      if (recv_comm == nullptr && result_ == nccl::Result::kSuccess) result_ = net_->accept(listen_comm, &recv_comm);
      return result_ != nccl::Result::kSuccess || (send_comm != nullptr && recv_comm != nullptr);
    });
    EXPECT_EQ(net_->close_listen(listen_comm), nccl::Result::kSuccess);
  }

  std::unique_ptr<netapi::Plugin> net_;
  void* context_ = nullptr;
  nccl::Result result_ = nccl::Result::kSuccess;  // of the last call
};

}  // namespace conformance
