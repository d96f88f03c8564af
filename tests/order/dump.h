// Sets VERBATIM_QP_DUMP for a test and reads the file.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "ranks/scratch_directory.h"
#include "verbatim-perf/qp_order/figures.h"
#include "verbatim-perf/qp_order/job.h"

namespace verbatim::perf::qp_order {

// Environment variables that are removed at the end of the test.
class Variables {
 public:
  Variables() = default;
  ~Variables();
  Variables(const Variables&) = delete;
  Variables& operator=(const Variables&) = delete;
  void set(const std::string& name, const std::string& value);

 private:
  std::vector<std::string> names_;
};

// While it exists, new contexts write their QPs to a file.
class Dump {
 public:
  explicit Dump(Variables& variables) { variables.set("VERBATIM_QP_DUMP", path()); }
  std::vector<DumpedQp> read() const { return read_dump(path()); }
  std::string directory() const { return scratch_.path(); }

 private:
  std::string path() const { return (scratch_ / "dump").string(); }

  ranks::Scratch scratch_{"order-test"};
};

// The QPs of one side of one rank, by rising QP number.
std::vector<DumpedQp> by_number(const std::vector<DumpedQp>& dump, const std::string& side, const std::string& self);

std::map<std::string, int> ranks_of(const Job& job, int ranks);

std::string plugin_path();

}  // namespace verbatim::perf::qp_order
