// The messages of one connection, and its two ends, each of which runs on a thread of its own, in one process or in
// two.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fault/dma_buf.h"
#include "netapi/plugin.h"

namespace simulation {

// The members of one receive. A member is as large as its message, or larger by `spare`.
struct Group {
  std::vector<std::size_t> sizes;
  std::vector<std::size_t> order;  // of the sends
  std::size_t spare = 0;
};

struct ConnectionPlan {
  std::size_t receiver = 0;  // its process
  std::size_t sender = 0;
  bool receives_in_gpu_memory = false;  // registered as dma-bufs, so that they are flushed
  std::vector<Group> groups;
};

// Where the receiver leaves the handle for the sender: in memory that the processes share.
struct Handle {
  std::atomic<bool> is_there{false};
  alignas(8) std::array<unsigned char, nccl::kNetHandleMaxBytes> bytes{};
};

// A connection, in one of its processes. What happened is in `problems`, a line for each.
class Connection {
 public:
  Connection(netapi::Plugin& net, void* context, unsigned number, const ConnectionPlan& plan, Handle& handle)
      : net_(net), context_(context), number_(number), plan_(plan), handle_(handle) {}

  void receive();
  void send();
  const std::vector<std::string>& problems() const { return problems_; }
  std::uint64_t bytes_checked() const { return bytes_checked_; }

 private:
  static constexpr std::size_t kSlots = 4;  // groups that are under way

  // One end. A slot has the buffers of a group; groups are posted in their order.
  struct End {
    bool sends;
    void* comm = nullptr;
    struct Slot {
      std::unique_ptr<fault::DmaBuf> buffer;
      void* mhandle = nullptr;
      std::size_t group = 0;
      std::size_t posted = 0;  // messages, or 1 for a receive
      std::vector<void*> requests;
      void* flush = nullptr;
      bool in_use = false;
    };
    std::array<Slot, kSlots> slots{};
    std::size_t next = 0;  // the first group that is not posted completely
    std::size_t done = 0;
    std::array<int, netapi::kMaxGroup> sizes{};  // of the request that was tested last
  };
  using Slot = End::Slot;

  // False and a line in `problems` unless the call succeeds. A call of a table is a step of the simulation.
  template <typename Call>
  bool call(const End& end, const char* name, Call function);
  void exchange(End& end);
  void close(End& end);
  bool add_buffers(End& end);
  bool make_progress(End& end, bool& moved);
  void begin(const End& end, Slot& slot, std::size_t group);
  bool post_sends(End& end, Slot& slot);
  bool post_receive(End& end, Slot& slot);
  // Sets `done` when all of the group is.
  bool test(End& end, Slot& slot, bool& done);
  bool flush(End& end, Slot& slot);
  void check_sizes(const End& end, const Slot& slot);
  void check_bytes(const Slot& slot);
  std::size_t needed(const End& end, std::size_t group) const {
    return end.sends ? plan_.groups[group].sizes.size() : 1;
  }
  unsigned char content(std::size_t group, std::size_t member, std::size_t at) const;
  void add_problem(const std::string& line);

  netapi::Plugin& net_;
  void* const context_;
  const unsigned number_;
  const ConnectionPlan& plan_;
  Handle& handle_;
  std::mutex mutex_;
  std::vector<std::string> problems_;
  std::uint64_t bytes_checked_ = 0;
  std::size_t flushes_ = 0;
};

}  // namespace simulation
