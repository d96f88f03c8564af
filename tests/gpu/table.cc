#include "table.h"

#include <algorithm>
#include <cstdio>

#include "operations.h"
#include "scenarios.h"

namespace verbatim::gpu {

void Table::print_complete_rows(const std::vector<std::vector<Report>>& rows_of_rank) {
  const auto complete = [&](const std::vector<Report>& rows) { return rows.size() > printed_; };
  for (; std::all_of(rows_of_rank.begin(), rows_of_rank.end(), complete); ++printed_) {
    Report total = rows_of_rank.front()[printed_];
    for (std::size_t rank = 1; rank < rows_of_rank.size(); ++rank) {
      const Report& row = rows_of_rank[rank][printed_];
      total.microseconds = std::max(total.microseconds, row.microseconds);
      total.abort_seconds = std::max(total.abort_seconds, row.abort_seconds);
      total.cpu_microseconds += row.cpu_microseconds;
      total.wrong += row.wrong;
      total.checked += row.checked;
    }
    wrong_ += total.wrong;
    checked_ += total.checked;
    if (total.kind == Report::Kind::kScenario) {
      print_scenario(total);
    } else {
      print_size(total, static_cast<int>(rows_of_rank.size()));
    }
    std::fflush(stdout);
    last_ = total;
  }
}

void Table::print_size(const Report& row, int ranks) {
  const Operation& operation = kOperations[row.index];
  if (!last_ || last_->index != row.index) {
    std::printf("\n# %s\n#%12s %12s %8s %10s %9s %9s %7s %9s\n", operation.name, "size", "count", "type", "time",
                "algbw", "busbw", "#wrong", "progress");
    std::printf("#%12s %12s %8s %10s %9s %9s %7s %9s\n", "(B)", "(elements)", "", "(us)", "(GB/s)", "(GB/s)", "",
                "(CPU us)");
  }
  const std::size_t bytes = row.count * sizeof(Element);
  const double algbw = static_cast<double>(bytes) / row.microseconds / 1e3;
  std::printf(" %12zu %12zu %8s %10.1f %9.2f %9.2f %7llu %9.1f\n", bytes, static_cast<std::size_t>(row.count), "uint32",
              row.microseconds, algbw, algbw * operation.bus_factor(ranks), static_cast<unsigned long long>(row.wrong),
              row.cpu_microseconds);
}

void Table::print_scenario(const Report& row) {
  if (!last_ || last_->kind != Report::Kind::kScenario) {
    std::printf("\n# scenarios\n#%19s %12s %7s %9s %9s\n", "", "compared", "#wrong", "time (s)", "abort (s)");
  }
  std::printf(" %-19s %12llu %7llu %9.2f %9.3f  %s\n", kScenarios[row.index].name,
              static_cast<unsigned long long>(row.checked), static_cast<unsigned long long>(row.wrong),
              row.microseconds / 1e6, row.abort_seconds, row.text);
}

}  // namespace verbatim::gpu
