// The sending end of a connection. The receiver writes CTS entries into our ring; isend gives its message to the first
// member of the head group that carries its tag; when the group is complete its data goes out as RDMA WRITEs and one
// immediate per QP used.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "net/comm.h"
#include "wire/completion.h"
#include "wire/cts.h"

namespace verbatim {

class SendComm final : public Comm {
 public:
  // What a comm on `devices` ports needs of its endpoint, with so many QPs on each.
  static EndpointSizes endpoint_sizes(std::size_t devices, std::size_t qps_per_device);

  // `remote_devices`: how many the listening side has, which fixes the layout of the ring.
  static Result<std::unique_ptr<SendComm>> create(Context& context, Endpoint endpoint, std::size_t remote_devices);

  Status connect(const wire::Hello& remote, int traffic_class) override;

  // Sends `bytes` at `data` to the next receive with `tag`. nullptr: not yet, call again; or the comm has failed, see
  // error().
  Request* isend(const void* data, std::size_t bytes, int tag, const MemoryKeys& memory);

  bool quiet() const override;
  // A send that is under way needs only its acknowledgement.
  bool needs_peer() const override { return false; }

  // Drives the comm: completions, and what is left of a message that did not fit the send queues.
  void progress();

  // Ends a request that is done: its bytes.
  std::size_t retire(Request& request) {
    request.state = RequestState::kFree;
    return static_cast<SendRequest&>(request).bytes;
  }

 private:
  struct SendRequest : Request {
    std::uint8_t group_size = 0;   // of the group's first member
    std::uint32_t parts_left = 0;  // of the group's first member: QPs that have not finished
    const MemoryKeys* memory = nullptr;
    std::uint64_t data = 0;
    std::uint64_t bytes = 0;
  };

  // What the data path needs of a QP, side by side.
  struct SendQueue {
    ibv_qp* qp = nullptr;
    std::uint32_t free = 0;         // work requests that it still takes
    std::uint32_t record_rkey = 0;  // of the peer's size records
    std::uint32_t inline_bytes = 0;
    std::uint8_t device = 0;
    std::uint8_t remote_device = 0;
  };

  // The head group from the moment when all of its CTS entries are there. Each member's WRITE is formatted as its
  // message comes, for the usual case that the whole group leaves over one QP, a work request a member.
  struct Head {
    std::uint32_t open = 0;  // bit i: member i waits for its message; 0: no group has been looked at
    std::uint32_t group_size = 0;
    std::uint32_t index = 0;      // ring index of the first member
    std::uint32_t formatted = 0;  // work requests
    std::uint64_t bytes = 0;
    std::uint64_t unfilled = 0;  // bytes of the buffers that stay as they are
    const std::byte* entries = nullptr;
    std::size_t key_offset = 0;  // from an entry to the key for the QP that will carry the group
    std::uint64_t wr_id = 0;     // of work requests that are reported only if they fail
    std::uint8_t device = 0;     // of that QP
  };

  // A group that takes more: stripes, pieces, or more room than its QP has. It waits here for room, one at a time.
  struct Posting {
    bool active = false;
    wire::SizeSource sizes = wire::SizeSource::kPosted;
    std::uint32_t first_member = 0;  // number of the group's first member
    std::uint32_t group_size = 0;
    std::uint32_t parts = 1;
    std::uint32_t first_queue = 0;
    std::uint32_t part = 0;  // where we are: part, member, bytes of the member's stripe already posted
    std::uint32_t member = 0;
    std::uint64_t stripe_done = 0;
  };

  // Work requests posted with one doorbell.
  static constexpr std::uint32_t kBatch = 16;

  const void* written_by_peer() const override { return control_.data(); }

  SendComm(Context& context, Endpoint endpoint, ControlMemory control, std::size_t remote_devices);

  const wire::CtsHead& entry(std::uint32_t index) const {
    return *reinterpret_cast<const wire::CtsHead*>(control_.data() + index * entry_bytes_);
  }
  bool ready(const std::byte* entry, std::uint32_t member) const {
    const auto* word = reinterpret_cast<const std::uint32_t*>(entry + ready_offset_);
    // Pairs with the device's write of the entry: what lies before `ready` is read after it.
    return __atomic_load_n(word, __ATOMIC_ACQUIRE) == member + 1;
  }
  std::uint32_t remote_key(std::uint32_t index, std::size_t remote_device) const;
  wire::SizeRecord& record_shadow() const;

  Request* send_single(std::uint32_t index, const void* data, std::size_t bytes, int tag, const MemoryKeys& memory);
  bool open_group(std::uint32_t index);
  Request* find_member(const void* data, std::size_t bytes, int tag, const MemoryKeys& memory);
  Request* take(std::uint32_t member, const void* data, std::size_t bytes, const MemoryKeys& memory);
  void post_group(SendRequest& first);
  void post_last(SendRequest& first, SendQueue& queue, std::uint32_t queue_index, ibv_send_wr& last,
                 const wire::Immediate& immediate, std::uint32_t count, std::uint32_t group_size);
  void tell_sizes(std::uint32_t index, std::uint32_t group_size) const;
  void post(SendQueue& queue, ibv_send_wr& last);
  bool separates_completion(std::uint64_t bytes) const {
    return adaptive_routing_ && bytes > adaptive_routing_threshold_;
  }
  bool finish_posting();
  bool refuse_entry();
  void fail_send(const ibv_wc& completion);
  Request* refuse_size(std::size_t bytes, const wire::CtsHead& wanted);
  void start_posting(std::uint32_t first_member, std::uint32_t group_size);
  void continue_posting();
  bool next_piece(const SendQueue& queue, ibv_send_wr& work, ibv_sge& segment);
  void finish_part(const SendQueue& queue, ibv_send_wr& work, ibv_sge& segment, std::uint32_t index,
                   std::uint32_t group_size, wire::SizeSource sizes);
  std::uint64_t stripe_begin(std::uint64_t bytes, std::uint32_t part) const;
  void complete(const ibv_wc& completion);

  const std::size_t entry_bytes_;
  const std::size_t ready_offset_;
  std::uint32_t head_ = 0;  // number of the head group's first member
  Head group_;
  std::uint32_t next_queue_ = 0;
  std::uint32_t max_piece_bytes_ = 0;
  bool adaptive_routing_ = false;
  std::uint64_t adaptive_routing_threshold_ = 0;
  std::uint64_t stripe_threshold_ = 0;  // groups of at least this many bytes go over all QPs
  std::uint64_t complex_bytes_ = 0;     // smaller ones go over one QP, a work request a member
  std::uint64_t record_address_ = 0;    // the peer's size records
  std::vector<SendQueue> queues_;
  Posting posting_;
  std::array<ibv_send_wr, kBatch> work_ = {};  // formatted once, linked
  std::array<ibv_sge, kBatch> segments_ = {};
  std::array<SendRequest, wire::kRingEntries> requests_;
};

}  // namespace verbatim
