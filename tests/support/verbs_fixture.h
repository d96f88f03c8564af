// Building blocks for tests of a verbs device: owned objects, an RC endpoint that connects in three calls, functions
// that post one work request. When a set-up step (opening, creating, connecting) fails, it throws; gtest then ends the
// test with a failure.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/verbs_data.h"
#include "support/verbs_library.h"
#include "support/wait.h"

namespace verbatim::test {

using namespace std::chrono_literals;
using Milliseconds = std::chrono::milliseconds;

void expect_destroyed(int result, const char* what);  // a destroy verb that fails in a destructor fails the test

template <typename T, auto Verb>
struct Destroy {
  void operator()(T* object) const { expect_destroyed((verbs().*Verb)(object), typeid(T).name()); }
};

using Context = std::unique_ptr<ibv_context, Destroy<ibv_context, &VerbsLibrary::close_device>>;
using Pd = std::unique_ptr<ibv_pd, Destroy<ibv_pd, &VerbsLibrary::dealloc_pd>>;
using Mr = std::unique_ptr<ibv_mr, Destroy<ibv_mr, &VerbsLibrary::dereg_mr>>;
using Channel = std::unique_ptr<ibv_comp_channel, Destroy<ibv_comp_channel, &VerbsLibrary::destroy_comp_channel>>;
using Cq = std::unique_ptr<ibv_cq, Destroy<ibv_cq, &VerbsLibrary::destroy_cq>>;
using Srq = std::unique_ptr<ibv_srq, Destroy<ibv_srq, &VerbsLibrary::destroy_srq>>;
using Qp = std::unique_ptr<ibv_qp, Destroy<ibv_qp, &VerbsLibrary::destroy_qp>>;
using Ah = std::unique_ptr<ibv_ah, Destroy<ibv_ah, &VerbsLibrary::destroy_ah>>;

constexpr int kAllAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

// An open device with its first active port and the GID of this port.
struct Device {
  Context context;
  ibv_device_attr attr{};
  ibv_port_attr port{};
  std::uint8_t port_num = 1;
  std::uint8_t gid_index = 0;
  ibv_gid gid{};
  Pd pd;

  bool is_roce() const { return port.link_layer == IBV_LINK_LAYER_ETHERNET; }
};

// The `ordinal`-th device that has an active port, with the first GID of the port; on RoCE the first RoCE v2 GID.
Device open_device(unsigned ordinal = 0);

Pd alloc_pd(const Device& device);
Mr reg_mr(ibv_pd* pd, void* address, std::size_t length, int access = kAllAccess);
Cq create_cq(const Device& device, unsigned cqe = 256, ibv_comp_channel* channel = nullptr, void* cq_context = nullptr);
Srq create_srq(ibv_pd* pd, unsigned max_wr = 16, unsigned max_sge = 4);

// A guarded buffer; exactly its payload is registered as one memory region.
struct Region {
  Region(ibv_pd* pd, std::size_t size, std::size_t misalign = 0, int access = kAllAccess)
      : buffer(size, misalign), mr(reg_mr(pd, buffer.data(), size, access)) {}

  ibv_sge sge(std::size_t offset, std::size_t length) const {
    return {buffer.address() + offset, static_cast<std::uint32_t>(length), mr->lkey};
  }
  ibv_sge sge() const { return sge(0, buffer.size()); }
  std::span<std::byte> bytes(std::size_t offset, std::size_t length) const {
    return buffer.bytes().subspan(offset, length);
  }
  void fill(std::uint64_t seed) const { fill_pattern(buffer.bytes(), seed); }
  std::uint64_t address(std::size_t offset = 0) const { return buffer.address() + offset; }

  GuardedBuffer buffer;
  Mr mr;
};

// The address of a QP for its peer. Trivially copyable, because it is sent between processes.
struct Address {
  std::uint32_t qp_num;
  std::uint32_t psn;
  std::uint16_t lid;
  std::uint16_t is_roce;
  ibv_gid gid;
};

// Reliability settings of one QP, in the units of ibv_qp_attr. With the defaults a peer that does not respond is given
// up after 0.5 s.
struct Timers {
  std::uint8_t timeout = 14;        // 4.096 us * 2^14 = 67 ms per attempt
  std::uint8_t retry_count = 7;     // attempts after the first one
  std::uint8_t rnr_retry = 7;       // 7: no limit
  std::uint8_t min_rnr_timer = 12;  // 0.64 ms; the peer waits this long after an RNR NAK
};

struct EndpointOptions {
  unsigned send_wr = 64;
  unsigned recv_wr = 64;
  unsigned send_sge = 4;
  unsigned recv_sge = 4;
  unsigned inline_bytes = 64;
  bool signal_all = false;
  int access = kAllAccess;
  Timers timers{};
  std::optional<std::uint32_t> psn = std::nullopt;  // first PSN sent; derived from the QP number when not given
  ibv_pd* pd = nullptr;                             // null: the device's PD; for CQs, own ones
  ibv_cq* send_cq = nullptr;
  ibv_cq* recv_cq = nullptr;
  ibv_srq* srq = nullptr;
  ibv_qp_type type = IBV_QPT_RC;  // or IBV_QPT_UC, IBV_QPT_UD
  std::uint32_t qkey = 0x1234;    // of a UD QP
  // When given, ibv_create_qp_ex creates the QP with these send operations.
  std::optional<std::uint64_t> send_ops = std::nullopt;
};

// The same as ibv_create_qp_ex; nullptr and EOPNOTSUPP on a device without extended QPs.
ibv_qp* create_qp_ex(ibv_context* context, ibv_qp_init_attr_ex& attr);

// One QP, with its own CQ for each direction unless the options name one.
class Endpoint {
 public:
  explicit Endpoint(const Device& device, const EndpointOptions& options = {});

