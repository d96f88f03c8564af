// The results of a job, and their output: a table on stdout, Verbatim's or nccl-tests', and JSON in a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "netapi/plugin.h"
#include "verbatim-perf/iterations.h"
#include "verbatim-perf/options.h"

namespace verbatim::perf {

struct RankInfo {
  std::string host;
  int pid = 0;
  std::string memory;         // "GPU 0 of 2 (NVIDIA H100 80GB HBM3)"
  std::string registered_by;  // "regMr" or "regMrDmaBuf"
};

// Times of single iterations.
struct Latency {
  double min_us = 0;
  double median_us = 0;
  double p99_us = 0;
  double p999_us = 0;
};

// Times, rates and wrong elements of one size.
struct Measured {
  double time_us = 0;
  double algbw = 0;                         // GB/s, 10^9
  double busbw = 0;                         // GB/s
  std::optional<std::uint64_t> wrong = {};  // elements; empty: not checked
  IterationTimes iterations = {};           // with Options::per_iteration
};

// One line of the table.
struct Row {
  std::size_t bytes = 0;
  std::size_t count = 0;
  double time_us = 0;
  double algbw = 0;  // GB/s, 10^9
  double busbw = 0;
  std::uint64_t wrong = 0;                // elements
  std::optional<Latency> latency = {};    // of rank 0; pingpong only
  std::optional<Measured> in_place = {};  // with Format::kNcclTests
  IterationTimes iterations = {};
  workload::ElementType type = workload::ElementType::kFloat;
  std::string redop = "none";
  int root = -1;
};

struct Report {
  Options options;
  std::string plugin_name;
  std::string plugin_path;  // the file that was loaded
  int api_version = 0;
  std::vector<netapi::Properties> devices;  // of rank 0
  std::vector<RankInfo> ranks;
  std::size_t chunk_bytes = 0;
  std::size_t group = 0;
  std::vector<Row> rows;

  std::uint64_t wrong() const;
  double average_busbw() const;
  // As nccl-tests: nothing is required, or 90 % of Options::required_busbw are reached or not.
  const char* busbw_result() const;
};

// The time of an operation from those of the ranks, of rank 0 first.
double average_time(Average average, const std::vector<double>& times);

// In the format of report.options.
void print_header(std::FILE* out, const Report& report);
void print_row(std::FILE* out, const Report& report, const Row& row);
void print_footer(std::FILE* out, const Report& report);

// The three parts in nccl-tests' format.
void print_nccl_tests_header(std::FILE* out, const Report& report);
void print_nccl_tests_row(std::FILE* out, const Report& report, const Row& row);
void print_nccl_tests_footer(std::FILE* out, const Report& report);

// Throws Failure when the file cannot be written.
void write_json(const Report& report, const std::string& path);

// The JSON of nccl-tests' option -J. Like there an existing file stays as it is: a number is added to the name.
class NcclTestsJson {
 public:
  // At the start of the run: it remembers the time. Writes nothing unless the name ends with .json, as nccl-tests.
  NcclTestsJson(std::string path, std::vector<std::string> arguments);
  void write(const Report& report) const;

 private:
  const std::string path_;
  const std::vector<std::string> arguments_;
  const std::string start_;
};

// Of this moment, as nccl-tests prints it.
inline constexpr const char* kTimeFormat = "%Y-%m-%d %H:%M:%S";
std::string time_of_day();
// "0000:81:00": nccl-tests prints no function. A device that is none of PCI's has zeros.
std::string pci_of(const netapi::Properties& device);
// The number of a rank among those of its host.
int number_on_host(const Report& report, std::size_t rank);
std::string program_name(const Report& report);

}  // namespace verbatim::perf
