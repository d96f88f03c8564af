// Several ports, in virtual time.
//: program perf_lanes link=ranks,json,perf_run,gtest
//: test perf-lanes use=over-verbatim filter=-*Benchmark*
//: benchmark perf-lanes-rates use=over-verbatim filter=*Benchmark* timeout=300

// Connections over several ports with rates in softverbs' virtual time: which part of the bytes each port carries and,
// as benchmarks, how much of the ports' rates a stream of messages uses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "perf/perf_run.h"
#include "ranks/scratch_directory.h"
#include "support/benchmark.h"

namespace verbatim::perf {
namespace {

using Json = nlohmann::json;

struct Measured {
  double gbps = 0;
  std::map<std::string, double> port_parts;  // of the bytes, by device number
};

class Lanes : public testing::Test {
 protected:
  // `gbps`: the rates of the ports, which they also declare. `depth` messages are under way.
  Measured stream(int ports, const std::string& gbps, const std::string& message, const std::string& total,
                  const std::string& depth) {
    const std::string trace = (scratch_ / "trace.jsonl").string();
    std::filesystem::remove(trace);
    const std::string count = std::to_string(ports);
    const Outcome outcome = run({"stream", "--plugin", setting("PERF_PLUGIN"), "--merge", count, "--channels", "1",
                                 "--depth", depth, "--chunk", message, "-b", total, "-e", total, "-n", "1", "-w", "0"},
                                {"SOFTVERBS_DEVICES=" + count, "SOFTVERBS_LINK_GBPS=" + gbps,
                                 "SOFTVERBS_SPEED_GBPS=" + gbps, "SOFTVERBS_TRACE=" + trace});
    EXPECT_EQ(outcome.status, kCorrect) << outcome.output;
    return read(trace);
  }

  // Two ports of 100 Gbit/s whose links go down one after the other. What is measured is the end.
  Measured stream_after_outages() {
    constexpr std::uint64_t kIterations = 60;
    constexpr std::uint64_t kIterationBytes = std::uint64_t{256} << 20;
    const std::string trace = (scratch_ / "trace.jsonl").string();
    std::filesystem::remove(trace);
    const std::string faults =
        "link-down device=0 after=100 op=write for=30ms; link-down device=1 after=200 op=write for=30ms";
    const Outcome outcome =
        run({"stream",
             "--plugin",
             setting("PERF_PLUGIN"),
             "--plugin-log",
             "--merge",
             "2",
             "--channels",
             "1",
             "--depth",
             "8",
             "--chunk",
             "8M",
             "-b",
             "256M",
             "-e",
             "256M",
             "-n",
             std::to_string(kIterations),
             "-w",
             "0"},
            {"SOFTVERBS_DEVICES=2", "SOFTVERBS_LINK_GBPS=100", "SOFTVERBS_SPEED_GBPS=100", "SOFTVERBS_TRACE=" + trace,
             "SOFTVERBS_QUANTUM=1048576", "SOFTVERBS_FAULTS=" + faults, "VERBATIM_TIMEOUT=14"});
    EXPECT_EQ(outcome.status, kCorrect) << outcome.output;
    std::size_t returns = 0;
    for (std::size_t at = 0; (at = outcome.output.find(" is back after ", at)) != std::string::npos; ++at) ++returns;
    EXPECT_GE(returns, 2U) << outcome.output;  // at two ends
    return read(trace, (kIterations - 1) * kIterationBytes);
  }

  // While one message at a time is under way, stripes depend only on what the ports declare.
  void expect_parts(int ports, const std::string& gbps, const std::map<std::string, double>& parts) {
    for (const auto& [message, total] : {std::pair{"1M", "16M"}, std::pair{"8M", "64M"}}) {
      SCOPED_TRACE(message);
      const Measured measured = stream(ports, gbps, message, total, "1");
      EXPECT_EQ(measured.port_parts.size(), parts.size());
      for (const auto& [port, part] : parts) EXPECT_NEAR(measured.port_parts.at(port), part, 0.001) << port;
    }
  }

  const ranks::Scratch scratch_{"lanes-test"};

