#include "verbatim-eplb/report.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <set>
#include <utility>

#include "cli/table.h"
#include "ranks/statistics.h"

namespace verbatim::eplb {
namespace {

using ranks::Json;
using ranks::percentile;

constexpr std::size_t kMostLines = 64;
// Formats as "1.4769 GiB", in the largest unit in which the value is at least 1.
std::string amount(std::uint64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(units); ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.4f %s", value, units[unit]);
  return text;
}

std::vector<double> all_times(const Report& report) {
  std::vector<double> times;
  for (const LayerRow& row : report.layers) times.insert(times.end(), row.times_us.begin(), row.times_us.end());
  return times;
}

// The time of one iteration: the sum of the median times of the layers.
double total_us(const Report& report) {
  return std::accumulate(report.layers.begin(), report.layers.end(), 0.0,
                         [](double sum, const LayerRow& row) { return sum + percentile(row.times_us, 0.5); });
}

std::uint64_t total_bytes(const Report& report) {
  return std::accumulate(report.layers.begin(), report.layers.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const LayerRow& row) { return sum + row.bytes; });
}

// The rate in GB/s.
double rate(std::uint64_t bytes, double us) {
  return us > 0 ? static_cast<double>(bytes) / us / 1000 : 0;
}

template <typename Member>
std::size_t largest(const std::vector<RankSummary>& summaries, Member member) {
  std::size_t most = 0;
  for (const RankSummary& summary : summaries) most = std::max<std::size_t>(most, summary.*member);
  return most;
}

// The bytes of the rows of one layer on one rank.
std::size_t layer_bytes(const Report& report) {
  return report.input.workload.local_rows() * report.input.expert.bytes();
}

struct OldDesign {
  std::size_t send_bytes;  // one layer for each rank
  std::size_t all_bytes;   // in addition a receive buffer of one layer, and the new rows
};
OldDesign old_design(const Report& report) {
  const std::size_t layer = layer_bytes(report);
  const std::size_t ranks = report.input.workload.ranks;
  return {ranks * layer, (ranks + 2) * layer};
}

// Bytes that vLLM's communicators need on a device in addition to the weights: all need the new rows of one layer. The
// numbers are those of vLLM's pull requests, which describe the buffers.
struct VllmBytes {
  std::size_t without_staging;  // PyNccl, torch_nccl, and NIXL from #41633 on: the new rows
  std::size_t packed;           // NIXL of #40013: in addition a send and a receive buffer of one layer
  std::size_t send_for_each;    // NIXL of #36276: in addition a send buffer of one layer for each rank
};
VllmBytes vllm_bytes(const Report& report) {
  const std::size_t layer = layer_bytes(report);
  return {layer, 3 * layer, old_design(report).all_bytes};
}

std::vector<std::uint64_t> pair_bytes(const Report& report) {
  std::vector<std::uint64_t> pairs;
  for (const RankSummary& summary : report.by_rank) {
    for (const std::uint64_t bytes : summary.sent) {
      if (bytes > 0) pairs.push_back(bytes);
    }
  }
  return pairs;
}

double planning_ms(const Report& report) {
  double most = 0;
  for (const RankSummary& summary : report.by_rank) most = std::max(most, summary.planning_ms);
  return most;
}

Json json_of(const LayerRow& row) {
  return {{"layer", row.layer},
          {"experts", row.experts},
          {"bytes", row.bytes},
          {"most_bytes_of_a_rank", row.most_bytes},
          {"packs", row.packs},
          {"groups", row.groups},
          {"largest_group", row.largest_group},
          {"times_us", row.times_us},
          {"wrong_bytes", row.wrong}};
}

Json memory_of(const Report& report) {
  const OldDesign old = old_design(report);
  const VllmBytes vllm = vllm_bytes(report);
  const bool cuda = report.options.over == Over::kNccl || report.options.memory == memory::Kind::kCuda;
  return {{"kind", memory::kind_name(cuda ? memory::Kind::kCuda : memory::Kind::kHost)},
          {"vllm_bytes",
           {{"pynccl", vllm.without_staging},
            {"nixl_pr_41633", vllm.without_staging},
            {"nixl_pr_40013", vllm.packed},
            {"nixl_pr_36276", vllm.send_for_each}}},
          {"weights_bytes", largest(report.by_rank, &RankSummary::weights_bytes)},
          {"send_bytes", largest(report.by_rank, &RankSummary::send_bytes)},
          {"recv_bytes", largest(report.by_rank, &RankSummary::recv_bytes)},
          {"new_rows_bytes", largest(report.by_rank, &RankSummary::new_rows_bytes)},
          {"allocated_with_guards_bytes", largest(report.by_rank, &RankSummary::allocated_bytes)},
          {"in_use_bytes", largest(report.by_rank, &RankSummary::in_use_bytes)},
          {"old_design_send_bytes", old.send_bytes},
          {"old_design_all_buffers_bytes", old.all_bytes}};
}

}  // namespace

