#include "verbatim-eplb/rank.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "ranks/plugin_counters.h"
#include "ranks/progress_bar.h"
#include "verbatim-eplb/agreement.h"
#include "verbatim-eplb/injection.h"
#include "verbatim-eplb/input.h"
#include "verbatim-eplb/mover.h"
#include "verbatim-eplb/posting.h"
#include "verbatim-eplb/report.h"
#include "verbatim-eplb/stats.h"
#include "verbatim-eplb/transport.h"
#include "verbatim-eplb/watchdog.h"

namespace verbatim::eplb {
namespace {

using ranks::ExitStatus;
using ranks::Failure;

struct RankCapabilities {
  char host[64];
  int pid;
};

// What the ranks exchange after each layer.
struct Outcome {
  std::uint64_t elapsed_ns;
  std::uint64_t wrong;
  char first[192];
};

double milliseconds(std::uint64_t ns) {
  return static_cast<double>(ns) / 1e6;
}

// Each rank gets its own host id, so that NCCL uses the network between ranks. Small tensors are sent without the flags
// of the LL protocol, so that the bytes on the network are those of the plan.
void prepare_nccl(int rank) {
  ::setenv("NCCL_HOSTID", ("verbatim-eplb-" + std::to_string(rank)).c_str(), 0);
  ::setenv("NCCL_P2P_LL_THRESHOLD", "0", 0);
}

class EplbRank final : public ranks::Rank {
 public:
  EplbRank(const Options& options, ranks::CoordinatorConnection& coordinator)
      : options_(options),
        rank_(static_cast<std::size_t>(options.job.rank)),
        coordinator_(coordinator),
        input_(make_input(options)),
        watchdog_(options.watchdog_s,
                  [&coordinator](const std::string& pending) { coordinator.fail(ExitStatus::kTimeout, pending); }),
        report_{options_, input_},
        bar_(options.job.rank == 0) {
    if (options.over == Over::kNccl) prepare_nccl(options.job.rank);
  }

  ExitStatus run() override {
    agree(coordinator_, options_, input_);
    try {
      plan();
    } catch (const BadInput& bad) {
      throw Failure(bad.what(), ExitStatus::kUsage);
    }
    transport_ = make_transport();
    const std::size_t in_use = transport_->memory().in_use();
    mover_.emplace(options_, input_, injection_, *transport_, watchdog_);
    transport_->connect(pairs(), mover_->pieces());
    report_.transport = transport_->describe();
    exchange_capabilities();
    if (is_first()) print_head(stdout, report_);
    for (std::uint64_t iteration = 0; iteration < static_cast<std::uint64_t>(options_.total_iterations());
         ++iteration) {
      for (std::size_t layer = 0; layer < plans_.size(); ++layer) rearrange(layer, iteration);
    }
    bar_.clear();
    finish(in_use);
    if (!is_first()) return ExitStatus::kOk;  // rank 0 reports the result
    print_table(stdout, report_);
    if (!report_.first_wrong.empty()) ranks::print_error("first wrong byte: " + report_.first_wrong);
    if (!options_.json.empty()) write_report(report_, options_.json);
    return report_.wrong_bytes == 0 && report_.errors.empty() ? ExitStatus::kOk : ExitStatus::kWrong;
  }

 private:
  bool is_first() const { return rank_ == 0; }

  std::unique_ptr<Transport> make_transport() {
    const bool puts = options_.mode == Mode::kPut;
    if (options_.over == Over::kNccl) {
      return puts ? make_nccl_put_transport(options_, coordinator_) : make_nccl_transport(options_, coordinator_);
    }
    return puts ? make_rma_transport(options_, coordinator_, watchdog_)
                : make_plugin_transport(options_, coordinator_, watchdog_);
  }

  void exchange_capabilities() {
    RankCapabilities own{{}, getpid()};
    gethostname(own.host, sizeof own.host - 1);
    for (const RankCapabilities& other : coordinator_.all_gather_values(own))
      report_.processes.push_back({other.host, other.pid});
  }

