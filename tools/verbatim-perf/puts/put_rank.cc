#include "verbatim-perf/puts/put_rank.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "memory/content.h"
#include "memory/guarded_buffer.h"
#include "ranks/agreement.h"
#include "ranks/progress_bar.h"
#include "ranks/rma_comm.h"
#include "ranks/worker_thread.h"
#include "verbatim-perf/puts/put_plan.h"
#include "verbatim-perf/puts/put_progress.h"
#include "verbatim-perf/report.h"

namespace verbatim::perf {
namespace {

constexpr int kMaxPutErrors = 3;  // that a rank prints; the table counts all
constexpr std::chrono::milliseconds kPutBarInterval{100};

// What the ranks exchange before they connect.
struct PutRankInfo {
  char host[64];
  int pid;
  int api_version;
};

// What the ranks exchange after each size.
struct PutOutcome {
  std::uint64_t elapsed_ns;
  std::uint64_t wrong;
};

class PutRank final : public ranks::Rank {
 public:
  PutRank(const Options& options, ranks::CoordinatorConnection& coordinator)
      : options_(options),
        coordinator_(coordinator),
        comm_(options.plugin, options.api_version, coordinator.comm_id()),
        shape_{options.operation, options.job.rank, options.job.nranks, options.contexts, options.types.front()} {}

  ExitStatus run() override {
    ranks::agree(coordinator_, options_.job.rank, facts());
    exchange_ranks();
    connect();
    if (is_first()) {
      for (const std::string& note : options_.notes) std::fprintf(stderr, "verbatim-perf: note: %s\n", note.c_str());
      print_header(stdout, report_);
    }
    for (const std::size_t bytes : sizes_) measure(bytes);
    coordinator_.barrier();
    service_.run([this] { comm_.close(); });
    if (is_first()) {
      print_footer(stdout, report_);
      if (!options_.json.empty()) write_json(report_, options_.json);
    }
    return report_.wrong() == 0 ? ExitStatus::kOk : ExitStatus::kWrong;
  }

 private:
  bool is_first() const { return options_.job.rank == 0; }

  // What must be the same on all ranks.
  std::vector<ranks::Fact> facts() const {
    return {{"operation", operation_name(options_.operation)},
            {"number of contexts (--contexts)", std::to_string(options_.contexts)},
            {"transfers under way (--depth)", std::to_string(options_.depth)},
            {"smallest size (--minbytes)", std::to_string(options_.min_bytes)},
            {"largest size (--maxbytes)", std::to_string(options_.max_bytes)},
            {"factor of the sizes (--stepfactor)", std::to_string(options_.factor)},
            {"step of the sizes (--stepbytes)", std::to_string(options_.step_bytes)},
            {"timed iterations (--iters)", std::to_string(options_.iterations)},
            {"warm-up iterations (--warmup_iters)", std::to_string(options_.warmup_iterations)},
            {"checked iterations (--check)", std::to_string(options_.check_iterations)},
            {"type (--datatype)", workload::element_name(options_.types.front())}};
  }

  void exchange_ranks() {
    PutRankInfo own{};
    gethostname(own.host, sizeof own.host - 1);
    own.pid = getpid();
    own.api_version = comm_.plugin().api_version();
    report_ = {.options = options_,
               .plugin_name = comm_.plugin().name(),
               .plugin_path = comm_.path(),
               .api_version = own.api_version,
               .devices = comm_.devices(),
               .ranks = {},
               .rows = {}};
    for (const PutRankInfo& other : coordinator_.all_gather_values(own)) {
      if (other.api_version != own.api_version) {
        throw Failure("this rank's plugin has RMA table version " + std::to_string(own.api_version) +
                      ", another rank's plugin has " + std::to_string(other.api_version) + ". Next: set --api");
      }
      report_.ranks.push_back({other.host, other.pid, memory_->describe(), "regMrSym"});
    }
  }

  void connect() {
    const Extent largest = put_extent(shape_, options_.max_bytes);
    send_.emplace(*memory_, std::max<std::size_t>(largest.send_bytes, 1));
    recv_.emplace(*memory_, std::max<std::size_t>(largest.recv_bytes, 1));
    words_.emplace(*memory_, signal_words(shape_) * sizeof(std::uint64_t));
    std::memset(words_->data(), 0, words_->size());
    PutMemory memory;
    service_.run([&] {
      comm_.connect(coordinator_, options_.job.rank, options_.job.nranks, options_.contexts);
      memory.coll = comm_.coll();
      memory.contexts = comm_.contexts();
      memory.send = comm_.register_memory(send_->data(), send_->capacity(), 0);
      memory.recv = comm_.register_memory(recv_->data(), recv_->capacity(), 0);
      memory.words = comm_.register_memory(words_->data(), words_->capacity(), nccl::kMrForceStrictOrdering);
    });
    memory.signals = reinterpret_cast<const std::uint64_t*>(words_->data());
    const int depth = options_.operation == OperationKind::kAllToAllPut ? 1 : options_.depth;
    progress_.emplace(comm_.plugin(), shape_, memory, depth, options_.pause_us);
  }

  void measure(std::size_t bytes) {
    const Extent extent = put_extent(shape_, bytes);
    progress_->prepare(put_transfers(shape_, extent));
    PutOutcome own{};
    for (int i = 0; i < options_.check_iterations; ++i) {
      fill(extent);
      iterate(1, bytes);
      own.wrong += check(extent);
    }
    fill(extent);
    iterate(options_.warmup_iterations, bytes);
    coordinator_.barrier();
    const std::uint64_t begin = monotonic_ns();
    iterate(options_.iterations, bytes);
    own.elapsed_ns = monotonic_ns() - begin;
    if (options_.check_iterations > 0) own.wrong += check(extent);
    add_row(extent, own);
  }

