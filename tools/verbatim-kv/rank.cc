#include "verbatim-kv/rank.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <future>
#include <optional>
#include <utility>
#include <vector>

#include "ranks/plugin_log.h"
#include "ranks/progress_bar.h"
#include "ranks/worker.h"
#include "verbatim-kv/decode.h"
#include "verbatim-kv/prefill.h"
#include "verbatim-kv/rendezvous.h"
#include "verbatim-kv/report.h"

namespace verbatim::kv {
namespace {

constexpr int kDefaultGroup = 8;
constexpr double kSpareBlocks = 1.5;
constexpr std::chrono::milliseconds kBarInterval{100};

struct Agreement {
  int api_version;
  int max_recvs;
};

class KvRank final : public ranks::Rank {
 public:
  KvRank(const Options& options, ranks::Link& link)
      : options_(options),
        link_(link),
        requests_(make_requests(options_)),
        is_prefill_(options_.job.rank < options_.prefills),
        index_(static_cast<std::uint32_t>(is_prefill_ ? options_.job.rank : options_.job.rank - options_.prefills)) {
    ranks::keep_plugin_log(options_.job.rank, options_.verbose);
    plugin_.emplace(options_.plugin, options_.api_version, options_.job.token);
  }

  ExitStatus run() override {
    agree();
    lay_out();
    device_ = static_cast<int>(index_ % plugin_->devices().size());
    registrations_.emplace(*plugin_, device_, memory_->intervals());
    world_.emplace(
        World{options_, *plugin_, *registrations_, memory_->intervals(), requests_, device_, index_, finished_});
    make_sides();
    transfer();
    link_.barrier();
    finish();
    report_own();
    if (options_.job.rank == 0) {
      print(stdout, report_);
      if (!options_.json.empty()) write(report_, options_.json);
    }
    return report_.status();
  }

 private:
  void agree() {
    Agreement own{(*plugin_)->api_version(),
                  options_.group > 0 ? options_.group : std::min(kDefaultGroup, plugin_->max_recvs())};
    report_.plugin_name = (*plugin_)->name();
    report_.api_version = own.api_version;
    report_.group = static_cast<std::size_t>(std::max(1, own.max_recvs));
    for (const Agreement& other : link_.all_gather_values(own)) {
      if (other.api_version != own.api_version) {
        throw Failure("this rank's plugin speaks v" + std::to_string(own.api_version) + ", that of another v" +
                      std::to_string(other.api_version) + ": say --api");
      }
      report_.group = std::min(report_.group, static_cast<std::size_t>(std::max(1, other.max_recvs)));
    }
  }

  // Makes the families and gives them memory.
  void lay_out() {
    for (const Geometry& geometry : options_.geometries) {
      std::size_t longest = 0;
      std::size_t longest_hit = 0;
      double mean = 0;
      for (const Request& request : requests_) {
        const std::size_t hits = request.hit_blocks(geometry.block_tokens);
        const std::size_t sent = request.blocks(geometry.block_tokens) - hits;
        longest = std::max(longest, sent);
        longest_hit = std::max(longest_hit, hits);
        mean += static_cast<double>(sent) / static_cast<double>(requests_.size());
      }
      const auto in_flight =
          static_cast<std::size_t>(std::ceil(kSpareBlocks * mean * static_cast<double>(options_.concurrency)));
      const std::size_t wanted = std::max(longest, in_flight);
      const std::size_t prefill_blocks =
          options_.blocks > 0 ? options_.blocks
                              : std::max(longest, in_flight * static_cast<std::size_t>(options_.engines()));
      const std::size_t decode_blocks = options_.blocks > 0 ? options_.blocks : longest_hit + wanted;
      if (options_.blocks > 0 && options_.blocks < longest + longest_hit) {
        throw Failure("--blocks " + std::to_string(options_.blocks) + ": a request of family " + geometry.name +
                          " needs " + std::to_string(longest + longest_hit),
                      ExitStatus::kUsage);
      }
      reserved_.push_back(longest_hit);
      families_.push_back({.geometry = geometry,
                           .num_blocks = is_prefill_ ? prefill_blocks : decode_blocks,
                           .block_len = is_prefill_ ? geometry.prefill_bytes : geometry.part_bytes()});
      report_.longest_blocks = std::max<std::uint64_t>(report_.longest_blocks, longest);
      report_.families.push_back({.geometry = geometry,
                                  .blocks = {prefill_blocks, decode_blocks},
                                  .plan = plan_of(geometry, requests_),
                                  .stats = {}});
    }
    memory_.emplace(families_, options_.allocations);
  }

