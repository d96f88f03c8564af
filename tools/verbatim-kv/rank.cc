#include "verbatim-kv/rank.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <optional>
#include <utility>
#include <vector>

#include "memory/memory.h"
#include "ranks/plugin_counters.h"
#include "ranks/plugin_log.h"
#include "ranks/progress_bar.h"
#include "ranks/worker_thread.h"
#include "verbatim-kv/agreement.h"
#include "verbatim-kv/decode.h"
#include "verbatim-kv/layout.h"
#include "verbatim-kv/nccl_rank.h"
#include "verbatim-kv/prefill.h"
#include "verbatim-kv/put_rank.h"
#include "verbatim-kv/rendezvous.h"
#include "verbatim-kv/report.h"

namespace verbatim::kv {
namespace {

constexpr int kDefaultGroup = 8;
constexpr std::chrono::milliseconds kBarInterval{100};

struct Agreement {
  int api_version;
  int max_recvs;
};

class DirectRank final : public ranks::Rank {
 public:
  DirectRank(const Options& options, ranks::CoordinatorConnection& coordinator)
      : options_(options),
        coordinator_(coordinator),
        requests_(make_requests(options_)),
        is_prefill_(options_.job.rank < options_.prefills),
        index_(static_cast<std::uint32_t>(is_prefill_ ? options_.job.rank : options_.job.rank - options_.prefills)) {
    ranks::keep_plugin_log(options_.job.rank, options_.plugin_log);
    storage_ = memory::make_memory(options_.memory, options_.cuda, options_.job.rank, options_.pages);
    plugin_.emplace(options_.plugin, options_.api_version, coordinator_.comm_id());
    memory::require_support(*storage_, *plugin_);
  }

  ExitStatus run() override {
    kv::agree(coordinator_, options_, requests_);
    agree_on_plugin();
    make_families();
    device_ = static_cast<int>(index_ % plugin_->devices().size());
    registrations_.emplace(*plugin_, device_, *storage_, memory_->intervals());
    context_.emplace(RankContext{options_, *plugin_, *registrations_, *storage_, memory_->intervals(), requests_,
                                 device_, index_, finished_});
    make_sides();
    transfer();
    coordinator_.barrier();
    finish();
    report_own();
    if (options_.job.rank == 0) {
      print(stdout, report_);
      if (!options_.json.empty()) write(report_, options_.json);
    }
    return report_.status();
  }

 private:
  void agree_on_plugin() {
    if (options_.group > plugin_->max_recvs()) {
      throw Failure("--group " + std::to_string(options_.group) + ": the plugin's maximum is " +
                        std::to_string(plugin_->max_recvs()),
                    ExitStatus::kUsage);
    }
    Agreement own{(*plugin_)->api_version(),
                  options_.group > 0 ? options_.group : std::min(kDefaultGroup, plugin_->max_recvs())};
    report_.transport = std::string((*plugin_)->name()) + " (net plugin v" + std::to_string(own.api_version) + ", " +
                        options_.plugin + ")";
    report_.group = static_cast<std::size_t>(std::max(1, own.max_recvs));
    report_.memory_of_rank_0 = storage_->describe() + ", " + storage_->registered_by(*plugin_, 0);
    for (const Agreement& other : coordinator_.all_gather_values(own)) {
      if (other.api_version != own.api_version) {
        throw Failure("this rank's plugin has table version " + std::to_string(own.api_version) +
                      ", another rank's plugin has " + std::to_string(other.api_version) + ". Next: set --api");
      }
      report_.group = std::min(report_.group, static_cast<std::size_t>(std::max(1, other.max_recvs)));
    }
  }

  // Lays out the families and assigns their memory.
  void make_families() {
    Layout layout = lay_out(options_, requests_, is_prefill_);
    families_ = std::move(layout.families);
    reserved_ = std::move(layout.reserved);
    report_.families = std::move(layout.reports);
    report_.longest_blocks = layout.longest_blocks;
    memory_.emplace(*storage_, families_, options_.allocations);
  }

  void make_sides() {
    auto channels = connect_channels(options_.job, coordinator_, families_.size(), options_.prefills);
    for (std::size_t i = 0; i < families_.size(); ++i) {
      if (is_prefill_) {
        prefills_.push_back(std::make_unique<Prefill>(*context_, families_[i], std::move(channels[i])));
      } else {
        decodes_.push_back(
            std::make_unique<Decode>(*context_, families_[i], std::move(channels[i]), reserved_[i], report_.group));
      }
    }
  }

