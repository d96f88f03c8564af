#include "rma_lifetime.h"

#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "conformance.h"
#include "dma_buf.h"
#include "netapi/log.h"
#include "netapi/rma.h"

namespace fault {
namespace {

using nccl::Result;

constexpr int kRanks = 2;
constexpr int kContexts = 2;
constexpr std::size_t kHalfBytes = 128 << 10;  // of a buffer: the first half is the source, the second one the target
constexpr std::size_t kSignalValue = 5;
constexpr auto kRmaTimeout = std::chrono::seconds(20);

bool soon(const std::function<bool()>& poll) {
  return conformance::eventually(poll, kRmaTimeout);
}

unsigned char content_of(int rank, std::size_t at) {
  return static_cast<unsigned char>(at * 7 + at / 251 + 1 + static_cast<std::size_t>(rank));
}

// What the ranks of a lifetime share.
struct RmaJob {
  enum class State : std::uint8_t { kWorks, kDone, kFailed };

  netapi::RmaPlugin& net;
  std::barrier<> listening{kRanks};
  std::array<conformance::Handle, kRanks> handles{};
  std::array<std::atomic<bool>, kRanks> listens{};
  std::array<std::atomic<State>, kRanks> states{};
};

class RmaRank {
 public:
  RmaRank(RmaJob& job, int number)
      : job_(job), net_(job.net), number_(number), peer_(1 - number), rank_(static_cast<std::size_t>(number)) {
    if (!buffer_.is_mapped()) return;
    for (std::size_t i = 0; i < kHalfBytes; ++i) buffer_.data()[i] = content_of(number, i);
  }

  void run() {
    job_.listens[rank_] = listen();
    job_.listening.arrive_and_wait();
    if (job_.listens[0] && job_.listens[1]) {
      const bool done = work();
      job_.states[rank_] = done ? RmaJob::State::kDone : RmaJob::State::kFailed;
      if (done) await_peer();
    }
    close();
  }

  const std::string& failed() const { return failed_; }
  const std::string& violation() const { return violation_; }

 private:
  bool succeeded(const char* call, Result result) {
    if (result != Result::kSuccess && failed_.empty()) {
      failed_ = std::string(call) + ": " + netapi::result_name(result);
    }
    return result == Result::kSuccess;
  }
  void add_violation(std::string what) {
    if (violation_.empty()) violation_ = std::move(what);
  }

  bool listen() {
    int count = 0;
    nccl::v12::NetProperties properties{};
    return succeeded("init", net_.init(0x1234, &instance_)) && succeeded("devices", net_.devices(&count)) &&
           succeeded("getProperties", net_.properties(0, &properties)) &&
           succeeded("listen", net_.listen(instance_, 0, job_.handles[rank_].bytes, &listen_));
  }

  bool work() {
    void* handles[] = {job_.handles[0].bytes, job_.handles[1].bytes};
    const bool connected = succeeded("connect", net_.connect(instance_, handles, kRanks, number_, listen_, &coll_));
    succeeded("closeListen", net_.close_listen(std::exchange(listen_, nullptr)));
    return connected && succeeded("createContext", net_.create_context(coll_, {.contexts = kContexts}, &contexts_)) &&
           register_all() && put_all() && signal_all() && get_and_flush() && await_signals() && has_all_bytes();
  }

  bool register_all() {
    if (!buffer_.is_mapped()) {
      add_violation("no file for a dma-buf");
      return false;
    }
    return add_registration("regMrSym",
                            net_.reg_mr(coll_, words_.data(), sizeof words_, nccl::kPtrHost,
                                        nccl::kMrForceStrictOrdering, &words_mr_),
                            words_mr_) &&
           register_buffer();
  }
  // As NCCL: a dma-buf that cannot be registered is registered by its address.
  bool register_buffer() {
    if (net_.reg_mr_dmabuf(coll_, buffer_.data(), buffer_.bytes(), nccl::kPtrCuda, 0, buffer_.fd(), 0, &buffer_mr_) ==
        Result::kSuccess) {
      registrations_.push_back(buffer_mr_);
      return true;
    }
    return add_registration("regMrSym after regMrSymDmaBuf",
                            net_.reg_mr(coll_, buffer_.data(), buffer_.bytes(), nccl::kPtrCuda, 0, &buffer_mr_),
                            buffer_mr_);
  }
  bool add_registration(const char* call, Result result, void* mhandle) {
    if (!succeeded(call, result)) return false;
    registrations_.push_back(mhandle);
    return true;
  }

