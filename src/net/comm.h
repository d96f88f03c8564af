// What a send comm and a receive comm share: their end of the connection, the side channel, and the first error.
//
// Threads: isend, irecv, iflush and test of one comm come from one thread at a time (NCCL's progress thread); while
// they run, another thread may register memory, which touches only `ports`, the devices' own locked caches and, on a
// receive comm, the locked making of its flush QPs.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/result.h"
#include "net/endpoint.h"
#include "net/memory.h"
#include "net/request.h"
#include "wire/handshake.h"

namespace verbatim {

class Context;

// What the control thread tells a comm: bits of its signal word.
enum class CommSignal : std::uint32_t { kPeerClosed = 0x1, kPeerGone = 0x2, kDeviceFailed = 0x4 };

enum class CommKind : std::uint8_t { kSend, kRecv };

class Comm {
 public:
  virtual ~Comm() = default;
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  CommKind kind() const { return kind_; }
  Context& context() const { return context_; }
  Endpoint& endpoint() { return endpoint_; }
  const Endpoint& endpoint() const { return endpoint_; }

  // Moves the QPs to RTS towards `remote` and remembers what the data path needs of it.
  virtual Status connect(const wire::Hello& remote, int traffic_class) = 0;

  // What the peer is told about this end; the secret and identity are the caller's to add.
  wire::Hello hello() const;

  void keep_side_channel(UniqueFd socket) { side_channel_ = std::move(socket); }
  const UniqueFd& side_channel() const { return side_channel_; }

  // Any thread: the data path sees it at its next progress.
  void raise(CommSignal signal) { signals_.fetch_or(static_cast<std::uint32_t>(signal), std::memory_order_release); }

  bool uses(const Device& device) const;
  bool uses(const ibv_qp& qp) const;
  bool uses(const ibv_cq& cq) const;
  // Asks the device whether all QPs are sound: they are in no error state.
  bool qps_stand() const;

  // Whether every request has finished: then the QPs may outlive the caller's buffers.
  virtual bool quiet() const = 0;
  // Whether what is outstanding waits for the peer to do more than acknowledge.
  virtual bool needs_peer() const = 0;
  // Stops all work at once: the buffers are the caller's again.
  void abort();

  // Any thread.
  virtual Result<std::unique_ptr<MemoryHandle>> register_memory(const MrRequest& request);

  // The first error; every call answers with it from then on.
  const Error* error() const { return failed_ ? &error_ : nullptr; }

 protected:
  Comm(CommKind kind, Context& context, Endpoint endpoint, ControlMemory control);

  // Any thread. Of a receive comm, which has QPs of its own for flushes.
  virtual bool flushes_with(const ibv_qp&) const { return false; }

  // The part of the control memory that the peer writes: the CTS ring or the size records.
  virtual const void* written_by_peer() const = 0;

  // Logs and keeps the first error of the comm; the ones that follow from it are silent.
  void fail(ErrorKind kind, const char* operation, const std::string& what);
  // The same for a completion that reports a failure. `operation` says what the work request was for.
  void fail_completion(const ibv_wc& completion, std::size_t qp, const std::string& operation);
  void fail_post(const char* operation, int returned, std::size_t qp);
  // Hands `complete` what the completion queues hold, up to a batch of each: whether that was all of it.
  template <typename Complete>
  bool take_completions(Complete complete) {
    constexpr int kBatch = 8;
    bool all = true;
    for (const UniqueCq& cq : endpoint_.cqs()) {
      ibv_wc completions[kBatch];
      const int count = ibv_poll_cq(cq.get(), kBatch, completions);
      all = all && count < kBatch;
      for (int i = 0; i < count; ++i) complete(completions[i]);
      if (count < 0) fail_poll();
    }
    return all;
  }
  void fail_poll();
  // Only when everything that has arrived was taken in: the completion queues were found empty. `starved`: the caller
  // waits for something of the peer.
  void hear_signals(bool starved) {
    if (signals_.load(std::memory_order_relaxed) != 0) obey_signals(starved);
  }

  Context& context_;
  ControlMemory control_;  // outlives the QPs through which the peer writes it
  Endpoint endpoint_;

 private:
  void obey_signals(bool starved);

  const CommKind kind_;
  std::atomic<std::uint32_t> signals_{0};
  std::uint64_t peer_end_seen_ns_ = 0;
  bool failed_ = false;
  Error error_;
  UniqueFd side_channel_;
};

// The registrable ends of connections, from NCCL's void*.
inline Comm* as_comm(void* comm) {
  return static_cast<Comm*>(comm);
}

}  // namespace verbatim
