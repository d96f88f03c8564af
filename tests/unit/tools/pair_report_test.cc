//: program pair_report_test sources=tools/verbatim-info/pair_report.cc link=cli,json,ranks,gtest
//: test verbatim-info-pair-report has=verbatim_info protocol=gtest

// The findings of verbatim-info --pairs: which links are slow.
#include "verbatim-info/pair_report.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace verbatim::info {
namespace {

constexpr double kLatencyUs = 10;
constexpr double kBandwidth = 8;

// Three hosts with two ports each; all links between ports with the same index are alike.
PairReport report_of_three() {
  PairReport report;
  const std::vector<PairPort> ports = {{"dev0", "RoCE", "RoCE v2", 4096, 100'000},
                                       {"dev1", "RoCE", "RoCE v2", 4096, 100'000}};
  for (const char* const name : {"a[0]", "b[1]", "c[2]"}) report.hosts.push_back({name, "", ports});
  for (int from = 0; from < 3; ++from) {
    for (int to = 0; to < 3; ++to) {
      for (int port = 0; from != to && port < 2; ++port) {
        report.links.push_back({from, port, to, port, "", kLatencyUs, kBandwidth});
      }
    }
  }
  return report;
}

// Both directions between these hosts.
std::vector<PairLink*> links_of(PairReport& report, int host, int other, int port) {
  std::vector<PairLink*> found;
  for (PairLink& link : report.links) {
    const bool is_between = (link.from == host && link.to == other) || (link.from == other && link.to == host);
    if (is_between && link.from_port == port) found.push_back(&link);
  }
  return found;
}

using Lines = std::vector<std::string>;

TEST(PairReport, AllLinksAlike_NothingIsFound) {
  EXPECT_EQ(report_of_three().findings(), Lines());
}

TEST(PairReport, LinksOfOnePortAreSlow_PortIsNamed) {
  for (const bool by_latency : {true, false}) {
    SCOPED_TRACE(by_latency);
    PairReport report = report_of_three();
    for (const int other : {0, 1}) {
      for (PairLink* const link : links_of(report, 2, other, 0)) {
        if (by_latency) link->latency_us = 4.1 * kLatencyUs;
        if (!by_latency) link->gb_s = 0.49 * kBandwidth;
      }
    }
    EXPECT_EQ(report.findings(),
              Lines{"c[2] dev0: the links to 2 of 2 ports are slow. Next: look at the cable, the switch port, the PCI "
                    "slot and the error counters of this port"});
  }
}

TEST(PairReport, OneLinkIsSlow_LinkIsNamed) {
  PairReport report = report_of_three();
  for (PairLink* const link : links_of(report, 0, 2, 1)) link->latency_us = 4.1 * kLatencyUs;
  EXPECT_EQ(report.findings(),
            Lines{"a[0] dev1 to c[2] dev1 is slow: 8.00 GB/s, 41.0 us. Next: look at the switches between these two"});
}

TEST(PairReport, LinksVaryByLess_NothingIsFound) {
  PairReport report = report_of_three();
  for (PairLink* const link : links_of(report, 0, 1, 0)) link->latency_us = 3.9 * kLatencyUs;
  for (PairLink* const link : links_of(report, 1, 2, 1)) link->gb_s = 0.51 * kBandwidth;
  EXPECT_EQ(report.findings(), Lines());
}

}  // namespace
}  // namespace verbatim::info
