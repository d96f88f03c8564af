// Reads what nccl-tests 2.19.6 prints, and nothing else. The comments in nccl_tests_reader.cc name the functions, and
// the lines of their file, whose formats define it.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace verbatim::perf {

struct NcclTestsRun {
  double time_us = 0;
  double algbw = 0;
  double busbw = 0;
  std::optional<double> wrong;       // N/A: none
  std::array<double, 4> iterations;  // of -I: minimum, maximum, p99, variation
};

struct NcclTestsRow {
  std::size_t size = 0;
  std::size_t count = 0;
  std::string type;
  std::string redop;
  int root = 0;
  NcclTestsRun out_of_place;
  NcclTestsRun in_place;
  std::string timestamp;
};

struct NcclTestsDevice {
  int rank = 0;
  int pid = 0;
  int device = 0;
  std::string host;
  std::string pci;
  std::string name;
};

struct NcclTestsOutput {
  std::string program;
  int threads = 0;
  int gpus = 0;
  std::size_t min_bytes = 0;
  std::size_t max_bytes = 0;
  std::size_t step = 0;
  std::string step_kind;
  int warmup_iterations = 0;
  int iterations = 0;
  int validation = 0;
  int unalign = 0;
  std::vector<NcclTestsDevice> devices;
  std::vector<NcclTestsRow> rows;
  long long out_of_bounds = 0;
  double busbw = 0;
  std::string busbw_result;  // of NCCL_TESTS_MIN_BW
};

struct NcclTestsColumns {
  bool per_iteration = false;  // -I 1
  bool timestamps = false;     // -S 1
};

// Throws std::runtime_error, which names the first line that is not as it must be.
NcclTestsOutput read_nccl_tests(const std::string& output, const NcclTestsColumns& columns);

}  // namespace verbatim::perf
