// Connections with both ends in this process, called as NCCL's progress thread does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "netapi/plugin.h"

namespace verbatim::perf::cost {

struct ConnectionPair {
  void* send = nullptr;
  void* recv = nullptr;
};

// A plugin with one context. Used by one thread. Throws Failure when the plugin fails.
class PluginUnderTest {
 public:
  // `merge`: connections have the plugin's first `merge` devices as ports.
  PluginUnderTest(std::unique_ptr<netapi::Plugin> plugin, int merge);
  ~PluginUnderTest();
  PluginUnderTest(const PluginUnderTest&) = delete;
  PluginUnderTest& operator=(const PluginUnderTest&) = delete;

  netapi::Plugin& plugin() { return *plugin_; }
  int max_recvs() const { return max_recvs_; }

  ConnectionPair connect();
  void close(ConnectionPair ends);

 private:
  std::unique_ptr<netapi::Plugin> plugin_;
  void* context_ = nullptr;
  int device_ = 0;
  int max_recvs_ = 1;
  bool close_failed_ = false;  // and was reported
};

// Transfers groups of `group` messages of `bytes` each over one connection, with `kAhead` receives always posted. With
// `optional`, receives of one message have optional completion, and the arrival of their data is seen in memory. Each
// receive has `room` bytes more than its message. Throws Failure when a call fails or a byte is wrong.
class GroupTransfer {
 public:
  static constexpr int kAhead = 8;

  GroupTransfer(PluginUnderTest& subject, ConnectionPair ends, std::size_t bytes, int group, bool optional = false,
                std::size_t room = 0);
  ~GroupTransfer();
  GroupTransfer(const GroupTransfer&) = delete;
  GroupTransfer& operator=(const GroupTransfer&) = delete;

  // Transfers one group at a time: sends it, tests until both ends are complete, and posts the receive again.
  void run(int groups);
  // The steps of a batch of kAhead groups, to be measured separately, in this order.
  void post_receives();
  void send();
  void finish_sends();
  void finish_receives();
  // Calls of test without a completion (receives must be posted), and of isend without a matching receive (none
  // posted).
  void test_incomplete(int times);
  void send_without_receive(int times);

  // Compares the receive buffers with what was sent last.
  void check() const;

 private:
  struct Receive {
    void* request = nullptr;
  };

  void post_receive(Receive& receive);
  void send_group();
  void finish(void* request);
  void invalidate_target();
  void wait_for_target() const;

  netapi::Plugin& plugin_;
  const ConnectionPair ends_;
  const std::size_t bytes_;
  const std::size_t group_;
  const bool optional_;
  std::vector<std::byte> source_;
  std::vector<std::byte> target_;
  void* source_handle_ = nullptr;
  void* target_handle_ = nullptr;
  std::vector<void*> buffers_;
  std::vector<std::size_t> sizes_;
  std::vector<int> tags_;
  std::vector<void*> handles_;
  std::vector<Receive> receives_;  // kAhead, oldest at `oldest_`
  std::size_t oldest_ = 0;
  std::vector<void*> sends_;
};

}  // namespace verbatim::perf::cost