  // Plans all layers before the first transfer, as a serving process does, and compares what the ranks will post.
  void plan() {
    const std::uint64_t begin = monotonic_ns();
    plans_ = plan_layers(options_, input_);
    for (std::size_t i = 0; i < plans_.size(); ++i) {
      own_.push_back(plan_of_rank(input_.workload, input_.workload.layers[i], plans_[i].transfers, rank_));
      calls_.push_back(calls_of_rank(plans_[i], own_[i], input_.expert, options_.mode));
    }
    planning_ns_ = monotonic_ns() - begin;
    injection_ = place_injection(options_, input_, plans_);
    DryRun dry_run(input_.workload.ranks, rank_);
    for (std::size_t i = 0; i < plans_.size(); ++i) {
      const Layer& layer = input_.workload.layers[i];
      if (const auto wrong = self_check(input_.workload, layer, plans_[i].transfers)) throw Failure(*wrong);
      if (injection_.is(Inject::kSwapOrder, i, rank_)) swap_order(calls_[i], plans_[i]);
      dry_run.add(layer.number, plans_[i], calls_[i], input_.expert);
      report_.layers.push_back(planned_layer(options_, input_, i, plans_[i]));
    }
    dry_run.compare(coordinator_);
  }

  std::set<std::pair<int, int>> pairs() const {
    std::set<std::pair<int, int>> pairs;
    for (const LayerPlan& plan : plans_) {
      for (const Transfer& transfer : plan.transfers) {
        pairs.emplace(static_cast<int>(transfer.source), static_cast<int>(transfer.destination));
      }
    }
    return pairs;
  }

  void rearrange(std::size_t index, std::uint64_t iteration) {
    const LayerWork work{index, input_.workload.layers[index], plans_[index], own_[index], calls_[index]};
    const std::uint64_t filling_from = monotonic_ns();
    if (options_.check || iteration + index == 0) mover_->prepare(work, iteration);
    if (options_.check) checking_ns_ += monotonic_ns() - filling_from;
    wait("before layer " + std::to_string(work.layer.number));
    coordinator_.barrier();
    const std::uint64_t begin = monotonic_ns();
    mover_->run(work);
    Outcome outcome{monotonic_ns() - begin, 0, {}};
    moving_ns_ += outcome.elapsed_ns;
    if (options_.check) {
      const std::uint64_t comparing_from = monotonic_ns();
      const Damage damage = mover_->check(work, iteration);
      checking_ns_ += monotonic_ns() - comparing_from;
      outcome.wrong = damage.bytes;
      std::snprintf(outcome.first, sizeof outcome.first, "%s", damage.first.c_str());
    }
    LayerRow& row = report_.layers[index];
    std::uint64_t slowest_ns = 0;
    wait("after layer " + std::to_string(work.layer.number));
    for (const Outcome& other : coordinator_.all_gather_values(outcome)) {
      slowest_ns = std::max(slowest_ns, other.elapsed_ns);
      row.wrong += other.wrong;
      report_.wrong_bytes += other.wrong;
      if (other.wrong > 0 && report_.first_wrong.empty()) report_.first_wrong = other.first;
    }
    watchdog_.end();
    if (iteration >= static_cast<std::uint64_t>(options_.warmup)) {
      row.times_us.push_back(static_cast<double>(slowest_ns) / 1000);
    }
    const auto done = static_cast<double>(iteration * plans_.size() + index + 1);
    bar_.draw(done / (static_cast<double>(plans_.size()) * options_.total_iterations()),
              "layer " + std::to_string(row.layer));
  }

  // Waits for the other ranks are watched too, so that a rank that hangs elsewhere is noticed.
  void wait(const std::string& where) {
    watchdog_.begin("rank " + std::to_string(rank_) + ", waiting for the other ranks " + where, 0, {});
  }

  void finish(std::size_t in_use_before) {
    RankSummary own;
    const Transport::Counters& counters = transport_->counters();
    own.sent = counters.sent;
    own.received = counters.received;
    own.operations = counters.operations;
    own.messages = counters.messages;
    own.grouped_receives = counters.grouped_receives;
    own.packs = mover_->packs();
    own.planning_ms = milliseconds(planning_ns_);
    own.moving_ms = milliseconds(moving_ns_);
    own.checking_ms = milliseconds(checking_ns_);
    own.weights_bytes = mover_->buffers().weights;
    own.send_bytes = mover_->buffers().send;
    own.recv_bytes = mover_->buffers().recv;
    own.new_rows_bytes = mover_->buffers().new_rows;
    own.allocated_bytes = transport_->memory().allocated();
    const std::size_t in_use = transport_->memory().in_use();
    own.wrong_signals = transport_->wrong_signals();
    own.in_use_bytes = in_use > in_use_before ? in_use - in_use_before : 0;
    transport_->close();
    mover_.reset();
    transport_.reset();  // unloads the plugin, which then writes its counters
    own.stats = plugin_counters();
    for (const std::string& text : coordinator_.all_gather(json_of(own).dump())) {
      report_.by_rank.push_back(summary_of(ranks::Json::parse(text)));
    }
    compare_with_plan();
  }