  bool finish(const char* call, Result started, void* request) {
    if (!succeeded(call, started)) return false;
    if (request == nullptr) return true;
    bool ok = true;
    int done = 0;
    const bool settled = soon([&] {
      ok = succeeded((std::string("test of ") + call).c_str(), net_.test(coll_, request, &done));
      return !ok || done != 0;
    });
    if (!settled) add_violation(std::string("test of ") + call + " did not end");
    return ok && settled;
  }

  bool put(int context, std::size_t offset, std::size_t bytes, int rank) {
    void* request = nullptr;
    const Result started = net_.iput(contexts_, context, {buffer_mr_, offset}, bytes, {buffer_mr_, kHalfBytes + offset},
                                     static_cast<std::uint32_t>(rank), &request);
    return finish("iput", started, request);
  }
  bool put_all() {
    bool ok = true;
    for (std::size_t i = 0; ok && i < 8; ++i) ok = put(static_cast<int>(i % kContexts), i * 64, 64, peer_);
    return ok && put(1, 512, 70'000, peer_);
  }

  // The words of the signals of a context: one that is incremented, and one to which a value is added.
  bool signal(int context, std::size_t bytes, std::size_t offset, bool strong) {
    const bool increments = bytes == 0;
    void* request = nullptr;
    const netapi::RmaPart nothing;
    const netapi::RmaPart source{buffer_mr_, offset};
    const netapi::RmaPart target{buffer_mr_, kHalfBytes + offset};
    const netapi::RmaSignal word{
        .word = {words_mr_, static_cast<std::size_t>(2 * context + (increments ? 0 : 1)) * sizeof(std::uint64_t)},
        .value = kSignalValue,
        .operation = increments ? nccl::kSignalIncrement : nccl::kSignalAdd,
        .strong = strong};
    const Result started =
        net_.iput_signal(contexts_, context, bytes == 0 ? nothing : source, bytes, bytes == 0 ? nothing : target,
                         static_cast<std::uint32_t>(peer_), word, &request);
    return finish("iputSignal", started, request);
  }
  bool signal_all() {
    bool ok = true;
    for (int context = 0; ok && context < kContexts; ++context) {
      const std::size_t offset = 80'000 + 4096 * static_cast<std::size_t>(context);
      ok = signal(context, 4096, offset, false) && signal(context, 0, 0, true);
    }
    return ok;
  }

  // The last quarter of the target: its upper half is put to oneself.
  bool get_and_flush() {
    void* request = nullptr;
    Result started = net_.iget(contexts_, 0, {buffer_mr_, kGotten}, kGottenBytes, {buffer_mr_, kHalfBytes + kGotten},
                               static_cast<std::uint32_t>(peer_), &request);
    if (!finish("iget", started, request) || !put(1, kOwn, kOwnBytes, number_)) return false;
    request = nullptr;
    started = net_.iflush(contexts_, 0, buffer_mr_, static_cast<std::uint32_t>(peer_), &request);
    return finish("iflush", started, request);
  }

  bool has_error() {
    bool error = false;
    if (!succeeded("queryLastError", net_.query_last_error(contexts_, &error))) return true;
    if (error && failed_.empty()) failed_ = "queryLastError: it has failed";
    return error;
  }

  // A signal that does not come is an error of this rank or of its peer.
  bool await_signals() {
    constexpr std::array<std::uint64_t, std::size_t{2} * kContexts> kExpected{1, kSignalValue, 1, kSignalValue};
    const auto arrived = [&] {
      for (std::size_t i = 0; i < kExpected.size(); ++i) {
        if (__atomic_load_n(&words_[i], __ATOMIC_ACQUIRE) != kExpected[i]) return false;
      }
      return true;
    };
    bool error = false;
    const bool settled = soon([&] {
      error = !succeeded("rmaProgress", net_.progress(contexts_)) || (!arrived() && has_error());
      return error || arrived();
    });
    if (!settled) add_violation("a signal did not arrive, and there is no error");
    return settled && !error;
  }

  bool has_all_bytes() {
    const unsigned char* const target = buffer_.data() + kHalfBytes;
    const auto is_right = [&](std::size_t offset, std::size_t bytes, int rank) {
      for (std::size_t i = offset; i < offset + bytes; ++i) {
        if (target[i] != content_of(rank, i)) return false;
      }
      return true;
    };
    if (!is_right(0, 70'512, peer_) || !is_right(80'000, 8192, peer_) || !is_right(kGotten, kGottenBytes, peer_) ||
        !is_right(kOwn, kOwnBytes, number_)) {
      add_violation("wrong bytes after their signals");
    }
    return true;
  }

  // A rank that has done all learns of it when the other one fails.
  void await_peer() {
    const auto& state = job_.states[static_cast<std::size_t>(peer_)];
    if (!soon([&] {
          net_.progress(contexts_);  // the peer may still get from here
          return state != RmaJob::State::kWorks;
        })) {
      add_violation("the other rank did not end");
    }
    if (state == RmaJob::State::kFailed && !soon([&] { return has_error(); })) {
      add_violation("queryLastError says nothing of the other rank's failure");
    }
  }

  void close() {
    if (contexts_ != nullptr) succeeded("destroyContext", net_.destroy_context(contexts_));
    for (void* const mhandle : registrations_) succeeded("deregMrSym", net_.dereg_mr(coll_, mhandle));
    if (coll_ != nullptr) succeeded("closeColl", net_.close_coll(coll_));
    if (listen_ != nullptr) succeeded("closeListen", net_.close_listen(listen_));
    if (instance_ != nullptr) succeeded("finalize", net_.finalize(instance_));
  }

  // Parts of the target that no put of the peer writes.
  static constexpr std::size_t kGotten = 96 << 10;
  static constexpr std::size_t kGottenBytes = 16 << 10;
  static constexpr std::size_t kOwn = kGotten + kGottenBytes;
  static constexpr std::size_t kOwnBytes = 300;

  RmaJob& job_;
  netapi::RmaPlugin& net_;
  const int number_;
  const int peer_;
  const std::size_t rank_;  // number_, as an index
  const DmaBuf buffer_{2 * kHalfBytes};
  alignas(4096) std::array<std::uint64_t, 512> words_{};
  void* instance_ = nullptr;
  void* listen_ = nullptr;
  void* coll_ = nullptr;
  void* contexts_ = nullptr;
  void* words_mr_ = nullptr;
  void* buffer_mr_ = nullptr;
  std::vector<void*> registrations_;
  std::string failed_;
  std::string violation_;
};

void run_ranks(netapi::RmaPlugin& net, LifetimeResult& outcome) {
  RmaJob job{.net = net};
  RmaRank first(job, 0);
  RmaRank second(job, 1);
  std::thread thread([&] { second.run(); });
  first.run();
  thread.join();
  for (const RmaRank* const rank : {&first, &second}) {
    const std::string name = rank == &first ? "rank 0: " : " rank 1: ";
    if (!rank->failed().empty()) outcome.failed += name + rank->failed();
    if (!rank->violation().empty()) outcome.violation += name + rank->violation();
  }
}

}  // namespace

LifetimeResult run_rma_lifetime(int version, const Hooks& hooks) {
  LifetimeResult outcome;
  std::mutex mutex;
  netapi::set_log_callback([&](const netapi::LogLine& line) {
    if (line.level != nccl::DebugLogLevel::kWarn) return;
    const std::lock_guard lock(mutex);
    outcome.warnings.push_back(line.text);
  });
  netapi::OpenedRma library = netapi::open_rma_plugin(conformance::options().plugin, version);
  if (library.plugin == nullptr) {
    outcome.violation = library.error;
    return outcome;
  }
  if (hooks.loaded) hooks.loaded();
  run_ranks(*library.plugin, outcome);
  library.plugin.reset();
  if (hooks.unloaded) hooks.unloaded();
  netapi::set_log_callback({});
  return outcome;
}

}  // namespace fault
