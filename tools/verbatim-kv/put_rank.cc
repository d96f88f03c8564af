#include "verbatim-kv/put_rank.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <optional>
#include <utility>

#include "memory/guarded_buffer.h"
#include "ranks/plugin_counters.h"
#include "ranks/plugin_log.h"
#include "ranks/progress_bar.h"
#include "ranks/worker_thread.h"
#include "verbatim-kv/agreement.h"
#include "verbatim-kv/layout.h"
#include "verbatim-kv/poll_backoff.h"
#include "verbatim-kv/put_decode.h"
#include "verbatim-kv/put_prefill.h"
#include "verbatim-kv/rendezvous.h"
#include "verbatim-kv/report.h"

namespace verbatim::kv {
namespace {

constexpr std::chrono::milliseconds kPutBarInterval{100};

class PutRank final : public ranks::Rank {
 public:
  PutRank(const Options& options, ranks::CoordinatorConnection& coordinator)
      : options_(options),
        coordinator_(coordinator),
        requests_(make_requests(options_)),
        is_prefill_(options_.job.rank < options_.prefills),
        index_(static_cast<std::uint32_t>(is_prefill_ ? options_.job.rank : options_.job.rank - options_.prefills)),
        layout_(lay_out(options_, requests_, is_prefill_)),
        memory_(*storage_, layout_.families, options_.allocations) {
    ranks::keep_plugin_log(options_.job.rank, options_.plugin_log);
    comm_.emplace(options_.plugin, options_.api_version, coordinator_.comm_id());
  }

  ExitStatus run() override {
    kv::agree(coordinator_, options_, requests_);
    agree_on_put_plugin();
    comm_->connect(coordinator_, options_.job.rank, options_.job.nranks, kPutContexts);
    register_memory();
    make_put_sides();
    transfer_all();
    coordinator_.barrier();
    for (const auto& side : sides_) side->check();
    comm_->close();
    comm_.reset();
    return report_all();
  }

 private:
  static constexpr int kPutContexts = 2;  // KV's and LF's, whether or not there is LF

  void agree_on_put_plugin() {
    const int version = comm_->plugin().api_version();
    for (const int other : coordinator_.all_gather_values(version)) {
      if (other != version) {
        throw Failure("this rank's plugin has RMA table version " + std::to_string(version) +
                      ", another rank's plugin has " + std::to_string(other) + ". Next: set --api");
      }
    }
    report_.transport =
        std::string(comm_->plugin().name()) + " (RMA plugin v" + std::to_string(version) + ", " + comm_->path() + ")";
    report_.memory_of_rank_0 = storage_->describe() + ", regMrSym";
  }

  // All ranks register the same number of intervals in the same order: a handle names the memory of all of them.
  void register_memory() {
    const std::size_t count = memory_.intervals().all().size();
    for (const std::size_t other : coordinator_.all_gather_values(count)) {
      if (other != count) {
        throw Failure("this rank has " + std::to_string(count) + " ranges of memory, another rank has " +
                      std::to_string(other) + ". Next: set --allocations slab");
      }
    }
    for (const Interval& interval : memory_.intervals().all()) {
      window_.push_back(
          comm_->register_memory(reinterpret_cast<void*>(interval.begin), interval.end - interval.begin, 0));
    }
    for (std::size_t i = 0; i < layout_.families.size(); ++i) {
      words_.push_back(
          std::make_unique<memory::GuardedBuffer>(*storage_, signal_words(options_) * sizeof(std::uint64_t)));
      std::memset(words_.back()->data(), 0, words_.back()->size());
      word_handles_.push_back(
          comm_->register_memory(words_.back()->data(), words_.back()->size(), nccl::kMrForceStrictOrdering));
    }
  }

  void make_put_sides() {
    std::vector<std::vector<FamilyDescription>> peers = exchange_families();
    auto channels = connect_channels(options_.job, coordinator_, layout_.families.size(), options_.prefills);
    context_.emplace(
        PutContext{options_, *comm_, *storage_, memory_.intervals(), window_, requests_, index_, finished_});
    for (std::size_t i = 0; i < layout_.families.size(); ++i) {
      const Family& family = layout_.families[i];
      if (is_prefill_) {
        sides_.push_back(std::make_unique<PutPrefill>(*context_, family, std::move(channels[i]), std::move(peers[i]),
                                                      word_handles_[i]));
      } else {
        sides_.push_back(std::make_unique<PutDecode>(*context_, family, std::move(channels[i]), layout_.reserved[i],
                                                     reinterpret_cast<const std::uint64_t*>(words_[i]->data())));
      }
    }
  }