 private:
  // CTS entries and completion signals are not counted, nor the first `skipped` bytes.
  static Measured read(const std::string& trace, std::uint64_t skipped = 0) {
    constexpr std::uint64_t kData = 4096;
    std::ifstream in(trace);
    std::map<std::string, std::uint64_t> by_port;
    std::uint64_t bytes = 0;
    std::uint64_t first = ~std::uint64_t{0};
    std::uint64_t last = 0;
    for (std::string line; std::getline(in, line);) {
      const Json quantum = Json::parse(line);
      if (quantum["bytes"] < kData) continue;
      if (skipped != 0) {
        skipped -= std::min(skipped, quantum["bytes"].get<std::uint64_t>());
        continue;
      }
      bytes += quantum["bytes"].get<std::uint64_t>();
      const auto port = quantum["port"].get<std::string>();
      by_port[port.substr(port.find('.') + 1)] += quantum["bytes"].get<std::uint64_t>();
      first = std::min(first, quantum["ns"].get<std::uint64_t>());
      last = std::max(last, quantum["arrival_ns"].get<std::uint64_t>());
    }
    Measured measured;
    if (last <= first) return measured;
    measured.gbps = static_cast<double>(bytes) * 8 / static_cast<double>(last - first);
    for (const auto& [port, sent] : by_port) {
      measured.port_parts[port] = static_cast<double>(sent) / static_cast<double>(bytes);
    }
    return measured;
  }
};

TEST_F(Lanes, PortsOf100And25_CarryFourFifthsAndOneFifth) {
  expect_parts(2, "100,25", {{"0", 0.8}, {"1", 0.2}});
}

TEST_F(Lanes, FourEqualPorts_CarryAQuarterEach) {
  expect_parts(4, "100", {{"0", 0.25}, {"1", 0.25}, {"2", 0.25}, {"3", 0.25}});
}

TEST_F(Lanes, PortBelowAnEighth_CarriesNothing) {
  expect_parts(2, "100,10", {{"0", 1}});
}

TEST_F(Lanes, LinksWereDown_BothCarryDataAgain) {
  std::map<std::string, double> parts = stream_after_outages().port_parts;
  for (const char* port : {"0", "1"}) EXPECT_GE(parts[port], 0.25) << port;
}

// Messages that are not striped use the ports in turn, the faster one for four of five.
TEST_F(Lanes, SmallMessages_UseFasterPortsMoreOften) {
  constexpr double kMessages = 256;
  const Measured measured = stream(2, "100,25", "64K", "16M", "8");
  EXPECT_NEAR(measured.port_parts.at("0") * kMessages, 0.8 * kMessages, 1);
}

// The flow labels of a connection's QPs spread them over the paths behind a port.
TEST_F(Lanes, EightQpsAndFourPaths_NoPathIsIdle) {
  const std::string stats = (scratch_ / "stats-%p.json").string();
  for (int i = 0; i < 5; ++i) {  // the labels of a connection are random
    const Outcome outcome = run({"stream", "--plugin", setting("PERF_PLUGIN"), "--channels", "1", "--depth", "1", "-b",
                                 "8M", "-e", "8M", "-n", "1", "-w", "0"},
                                {"VERBATIM_QPS_PER_CONNECTION=8", "SOFTVERBS_PATHS=4", "SOFTVERBS_STATS=" + stats});
    EXPECT_EQ(outcome.status, kCorrect) << outcome.output;
    std::map<int, std::uint64_t> carried;
    for (const auto& file : std::filesystem::directory_iterator(std::filesystem::path(stats).parent_path())) {
      if (!file.path().filename().string().starts_with("stats-")) continue;
      std::ifstream in(file.path());
      const Json statistics = Json::parse(in);
      for (const Json& qp : statistics["qps"]) carried[qp["path"].get<int>()] += qp["bytes"].get<std::uint64_t>();
      in.close();
      std::filesystem::remove(file.path());
    }
    EXPECT_EQ(carried.size(), 4U);
    for (const auto& [path, bytes] : carried) EXPECT_GE(bytes, 1U << 20) << path;
  }
}

// A sender that gets no processor posts too late, and its ports are idle meanwhile: then a rate is smaller.
class LanesBenchmark : public Lanes {
 protected:
  static constexpr int kRounds = 5;

  void print_rates(const std::string& what, int ports, const std::string& gbps) {
    const auto print = [&](const std::string& message, const std::string& total) {
      test::run_benchmark("messages of " + message + " over " + what, "Gbit/s of virtual time", kRounds,
                          [&] { return stream(ports, gbps, message, total, "8").gbps; });
    };
    print("1M", "64M");
    print("8M", "256M");
  }
};

TEST_F(LanesBenchmark, Rates) {
  print_rates("ports of 100 and 25", 2, "100,25");
  print_rates("ports of 100 and 10", 2, "100,10");
  print_rates("four ports of 100", 4, "100");
}

TEST_F(LanesBenchmark, RateAfterOutages) {
  test::run_benchmark("two ports of 100 after outages of both", "Gbit/s of virtual time", 3,
                      [&] { return stream_after_outages().gbps; });
}

}  // namespace
}  // namespace verbatim::perf
