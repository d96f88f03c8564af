// Both ends of connections within this process, driven as NCCL's progress thread drives them.
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

// A plugin and one context of it. Throws Failure where the plugin fails.
class PluginUnderTest {
 public:
  explicit PluginUnderTest(std::unique_ptr<netapi::Plugin> plugin);
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
  int max_recvs_ = 1;
};

// Groups of `group` messages of `bytes` each over one connection, `kAhead` receives always posted; with `optional`
// those of one message without completion, so that their data is awaited in memory. Throws Failure when a call fails or
// a byte is wrong.
class GroupTransfer {
 public:
  static constexpr int kAhead = 8;

  GroupTransfer(PluginUnderTest& subject, ConnectionPair ends, std::size_t bytes, int group, bool optional = false);
  ~GroupTransfer();
  GroupTransfer(const GroupTransfer&) = delete;
  GroupTransfer& operator=(const GroupTransfer&) = delete;

  // One at a time: sent, tested until both sides are done, and the receive posted again.
  void run(int groups);
  // The receives that are posted, as a step of their own: then `send`, `finish_sends`, `finish_receives` for as many.
  void post_receives();
  void send();
  void finish_sends();
  void finish_receives();
  // Tests that find nothing, and sends that no receive waits for; with receives posted, or none.
  void test_incomplete(int times);
  void send_without_receive(int times);

  // What was sent last lies in the receive buffers.
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
  std::vector<void*> places_;
  std::vector<std::size_t> sizes_;
  std::vector<int> tags_;
  std::vector<void*> handles_;
  std::vector<Receive> receives_;  // kAhead, oldest at `oldest_`
  std::size_t oldest_ = 0;
  std::vector<void*> sends_;
};

}  // namespace verbatim::perf::cost