  std::string plugin_counters() const {
    if (options_.mode != Mode::kPut) return compare_stats(counters_.text(), planned(true), planned(false));
    // Puts between ranks that NCCL has joined by NVLink or memory do not reach the plugin.
    if (options_.over != Over::kPlugin) return "absent";
    return compare_put_stats(counters_.text(), planned(true));
  }

  std::vector<std::uint64_t> planned(bool sends) const { return planned(rank_, sends); }

  // Bytes to or from each rank over all iterations, including the warm-up.
  std::vector<std::uint64_t> planned(std::size_t rank, bool sends) const {
    const std::uint64_t each = input_.expert.bytes() * static_cast<std::uint64_t>(options_.total_iterations());
    std::vector<std::uint64_t> bytes(input_.workload.ranks);
    for (const LayerPlan& plan : plans_) {
      for (const Transfer& transfer : plan.transfers) {
        if (sends && transfer.source == rank) bytes[transfer.destination] += each;
        if (!sends && transfer.destination == rank) bytes[transfer.source] += each;
      }
    }
    return bytes;
  }

  void compare_with_plan() {
    const bool whole = options_.mode != Mode::kPerTensor;
    const std::uint64_t calls = whole ? 1 : input_.expert.tensors.size();
    const auto iterations = static_cast<std::uint64_t>(options_.total_iterations());
    std::uint64_t operations = 0;
    std::uint64_t packs = 0;
    for (std::size_t rank = 0; rank < report_.by_rank.size(); ++rank) {
      const RankSummary& summary = report_.by_rank[rank];
      const std::string rank_text = "rank " + std::to_string(rank);
      if (summary.sent != planned(rank, true) || summary.received != planned(rank, false)) {
        report_.errors.push_back(rank_text + " sent or received other amounts than planned");
      }
      if (summary.stats != "equal" && summary.stats != "absent") {
        report_.errors.push_back(rank_text + ", counters of the plugin: " + summary.stats);
      }
      if (!summary.wrong_signals.empty()) report_.errors.push_back(rank_text + ": " + summary.wrong_signals);
      operations += summary.operations;
      packs += summary.packs;
    }
    std::uint64_t planned_operations = 0;
    std::uint64_t planned_packs = 0;
    for (const LayerRow& row : report_.layers) {
      planned_operations += 2 * row.experts * calls * iterations;
      planned_packs += row.packs * iterations;
    }
    if (operations != planned_operations) {
      report_.errors.push_back(std::to_string(operations) + " operations instead of " +
                               std::to_string(planned_operations));
    }
    if (packs != planned_packs) {
      report_.errors.push_back(std::to_string(packs) + " packs instead of " + std::to_string(planned_packs));
    }
  }

  const Options options_;
  const std::size_t rank_;
  ranks::CoordinatorConnection& coordinator_;
  const ranks::PluginCounters counters_;
  const Input input_;
  Watchdog watchdog_;
  Injection injection_;
  std::vector<LayerPlan> plans_;
  std::vector<RankPlan> own_;
  std::vector<std::vector<CallGroup>> calls_;
  std::uint64_t planning_ns_ = 0;
  std::uint64_t moving_ns_ = 0;
  std::uint64_t checking_ns_ = 0;
  Report report_;
  ranks::ProgressBar bar_;
  std::unique_ptr<Transport> transport_;
  std::optional<Mover> mover_;  // declared after the transport, whose memory it uses
};

}  // namespace

std::unique_ptr<ranks::Rank> make_rank(const Options& options, ranks::CoordinatorConnection& coordinator) {
  try {
    return std::make_unique<EplbRank>(options, coordinator);
  } catch (const BadInput& bad) {
    throw Failure(bad.what(), ExitStatus::kUsage);
  }
}

}  // namespace verbatim::eplb
