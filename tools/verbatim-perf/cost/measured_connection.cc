#include "verbatim-perf/cost/measured_connection.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>

#include "nccl/types.h"
#include "netapi/log.h"
#include "ranks/failure.h"
#include "ranks/loaded_plugin.h"
#include "workload/content.h"

namespace verbatim::perf::cost {
namespace {

constexpr auto kTimeout = std::chrono::seconds(60);
constexpr int kMaxAttempts = 1'000'000;  // of a call that is not ready; reading a clock is too slow under valgrind
constexpr int kFirstTag = 100;

}  // namespace

PluginUnderTest::PluginUnderTest(std::unique_ptr<netapi::Plugin> plugin, int merge) : plugin_(std::move(plugin)) {
  ranks::require(plugin_->init(1, {}, &context_), "init");
  int devices = 0;
  ranks::require(plugin_->devices(&devices), "devices");
  if (devices == 0) throw ranks::Failure("the plugin has no device; run under tools/softverbs");
  device_ = ranks::merge_devices(*plugin_, devices, merge);
  netapi::Properties properties;
  ranks::require(plugin_->properties(device_, &properties), "getProperties");
  max_recvs_ = properties.max_recvs;
}

PluginUnderTest::~PluginUnderTest() {
  plugin_->finalize(context_);
}

ConnectionPair PluginUnderTest::connect() {
  alignas(16) std::array<char, nccl::kNetHandleMaxBytes> handle{};
  void* listen = nullptr;
  ranks::require(plugin_->listen(context_, device_, handle.data(), &listen), "listen");
  ConnectionPair ends;
  const auto end = std::chrono::steady_clock::now() + kTimeout;
  while (ends.send == nullptr || ends.recv == nullptr) {
    if (ends.send == nullptr) ranks::require(plugin_->connect(context_, device_, handle.data(), &ends.send), "connect");
    if (ends.recv == nullptr) ranks::require(plugin_->accept(listen, &ends.recv), "accept");
    if (std::chrono::steady_clock::now() > end) throw ranks::Failure("a connection was not established within 60 s");
  }
  ranks::require(plugin_->close_listen(listen), "closeListen");
  return ends;
}

// A plugin whose close fails can still be measured.
void PluginUnderTest::close(ConnectionPair ends) {
  const auto report = [&](nccl::Result result, const char* call) {
    if (result == nccl::Result::kSuccess || std::exchange(close_failed_, true)) return;
    std::fprintf(stderr, "verbatim-perf: %s of %s: %s\n", call, plugin_->name(), netapi::result_name(result));
  };
  report(plugin_->close_send(ends.send), "closeSend");
  report(plugin_->close_recv(ends.recv), "closeRecv");
}

GroupTransfer::GroupTransfer(PluginUnderTest& subject, ConnectionPair ends, std::size_t bytes, int group, bool optional,
                             std::size_t room)
    : plugin_(subject.plugin()),
      ends_(ends),
      bytes_(bytes),
      group_(static_cast<std::size_t>(group)),
      optional_(optional && group == 1),
      source_(std::max<std::size_t>(bytes * group_, 1)),
      target_(source_.size() + room),
      sizes_(group_, bytes + room),
      receives_(kAhead) {
  workload::Pattern(1, bytes).produce(source_.data(), source_.size(), 0);
  ranks::require(plugin_.reg_mr(ends_.send, source_.data(), source_.size(), nccl::kPtrHost, &source_handle_), "regMr");
  ranks::require(plugin_.reg_mr(ends_.recv, target_.data(), target_.size(), nccl::kPtrHost, &target_handle_), "regMr");
  for (std::size_t i = 0; i < group_; ++i) {
    buffers_.push_back(target_.data() + i * bytes_);
    tags_.push_back(kFirstTag + static_cast<int>(i));
    handles_.push_back(target_handle_);
  }
  sends_.reserve(group_ * kAhead);
}

GroupTransfer::~GroupTransfer() {
  plugin_.dereg_mr(ends_.send, source_handle_);
  plugin_.dereg_mr(ends_.recv, target_handle_);
}

void GroupTransfer::post_receive(Receive& receive) {
  for (int attempt = 0; receive.request == nullptr; ++attempt) {
    if (optional_) receive.request = reinterpret_cast<void*>(nccl::kNetOptionalRecvCompletion);
    ranks::require(plugin_.irecv(ends_.recv, static_cast<int>(group_), buffers_.data(), sizes_.data(), tags_.data(),
                                 handles_.data(), &receive.request),
                   "irecv");
    if (attempt == kMaxAttempts) throw ranks::Failure("irecv returned no request in all attempts");
  }
}

void GroupTransfer::send_group() {
  for (std::size_t i = 0; i < group_; ++i) {
    void* request = nullptr;
    for (int attempt = 0; request == nullptr; ++attempt) {
      ranks::require(plugin_.isend(ends_.send, source_.data() + i * bytes_, bytes_, tags_[i], source_handle_, &request),
                     "isend");
      if (attempt == kMaxAttempts) throw ranks::Failure("isend returned no request in all attempts");
    }
    sends_.push_back(request);
  }
}

void GroupTransfer::finish(void* request) {
  int done = 0;
  std::array<int, netapi::kMaxGroup> sizes{};
  for (int attempt = 0; done == 0; ++attempt) {
    ranks::require(plugin_.test(request, &done, sizes.data()), "test");
    if (attempt == kMaxAttempts) throw ranks::Failure("a request did not complete in all attempts");
  }
}

// Changes the last byte of the target, so that wait_for_target() sees the next message arrive. RC writes the last byte
// last.
void GroupTransfer::invalidate_target() {
  if (bytes_ != 0) target_[bytes_ - 1] = ~source_[bytes_ - 1];
}

void GroupTransfer::wait_for_target() const {
  if (bytes_ == 0) return;
  const volatile std::byte& last = target_[bytes_ - 1];
  for (int attempt = 0; last != source_[bytes_ - 1]; ++attempt) {
    if (attempt == kMaxAttempts) throw ranks::Failure("the data of a receive with optional completion did not arrive");
  }
}

void GroupTransfer::post_receives() {
  for (Receive& receive : receives_) post_receive(receive);
  oldest_ = 0;
}

void GroupTransfer::send() {
  for (std::size_t i = 0; i < receives_.size(); ++i) send_group();
}

void GroupTransfer::finish_sends() {
  for (void* request : sends_) finish(request);
  sends_.clear();
}

void GroupTransfer::finish_receives() {
  for (Receive& receive : receives_) finish(std::exchange(receive.request, nullptr));
}

void GroupTransfer::run(int groups) {
  for (int i = 0; i < groups; ++i) {
    if (optional_) invalidate_target();
    send_group();
    finish_sends();
    finish(std::exchange(receives_[oldest_].request, nullptr));
    if (optional_) wait_for_target();
    post_receive(receives_[oldest_]);
    oldest_ = (oldest_ + 1) % receives_.size();
  }
}

void GroupTransfer::test_incomplete(int times) {
  int done = 0;
  std::array<int, netapi::kMaxGroup> sizes{};
  for (int i = 0; i < times; ++i) ranks::require(plugin_.test(receives_[oldest_].request, &done, sizes.data()), "test");
  if (done != 0) throw ranks::Failure("a receive completed, but no message was sent to it");
}

void GroupTransfer::send_without_receive(int times) {
  for (int i = 0; i < times; ++i) {
    void* request = nullptr;
    ranks::require(plugin_.isend(ends_.send, source_.data(), bytes_, tags_[0], source_handle_, &request), "isend");
    if (request != nullptr) throw ranks::Failure("isend returned a request, but no receive is posted");
  }
}

void GroupTransfer::check() const {
  if (std::memcmp(source_.data(), target_.data(), bytes_ * group_) != 0)
    throw ranks::Failure("the received data is wrong");
}

}  // namespace verbatim::perf::cost
