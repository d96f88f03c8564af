#include "verbatim-perf/rank.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/version.h"
#include "memory/content.h"
#include "memory/guarded_buffer.h"
#include "netapi/plugin.h"
#include "ranks/agreement.h"
#include "ranks/connections.h"
#include "ranks/coordinator_connection.h"
#include "ranks/loaded_plugin.h"
#include "ranks/plugin_log.h"
#include "ranks/progress_bar.h"
#include "ranks/statistics.h"
#include "ranks/worker_thread.h"
#include "verbatim-perf/operation.h"
#include "verbatim-perf/progress.h"
#include "verbatim-perf/puts/put_rank.h"
#include "verbatim-perf/report.h"

namespace verbatim::perf {
namespace {

using memory::GuardedBuffer;

constexpr int kDefaultGroup = 8;
constexpr std::size_t kMaxElementBytes = 8;
constexpr int kMaxErrors = 3;  // mismatches that a rank prints; the table counts all
constexpr std::chrono::milliseconds kBarInterval{100};

// What the ranks exchange before they connect.
struct RankCapabilities {
  char host[64];
  int pid;
  char memory[96];
  char registered_by[16];
  int api_version;
  int max_recvs;
  std::size_t max_p2p_bytes;
};

// What the ranks exchange after each size.
struct Outcome {
  std::uint64_t elapsed_ns;
  std::uint64_t wrong;
};

class PerfRank final : public ranks::Rank {
 public:
  PerfRank(const Options& options, ranks::CoordinatorConnection& coordinator)
      : options_(options),
        coordinator_(coordinator),
        memory_(memory::make_memory(options.memory, options.cuda, options.job.rank)),
        plugin_(options.plugin, options.api_version, coordinator.comm_id(), options.merge) {
    memory::require_support(*memory_, plugin_);
  }

  ExitStatus run() override {
    ranks::agree(coordinator_, options_.job.rank, facts());
    exchange_capabilities();
    connect();
    if (is_first()) {
      for (const std::string& note : notes()) std::fprintf(stderr, "verbatim-perf: note: %s\n", note.c_str());
      print_header(stdout, report_);
    }
    for (const workload::ElementType type : options_.types) {
      for (const workload::ReductionKind reduction : options_.reductions) {
        for (const int root : options_.roots) measure_sizes(type, reduction, root);
      }
    }
    service_.run([this] { connections_->close(); });
    plugin_.finalize();
    if (is_first()) {
      print_footer(stdout, report_);
      if (!options_.json.empty()) write_json(report_, options_.json);
      nccl_tests_json_.write(report_);
    }
    if (options_.required_busbw != -1 && std::strcmp(report_.busbw_result(), "OK") != 0) return ExitStatus::kWrong;
    return report_.wrong() == 0 ? ExitStatus::kOk : ExitStatus::kWrong;
  }

 private:
  bool is_first() const { return options_.job.rank == 0; }

  // nccl-tests' table has no place for the plugin, nor for what one rank alone shows.
  std::vector<std::string> notes() const {
    std::vector<std::string> notes = options_.notes;
    if (options_.format == Format::kNcclTests) {
      notes.push_back("verbatim-perf " + release_and_commit() + " over " + report_.plugin_name + " (net plugin v" +
                      std::to_string(report_.api_version) + ", " + report_.plugin_path + "), without NCCL");
      if (report_.ranks.size() == 1) notes.emplace_back("one rank: no bytes are sent between ranks");
    }
    return notes;
  }

