// Fuzzes the data path against a corrupted peer: both ends of a connection are in this process, over softverbs. The
// input chooses what is sent and received, what the peer writes into memory that it may access: CTS entries, sizes,
// arrival words, immediates; what it says of lanes; and which QPs fail. The comms must work or fail. They must not
// report impossible sizes, and no work request may access local memory outside its buffers.
#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "fuzz.h"
#include "net/context/context.h"
#include "net/transfer/recv_comm.h"
#include "net/transfer/send_comm.h"
#include "verbs/qp.h"
#include "wire/completion.h"
#include "wire/cts.h"

namespace {

using namespace verbatim;
using fuzz::require;

constexpr std::size_t kBufferBytes = 16 << 10;
constexpr int kMaxSteps = 100;
constexpr int kMaxImmediates = 8;  // fewer than the posted receives
alignas(4096) std::array<std::byte, kBufferBytes> g_source;
alignas(4096) std::array<std::byte, kBufferBytes> g_target;

// A range of memory: one that work requests may access locally, or the receiver's completion record.
struct Range {
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
  bool contains(std::uint64_t address, std::uint64_t length) const {
    return address >= begin && length <= bytes && address - begin <= bytes - length;
  }
};
std::vector<Range> g_local_ranges;
Range g_record;
// By device: what a QP of this context writes into the record with.
std::vector<std::pair<const ibv_context*, std::uint32_t>> g_record_keys;
decltype(ibv_context_ops::post_send) g_post_send = nullptr;

int check_and_post(ibv_qp* qp, ibv_send_wr* first, ibv_send_wr** bad) {
  for (const ibv_send_wr* request = first; request != nullptr; request = request->next) {
    for (int i = 0; i < request->num_sge; ++i) {
      const ibv_sge& segment = request->sg_list[i];
      require(segment.length == 0 ||
                  std::any_of(g_local_ranges.begin(), g_local_ranges.end(),
                              [&](const Range& range) { return range.contains(segment.addr, segment.length); }),
              "a work request accesses only its own local memory");
    }
    if (request->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
      require(g_record.contains(request->wr.atomic.remote_addr, sizeof(std::uint64_t)),
              "an atomic addresses an arrival word");
    } else if (std::ranges::find(g_record_keys, std::pair<const ibv_context*, std::uint32_t>(
                                                    qp->context, request->wr.rdma.rkey)) != g_record_keys.end()) {
      std::uint64_t bytes = 0;
      for (int i = 0; i < request->num_sge; ++i) bytes += request->sg_list[i].length;
      require(g_record.contains(request->wr.rdma.remote_addr, bytes),
              "a write to the completion record stays within its bounds");
    }
  }
  return g_post_send(qp, first, bad);
}

Context* open_with(const char* completion) {
  ::setenv("VERBATIM_COMPLETION", completion, 1);
  Result<Context*> context = open_context(-1);
  require(!!context, "open_context succeeds");
  return *context;
}

struct PendingRequest {
  Request* request;
  std::vector<std::uint64_t> capacities;  // of the members of a receive
};

class Connection {
 public:
  Connection(Context& context, std::size_t device) : context_(context) {
    std::array<std::uint8_t, wire::kHandleBytes> handle{};
    Result<ListenComm*> listen = context.listen(device, handle);
    require(!!listen, "listen succeeds");
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (send_ == nullptr || recv_ == nullptr) {
      require(std::chrono::steady_clock::now() < end, "both ends connect within 60 s");
      if (send_ == nullptr) {
        Result<SendComm*> comm = context.connect(device, handle, -1);
        require(!!comm, "connect succeeds");
        send_ = *comm;
      }
      if (recv_ == nullptr) {
        Result<RecvComm*> comm = context.accept(**listen);
        require(!!comm, "accept succeeds");
        recv_ = *comm;
      }
    }
    context.close(**listen);
    source_ = registered(*send_, g_source);
    target_ = registered(*recv_, g_target);
    ring_ = reinterpret_cast<std::byte*>(send_->hello().control_address);
    const wire::Hello receiver = recv_->hello();
    record_ = reinterpret_cast<std::byte*>(receiver.control_address);
    const std::size_t ring_bytes = wire::cts_ring_bytes(1);
    const std::size_t record_bytes =
        wire::completion_record_bytes((receiver.capabilities & wire::kAtomicCompletion) != 0);
    g_record = {receiver.control_address, record_bytes};
    constexpr std::size_t kShadowBytes = (wire::kRingEntries + 2) * sizeof(std::uint64_t);
    g_local_ranges = {{reinterpret_cast<std::uint64_t>(g_source.data()), g_source.size()},
                      {send_->hello().control_address + ring_bytes, kShadowBytes},
                      {receiver.control_address - ring_bytes, ring_bytes}};
    g_record_keys.clear();
    for (std::size_t i = 0; i < receiver.devices.size(); ++i) {
      ibv_context* const verbs = send_->endpoint().ports()[i]->device->context();
      g_record_keys.emplace_back(verbs, receiver.devices[i].control_rkey);
      if (verbs->ops.post_send != check_and_post) g_post_send = std::exchange(verbs->ops.post_send, check_and_post);
    }
  }
  ~Connection() {
    context_.close(*send_);
    context_.close(*recv_);
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void run(fuzz::Input input) {
    for (int step = 0; step < kMaxSteps && !input.rest().empty() && has_no_error(); ++step) run_step(input);
    for (int i = 0; i < 3; ++i) test_all();
  }

 private:
  static std::unique_ptr<MemoryHandle> registered(Comm& comm, std::array<std::byte, kBufferBytes>& buffer) {
    auto handle = comm.register_memory({.address = buffer.data(), .bytes = buffer.size()});
    require(!!handle, "memory registration succeeds");
    return std::move(*handle);
  }
  bool has_no_error() const { return send_->error() == nullptr && recv_->error() == nullptr; }

  void run_step(fuzz::Input& input) {
    const auto operation = input.get<std::uint8_t>();
    switch (operation % 8) {
      case 0:
      case 1:
        receive(1 + (operation >> 3) % wire::kMaxGroup, input);
        break;
      case 2:
      case 3: {
        const std::size_t bytes = input.get<std::uint16_t>() % kBufferBytes;
        void* request = nullptr;
        send_->isend(g_source.data(), bytes, operation >> 6, &*source_, nullptr, &request);
        if (request != nullptr) sends_.push_back({static_cast<Request*>(request), {}});
        break;
      }
      case 4:
        write_entry(input);
        break;
      case 5:
        write_record(input);
        break;
      case 6:
        post_immediate(input.get<std::uint32_t>(), operation >> 3);
        break;
      default:
        if ((operation & 8) == 0) {
          test_all();
        } else if ((operation & 16) == 0) {
          receive_notice(input);
        } else {
          fail_lane(operation >> 5);
        }
        break;
    }
  }

  // As the device does when the link of one end is down.
  void fail_lane(unsigned choice) {
    Comm& comm = (choice & 1) != 0 ? static_cast<Comm&>(*send_) : static_cast<Comm&>(*recv_);
    const Endpoint& endpoint = comm.endpoint();
    const EndpointQp& qp = endpoint.qps()[(choice >> 1) % endpoint.qps().size()];
    require(static_cast<bool>(to_error(qp.qp.get(), *endpoint.ports()[qp.device]->device)), "a QP fails");
    // Meanwhile the ends agree on what has arrived, and what has not is sent over the other lane.
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(10);
    while (std::chrono::steady_clock::now() < end) test_all();
  }

  // A message about a lane, as the peer of either end could send it.
  void receive_notice(fuzz::Input& input) {
    const auto choice = input.get<std::uint8_t>();
    Comm& comm = (choice & 1) != 0 ? static_cast<Comm&>(*send_) : static_cast<Comm&>(*recv_);
    const std::uint32_t lane = choice >> 1 & 1;
    const std::uint32_t round = choice >> 2 & 3;
    switch (choice >> 4 & 3) {
      case 0:
        comm.receive_lane_down({lane, round});
        return;
      case 1: {
        wire::LaneReport report{.lane = lane, .round = round, .members = input.get<std::uint32_t>()};
        report.next_arrival = input.get<std::uint32_t>();
        report.all_drained = choice >> 7 & 1;
        report.qps = input.get<std::uint8_t>() % (wire::kMaxLaneQps + 1);
        for (std::uint32_t i = 0; i < report.qps; ++i) report.arrived[i] = input.get<std::uint16_t>();
        comm.receive_lane_report(report);
        return;
      }
      default: {
        wire::LaneAddress address{.lane = lane, .round = round};
        address.qps = input.get<std::uint8_t>() % (wire::kMaxLaneQps + 1);
        for (std::uint32_t i = 0; i < address.qps; ++i) address.qp_numbers[i] = input.get<std::uint16_t>();
        comm.receive_lane_address((choice & 64) != 0 ? wire::MessageType::kLaneOffer : wire::MessageType::kLaneAnswer,
                                  address);
        return;
      }
    }
  }

  void receive(std::size_t count, fuzz::Input& input) {
    std::array<void*, wire::kMaxGroup> data{};
    std::array<std::size_t, wire::kMaxGroup> sizes{};
    std::array<int, wire::kMaxGroup> tags{};
    std::array<void*, wire::kMaxGroup> handles{};
    const auto options = input.get<std::uint8_t>();
    for (std::size_t i = 0; i < count; ++i) {
      data[i] = g_target.data() + i * (kBufferBytes / wire::kMaxGroup);
      sizes[i] = input.get<std::uint16_t>() % (kBufferBytes / wire::kMaxGroup);
      tags[i] = static_cast<int>(options >> (i % 4) & 3);
      handles[i] = target_.get();
    }
    void* request = (options & 0x80) != 0 ? kOptionalCompletion : nullptr;
    recv_->irecv(static_cast<int>(count), data.data(), sizes.data(), tags.data(), handles.data(), &request);
    if (request == nullptr) return;
    receives_.push_back({static_cast<Request*>(request), {sizes.begin(), sizes.begin() + static_cast<long>(count)}});
  }

  // Writes an entry into the sender's CTS ring, as the receiver's end could.
  void write_entry(fuzz::Input& input) {
    const std::size_t index = input.get<std::uint8_t>();
    wire::CtsEntry entry;
    std::memcpy(&entry, ring_ + index * sizeof entry, sizeof entry);
    const auto fields = input.get<std::uint8_t>();
    if ((fields & 1) != 0) entry.address = input.get<std::uint64_t>();
    if ((fields & 2) != 0) entry.address = reinterpret_cast<std::uint64_t>(g_target.data());
    std::uint64_t bytes = entry.size.bytes();
    std::uint32_t group_size = entry.size.group_size();
    wire::CtsFlags flags = entry.size.flags();
    if ((fields & 4) != 0) bytes = input.get<std::uint64_t>();
    if ((fields & 8) != 0) entry.tag = input.get<std::uint8_t>() & 3;
    if ((fields & 16) != 0) group_size = input.get<std::uint8_t>();
    if ((fields & 32) != 0) flags = static_cast<wire::CtsFlags>(input.get<std::uint8_t>());
    entry.size = {bytes, wire::CtsSize::of_group(group_size, flags)};
    if ((fields & 64) != 0) entry.rkey[0] = target_->rkey[0];
    if ((fields & 128) != 0) entry.ready = static_cast<std::uint32_t>(index + 1);
    std::memcpy(ring_ + index * sizeof entry, &entry, sizeof entry);
  }

  // Writes a word into the receiver's completion record, as the sender's end could.
  void write_record(fuzz::Input& input) {
    const std::size_t words = g_record.bytes / sizeof(std::uint64_t);
    const std::size_t word = input.get<std::uint16_t>() % words;
    const auto value = input.get<std::uint64_t>();
    std::memcpy(record_ + word * sizeof value, &value, sizeof value);
  }

  void post_immediate(std::uint32_t bits, int plausible) {
    if (++immediates_ > kMaxImmediates) return;
    if ((plausible & 1) != 0) {  // for a group that may be posted
      wire::Immediate decoded = wire::decode_immediate(bits);
      decoded.entry %= 16;
      decoded.pass = 0;
      if ((plausible & 2) != 0) decoded.parts = 1;
      bits = wire::encode_immediate(decoded);
    }
    ibv_send_wr work = {};
    work.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    work.imm_data = htonl(bits);
    work.wr.rdma.remote_addr = g_record.begin;
    work.wr.rdma.rkey = g_record_keys.front().second;
    ibv_send_wr* bad = nullptr;
    if ((recv_->hello().capabilities & wire::kAtomicCompletion) != 0) return;  // no receive is posted for it
    ibv_post_send(send_->endpoint().qps()[0].qp.get(), &work, &bad);
  }

  void test_all() {
    std::erase_if(sends_, [](const PendingRequest& pending) {
      int done = 0;
      int bytes = -1;
      const ErrorKind result = SendComm::test(*pending.request, &done, &bytes);
      require(done == 0 || static_cast<std::size_t>(bytes) < kBufferBytes, "a completed send reports a possible size");
      return done != 0 || result != ErrorKind::kNone;
    });
    std::erase_if(receives_, [](const PendingRequest& pending) {
      int done = 0;
      std::array<int, wire::kMaxGroup + 1> sizes;
      sizes.fill(-1);
      const bool atomic = pending.request->kind == RequestKind::kRecvAtomic;
      const ErrorKind result = atomic ? RecvComm::test_atomic(*pending.request, &done, sizes.data())
                                      : RecvComm::test(*pending.request, &done, sizes.data());
      for (std::size_t i = 0; i < pending.capacities.size() && done != 0 && result == ErrorKind::kNone; ++i) {
        require(sizes[i] >= 0 && static_cast<std::uint64_t>(sizes[i]) <= pending.capacities[i],
                "a completed receive reports at most its capacity");
      }
      require(sizes[pending.capacities.size()] == -1, "test writes only the sizes of the members");
      return done != 0 || result != ErrorKind::kNone;
    });
  }

  Context& context_;
  SendComm* send_ = nullptr;
  RecvComm* recv_ = nullptr;
  std::unique_ptr<MemoryHandle> source_;
  std::unique_ptr<MemoryHandle> target_;
  std::byte* ring_ = nullptr;
  std::byte* record_ = nullptr;
  std::vector<PendingRequest> sends_;
  std::vector<PendingRequest> receives_;
  int immediates_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Context* const contexts[] = {open_with("imm"), open_with("atomic")};
  static const std::size_t both = [] {
    const int members[] = {0, 1};
    const Result<std::size_t> merged = merge_devices(members, 2, 2);
    require(!!merged, "devices can be merged");
    return *merged;
  }();
  set_log_sink([](LogLevel, const char*, int, const char* text) {
    require(std::strchr(text, '\n') == nullptr, "a warning is one line");
  });
  fuzz::Input input({data, size});
  const auto choice = input.get<std::uint8_t>();
  Connection(*contexts[choice % 2], (choice & 2) != 0 ? both : 0).run(input);
  return 0;
}
