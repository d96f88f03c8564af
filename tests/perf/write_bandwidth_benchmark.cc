//: program write_bandwidth link=perf_run,gtest
//: benchmark softverbs-write-bandwidth suite=softverbs PERF_TOOL={softverbs_bench} VERBATIM_VERBS_LIBRARY={softverbs}
//:   + SOFTVERBS_ENGINE=thread

// RDMA WRITEs of softverbs beside process_vm_writev, as softverbs-bench measures them: the best of interleaved rounds.
#include <gtest/gtest.h>

#include <regex>
#include <string>

#include "perf_run.h"
#include "support/benchmark.h"

namespace verbatim::perf {
namespace {

TEST(WriteBandwidthBenchmark, AgainstProcessVmWritev) {
  test::run_benchmark("bandwidth of WRITEs of 1 MiB over that of process_vm_writev", "times", 9, [] {
    const Outcome outcome = run({"--size", "1M", "--no-latency"});
    EXPECT_EQ(outcome.status, kCorrect) << outcome.output;
    // memcpy, process_vm_writev and WRITE in GB/s, and the ratio of the last two.
    std::smatch row;
    const bool is_found = std::regex_search(outcome.output, row, std::regex(" 1 MiB( +[0-9.]+){3} +([0-9.]+)"));
    EXPECT_TRUE(is_found) << outcome.output;
    return is_found ? std::stod(row[2]) : 0;
  });
}

}  // namespace
}  // namespace verbatim::perf