  // What must be the same on all ranks.
  std::vector<ranks::Fact> facts() const {
    return {{"operation", operation_name(options_.operation)},
            {"number of channels (--channels)", std::to_string(options_.channels)},
            {"largest message (--chunk)", std::to_string(options_.chunk_bytes)},
            {"receives posted ahead (--depth)", std::to_string(options_.depth)},
            {"members of a receive (--group)", std::to_string(options_.group)},
            {"smallest size (--minbytes)", std::to_string(options_.min_bytes)},
            {"largest size (--maxbytes)", std::to_string(options_.max_bytes)},
            {"factor of the sizes (--stepfactor)", std::to_string(options_.factor)},
            {"step of the sizes (--stepbytes)", std::to_string(options_.step_bytes)},
            {"timed iterations (--iters)", std::to_string(options_.iterations)},
            {"warm-up iterations (--warmup_iters)", std::to_string(options_.warmup_iterations)},
            {"checked iterations (--check)", std::to_string(options_.check_iterations)},
            {"type (--datatype)", listed(options_.types, workload::element_name)},
            {"reduction (--op)", listed(options_.reductions, workload::reduction_name)},
            {"root (-r)", listed(options_.roots, [](int root) { return std::to_string(root); })},
            {"runs of all sizes (--run_cycles)", std::to_string(options_.cycles)},
            {"offset of the buffers (--unalign)", std::to_string(options_.unalign)},
            {"times of the iterations (--per_iter_timing)", options_.per_iteration ? "wanted" : "not wanted"},
            {"runs of each size (--format)", options_.format == Format::kNcclTests ? "two" : "one"}};
  }

  template <typename T, typename Name>
  static std::string listed(const std::vector<T>& values, const Name& name_of) {
    std::string names;
    for (const T value : values) names += (names.empty() ? "" : ",") + std::string(name_of(value));
    return names;
  }

  // Exchanges with the other ranks what each plugin supports, and uses the smallest values.
  void exchange_capabilities() {
    RankCapabilities own{};
    gethostname(own.host, sizeof own.host - 1);
    own.pid = getpid();
    std::snprintf(own.memory, sizeof own.memory, "%s", memory_->describe().c_str());
    std::snprintf(own.registered_by, sizeof own.registered_by, "%s", memory_->registered_by(plugin_, 0));
    own.api_version = plugin_->api_version();
    own.max_recvs = std::min(kDefaultGroup, plugin_.max_recvs());
    own.max_p2p_bytes = plugin_.max_p2p_bytes();
    if (options_.group > 0) own.max_recvs = options_.group;

    RankCapabilities common = own;
    report_ = {.options = options_,
               .plugin_name = plugin_->name(),
               .plugin_path = plugin_.path(),
               .api_version = plugin_->api_version(),
               .devices = plugin_.devices(),
               .ranks = {},
               .rows = {}};
    for (const RankCapabilities& other : coordinator_.all_gather_values(own)) {
      if (other.api_version != own.api_version) {
        throw Failure("this rank's plugin has table version " + std::to_string(own.api_version) +
                      ", another rank's plugin has " + std::to_string(other.api_version) + ". Next: set --api");
      }
      report_.ranks.push_back({other.host, other.pid, other.memory, other.registered_by});
      common.max_recvs = std::min(common.max_recvs, other.max_recvs);
      common.max_p2p_bytes = std::min(common.max_p2p_bytes, other.max_p2p_bytes);
    }
    report_.group = static_cast<std::size_t>(std::max(1, common.max_recvs));
    report_.chunk_bytes = chunk_bytes(common.max_p2p_bytes);
    operation_ = operation_of(options_.types.front(), options_.reductions.front(), options_.roots.front());
  }

  // Connections and memory are the same for all of them.
  std::unique_ptr<Operation> operation_of(workload::ElementType type, workload::ReductionKind reduction,
                                          int root) const {
    return make_operation(options_.operation, {.rank = options_.job.rank,
                                               .ranks = options_.job.nranks,
                                               .channels = options_.channels,
                                               .type = type,
                                               .reduction = reduction,
                                               .root = root,
                                               .chunk_bytes = report_.chunk_bytes,
                                               .depth = static_cast<std::size_t>(options_.depth),
                                               .group = report_.group});
  }

  void measure_sizes(workload::ElementType type, workload::ReductionKind reduction, int root) {
    operation_ = operation_of(type, reduction, root);
    row_ = {.type = type, .redop = "none", .root = root};
    if (shows_reduction(options_.operation)) row_.redop = workload::reduction_name(reduction);
    if (options_.operation == OperationKind::kHypercube) row_.redop = "";  // as in nccl-tests
    // Without checks the buffers keep this content.
    if (options_.check_iterations == 0) fill(operation_->extent(sizes_.back()), {});
    for (int cycle = 0; cycle < options_.cycles || options_.cycles == 0; ++cycle) {
      if (options_.cycles == 0) report_.rows.clear();  // there is no end at which they would be used
      for (const std::size_t bytes : sizes_) measure(bytes);
    }
  }