  void make_sides() {
    auto channels = meet(options_.job, link_, families_.size(), options_.prefills);
    for (std::size_t i = 0; i < families_.size(); ++i) {
      if (is_prefill_) {
        prefills_.push_back(std::make_unique<Prefill>(*world_, families_[i], std::move(channels[i])));
      } else {
        decodes_.push_back(
            std::make_unique<Decode>(*world_, families_[i], std::move(channels[i]), reserved_[i], report_.group));
      }
    }
  }

  // Each family on a thread of its own.
  void transfer() {
    std::vector<std::future<void>> running;
    for (std::size_t i = 0; i < families_.size(); ++i) {
      workers_.push_back(std::make_unique<ranks::Worker>(families_[i].geometry.name.c_str()));
      running.push_back(workers_.back()->start([this, i] { is_prefill_ ? prefills_[i]->run() : decodes_[i]->run(); }));
    }
    ranks::ProgressBar bar(options_.job.rank == 0);
    const std::uint64_t total = families_.size() * own_requests();
    for (std::size_t ended = 0; ended < running.size();) {
      if (running[ended].wait_for(kBarInterval) == std::future_status::ready) {
        running[ended++].get();
        continue;
      }
      for (std::size_t other = ended + 1; other < running.size(); ++other) {  // its failure must not wait for this one
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
    plugin_->finalize();
  }

  // Puts what all ranks have counted into the report.
  void report_own() {
    ranks::Json own;
    own["memory"] = {memory_bytes(), memory_->allocations(), memory_->intervals().all().size(), registrations_->calls(),
                     memory_->damage()};
    own["families"] = ranks::Json::array();
    for (auto& side : prefills_) own["families"].push_back(to_json(side->stats()));
    for (auto& side : decodes_) own["families"].push_back(to_json(side->stats()));
    for (const std::string& text : link_.all_gather(own.dump())) {
      const ranks::Json other = ranks::Json::parse(text);
      const auto memory = other.at("memory").get<std::vector<std::uint64_t>>();
      report_.ranks.push_back({memory.at(0), memory.at(1), memory.at(2), memory.at(3), memory.at(4)});
      for (std::size_t i = 0; i < families_.size(); ++i) {
        report_.families[i].stats.add(from_json(other.at("families").at(i)));
      }
    }
  }

  std::uint64_t memory_bytes() const {
    std::uint64_t bytes = 0;
    for (const Family& family : families_) bytes += family.bytes();
    return bytes;
  }

  const Options options_;
  ranks::Link& link_;
  const std::vector<Request> requests_;
  const bool is_prefill_;
  const std::uint32_t index_;  // on its side
  std::optional<ranks::LoadedPlugin> plugin_;
  int device_ = 0;
  std::vector<Family> families_;
  std::vector<std::size_t> reserved_;  // blocks of each family for prefixes that are there
  std::optional<CacheMemory> memory_;
  std::optional<Registrations> registrations_;
  std::atomic<std::uint64_t> finished_{0};
  std::optional<World> world_;
  std::vector<std::unique_ptr<Prefill>> prefills_;
  std::vector<std::unique_ptr<Decode>> decodes_;
  Report report_{.options = options_, .plugin_name = {}};
  std::vector<std::unique_ptr<ranks::Worker>> workers_;  // last: they use the others
};

}  // namespace

std::unique_ptr<ranks::Rank> make_rank(const Options& options, ranks::Link& link) {
  return std::make_unique<KvRank>(options, link);
}

}  // namespace verbatim::kv