  void add_row(const Extent& extent, const PutOutcome& own) {
    std::vector<double> times_ns;
    std::uint64_t wrong = 0;
    for (const PutOutcome& outcome : coordinator_.all_gather_values(own)) {
      times_ns.push_back(static_cast<double>(std::max<std::uint64_t>(outcome.elapsed_ns, 1)));
      wrong += outcome.wrong;
    }
    const double ns = average_time(options_.average, times_ns) / options_.iterations;
    const double algbw = static_cast<double>(extent.bytes) / ns;
    const double ranks = options_.job.nranks;
    const double factor = options_.operation == OperationKind::kAllToAllPut ? (ranks - 1) / ranks : 1;
    const Row row{.bytes = extent.bytes,
                  .count = extent.count,
                  .time_us = ns / 1000,
                  .algbw = algbw,
                  .busbw = algbw * factor,
                  .wrong = wrong,
                  .type = options_.types.front()};
    report_.rows.push_back(row);
    bar_.clear();
    if (is_first()) print_row(stdout, report_, row);
  }

  // Writes new content to the send buffer, and the complement of the expected content to the receive buffer. Returns
  // when all ranks have done so.
  void fill(const Extent& extent) {
    ++step_;
    if (options_.check_iterations > 0 || step_ == 1) {
      send_->resize(extent.send_bytes);
      recv_->resize(extent.recv_bytes);
      memory::fill(*memory_, own_content(), send_->data(), extent.send_bytes);
      for (const Expected& expected : put_expected(shape_, extent, step_)) {
        memory::poison(*memory_, *expected.content, recv_->data() + expected.offset, expected.bytes,
                       expected.content_offset);
      }
    }
    coordinator_.barrier();
  }

  // Returns the number of wrong elements and signals on this rank; in guards, of wrong bytes. Only a signal says that
  // the bytes before it have arrived: then they are compared at once.
  std::uint64_t check(const Extent& extent) {
    if (options_.operation == OperationKind::kPut) coordinator_.barrier();
    const std::size_t unit = workload::element_bytes(options_.types.front());
    std::uint64_t wrong = 0;
    for (const Expected& expected : put_expected(shape_, extent, step_)) {
      wrong += describe("receive", expected.offset,
                        memory::verify(*memory_, *expected.content, recv_->data() + expected.offset, expected.bytes,
                                       expected.content_offset, unit));
    }
    wrong += describe("send", 0, memory::verify(*memory_, own_content(), send_->data(), extent.send_bytes, 0, unit));
    const std::vector<std::string> signals = progress_->wrong_signals();
    for (const std::string& signal : signals) add_error(signal);
    wrong += signals.size();
    for (const auto* const guarded : {&send_, &recv_, &words_}) {
      const auto damage = (*guarded)->damage();
      if (!damage) continue;
      wrong += damage->bytes;
      add_error("wrote outside of a buffer of " + std::to_string((*guarded)->size()) + " bytes, at offset " +
                std::to_string(damage->offset));
    }
    // The peers may still read the send buffer.
    if (options_.operation == OperationKind::kGet) coordinator_.barrier();
    return wrong;
  }

  std::uint64_t describe(const char* which, std::size_t offset, const workload::Mismatch& found) {
    if (found.wrong == 0) return 0;
    char text[160];
    std::snprintf(text, sizeof text,
                  "%" PRIu64 " wrong elements in the %s buffer, first at byte %zu: %02x instead of %02x", found.wrong,
                  which, offset + static_cast<std::size_t>(found.first_offset), found.got, found.expected);
    add_error(text);
    return found.wrong;
  }

  void add_error(const std::string& what) {
    if (errors_++ >= kMaxPutErrors) return;
    bar_.clear();
    std::fprintf(stderr, "verbatim-perf: rank %d, iteration %" PRIu64 ": %s\n", options_.job.rank, step_, what.c_str());
  }

  void iterate(int iterations, std::size_t bytes) {
    std::atomic<std::uint64_t> finished{0};
    std::future<void> done =
        progress_thread_.start([&] { progress_->run(static_cast<std::uint64_t>(iterations), finished); });
    while (done.wait_for(kPutBarInterval) != std::future_status::ready) {
      const double part = static_cast<double>(finished.load(std::memory_order_relaxed)) / std::max(iterations, 1);
      const auto size = static_cast<double>(report_.rows.size());
      bar_.draw((size + part) / static_cast<double>(sizes_.size()), std::to_string(bytes) + " B");
    }
    done.get();
  }

  workload::Elements own_content() const {
    return {options_.types.front(), static_cast<std::uint64_t>(options_.job.rank), step_};
  }

  const Options options_;
  ranks::CoordinatorConnection& coordinator_;
  const std::unique_ptr<memory::Memory> memory_ = memory::make_host_memory();  // registered: freed after the plugin
  std::optional<memory::GuardedBuffer> send_;
  std::optional<memory::GuardedBuffer> recv_;
  std::optional<memory::GuardedBuffer> words_;
  ranks::RmaComm comm_;
  const PutShape shape_;
  const std::vector<std::size_t> sizes_ = message_sizes(options_);
  std::optional<PutProgress> progress_;
  ranks::ProgressBar bar_{options_.job.rank == 0};
  Report report_;
  std::uint64_t step_ = 0;
  int errors_ = 0;
  ranks::Worker service_{"service"};
  ranks::Worker progress_thread_{"progress"};
};

}  // namespace

std::unique_ptr<ranks::Rank> make_put_rank(const Options& options, ranks::CoordinatorConnection& coordinator) {
  return std::make_unique<PutRank>(options, coordinator);
}

}  // namespace verbatim::perf