  // A chunk is at most as large as the largest message; otherwise the staging buffer would be needlessly large.
  std::size_t chunk_bytes(std::size_t max_p2p_bytes) const {
    const std::size_t wanted =
        options_.chunk_bytes > 0 ? options_.chunk_bytes : default_chunk_bytes(options_.operation);
    const std::size_t useful = std::min({wanted, max_p2p_bytes, options_.max_bytes + kMaxElementBytes});
    return std::max(useful / kMaxElementBytes * kMaxElementBytes, kMaxElementBytes);
  }

  void connect() {
    std::size_t needed[kBuffers] = {0, 0, operation_->staging_bytes()};
    for (const workload::ElementType type : options_.types) {
      const Extent largest =
          operation_of(type, options_.reductions.front(), options_.roots.front())->extent(options_.max_bytes);
      needed[0] = std::max(needed[0], largest.send_bytes);
      needed[1] = std::max(needed[1], largest.recv_bytes);
    }
    const auto unaligned = static_cast<std::size_t>(options_.unalign) * workload::element_bytes(options_.types.front());
    std::vector<ranks::Piece> pieces;
    for (std::size_t i = 0; i < kBuffers; ++i) {
      const bool is_staging = i == static_cast<std::size_t>(Buffer::kStaging);
      buffers_[i] = std::make_unique<GuardedBuffer>(*memory_, needed[i], is_staging ? 0 : unaligned);
      pieces.push_back({buffers_[i]->data(), buffers_[i]->capacity()});
    }
    const std::vector<Flow> flows = operation_->flows();
    connections_.emplace(*plugin_, plugin_.context(), static_cast<int>(plugin_.devices().size()), flows,
                         options_.job.rank, plugin_.first_device());
    std::vector<ranks::Handle> own;
    service_.run([&] { own = connections_->listen(); });
    std::vector<ranks::Handle> handles = ranks::exchange_handles(coordinator_, flows, own);
    service_.run([&] {
      connections_->establish(handles);
      connections_->register_memory(pieces, [this](const ranks::Connection& connection, const ranks::Piece& piece) {
        return memory_->register_at(plugin_, connection.device, connection.comm, piece.data, piece.bytes);
      });
    });
    progress_.emplace(*plugin_, *connections_, *memory_, pieces, options_.pause_us);
  }

  void measure(std::size_t bytes) {
    const Extent extent = operation_->extent(bytes);
    const Measured measured = run_size(extent, std::nullopt);
    std::optional<Measured> in_place;
    if (options_.format == Format::kNcclTests) {
      in_place = run_size(extent, Range{operation_->in_place_offset(extent), extent.send_bytes});
    }
    add_row(extent, measured, in_place);
  }

  // `own`: in place the part of the receive buffer that this rank sends. Iterations after the first one then send what
  // the one before has received, so only single iterations are checked.
  Measured run_size(const Extent& extent, const std::optional<Range>& own) {
    Plan plan = operation_->plan(extent);
    if (own) plan = in_place(std::move(plan), own->offset);
    progress_->prepare(plan, operation_->arithmetic());
    const Range sent = own.value_or(Range{});
    const bool checks = options_.check_iterations > 0 && (!own || operation_->has_result_in_place());
    Outcome outcome{};
    for (int i = 0; i < options_.check_iterations && checks; ++i) {
      fill(extent, sent);
      iterate(1, extent.bytes);
      outcome.wrong += check(extent, sent);
    }
    if (options_.check_iterations > 0) fill(extent, sent);
    coordinator_.barrier();
    iterate(options_.warmup_iterations, extent.bytes);  // also synchronises the ranks
    const bool times_each = options_.operation == OperationKind::kPingPong || options_.per_iteration;
    times_ns_.clear();
    if (times_each) times_ns_.reserve(static_cast<std::size_t>(options_.iterations));
    const std::uint64_t begin = monotonic_ns();
    iterate(options_.iterations, extent.bytes, times_each ? &times_ns_ : nullptr);
    outcome.elapsed_ns = monotonic_ns() - begin;
    if (checks && !own) outcome.wrong += check(extent, sent);
    Measured measured = gather(extent, outcome);
    if (!checks) measured.wrong.reset();
    return measured;
  }

