// The receiving end of a connection. irecv writes CTS entries into the sender's ring; immediates tell when a group has
// arrived; iflush makes what arrived in GPU memory visible to the GPU.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "net/comm.h"
#include "net/flush.h"
#include "wire/completion.h"
#include "wire/cts.h"

namespace verbatim {

// One member of a grouped receive. Without initializers: arrays of it are filled on the data path.
struct RecvBuffer {
  void* data;
  std::size_t bytes;
  int tag;
  const MemoryKeys* memory;
};

class RecvComm final : public Comm {
 public:
  // What a comm with so many QPs, as the peer has, needs of its endpoint.
  static EndpointSizes endpoint_sizes(std::size_t qps);

  static Result<std::unique_ptr<RecvComm>> create(Context& context, Endpoint endpoint);

  Status connect(const wire::Hello& remote, int traffic_class) override;

  // Device memory needs a way to be flushed, which is made here, off the data path.
  Result<std::unique_ptr<MemoryHandle>> register_memory(const MrRequest& request) override;

  // Posts a receive of 1 to max_recvs members. nullptr: not yet, call again; or the comm has failed, see error().
  Request* irecv(std::span<const RecvBuffer> buffers);

  // Makes what arrived in `data` visible to the GPU. nullptr with no error(): there is nothing to do.
  Request* iflush(const void* data, const MemoryKeys& memory);

  bool quiet() const override;
  bool needs_peer() const override { return groups_in_flight_ != 0; }

  void progress();

  // Ends a receive that is done: `sizes[i]` is set to the bytes of member i. Answers the number of members.
  std::uint32_t retire_recv(Request& request, std::span<std::uint64_t, wire::kMaxGroup> sizes);
  void retire_flush(Request& request) { flush_.retire(request); }

 private:
  struct RecvRequest : Request {
    std::uint8_t group_size = 0;
    wire::SizeSource sizes = wire::SizeSource::kPosted;
    std::uint16_t parts_seen = 0;
    std::uint32_t first_member = 0;
    std::uint64_t bytes_counted = 0;
  };

  struct RecvQueue {
    ibv_qp* qp = nullptr;
    std::uint32_t posted = 0;  // receive work requests that wait for an immediate
  };

  // Receives are posted this many at a time.
  static constexpr std::uint32_t kReceiveBatch = 16;

  const void* written_by_peer() const override { return &records(); }
  bool flushes_with(const ibv_qp& qp) const override { return flush_.uses(qp); }

  RecvComm(Context& context, Endpoint endpoint, ControlMemory control);

  std::byte* entry(std::uint32_t index) const { return control_.data() + index * entry_bytes_; }
  wire::SizeRecord& records() const;
  Status prepare_flush();
  bool can_flush();
  void refuse_immediate(std::size_t queue);
  std::uint64_t refuse_size(std::uint64_t posted);
  bool make_room(std::uint32_t group_size);
  void write_entry(std::uint32_t index, std::uint32_t member, std::uint8_t group_size, const RecvBuffer& buffer) const;
  void post_cts(std::uint32_t first_member, std::uint32_t group_size);
  void post_receives(std::size_t queue);
  void complete(const ibv_wc& completion);
  void arrived(const ibv_wc& completion, std::size_t queue);

  const std::size_t entry_bytes_;
  std::uint32_t next_member_ = 0;
  std::uint32_t oldest_member_ = 0;  // first member of the oldest group that has not been retired
  std::uint32_t groups_in_flight_ = 0;
  std::uint32_t receive_target_ = 0;  // receive work requests to keep posted on every QP
  std::uint32_t most_receives_ = wire::kMaxInFlight + kReceiveBatch;  // that every QP can hold
  std::uint64_t ring_address_ = 0;                                    // the sender's CTS ring
  std::uint32_t ring_rkey_ = 0;
  std::uint32_t cts_free_ = 0;  // CTS work requests that QP 0 still takes
  std::uint32_t cts_unsignalled_ = 0;
  std::uint32_t cts_signal_interval_ = 1;
  ibv_send_wr cts_work_ = {};
  ibv_sge cts_segment_ = {};
  std::vector<RecvQueue> queues_;
  std::array<ibv_recv_wr, kReceiveBatch> receive_chain_ = {};  // formatted once, posted with one doorbell
  std::array<RecvRequest, wire::kMaxInFlight> requests_;
  // Bytes of the buffers by ring entry: the entries themselves lie where the peer may write.
  std::array<std::uint64_t, wire::kRingEntries> posted_;
  FlushQueue flush_;
};

}  // namespace verbatim
