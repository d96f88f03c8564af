// --format nccl-tests: the lines that nccl-tests 2.19.6 prints, character by character, for scripts that read its
// output. tests/perf/nccl_tests_reader.h says which lines of its sources define them.
#include <ctime>
#include <string>

#include "verbatim-perf/report.h"

namespace verbatim::perf {
namespace {

constexpr const char* kNcclTestsVersion = "2.19.6";
constexpr int kTimeWidth = 19;

// A number in at most `width` characters: two digits after the point, or one, or none, or with an exponent.
std::string fit(double value, int width) {
  char text[64];
  for (int digits = 2; digits >= 0; --digits) {
    if (std::snprintf(text, sizeof text, "%*.*f", width, digits, value) <= width) return text;
  }
  std::snprintf(text, sizeof text, "%*.*e", width, width >= 7 ? 1 : 0, value);
  return text;
}

struct Titles {
  const char* size;
  const char* count;
  const char* type;
  const char* redop;
  const char* root;
  const char* time;
  const char* bandwidth[2];
  const char* wrong;
  const char* iterations[4];
  const char* timestamp;
};

// One line of the titles or units: the columns of the size, and twice those of a measurement.
void print_titles_line(std::FILE* out, const Options& options, const Titles& titles) {
  std::fprintf(out, "# %10s  %12s  %8s  %6s  %6s", titles.size, titles.count, titles.type, titles.redop, titles.root);
  for (int run = 0; run < 2; ++run) {
    std::fprintf(out, "  %7s  %6s  %6s  %6s", titles.time, titles.bandwidth[0], titles.bandwidth[1], titles.wrong);
    for (const char* const title : titles.iterations) {
      if (options.per_iteration) std::fprintf(out, "  %7s", title);
    }
  }
  std::fprintf(out, " %*s\n", options.timestamps ? kTimeWidth : 0, options.timestamps ? titles.timestamp : "");
}

void print_iterations(std::FILE* out, const IterationTimes& times, int skipped) {
  const IterationSummary summary = summary_of(slowest_of(times), skipped);
  for (const double value : {summary.min, summary.max, summary.p99, summary.variation()}) {
    std::fprintf(out, "  %7s", fit(value, 7).c_str());
  }
}

void print_measured(std::FILE* out, const Options& options, const Measured& measured) {
  std::fprintf(out, "  %7s  %6s  %6s", fit(measured.time_us, 7).c_str(), fit(measured.algbw, 6).c_str(),
               fit(measured.busbw, 6).c_str());
  if (measured.wrong) {
    std::fprintf(out, "  %6g", static_cast<double>(*measured.wrong));
  } else {
    std::fputs("    N/A", out);  // one character less, as there
  }
  if (options.per_iteration) print_iterations(out, measured.iterations, options.per_iteration_skip);
}

}  // namespace

std::string time_of_day() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  char text[64];
  std::strftime(text, sizeof text, kTimeFormat, &local);
  return text;
}

std::string pci_of(const netapi::Properties& device) {
  const std::string name = device.pci_path.substr(device.pci_path.rfind('/') + 1);
  unsigned domain = 0;
  unsigned bus = 0;
  unsigned slot = 0;
  char text[32];
  if (std::sscanf(name.c_str(), "%x:%x:%x.", &domain, &bus, &slot) != 3) domain = bus = slot = 0;
  std::snprintf(text, sizeof text, "%04x:%02x:%02x", domain, bus, slot);
  return text;
}

int number_on_host(const Report& report, std::size_t rank) {
  int number = 0;
  for (std::size_t i = 0; i < rank; ++i) {
    if (report.ranks[i].host == report.ranks[rank].host) ++number;
  }
  return number;
}

std::string program_name(const Report& report) {
  return std::string(operation_name(report.options.operation)) + "_perf";
}