  ibv_qp* qp() const { return qp_.get(); }
  ibv_cq* send_cq() const { return qp_->send_cq; }
  ibv_cq* recv_cq() const { return qp_->recv_cq; }
  const ibv_qp_cap& cap() const { return cap_; }
  const Device& device() const { return *device_; }
  Address address() const;
  ibv_qp_state state() const;

  void to_init();
  void to_rtr(const Address& peer);
  void to_rts();
  void to_error();
  void to_reset();
  void connect(const Address& peer);
  void to_ready() { connect({}); }  // of a UD QP
  void destroy() { qp_.reset(); }

  // The attributes of the three state transitions, for tests that change them.
  ibv_qp_attr init_attr() const;
  ibv_qp_attr rtr_attr(const Address& peer) const;
  ibv_qp_attr rts_attr() const;

 private:
  const Device* device_;
  EndpointOptions options_;
  ibv_qp_cap cap_{};
  Cq own_send_cq_;
  Cq own_recv_cq_;
  Qp qp_;
};

constexpr int kInitMask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
constexpr int kRtrMask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                         IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
constexpr int kRtsMask =
    IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_TIMEOUT;
constexpr int kUcRtrMask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
constexpr int kUcRtsMask = IBV_QP_STATE | IBV_QP_SQ_PSN;
constexpr int kUdInitMask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
constexpr int kUdRtrMask = IBV_QP_STATE;
constexpr int kUdRtsMask = IBV_QP_STATE | IBV_QP_SQ_PSN;

void connect(Endpoint& a, Endpoint& b);

// Fields of a send work request beyond its opcode and buffers.
struct SendOptions {
  std::uint64_t wr_id = 0;
  unsigned flags = IBV_SEND_SIGNALED;
  std::uint64_t remote_addr = 0;
  std::uint32_t rkey = 0;
  __be32 imm = 0;
};

// Each posts one work request and returns what the verb returned. Non-zero: *bad_wr must be the request.
int post(ibv_qp* qp, ibv_wr_opcode opcode, std::vector<ibv_sge> sges, const SendOptions& options = {});
int post_atomic(ibv_qp* qp, ibv_wr_opcode opcode, ibv_sge result, const SendOptions& target, std::uint64_t compare_add,
                std::uint64_t swap = 0);
int post_recv(ibv_qp* qp, std::vector<ibv_sge> sges, std::uint64_t wr_id = 0);
int post_srq_recv(ibv_srq* srq, std::vector<ibv_sge> sges, std::uint64_t wr_id = 0);

constexpr Milliseconds kCompletionTimeout = kPatience;  // of every completion that is expected

// Polls for `count` completions. When they do not arrive in time: a test failure, and fewer completions.
std::vector<ibv_wc> poll(ibv_cq* cq, std::size_t count, Milliseconds timeout = kCompletionTimeout);
// Polls for one completion. When none arrives in time: a test failure, and a wr_id of kNoWr.
ibv_wc poll_one(ibv_cq* cq, Milliseconds timeout = kCompletionTimeout);
constexpr std::uint64_t kNoWr = ~std::uint64_t{0};
// True when the CQ is empty and stays empty for `time`.
bool stays_empty(ibv_cq* cq, Milliseconds time = 5ms);

// For a forked child, which cannot fail a test: one RDMA WRITE between two QPs of this process. 0, or the number of the
// step that failed: 3 to post, 4 to complete, 5 wrong bytes. Throws as the set-up steps do.
int write_in_child(const Device& device);

// The next asynchronous event, already acknowledged. Skips IBV_EVENT_COMM_EST, which a device need not raise.
std::optional<ibv_async_event> next_async_event(ibv_context* context, Milliseconds timeout = kCompletionTimeout);
// A test failure unless the next asynchronous event has this type. Returns the object that it names.
decltype(ibv_async_event::element) expect_async_event(ibv_context* context, ibv_event_type type);

// True when `fd` becomes readable in time.
bool readable(int fd, Milliseconds timeout);

}  // namespace verbatim::test