  // What all ranks have measured, as one result.
  Measured gather(const Extent& extent, const Outcome& own) {
    std::vector<double> times_ns;
    std::uint64_t wrong = 0;
    for (const Outcome& outcome : coordinator_.all_gather_values(own)) {
      times_ns.push_back(static_cast<double>(std::max<std::uint64_t>(outcome.elapsed_ns, 1)));
      wrong += outcome.wrong;
    }
    const double ns = average_time(options_.average, times_ns) / options_.iterations * operation_->time_factor();
    const double algbw = static_cast<double>(operation_->algorithm_bytes(extent)) / ns;
    Measured measured{.time_us = ns / 1000, .algbw = algbw, .busbw = algbw * operation_->bus_factor(), .wrong = wrong};
    if (options_.per_iteration) measured.iterations = times_of_ranks();
    return measured;
  }

  IterationTimes times_of_ranks() {
    IterationTimes all;
    const std::size_t bytes = times_ns_.size() * sizeof(std::uint64_t);
    for (const std::string& part : coordinator_.all_gather({reinterpret_cast<const char*>(times_ns_.data()), bytes})) {
      std::vector<std::uint64_t> ns(times_ns_.size());
      std::memcpy(ns.data(), part.data(), bytes);
      std::vector<double>& us = all.emplace_back();
      for (const std::uint64_t each : ns) us.push_back(static_cast<double>(each) / 1000);
    }
    return all;
  }

  void add_row(const Extent& extent, const Measured& measured, const std::optional<Measured>& in_place) {
    Row row = row_;
    row.bytes = extent.bytes;
    row.count = extent.count;
    row.time_us = measured.time_us;
    row.algbw = measured.algbw;
    row.busbw = measured.busbw;
    row.wrong = measured.wrong.value_or(0);
    row.in_place = in_place;
    row.iterations = measured.iterations;
    if (options_.operation == OperationKind::kPingPong) {
      const auto us = [&](double part) {
        return static_cast<double>(ranks::percentile(times_ns_, part)) / 1000 * operation_->time_factor();
      };
      row.latency = Latency{us(0), us(0.5), us(0.99), us(0.999)};
    }
    report_.rows.push_back(row);
    bar_.clear();
    if (is_first()) print_row(stdout, report_, row);
  }

  // Writes new content to what this rank sends, and to the receive buffer the complement of the expected content.
  // `own`: see run_size(), empty if not in place.
  void fill(const Extent& extent, const Range& own) {
    ++step_;
    buffer(Buffer::kSend).resize(extent.send_bytes);
    buffer(Buffer::kRecv).resize(extent.recv_bytes);
    memory::fill(*memory_, *own_content(), buffer(Buffer::kSend).data(), extent.send_bytes);
    std::byte* const received = buffer(Buffer::kRecv).data();
    for (const Expected& expected : operation_->expected(extent, step_)) {
      memory::poison(*memory_, *expected.content, received + expected.offset, expected.bytes, expected.content_offset);
    }
    for (const Expected& kept : unchanged(extent, own)) {
      memory::fill(*memory_, *kept.content, received + kept.offset, kept.bytes, kept.content_offset);
    }
    memory::fill(*memory_, *own_content(), received + own.offset, own.bytes);
  }

  // What the receive buffer holds before and after an iteration: in `own` what this rank sends, elsewhere a pattern
  // that no rank sends.
  std::vector<Expected> unchanged(const Extent& extent, const Range& own) const {
    std::vector<Expected> all;
    const auto add = [&all](std::size_t begin, std::size_t end, std::unique_ptr<workload::Content> content,
                            std::size_t content_offset) {
      if (begin < end) all.push_back({begin, end - begin, std::move(content), content_offset});
    };
    for (const Range& range : operation_->unchanged(extent)) {
      const std::size_t end = range.offset + range.bytes;
      const std::size_t own_begin = std::clamp(own.offset, range.offset, end);
      const std::size_t own_end = std::clamp(own.offset + own.bytes, range.offset, end);
      add(range.offset, own_begin, unsent_pattern(), range.offset);
      add(own_begin, own_end, own_content(), own_begin - own.offset);
      add(own_end, end, unsent_pattern(), own_end);
    }
    return all;
  }