void print_nccl_tests_header(std::FILE* out, const Report& report) {
  const Options& options = report.options;
  const bool by_factor = options.factor > 1;
  // No headers and no library of NCCL: both versions are 0.
  std::fprintf(out, "# nccl-tests version %s nccl-headers=%d nccl-library=%d\n", kNcclTestsVersion, 0, 0);
  std::fprintf(out, "# Collective test starting: %s\n", program_name(report).c_str());
  std::fprintf(out,
               "# nThread %d nGpus %d minBytes %zu maxBytes %zu step: %.0f(%s) warmup iters: %d iters: %d agg iters: 1 "
               "validation: %d graph: 0 unalign: %d\n",
               options.threads, options.gpus, options.min_bytes, options.max_bytes,
               by_factor ? options.factor : static_cast<double>(options.step_bytes), by_factor ? "factor" : "bytes",
               options.warmup_iterations, options.iterations, options.check_iterations, options.unalign);
  if (options.per_iteration) {
    std::fputs("# Per-Iteration Report: monotonic clock; i_* uses max over process rows", out);
    if (options.per_iteration_skip > 0) {
      std::fprintf(out, "; summary skips first %d iterations", options.per_iteration_skip);
    }
    std::fputs(" \n", out);
  }
  std::fputs("#\n# Using devices\n", out);
  const netapi::Properties& device = report.devices.front();
  for (std::size_t i = 0; i < report.ranks.size(); ++i) {
    const RankInfo& rank = report.ranks[i];
    std::fprintf(out, "#  Rank %2zu Group %2d Pid %6d on %10s device %2d [%s] %s over %s, %s\n", i, 0, rank.pid,
                 rank.host.c_str(), number_on_host(report, i), pci_of(device).c_str(), report.plugin_name.c_str(),
                 netapi::verbs_name(device).c_str(), rank.memory.c_str());
  }
  std::fprintf(out, "#\n# %10s  %12s  %8s  %6s  %6s", "", "", "", "", "");
  if (options.per_iteration) {
    std::fprintf(out, "%*s%*s\n", 14 + 30, "out-of-place (+ per-iteration)", 32 + 26, "in-place (+ per-iteration)");
  } else {
    std::fprintf(out, "%*s%*s%*s\n", 11 + 12, "out-of-place", 23 + 8, "in-place", 10, "");
  }
  print_titles_line(out, options,
                    {"size",
                     "count",
                     "type",
                     "redop",
                     "root",
                     "time",
                     {"algbw", "busbw"},
                     "#wrong",
                     {"i_min", "i_max", "i_p99", "i_cv%"},
                     "timestamp"});
  print_titles_line(out, options,
                    {"(B)",
                     "(elements)",
                     "",
                     "",
                     "",
                     "(us)",
                     {"(GB/s)", "(GB/s)"},
                     "",
                     {"(us)", "(us)", "(us)", "(%)"},
                     kTimeFormat});
  std::fflush(out);
}

void print_nccl_tests_row(std::FILE* out, const Report& report, const Row& row) {
  std::optional<std::uint64_t> wrong = row.wrong;
  if (report.options.check_iterations == 0) wrong.reset();
  std::fprintf(out, "%12zu  %12zu  %8s  %6s  %6d", row.bytes, row.count, workload::element_name(row.type),
               row.redop.c_str(), row.root);
  print_measured(out, report.options, {row.time_us, row.algbw, row.busbw, wrong, row.iterations});
  if (row.in_place) print_measured(out, report.options, *row.in_place);
  if (report.options.timestamps) std::fprintf(out, "%21s", time_of_day().c_str());
  std::fputc('\n', out);
  std::fflush(out);
}

void print_nccl_tests_footer(std::FILE* out, const Report& report) {
  const auto wrong = static_cast<unsigned long long>(report.wrong());
  std::fprintf(out, "# %-20s : %llu %s\n", "Out of bounds values", wrong, wrong == 0 ? "OK" : "FAILED");
  std::fprintf(out, "# %-20s : %g %s\n", "Avg bus bandwidth", report.average_busbw(), report.busbw_result());
  std::fprintf(out, "#\n# Collective test concluded: %s\n#\n\n", program_name(report).c_str());
  std::fflush(out);
}

}  // namespace verbatim::perf
