// A corrupted peer: both ends of a connection in this process, over softverbs, and an input that says what is sent and
// received and what the other end writes meanwhile where it may write: CTS entries, sizes, arrival words, immediates.
// Either all goes well or a comm fails; nothing is reported that cannot be, and no work request names memory of ours
// that is not its own.
#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "base/log.h"
#include "fuzz.h"
#include "net/context/context.h"
#include "net/transfer/recv_comm.h"
#include "net/transfer/send_comm.h"
#include "wire/completion.h"
#include "wire/cts.h"

namespace {

using namespace verbatim;
using fuzz::require;

constexpr std::size_t kBufferBytes = 16 << 10;
constexpr int kMaxSteps = 100;
constexpr int kMaxImmediates = 8;  // fewer than receives are posted
alignas(4096) std::array<std::byte, kBufferBytes> g_source;
alignas(4096) std::array<std::byte, kBufferBytes> g_target;

// Where the local side of a work request may lie, and where the receiver's record is.
struct Range {
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
  bool holds(std::uint64_t address, std::uint64_t length) const {
    return address >= begin && length <= bytes && address - begin <= bytes - length;
  }
};
std::vector<Range> g_own;
Range g_record;
std::uint32_t g_record_key = 0;
decltype(ibv_context_ops::post_send) g_post_send = nullptr;

int check_and_post(ibv_qp* qp, ibv_send_wr* first, ibv_send_wr** refused) {
  for (const ibv_send_wr* work = first; work != nullptr; work = work->next) {
    for (int i = 0; i < work->num_sge; ++i) {
      const ibv_sge& segment = work->sg_list[i];
      require(segment.length == 0 ||
                  std::any_of(g_own.begin(), g_own.end(),
                              [&](const Range& range) { return range.holds(segment.addr, segment.length); }),
              "a work request reads or writes memory of its own");
    }
    if (work->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
      require(g_record.holds(work->wr.atomic.remote_addr, sizeof(std::uint64_t)), "an atomic meets an arrival word");
    } else if (work->wr.rdma.rkey == g_record_key) {
      std::uint64_t bytes = 0;
      for (int i = 0; i < work->num_sge; ++i) bytes += work->sg_list[i].length;
      require(g_record.holds(work->wr.rdma.remote_addr, bytes), "a completion record is written within its bounds");
    }
  }
  return g_post_send(qp, first, refused);
}

Context* open(const char* completion) {
  ::setenv("VERBATIM_COMPLETION", completion, 1);
  Result<Context*> context = open_context(-1);
  require(!!context, "a context opens");
  return *context;
}

struct Open {
  Request* request;
  std::vector<std::uint64_t> room;  // of a receive's members
};

class Connection {
 public:
  explicit Connection(Context& context) : context_(context) {
    std::array<std::uint8_t, wire::kHandleBytes> handle{};
    Result<ListenComm*> listen = context.listen(0, handle);
    require(!!listen, "a listen opens");
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (send_ == nullptr || recv_ == nullptr) {
      require(std::chrono::steady_clock::now() < end, "both ends connect");
      if (send_ == nullptr) {
        Result<SendComm*> made = context.connect(0, handle, -1);
        require(!!made, "connect works");
        send_ = *made;
      }
      if (recv_ == nullptr) {
        Result<RecvComm*> made = context.accept(**listen);
        require(!!made, "accept works");
        recv_ = *made;
      }
    }
    context.close(**listen);
    source_ = registered(*send_, g_source);
    target_ = registered(*recv_, g_target);
    ring_ = reinterpret_cast<std::byte*>(send_->hello().control_address);
    const wire::Hello receiver = recv_->hello();
    record_ = reinterpret_cast<std::byte*>(receiver.control_address);
    const std::size_t ring_bytes = wire::cts_ring_bytes(1);
    const std::size_t record_bytes = wire::completion_record_bytes(receiver.capabilities != 0);
    g_record = {receiver.control_address, record_bytes};
    g_record_key = receiver.devices[0].control_rkey;
    constexpr std::size_t kShadowBytes = (wire::kRingEntries + 2) * sizeof(std::uint64_t);
    g_own = {{reinterpret_cast<std::uint64_t>(g_source.data()), g_source.size()},
             {send_->hello().control_address + ring_bytes, kShadowBytes},
             {receiver.control_address - ring_bytes, ring_bytes}};
    ibv_context_ops& operations = send_->endpoint().ports()[0]->device->context()->ops;
    if (operations.post_send != check_and_post) g_post_send = std::exchange(operations.post_send, check_and_post);
  }
  ~Connection() {
    context_.close(*send_);
    context_.close(*recv_);
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void run(fuzz::Input input) {
    for (int step = 0; step < kMaxSteps && !input.rest().empty() && sound(); ++step) take_step(input);
    for (int i = 0; i < 3; ++i) test_all();
  }

 private:
  static std::unique_ptr<MemoryHandle> registered(Comm& comm, std::array<std::byte, kBufferBytes>& buffer) {
    auto handle = comm.register_memory({.address = buffer.data(), .bytes = buffer.size()});
    require(!!handle, "memory is registered");
    return std::move(*handle);
  }
  bool sound() const { return send_->error() == nullptr && recv_->error() == nullptr; }

  void take_step(fuzz::Input& input) {
    const auto what = input.get<std::uint8_t>();
    switch (what % 8) {
      case 0:
      case 1:
        receive(1 + (what >> 3) % wire::kMaxGroup, input);
        break;
      case 2:
      case 3: {
        const std::size_t bytes = input.get<std::uint16_t>() % kBufferBytes;
        void* request = nullptr;
        send_->isend(g_source.data(), bytes, what >> 6, *source_, &request);
        if (request != nullptr) sends_.push_back({static_cast<Request*>(request), {}});
        break;
      }
      case 4:
        write_entry(input);
        break;
      case 5:
        format_size_record(input);
        break;
      case 6:
        immediate(input.get<std::uint32_t>(), what >> 3);
        break;
      default:
        test_all();
        break;
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
    recv_->irecv<std::size_t>(static_cast<int>(count), data.data(), sizes.data(), tags.data(), handles.data(),
                              &request);
    if (request == nullptr) return;
    receives_.push_back({static_cast<Request*>(request), {sizes.begin(), sizes.begin() + static_cast<long>(count)}});
  }

  // What the receiver's end could write into the sender's ring.
  void write_entry(fuzz::Input& input) {
    const std::size_t index = input.get<std::uint8_t>();
    wire::CtsEntry entry;
    std::memcpy(&entry, ring_ + index * sizeof entry, sizeof entry);
    const auto fields = input.get<std::uint8_t>();
    if ((fields & 1) != 0) entry.head.address = input.get<std::uint64_t>();
    if ((fields & 2) != 0) entry.head.address = reinterpret_cast<std::uint64_t>(g_target.data());
    if ((fields & 4) != 0) entry.head.size = input.get<std::uint64_t>();
    if ((fields & 8) != 0) entry.head.tag = input.get<std::uint8_t>() & 3;
    if ((fields & 16) != 0) entry.head.group_size = input.get<std::uint8_t>();
    if ((fields & 32) != 0) entry.head.flags = static_cast<wire::CtsFlags>(input.get<std::uint8_t>());
    if ((fields & 64) != 0) entry.rkey = target_->rkey[0];
    if ((fields & 128) != 0) entry.ready = static_cast<std::uint32_t>(index + 1);
    std::memcpy(ring_ + index * sizeof entry, &entry, sizeof entry);
  }

  // What the sender's end could write into the receiver's record.
  void format_size_record(fuzz::Input& input) {
    const std::size_t words = g_record.bytes / sizeof(std::uint64_t);
    const std::size_t word = input.get<std::uint16_t>() % words;
    const auto value = input.get<std::uint64_t>();
    std::memcpy(record_ + word * sizeof value, &value, sizeof value);
  }

  void immediate(std::uint32_t bits, int plausible) {
    if (++immediates_ > kMaxImmediates) return;
    if ((plausible & 1) != 0) {  // for a group that may be there
      wire::Immediate told = wire::decode_immediate(bits);
      told.entry %= 16;
      told.pass = 0;
      if ((plausible & 2) != 0) told.parts = 1;
      bits = wire::encode_immediate(told);
    }
    ibv_send_wr work = {};
    work.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    work.imm_data = htonl(bits);
    work.wr.rdma.remote_addr = g_record.begin;
    work.wr.rdma.rkey = g_record_key;
    ibv_send_wr* refused = nullptr;
    if ((recv_->hello().capabilities & wire::kAtomicCompletion) != 0) return;  // nobody waits for one
    ibv_post_send(send_->endpoint().qps()[0].qp.get(), &work, &refused);
  }

  void test_all() {
    std::erase_if(sends_, [](const Open& open) {
      int done = 0;
      int bytes = -1;
      const ErrorKind result = SendComm::test(*open.request, &done, &bytes);
      require(done == 0 || static_cast<std::size_t>(bytes) < kBufferBytes, "a send is done with its size");
      return done != 0 || result != ErrorKind::kNone;
    });
    std::erase_if(receives_, [](const Open& open) {
      int done = 0;
      std::array<int, wire::kMaxGroup + 1> sizes;
      sizes.fill(-1);
      const bool atomic = open.request->kind == RequestKind::kRecvAtomic;
      const ErrorKind result = atomic ? RecvComm::test_atomic(*open.request, &done, sizes.data())
                                      : RecvComm::test(*open.request, &done, sizes.data());
      for (std::size_t i = 0; i < open.room.size() && done != 0 && result == ErrorKind::kNone; ++i) {
        require(sizes[i] >= 0 && static_cast<std::uint64_t>(sizes[i]) <= open.room[i],
                "a receive is done with no more than its room");
      }
      require(sizes[open.room.size()] == -1, "only the sizes of the members are written");
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
  std::vector<Open> sends_;
  std::vector<Open> receives_;
  int immediates_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Context* const contexts[] = {open("imm"), open("atomic")};
  set_log_sink([](LogLevel, const char*, int, const char* text) {
    require(std::strchr(text, '\n') == nullptr, "a warning is one line");
  });
  fuzz::Input input({data, size});
  Connection(*contexts[input.get<std::uint8_t>() % 2]).run(input);
  return 0;
}
