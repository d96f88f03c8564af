// Compares whole log lines of the plugin with tests/log_lines.txt, which has them all.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

namespace verbatim::test {

// The name of the running case, without parameters, and which of its lines: a step or a parameter.
inline std::string log_lines_name(const std::string& which) {
  const testing::TestInfo& running = *testing::UnitTest::GetInstance()->current_test_info();
  const std::string suite = running.test_suite_name();
  const std::string name = running.name();
  return suite.substr(suite.rfind('/') + 1) + "." + name.substr(0, name.find('/')) + (which.empty() ? "" : " " + which);
}

// The lines that the table has below this name.
inline std::vector<std::string> log_lines(const std::string& which = "") {
  std::vector<std::string> lines;
  std::ifstream table(LOG_LINES);
  EXPECT_TRUE(table) << LOG_LINES;
  bool is_found = false;
  for (std::string line; std::getline(table, line);) {
    if (!line.starts_with("    "))
      is_found = line == log_lines_name(which);
    else if (is_found)
      lines.push_back(line.substr(4));
  }
  return lines;
}

// The line with this text, which differs from run to run, as `word`.
inline std::string replaced(std::string line, const std::string& varying, const std::string& word) {
  const std::size_t at = line.find(varying);
  return at == std::string::npos ? line : line.replace(at, varying.size(), word);
}

inline void expect_log_lines(const std::vector<std::string>& lines, const std::string& which = "") {
  const std::vector<std::string> expected = log_lines(which);
  EXPECT_FALSE(expected.empty()) << LOG_LINES << " has no line of " << log_lines_name(which);
  if (lines == expected) return;
  std::string difference = log_lines_name(which) + "\nexpected (tests/log_lines.txt):\n";
  for (const std::string& line : expected) difference += "    " + line + "\n";
  difference += "actual:\n";
  for (const std::string& line : lines) difference += "    " + line + "\n";
  ADD_FAILURE() << difference;
}

}  // namespace verbatim::test
