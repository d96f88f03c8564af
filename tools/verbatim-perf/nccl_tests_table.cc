// --format nccl-tests: the lines that nccl-tests prints, for scripts that read its output.
#include <algorithm>
#include <cmath>
#include <string>

#include "base/version.h"
#include "cli/table.h"
#include "verbatim-perf/report.h"

namespace verbatim::perf {
namespace {

// Fits a number into `width` characters as nccl-tests does: two digits after the point, then one, none, an exponent.
std::string fit(double value, int width) {
  const int digits = value < 1 ? 1 : static_cast<int>(std::log10(value)) + 1;
  char text[32];
  if (digits < width - 2) {
    std::snprintf(text, sizeof text, "%.2f", value);
  } else if (digits < width - 1) {
    std::snprintf(text, sizeof text, "%.1f", value);
  } else if (digits <= width) {
    std::snprintf(text, sizeof text, "%.0f", value);
  } else {
    std::snprintf(text, sizeof text, "%.*e", width >= 7 ? 1 : 0, value);
  }
  return text;
}

std::string program_name(const Report& report) {
  return std::string(operation_name(report.options.operation)) + "_perf";
}

const cli::Table& table() {
  static const cli::Table columns({{"size", 12},
                                   {"count", 12},
                                   {"type", 8},
                                   {"redop", 6},
                                   {"root", 6},
                                   {"time", 7},
                                   {"algbw", 6},
                                   {"busbw", 6},
                                   {"#wrong", 6},
                                   {"time", 7},
                                   {"algbw", 6},
                                   {"busbw", 6},
                                   {"#wrong", 6}},
                                  "  ");
  return columns;
}

void add_measured(std::vector<cli::Cell>& cells, const Measured& measured) {
  cells.insert(cells.end(), {fit(measured.time_us, 7), fit(measured.algbw, 6), fit(measured.busbw, 6),
                             measured.wrong ? std::to_string(*measured.wrong) : "N/A"});
}

}  // namespace

void print_nccl_tests_header(std::FILE* out, const Report& report) {
  const Options& options = report.options;
  const bool by_factor = options.factor > 1;
  std::fprintf(out, "# verbatim-perf %s over %s (net plugin v%d, %s)\n", release_and_commit().c_str(),
               report.plugin_name.c_str(), report.api_version, report.plugin_path.c_str());
  std::fprintf(out, "# Collective test starting: %s\n", program_name(report).c_str());
  std::fprintf(out,
               "# nThread 1 nGpus 1 minBytes %zu maxBytes %zu step: %.0f(%s) warmup iters: %d iters: %d agg iters: 1 "
               "validation: %d graph: 0\n#\n# Using devices\n",
               options.min_bytes, options.max_bytes,
               by_factor ? options.factor : static_cast<double>(options.step_bytes), by_factor ? "factor" : "bytes",
               options.warmup_iterations, options.iterations, options.check_iterations);
  const netapi::Properties& device = report.devices.front();
  for (std::size_t i = 0; i < report.ranks.size(); ++i) {
    std::fprintf(out, "#  Rank %2zu Group  0 Pid %6d on %10s device  0 [%s] %s, %s\n", i, report.ranks[i].pid,
                 report.ranks[i].host.c_str(), device.pci_path.substr(device.pci_path.rfind('/') + 1).c_str(),
                 netapi::verbs_name(device).c_str(), report.ranks[i].memory.c_str());
  }
  std::fprintf(out, "#\n# %10s  %12s  %8s  %6s  %6s           out-of-place                       in-place          \n",
               "", "", "", "", "");
  table().print_titles(out);
  table().print_comment(
      out, {"(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(GB/s)", "(GB/s)", ""});
}

void print_nccl_tests_row(std::FILE* out, const Report& report, const Row& row) {
  const bool reduces = report.options.operation == OperationKind::kAllReduce;
  std::vector<cli::Cell> cells{row.bytes, row.count, workload::element_name(report.options.type),
                               reduces ? "sum" : "none", -1};
  std::optional<std::uint64_t> wrong = row.wrong;
  if (report.options.check_iterations == 0) wrong.reset();
  add_measured(cells, {row.time_us, row.algbw, row.busbw, wrong});
  if (row.in_place) add_measured(cells, *row.in_place);
  table().print_row(out, cells);
}

void print_nccl_tests_footer(std::FILE* out, const Report& report) {
  const auto wrong = static_cast<unsigned long long>(report.wrong());
  std::fprintf(out, "# %-20s : %llu %s\n", "Out of bounds values", wrong, wrong == 0 ? "OK" : "FAILED");
  std::fprintf(out, "# %-20s : %g \n#\n# Collective test concluded: %s\n", "Avg bus bandwidth", report.average_busbw(),
               program_name(report).c_str());
  std::fflush(out);
}

}  // namespace verbatim::perf