LayerRow planned_layer(const Options& options, const Input& input, std::size_t index, const LayerPlan& plan) {
  const std::size_t expert_bytes = input.expert.bytes();
  LayerRow row{.layer = input.workload.layers[index].number,
               .experts = plan.transfers.size(),
               .bytes = plan.transfers.size() * expert_bytes,
               .groups = plan.schedule.groups,
               .largest_group = plan.schedule.largest_group};
  std::vector<std::uint64_t> received(input.workload.ranks);
  std::set<std::pair<std::uint32_t, std::uint32_t>> packs;
  for (const Transfer& transfer : plan.transfers) {
    received[transfer.destination] += expert_bytes;
    packs.emplace(transfer.source, transfer.expert);
  }
  row.most_bytes = *std::max_element(received.begin(), received.end());
  if (options.mode == Mode::kPacked) row.packs = packs.size();
  return row;
}

// The rank whose checks took the longest.
const RankSummary& slowest_checks(const Report& report) {
  return *std::max_element(
      report.by_rank.begin(), report.by_rank.end(),
      [](const RankSummary& left, const RankSummary& right) { return left.checking_ms < right.checking_ms; });
}

double jain(const std::vector<std::uint64_t>& values) {
  double sum = 0;
  double squares = 0;
  for (const std::uint64_t value : values) {
    sum += static_cast<double>(value);
    squares += static_cast<double>(value) * static_cast<double>(value);
  }
  return squares > 0 ? sum * sum / (static_cast<double>(values.size()) * squares) : 1;
}

Json json_of(const RankSummary& summary) {
  return {{"sent_bytes", summary.sent},
          {"received_bytes", summary.received},
          {"operations", summary.operations},
          {"messages", summary.messages},
          {"grouped_receives", summary.grouped_receives},
          {"packs", summary.packs},
          {"planning_ms", summary.planning_ms},
          {"moving_ms", summary.moving_ms},
          {"checking_ms", summary.checking_ms},
          {"weights_bytes", summary.weights_bytes},
          {"send_bytes", summary.send_bytes},
          {"recv_bytes", summary.recv_bytes},
          {"new_rows_bytes", summary.new_rows_bytes},
          {"allocated_bytes", summary.allocated_bytes},
          {"in_use_bytes", summary.in_use_bytes},
          {"wrong_signals", summary.wrong_signals},
          {"stats", summary.stats}};
}

RankSummary summary_of(const Json& json) {
  RankSummary summary;
  json.at("sent_bytes").get_to(summary.sent);
  json.at("received_bytes").get_to(summary.received);
  json.at("operations").get_to(summary.operations);
  json.at("messages").get_to(summary.messages);
  json.at("grouped_receives").get_to(summary.grouped_receives);
  json.at("packs").get_to(summary.packs);
  json.at("planning_ms").get_to(summary.planning_ms);
  json.at("moving_ms").get_to(summary.moving_ms);
  json.at("checking_ms").get_to(summary.checking_ms);
  json.at("weights_bytes").get_to(summary.weights_bytes);
  json.at("send_bytes").get_to(summary.send_bytes);
  json.at("recv_bytes").get_to(summary.recv_bytes);
  json.at("new_rows_bytes").get_to(summary.new_rows_bytes);
  json.at("allocated_bytes").get_to(summary.allocated_bytes);
  json.at("in_use_bytes").get_to(summary.in_use_bytes);
  json.at("wrong_signals").get_to(summary.wrong_signals);
  json.at("stats").get_to(summary.stats);
  return summary;
}

