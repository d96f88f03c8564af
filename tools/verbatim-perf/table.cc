#include "cli/table.h"

#include <algorithm>
#include <numeric>

#include "verbatim-perf/report.h"

namespace verbatim::perf {
namespace {

// Whether rows differ in the reduction or the root.
bool shows_rows_apart(const Options& options) {
  return options.reductions != std::vector{workload::ReductionKind::kSum} || has_root(options.operation);
}

cli::Table table_of(const Report& report) {
  std::vector<cli::Column> columns{{"size(B)", 12},        {"count", 12},          {"type", 8},  {"time(us)", 11, 2},
                                   {"algbw(GB/s)", 11, 3}, {"busbw(GB/s)", 11, 3}, {"#wrong", 8}};
  if (shows_rows_apart(report.options)) columns.insert(columns.begin() + 3, {{"redop", 6}, {"root", 4}});
  if (report.options.operation == OperationKind::kPingPong) {
    for (const char* title : {"min(us)", "p50(us)", "p99(us)", "p99.9(us)"}) columns.push_back({title, 9, 2});
  }
  return cli::Table(std::move(columns));
}

}  // namespace

std::uint64_t Report::wrong() const {
  std::uint64_t sum = 0;
  for (const Row& row : rows) sum += row.wrong + (row.in_place ? row.in_place->wrong.value_or(0) : 0);
  return sum;
}

double Report::average_busbw() const {
  double sum = 0;
  int count = 0;
  for (const Row& row : rows) {
    sum += row.busbw + (row.in_place ? row.in_place->busbw : 0);
    count += row.in_place ? 2 : 1;
  }
  return count == 0 ? 0 : sum / count;
}

const char* Report::busbw_result() const {
  constexpr double kEnough = 0.9;
  if (options.required_busbw == -1) return "";
  return average_busbw() < options.required_busbw * kEnough ? "FAILED" : "OK";
}

double average_time(Average average, const std::vector<double>& times) {
  switch (average) {
    case Average::kRank0:
      return times.front();
    case Average::kMin:
      return *std::min_element(times.begin(), times.end());
    case Average::kMax:
      return *std::max_element(times.begin(), times.end());
    case Average::kMean:
      break;
  }
  return std::accumulate(times.begin(), times.end(), 0.0) / static_cast<double>(times.size());
}

void print_header(std::FILE* out, const Report& report) {
  const Options& options = report.options;
  if (options.format == Format::kNcclTests) return print_nccl_tests_header(out, report);
  const bool puts = is_put_operation(options.operation);
  std::fprintf(out, "# %s over %s (%s plugin v%d, %s)\n", operation_name(options.operation), report.plugin_name.c_str(),
               puts ? "RMA" : "net", report.api_version, report.plugin_path.c_str());
  for (std::size_t i = 0; i < report.devices.size(); ++i) {
    const netapi::Properties& device = report.devices[i];
    std::fprintf(out, "# device %2zu  %s  port %d  %g Gbit/s  %s\n", i, netapi::verbs_name(device).c_str(), device.port,
                 device.speed / 1000.0, device.pci_path.c_str());
  }
  for (std::size_t i = 0; i < report.ranks.size(); ++i) {
    std::fprintf(out, "# rank %4zu  pid %7d on %s, %s, %s\n", i, report.ranks[i].pid, report.ranks[i].host.c_str(),
                 report.ranks[i].memory.c_str(), report.ranks[i].registered_by.c_str());
  }
  std::fprintf(out, "# %d iterations, %d warm-up, %d checked; ", options.iterations, options.warmup_iterations,
               options.check_iterations);
  if (puts) {
    std::fprintf(out, "%d context(s)", options.contexts);
    if (options.operation != OperationKind::kAllToAllPut) std::fprintf(out, ", %d under way", options.depth);
  } else {
    std::fprintf(out, "%d channel(s), %d receives ahead", options.channels, options.depth);
  }
  if (options.operation == OperationKind::kGrouped) std::fprintf(out, ", groups of %zu", report.group);
  std::fputs("\n#\n", out);
  table_of(report).print_titles(out);
}

void print_row(std::FILE* out, const Report& report, const Row& row) {
  if (report.options.format == Format::kNcclTests) return print_nccl_tests_row(out, report, row);
  const std::string wrong = report.options.check_iterations == 0 ? "N/A" : std::to_string(row.wrong);
  std::vector<cli::Cell> cells{row.bytes, row.count, workload::element_name(row.type), row.time_us, row.algbw,
                               row.busbw, wrong};
  if (shows_rows_apart(report.options)) cells.insert(cells.begin() + 3, {row.redop, row.root});
  if (row.latency) {
    const Latency& latency = *row.latency;
    for (const double us : {latency.min_us, latency.median_us, latency.p99_us, latency.p999_us}) cells.emplace_back(us);
  }
  table_of(report).print_row(out, cells);
}

void print_footer(std::FILE* out, const Report& report) {
  if (report.options.format == Format::kNcclTests) return print_nccl_tests_footer(out, report);
  if (report.options.check_iterations == 0) {
    std::fprintf(out, "# Wrong elements    : not checked\n");
  } else {
    std::fprintf(out, "# Wrong elements    : %llu %s%s\n", static_cast<unsigned long long>(report.wrong()),
                 report.wrong() == 0 ? "OK" : "FAILED",
                 report.ranks.size() == 1 ? " (one rank: no bytes were sent between ranks)" : "");
  }
  std::fprintf(out, "# Avg bus bandwidth : %g GB/s\n", report.average_busbw());
  std::fflush(out);
}

}  // namespace verbatim::perf