  // Runs each family on a thread of its own.
  void transfer() {
    std::vector<std::future<void>> running;
    for (std::size_t i = 0; i < families_.size(); ++i) {
      workers_.push_back(std::make_unique<ranks::Worker>(families_[i].geometry.name.c_str()));
      running.push_back(workers_.back()->start([this, i] { is_prefill_ ? prefills_[i]->run() : decodes_[i]->run(); }));
    }
    ranks::ProgressBar bar(options_.job.rank == 0);
    const std::uint64_t total = (families_.size() - (options_.idle ? 1 : 0)) * own_requests();
    for (std::size_t ended = 0; ended < running.size();) {
      if (running[ended].wait_for(kBarInterval) == std::future_status::ready) {
        running[ended++].get();
        continue;
      }
      for (std::size_t other = ended + 1; other < running.size();
           ++other) {  // look for another ended one, whose failure must be reported at once
        if (running[other].wait_for(std::chrono::seconds(0)) == std::future_status::ready)
          std::swap(running[ended], running[other]);
      }
      const std::uint64_t done = finished_.load(std::memory_order_relaxed);
      bar.draw(static_cast<double>(done) / static_cast<double>(std::max<std::uint64_t>(total, 1)),
               std::to_string(done) + " of " + std::to_string(total) + " requests");
    }
  }

  std::uint64_t own_requests() const {
    return static_cast<std::uint64_t>(std::count_if(requests_.begin(), requests_.end(), [this](const Request& request) {
      return is_prefill_ ? request.prefill == index_ : request.engine == index_ / options_.tp_ratio;
    }));
  }

  void finish() {
    for (auto& side : prefills_) {
      side->check();
      side->close();
    }
    for (auto& side : decodes_) {
      side->check();
      side->close();
    }
    registrations_->release();
    reg_mr_calls_ = registrations_->calls();
    plugin_->finalize();
    plugin_.reset();  // unloads the plugin, which then writes its counters
  }

  // Adds the counters of all ranks to the report.
  void report_own() {
    std::vector<const FamilyStats*> stats;
    for (auto& side : prefills_) stats.push_back(&side->stats());
    for (auto& side : decodes_) stats.push_back(&side->stats());
    report_.add_all_ranks(coordinator_,
                          {.bytes = memory_bytes(),
                           .allocations = memory_->allocations(),
                           .registrations = memory_->intervals().all().size(),
                           .reg_mr_calls = reg_mr_calls_,
                           .damage = memory_->damage()},
                          counters_.text(), stats);
  }

  std::uint64_t memory_bytes() const {
    std::uint64_t bytes = 0;
    for (const Family& family : families_) bytes += family.bytes();
    return bytes;
  }

  const Options options_;
  ranks::CoordinatorConnection& coordinator_;
  const std::vector<Request> requests_;
  const bool is_prefill_;
  const std::uint32_t index_;  // among the prefill or the decode ranks
  const ranks::PluginCounters counters_;
  std::unique_ptr<memory::Memory> storage_;  // before the plugin: see make_memory()
  std::optional<ranks::LoadedPlugin> plugin_;
  int device_ = 0;
  std::vector<Family> families_;
  std::vector<std::size_t> reserved_;  // by family: blocks for prefixes that the decode side already has
  std::optional<CacheMemory> memory_;
  std::optional<Registrations> registrations_;
  std::uint64_t reg_mr_calls_ = 0;
  std::atomic<std::uint64_t> finished_{0};
  std::optional<RankContext> context_;
  std::vector<std::unique_ptr<Prefill>> prefills_;
  std::vector<std::unique_ptr<Decode>> decodes_;
  Report report_{.options = options_};
  std::vector<std::unique_ptr<ranks::Worker>> workers_;  // last member: the threads use the others
};

}  // namespace

std::unique_ptr<ranks::Rank> make_rank(const Options& options, ranks::CoordinatorConnection& coordinator) {
  if (is_over_nccl(options.mode)) return make_nccl_rank(options, coordinator);
  if (options.mode == Mode::kPut) return make_put_rank(options, coordinator);
  return std::make_unique<DirectRank>(options, coordinator);
}

}  // namespace verbatim::kv
