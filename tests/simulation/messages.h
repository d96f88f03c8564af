// The messages of one connection, and its two ends, each of which runs on a thread of its own, in one process or in
// two.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fault/dma_buf.h"
#include "netapi/plugin.h"
#include "simulation/faults.h"
#include "simulation/job_parts.h"

namespace simulation {

// The members of one receive. A member is as large as its message, or larger by `spare`.
struct Group {
  std::vector<std::size_t> sizes;
  std::vector<std::size_t> order;  // of the sends
  std::size_t spare = 0;
  // It is done when its bytes are there, as for NCCL's protocols LL and LL128: they may be written again until the send
  // is done.
  bool completes_optionally = false;
};

struct ConnectionPlan {
  std::size_t number = 0;
  std::size_t receiver = 0;  // its process
  std::size_t sender = 0;
  // NCCL closes no listen after an abort. One of a process stays: more would be closed in the order of their addresses.
  bool listen_stays = false;
  bool receives_in_gpu_memory = false;  // registered as dma-bufs, so that they are flushed
  std::vector<Group> groups;
};

// Four processes or fewer have 1 to 4 of them, more have up to as many as they are.
constexpr std::size_t kMaxConnections = kMostProcesses;
constexpr std::size_t kMaxMembers = 8;  // of a receive, as NCCL has at most
std::vector<ConnectionPlan> draw_connections(Draw& draw, std::size_t processes);
// All of its groups, or each second one, so that a buffer always has such groups or never. They have one message, all
// of the same size, so that one which is written again changes nothing behind another.
void complete_optionally(ConnectionPlan& connection, bool all);

// A connection, in one of its processes.
class Connection {
 public:
  Connection(netapi::Plugin& net, void* context, int device, const ConnectionPlan& plan, const Faults& faults,
             Handle& handle)
      : net_(net),
        context_(context),
        device_(device),
        plan_(plan),
        faults_(faults),
        handle_(handle),
        receiver_("receiver of connection " + std::to_string(plan.number), [this] { return may_fail(); }),
        sender_("sender of connection " + std::to_string(plan.number), [this] { return may_fail(); }) {}

  void receive();
  void send();
  const Calls& receiver() const { return receiver_; }
  const Calls& sender() const { return sender_; }
  std::uint64_t bytes_checked() const { return bytes_checked_; }

 private:
  static constexpr std::size_t kSlots = 4;  // groups that are under way

  // One end. A slot has the buffers of a group; groups are posted in their order.
  struct End {
    bool sends;
    Calls& call;
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
    bool works = false;
    std::array<int, netapi::kMaxGroup> sizes{};  // of the request that was tested last
  };
  using Slot = End::Slot;

  bool may_fail() const {
    return faults_.may_end_job || (faults_.may_end_setup && handle_.connected_ends < 2) || has_lost_process() ||
           ends_at_once(plan_.receiver) || ends_at_once(plan_.sender) || faults_.qp.process == plan_.receiver ||
           faults_.qp.process == plan_.sender;
  }
  // The application of this process makes no more calls but those that close.
  bool has_aborted() const { return faults_.has_aborted(own_process()); }
  bool has_lost_process() const { return faults_.has_lost(plan_.receiver) || faults_.has_lost(plan_.sender); }
  void exchange(End& end);
  void close(End& end);
  bool add_buffers(End& end);
  bool make_progress(End& end, bool& moved);
  // Where GIDs change, an end is not connected before.
  void note_that_it_works(End& end);
  void begin(const End& end, Slot& slot, std::size_t group);
  bool post_sends(End& end, Slot& slot);
  bool post_receive(End& end, Slot& slot);
  // Sets `done` when all of the group is.
  bool test(End& end, Slot& slot, bool& done);
  bool flush(End& end, Slot& slot);
  bool has_come(const Slot& slot) const;
  // The peer has failed, and only bytes could say so.
  bool waits_in_vain(const End& end) const;
  void check_sizes(const End& end, const Slot& slot) const;
  void check_bytes(const Slot& slot, bool is_complete);
  std::size_t needed(const End& end, std::size_t group) const {
    return end.sends ? plan_.groups[group].sizes.size() : 1;
  }

  netapi::Plugin& net_;
  void* const context_;
  const int device_;
  const ConnectionPlan& plan_;
  const Faults& faults_;
  Handle& handle_;
  Calls receiver_;
  Calls sender_;
  std::uint64_t bytes_checked_ = 0;
  std::size_t flushes_ = 0;
};

}  // namespace simulation