  // Returns the number of wrong elements on this rank; in guards, of wrong bytes. `own`: as in fill().
  std::uint64_t check(const Extent& extent, const Range& own) {
    const std::size_t unit = workload::element_bytes(row_.type);
    std::uint64_t wrong = 0;
    std::vector<Expected> all = operation_->expected(extent, step_);
    std::ranges::move(unchanged(extent, own), std::back_inserter(all));
    for (const Expected& expected : all) {
      const workload::Mismatch found =
          memory::verify(*memory_, *expected.content, buffer(Buffer::kRecv).data() + expected.offset, expected.bytes,
                         expected.content_offset, unit);
      wrong += describe("receive", expected.offset, found);
    }
    wrong += describe(
        "send", 0, memory::verify(*memory_, *own_content(), buffer(Buffer::kSend).data(), extent.send_bytes, 0, unit));
    for (const auto& guarded : buffers_) {
      const auto damage = guarded->damage();
      if (!damage) continue;
      wrong += damage->bytes;
      add_error("wrote outside of a buffer of " + std::to_string(guarded->size()) + " bytes, at offset " +
                std::to_string(damage->offset));
    }
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
    if (errors_++ >= kMaxErrors) return;
    bar_.clear();
    std::fprintf(stderr, "verbatim-perf: rank %d, iteration %" PRIu64 ": %s\n", options_.job.rank, step_, what.c_str());
  }

  void iterate(int iterations, std::size_t bytes, std::vector<std::uint64_t>* times_ns = nullptr) {
    std::atomic<std::uint64_t> finished{0};
    std::future<void> done = progress_thread_.start(
        [&] { progress_->run(static_cast<std::uint64_t>(iterations), operation_->overlaps(), finished, times_ns); });
    while (done.wait_for(kBarInterval) != std::future_status::ready) {
      const double part = static_cast<double>(finished.load(std::memory_order_relaxed)) / iterations;
      const auto size = static_cast<double>(report_.rows.size());
      bar_.draw(std::min((size + part) / static_cast<double>(rows()), 1.0), std::to_string(bytes) + " B");
    }
    done.get();
  }

  // How many rows the table gets; without end, how many a cycle adds.
  std::size_t rows() const {
    return sizes_.size() * options_.types.size() * options_.reductions.size() * options_.roots.size() *
           static_cast<std::size_t>(std::max(options_.cycles, 1));
  }
  std::unique_ptr<workload::Content> own_content() const { return operation_->contribution(options_.job.rank, step_); }
  std::unique_ptr<workload::Content> unsent_pattern() const {
    return std::make_unique<workload::Pattern>(static_cast<std::uint64_t>(options_.job.nranks), step_);
  }
  GuardedBuffer& buffer(Buffer which) { return *buffers_[static_cast<std::size_t>(which)]; }

  const Options options_;
  ranks::CoordinatorConnection& coordinator_;
  const std::unique_ptr<memory::Memory> memory_;  // before the plugin: see make_memory()
  ranks::LoadedPlugin plugin_;
  const std::vector<std::size_t> sizes_ = message_sizes(options_);
  std::unique_ptr<Operation> operation_;
  std::unique_ptr<GuardedBuffer> buffers_[kBuffers];
  std::optional<ranks::Connections> connections_;
  std::optional<Progress> progress_;
  ranks::ProgressBar bar_{options_.job.rank == 0};
  Report report_;
  const NcclTestsJson nccl_tests_json_{options_.nccl_tests_json, options_.arguments};
  Row row_;                              // of the type, reduction and root that run
  std::vector<std::uint64_t> times_ns_;  // of the timed iterations of the last run, if each is timed
  std::uint64_t step_ = 0;
  int errors_ = 0;
  ranks::Worker service_{"service"};
  ranks::Worker progress_thread_{"progress"};
};

}  // namespace

std::unique_ptr<ranks::Rank> make_rank(const Options& options, ranks::CoordinatorConnection& coordinator) {
  ranks::keep_plugin_log(options.job.rank, options.plugin_log);
  if (is_put_operation(options.operation)) return make_put_rank(options, coordinator);
  return std::make_unique<PerfRank>(options, coordinator);
}

}  // namespace verbatim::perf