  // Returns the families of the decode ranks, by family and decode rank.
  std::vector<std::vector<FamilyDescription>> exchange_families() {
    const Faults faults_of_kv(options_.faults, FamilyId::kKv);
    const Faults faults_of_lf(options_.faults, FamilyId::kLf);
    Writer writer;
    for (const Family& family : layout_.families) {
      const Faults& faults = family.geometry.family == FamilyId::kKv ? faults_of_kv : faults_of_lf;
      Family described = family;
      if (!is_prefill_ && faults.has(FaultKind::kGeometry)) ++described.geometry.block_tokens;
      put_family(writer, described, memory_.intervals());
    }
    std::vector<std::vector<FamilyDescription>> decodes(layout_.families.size());
    int rank = 0;
    for (const std::string& bytes : coordinator_.all_gather(writer.bytes())) {
      Reader reader(bytes);
      for (std::size_t i = 0; i < layout_.families.size(); ++i) {
        FamilyDescription peer = get_family(reader);
        require_same_geometry(layout_.families[i], peer, rank);
        if (rank >= options_.prefills) decodes[i].push_back(std::move(peer));
      }
      ++rank;
    }
    return decodes;
  }

  static void require_same_geometry(const Family& own, const FamilyDescription& peer, int rank) {
    if (peer.family.geometry.hash() != own.geometry.hash()) {
      throw Failure(std::string(rejection_name(RejectionCode::kGeometryMismatch)) + ": family " + own.geometry.name +
                    " of rank " + std::to_string(rank));
    }
    if (const auto rejection = validate_family({peer.family, peer.memory})) throw Failure(rejection->text);
  }

  // Runs both families on one thread, as NCCL's progress thread does.
  void transfer_all() {
    coordinator_.barrier();
    ranks::Worker worker("put");
    std::future<void> running = worker.start([this] { progress(); });
    ranks::ProgressBar bar(options_.job.rank == 0);
    const std::uint64_t total = sides_.size() * own_requests();
    while (running.wait_for(kPutBarInterval) != std::future_status::ready) {
      const std::uint64_t done = finished_.load(std::memory_order_relaxed);
      bar.draw(static_cast<double>(done) / static_cast<double>(std::max<std::uint64_t>(total, 1)),
               std::to_string(done) + " of " + std::to_string(total) + " requests");
    }
    running.get();
  }

  void progress() {
    PollBackoff backoff;
    const auto all_finished = [this] {
      return std::all_of(sides_.begin(), sides_.end(), [](const auto& side) { return side->finished(); });
    };
    while (!all_finished()) {
      bool progressed = false;
      const bool poll_sockets = backoff.should_poll_sockets();
      for (const auto& side : sides_) progressed = side->step(poll_sockets) || progressed;
      ranks::require(comm_->plugin().progress(comm_->contexts()), "rmaProgress");
      backoff.after_round(progressed);
    }
  }

  std::uint64_t own_requests() const {
    return static_cast<std::uint64_t>(std::count_if(requests_.begin(), requests_.end(), [this](const Request& request) {
      return is_prefill_ ? request.prefill == index_ : request.engine == index_ / options_.tp_ratio;
    }));
  }

  ExitStatus report_all() {
    report_.longest_blocks = layout_.longest_blocks;
    report_.families = layout_.reports;
    std::vector<const FamilyStats*> stats;
    for (const auto& side : sides_) stats.push_back(&side->stats());
    RankMemory own{.allocations = memory_.allocations(),
                   .registrations = memory_.intervals().all().size(),
                   .reg_mr_calls = window_.size() + word_handles_.size(),
                   .damage = memory_.damage()};
    for (const Family& family : layout_.families) own.bytes += family.bytes();
    for (const auto& words : words_) {
      if (const auto damage = words->damage()) own.damage += damage->bytes;
    }
    report_.add_all_ranks(coordinator_, own, counters_.text(), stats, true);
    if (options_.job.rank == 0) {
      print(stdout, report_);
      if (!options_.json.empty()) write(report_, options_.json);
    }
    return report_.status();
  }

  const Options options_;
  ranks::CoordinatorConnection& coordinator_;
  const std::vector<Request> requests_;
  const bool is_prefill_;
  const std::uint32_t index_;  // among the prefill or the decode ranks
  Layout layout_;
  // Registered: freed after the plugin.
  const std::unique_ptr<memory::Memory> storage_ = memory::make_host_memory(options_.pages);
  CacheMemory memory_;
  const ranks::PluginCounters counters_;
  std::optional<ranks::RmaComm> comm_;
  std::vector<void*> window_;                                  // by interval
  std::vector<std::unique_ptr<memory::GuardedBuffer>> words_;  // by family
  std::vector<void*> word_handles_;
  std::atomic<std::uint64_t> finished_{0};
  std::optional<PutContext> context_;
  std::vector<std::unique_ptr<PutSide>> sides_;
  Report report_{.options = options_};
};

}  // namespace

std::unique_ptr<ranks::Rank> make_put_rank(const Options& options, ranks::CoordinatorConnection& coordinator) {
  return std::make_unique<PutRank>(options, coordinator);
}

}  // namespace verbatim::kv
