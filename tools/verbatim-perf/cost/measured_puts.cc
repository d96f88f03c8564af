#include "verbatim-perf/cost/measured_puts.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "nccl/rma_v13.h"
#include "ranks/failure.h"
#include "ranks/loaded_plugin.h"
#include "workload/content.h"

namespace verbatim::perf::cost {
namespace {

constexpr int kMaxTests = 1'000'000;       // of one request; reading a clock is too slow under valgrind
constexpr int kMaxIdle = 100 * kMaxTests;  // of a stream, whose device's thread may wait for a core
constexpr std::uint32_t kTarget = 1;

// Both versions have the same functions.
PutCalls calls_of(const netapi::RmaPlugin& plugin) {
  const auto take = [](const auto& table) { return PutCalls{table.iput, table.test}; };
  return plugin.api_version() == 13 ? take(*static_cast<const nccl::rma_v13::Rma*>(plugin.table()))
                                    : take(*static_cast<const nccl::rma_v14::Rma*>(plugin.table()));
}

}  // namespace

MeasuredPuts::MeasuredPuts(std::unique_ptr<netapi::RmaPlugin> plugin, std::size_t most_bytes)
    : plugin_(std::move(plugin)), calls_(calls_of(*plugin_)), most_bytes_(std::max<std::size_t>(most_bytes, 1)) {
  std::array<std::array<char, nccl::kNetHandleMaxBytes>, 2> handles{};
  void* all[] = {handles[0].data(), handles[1].data()};
  for (int rank = 0; rank < 2; ++rank) {
    RankState& state = ranks_[rank];
    ranks::require(plugin_->init(1, &state.instance), "init of the RMA table");
    int devices = 0;
    ranks::require(plugin_->devices(&devices), "devices");
    if (devices == 0) throw ranks::Failure("the plugin has no RMA device; run under tools/softverbs");
    ranks::require(plugin_->listen(state.instance, 0, all[rank], &state.listen), "listen");
    state.bytes = memory_->allocate(most_bytes_);
    if (rank == 0) workload::Pattern(1, most_bytes_).produce(state.bytes, most_bytes_, 0);
  }
  collective(
      [&](RankState& own, int rank) { return plugin_->connect(own.instance, all, 2, rank, own.listen, &own.coll); },
      "connect");
  for (const RankState& own : ranks_) ranks::require(plugin_->close_listen(own.listen), "closeListen");
  collective([&](RankState& own, int) { return plugin_->create_context(own.coll, {}, &own.contexts); },
             "createContext");
  collective([&](RankState& own,
                 int) { return plugin_->reg_mr(own.coll, own.bytes, most_bytes_, nccl::kPtrHost, 0, &own.data); },
             "regMrSym");
  collective(
      [&](RankState& own, int) {
        return plugin_->reg_mr(own.coll, &own.signal, sizeof own.signal, nccl::kPtrHost, nccl::kMrForceStrictOrdering,
                               &own.words);
      },
      "regMrSym");
}

MeasuredPuts::~MeasuredPuts() {
  for (const RankState& own : ranks_) {
    if (own.contexts != nullptr) plugin_->destroy_context(own.contexts);
    if (own.data != nullptr) plugin_->dereg_mr(own.coll, own.data);
    if (own.words != nullptr) plugin_->dereg_mr(own.coll, own.words);
  }
  for (const RankState& own : ranks_) {
    if (own.coll != nullptr) plugin_->close_coll(own.coll);
  }
  for (const RankState& own : ranks_) {
    if (own.instance != nullptr) plugin_->finalize(own.instance);
  }
}

void MeasuredPuts::collective(const std::function<nccl::Result(RankState&, int rank)>& call, const char* name) {
  nccl::Result other = nccl::Result::kSuccess;
  std::thread thread([&] { other = call(ranks_[1], 1); });
  const nccl::Result own = call(ranks_[0], 0);
  thread.join();
  ranks::require(own, name);
  ranks::require(other, name);
}

void MeasuredPuts::start_put(std::size_t bytes, void** request) {
  const RankState& own = ranks_[0];
  ranks::require(plugin_->iput(own.contexts, 0, {own.data, 0}, bytes, {own.data, 0}, kTarget, request), "iput");
}

void MeasuredPuts::finish(void* request) {
  int done = 0;
  for (int tests = 0; done == 0; ++tests) {
    ranks::require(plugin_->test(ranks_[0].coll, request, &done), "test");
    if (tests == kMaxTests) throw ranks::Failure("a put did not complete in all tests");
  }
}

void MeasuredPuts::put(std::size_t bytes, int times) {
  for (int i = 0; i < times; ++i) {
    void* request = nullptr;
    start_put(bytes, &request);
    finish(request);
  }
}

void MeasuredPuts::put_signal(std::size_t bytes, int times) {
  const RankState& own = ranks_[0];
  const netapi::RmaSignal signal{.word = {own.words, 0}, .operation = nccl::kSignalIncrement};
  signals_ += static_cast<std::uint64_t>(times);
  for (int i = 0; i < times; ++i) {
    void* request = nullptr;
    ranks::require(
        plugin_->iput_signal(own.contexts, 0, {own.data, 0}, bytes, {own.data, 0}, kTarget, signal, &request),
        "iputSignal");
    finish(request);
  }
}

void MeasuredPuts::put_bursts(std::size_t bytes, int times) {
  for (int i = 0; i < times; i += kBurst) {
    std::array<void*, kBurst> requests{};
    for (void*& request : requests) start_put(bytes, &request);
    for (void* const request : requests) finish(request);
  }
}

void MeasuredPuts::put_stream(std::size_t bytes, std::size_t times) {
  const RankState& own = ranks_[0];
  std::array<void*, kUnderWay> requests{};  // a ring
  std::size_t started = 0;
  std::size_t tested = 0;
  for (int idle = 0; tested < times; ++idle) {
    for (const std::size_t until = std::min(times, tested + kUnderWay); started < until; ++started) {
      ranks::require(
          calls_.iput(own.contexts, 0, 0, own.data, bytes, 0, own.data, kTarget, &requests[started % kUnderWay]),
          "iput");
    }
    for (; tested < started; ++tested) {
      int done = 0;
      ranks::require(calls_.test(own.coll, requests[tested % kUnderWay], &done), "test");
      if (done == 0) break;
      idle = 0;
    }
    if (idle == kMaxIdle) throw ranks::Failure("a put did not complete in all tests");
  }
}

void MeasuredPuts::check(std::size_t bytes) const {
  if (std::memcmp(ranks_[0].bytes, ranks_[kTarget].bytes, bytes) != 0) {
    throw ranks::Failure("the bytes that were put are wrong");
  }
  const std::uint64_t arrived = __atomic_load_n(&ranks_[kTarget].signal, __ATOMIC_ACQUIRE);
  if (arrived != signals_) {
    throw ranks::Failure("the signal is " + std::to_string(arrived) + " after " + std::to_string(signals_) +
                         " signals");
  }
}

bool MeasuredPuts::start_get() {
  const RankState& own = ranks_[0];
  return plugin_->iget(own.contexts, 0, {own.data, 0}, 1, {own.data, 0}, kTarget, &incomplete_) ==
             nccl::Result::kSuccess &&
         incomplete_ != nullptr;
}

void MeasuredPuts::test_incomplete(int times) {
  int done = 0;
  for (int i = 0; i < times; ++i) ranks::require(plugin_->test(ranks_[0].coll, incomplete_, &done), "test");
  if (done != 0) throw ranks::Failure("a get completed whose completion the device drops");
}

}  // namespace verbatim::perf::cost
