#include "dump.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

namespace verbatim::perf::qp_order {

Variables::~Variables() {
  for (const std::string& name : names_) ::unsetenv(name.c_str());
}

void Variables::set(const std::string& name, const std::string& value) {
  ::setenv(name.c_str(), value.c_str(), 1);
  names_.push_back(name);
}

std::vector<DumpedQp> by_number(const std::vector<DumpedQp>& dump, const std::string& side, const std::string& self) {
  std::vector<DumpedQp> found;
  std::copy_if(dump.begin(), dump.end(), std::back_inserter(found),
               [&](const DumpedQp& qp) { return qp.side == side && qp.self == self; });
  std::sort(found.begin(), found.end(), [](const DumpedQp& a, const DumpedQp& b) { return a.qpn < b.qpn; });
  return found;
}

std::map<std::string, int> ranks_of(const Job& job, int ranks) {
  std::map<std::string, int> by_identity;
  for (int rank = 0; rank < ranks; ++rank) by_identity[job.identity(rank)] = rank;
  EXPECT_EQ(by_identity.size(), static_cast<std::size_t>(ranks)) << "two ranks have the same identity";
  return by_identity;
}

std::string plugin_path() {
  const char* const path = std::getenv("PLUGIN");
  EXPECT_NE(path, nullptr) << "PLUGIN must name the plugin under test";
  return path != nullptr ? path : "";
}

}  // namespace verbatim::perf::qp_order
