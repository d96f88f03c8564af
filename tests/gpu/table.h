// Prints the rows of all ranks as they become complete.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "parent.h"

namespace verbatim::gpu {

class Table {
 public:
  // `rows_of_rank`: the rows of each rank so far. Prints a row when every rank has sent it: the slowest rank's time,
  // the sum of wrong elements.
  void print_complete_rows(const std::vector<std::vector<Report>>& rows_of_rank);

  std::size_t printed() const { return printed_; }
  std::uint64_t wrong() const { return wrong_; }
  std::uint64_t checked() const { return checked_; }

 private:
  void print_size(const Report& row, int ranks);
  void print_scenario(const Report& row);

  std::size_t printed_ = 0;
  std::optional<Report> last_;
  std::uint64_t wrong_ = 0;
  std::uint64_t checked_ = 0;
};

}  // namespace verbatim::gpu
