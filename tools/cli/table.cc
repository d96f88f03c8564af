#include "cli/table.h"

#include <fmt/format.h>

#include <cstdlib>

namespace verbatim::cli {
namespace {

constexpr const char kComment[] = "# ";
constexpr int kCommentWidth = 2;

}  // namespace

std::string Cell::text(const Column& column) const {
  if (const auto* const number = std::get_if<double>(&value_)) return fmt::format("{:.{}f}", *number, column.digits);
  if (const auto* const words = std::get_if<std::string>(&value_)) return *words;
  if (const auto* const number = std::get_if<std::int64_t>(&value_)) return fmt::format("{}", *number);
  return fmt::format("{}", std::get<std::uint64_t>(value_));
}

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

void Table::print_titles(std::FILE* out) const {
  std::vector<Cell> titles;
  for (const Column& column : columns_) titles.emplace_back(column.title);
  const int width = columns_.front().width;
  fmt::print(out, "{}{}\n", kComment, line(titles, width < 0 ? width + kCommentWidth : width - kCommentWidth));
  std::fflush(out);
}

void Table::print_row(std::FILE* out, const std::vector<Cell>& cells) const {
  fmt::print(out, "{}\n", row(cells));
  std::fflush(out);
}

std::string Table::row(const std::vector<Cell>& cells) const {
  return line(cells, columns_.front().width);
}

std::string Table::line(const std::vector<Cell>& cells, int first_width) const {
  std::string text;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const int width = i == 0 ? first_width : columns_[i].width;
    const std::string cell = cells[i].text(columns_[i]);
    if (i != 0) text += ' ';
    text += width < 0 ? fmt::format("{:<{}}", cell, -width) : fmt::format("{:>{}}", cell, width);
  }
  text.erase(text.find_last_not_of(' ') + 1);
  return text;
}

}  // namespace verbatim::cli