void print_head(std::FILE* out, const Report& report) {
  const Options& options = report.options;
  const Workload& workload = report.input.workload;
  std::fprintf(out, "# %s, schedule %s, %s of %s, over %s\n", mode_name(options.mode), schedule_name(options.peers),
               options.policy.c_str(), options.tensors.empty() ? options.preset.c_str() : options.tensors.c_str(),
               report.transport.value("name", "NCCL " + report.transport.value("version", std::string("?"))).c_str());
  std::fprintf(out, "# %zu ranks of %zu rows, %zu experts of %zu bytes in %zu tensors", workload.ranks,
               workload.local_rows(), workload.experts, report.input.expert.bytes(),
               report.input.expert.tensors.size());
  if (options.scale > 1) std::fprintf(out, ", scaled down by %zu", options.scale);
  std::fprintf(out, "\n# %zu layers, %d iteration(s), at most %zu operations per group%s, seed %llu\n",
               workload.layers.size(), options.iterations, options.ops_per_group,
               options.ops_per_group == 0 ? " (no limit)" : "", static_cast<unsigned long long>(options.seed));
  std::fprintf(
      out, "# memory of rank 0: %s%s\n", report.transport.value("memory", std::string("?")).c_str(),
      options.over != Over::kNccl ? (", " + report.transport.value("registered_by", std::string("?"))).c_str() : "");
  for (std::size_t rank = 0; rank < report.processes.size(); ++rank) {
    std::fprintf(out, "# rank %4zu  pid %7d on %s\n", rank, report.processes[rank].pid,
                 report.processes[rank].host.c_str());
  }
  std::fflush(out);
}

void print_table(std::FILE* out, const Report& report) {
  std::fputs(
      "#\n"
      "# experts, bytes: moved between ranks; max per rank: bytes that the rank with the most receives\n"
      "# packs: buffers of packed experts; groups: of operations; ops max: operations of the largest one on a rank\n"
      "# time: of the slowest rank, median of the iterations, without checks\n"
      "# GB/s/rank (10^9 bytes): max per rank over this time; #wrong: wrong bytes\n",
      out);
  const cli::Table table({{"layer", 8},
                          {"experts", 8},
                          {"bytes", 13},
                          {"max per rank", 13},
                          {"packs", 6},
                          {"groups", 7},
                          {"ops max", 8},
                          {"time(us)", 11, 1},
                          {"GB/s/rank", 11, 3},
                          {"#wrong", 9}});
  table.print_titles(out);
  std::size_t lines = 0;
  for (const LayerRow& row : report.layers) {
    if (lines++ == kMostLines) {
      std::fprintf(out, "# and %zu more layers\n", report.layers.size() - kMostLines);
      break;
    }
    const double us = percentile(row.times_us, 0.5);
    const std::string wrong = report.options.check ? std::to_string(row.wrong) : "N/A";
    table.print_row(out, {row.layer, row.experts, row.bytes, row.most_bytes, row.packs, row.groups, row.largest_group,
                          us, rate(row.most_bytes, us), wrong});
  }
  const std::vector<double> times = all_times(report);
  const OldDesign old = old_design(report);
  std::fprintf(out, "# Layer time          : p50 %.1f, p99 %.1f, max %.1f us; all layers %.1f ms\n",
               percentile(times, 0.5), percentile(times, 0.99), percentile(times, 1), total_us(report) / 1000);
  std::fprintf(out, "# Moved               : %s per iteration, %.3f GB/s over all ranks, Jain's index of pairs %.3f\n",
               amount(total_bytes(report)).c_str(), rate(total_bytes(report), total_us(report)),
               jain(pair_bytes(report)));
  std::fprintf(out, "# Planning            : %.2f ms for all layers on the slowest rank\n", planning_ms(report));
  std::fprintf(out, "# Send buffer         : %s per rank, measured; old design %s\n",
               amount(largest(report.by_rank, &RankSummary::send_bytes)).c_str(), amount(old.send_bytes).c_str());
  const std::size_t buffers = largest(report.by_rank, &RankSummary::send_bytes) +
                              largest(report.by_rank, &RankSummary::recv_bytes) +
                              largest(report.by_rank, &RankSummary::new_rows_bytes);
  std::fprintf(out, "# All buffers         : %s per rank in addition to %s of weights, measured; old design %s\n",
               amount(buffers).c_str(), amount(largest(report.by_rank, &RankSummary::weights_bytes)).c_str(),
               amount(old.all_bytes).c_str());
  const VllmBytes vllm = vllm_bytes(report);
  std::fprintf(
      out,
      "# In vLLM, computed   : %s with PyNccl or zero-copy NIXL (#41633), %s with packing NIXL (#40013), %s before "
      "(#36276)\n",
      amount(vllm.without_staging).c_str(), amount(vllm.packed).c_str(), amount(vllm.send_for_each).c_str());
  std::fprintf(out, "# Weights and buffers : %s per rank, guards included; memory in use has grown by %s\n",
               amount(largest(report.by_rank, &RankSummary::allocated_bytes)).c_str(),
               amount(largest(report.by_rank, &RankSummary::in_use_bytes)).c_str());
  std::fprintf(out, "# Plugin's counters   : %s\n", report.by_rank.front().stats.c_str());
  for (const std::string& error_text : report.errors) std::fprintf(out, "# %s\n", error_text.c_str());
  if (const RankSummary& rank = slowest_checks(report); rank.checking_ms > rank.moving_ms) {
    std::fprintf(
        out,
        "# Checks              : %.1f ms to fill and compare bytes, not in the times above; moving took %.1f ms. "
        "Next: --check off for a shorter run\n",
        rank.checking_ms, rank.moving_ms);
  }
  if (!report.options.check) {
    std::fprintf(out, "# Wrong bytes         : not checked\n");
  } else {
    std::fprintf(out, "# Wrong bytes         : %llu %s\n", static_cast<unsigned long long>(report.wrong_bytes),
                 report.wrong_bytes == 0 ? "OK" : "FAILED");
  }
  std::fflush(out);
}

