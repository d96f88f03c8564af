// Tables of figures for people: a line of titles, and a line for each row. All tools print their tables with this
// class.
#pragma once

#include <concepts>
#include <cstdint>
#include <cstdio>
#include <string>
#include <variant>
#include <vector>

namespace verbatim::cli {

struct Column {
  std::string title;
  int width;       // below 0: text at the left edge
  int digits = 0;  // behind the point of a floating-point number
};

// A number, or a text such as "N/A".
class Cell {
 public:
  template <std::integral T>
  Cell(T value) : value_(to_wide(value)) {}  // NOLINT(google-explicit-constructor): a row is a list of values
  template <std::floating_point T>
  Cell(T value) : value_(static_cast<double>(value)) {}    // NOLINT(google-explicit-constructor)
  Cell(std::string value) : value_(std::move(value)) {}    // NOLINT(google-explicit-constructor)
  Cell(const char* value) : value_(std::string(value)) {}  // NOLINT(google-explicit-constructor)

  std::string text(const Column& column) const;

 private:
  using Value = std::variant<std::int64_t, std::uint64_t, double, std::string>;
  template <typename T>
  static Value to_wide(T value) {
    if constexpr (std::signed_integral<T>)
      return static_cast<std::int64_t>(value);
    else
      return static_cast<std::uint64_t>(value);
  }

  Value value_;
};

class Table {
 public:
  explicit Table(std::vector<Column> columns);

  // Begins with "# ", which belongs to the first column, so that programs can leave out all but the rows.
  void print_titles(std::FILE* out) const;
  void print_row(std::FILE* out, const std::vector<Cell>& cells) const;
  // A row, or a part of one that begins with the first column, without the end of the line.
  std::string row(const std::vector<Cell>& cells) const;

 private:
  std::string line(const std::vector<Cell>& cells, int first_width) const;

  const std::vector<Column> columns_;
};

}  // namespace verbatim::cli