void write_report(const Report& report, const std::string& path) {
  const Options& options = report.options;
  const Workload& workload = report.input.workload;
  const std::vector<double> times = all_times(report);
  Json json{{"preset", options.preset},
            {"policy", options.policy},
            {"mode", mode_name(options.mode)},
            {"schedule", schedule_name(options.peers)},
            {"seed", options.seed},
            {"scale", options.scale},
            {"ranks", workload.ranks},
            {"experts", workload.experts},
            {"rows", workload.rows},
            {"expert_bytes", report.input.expert.bytes()},
            {"tensors", Json::array()},
            {"iterations", options.iterations},
            {"ops_per_group", options.ops_per_group},
            {"transport", report.transport},
            {"layers", Json::array()},
            {"processes", Json::array()},
            {"by_rank", Json::array()},
            {"layer_time_us",
             {{"p50", percentile(times, 0.5)}, {"p99", percentile(times, 0.99)}, {"max", percentile(times, 1)}}},
            {"iteration_us", total_us(report)},
            {"iteration_bytes", total_bytes(report)},
            {"gb_s", rate(total_bytes(report), total_us(report))},
            {"jain", jain(pair_bytes(report))},
            {"planning_ms", planning_ms(report)},
            {"memory", memory_of(report)},
            {"errors", report.errors},
            {"wrong_bytes", options.check ? Json(report.wrong_bytes) : Json()},
            {"first_wrong", report.first_wrong}};
  for (const Tensor& tensor : report.input.expert.tensors) {
    json["tensors"].push_back({{"name", tensor.name}, {"type", tensor.type}, {"bytes", tensor.bytes}});
  }
  for (const Process& process : report.processes) {
    json["processes"].push_back({{"host", process.host}, {"pid", process.pid}});
  }
  for (const LayerRow& row : report.layers) json["layers"].push_back(json_of(row));
  for (const RankSummary& summary : report.by_rank) json["by_rank"].push_back(json_of(summary));
  ranks::write_json(json, path);
}

}  // namespace verbatim::eplb
