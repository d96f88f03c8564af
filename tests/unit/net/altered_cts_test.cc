//: in isolated

// A receiver that changes a CTS entry behind a message whose lane is then lost, through the plugin's table.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "conformance/table_pair.h"
#include "support/child.h"
#include "wire/cts.h"

namespace conformance {
namespace {

namespace wire = verbatim::wire;

// The CTS entries of this receive buffer in the memory of this process: in the sender's ring, which the receiver
// writes, and in the receiver's copy of it.
[[gnu::no_sanitize_address]] std::vector<wire::CtsEntry*> cts_entries(const std::vector<std::uint8_t>& buffer) {
  constexpr std::uint64_t kLargest = std::uint64_t{1} << 30;  // the memory of a sanitizer's own is larger
  std::vector<wire::CtsEntry*> found;
  const std::uint64_t address = reinterpret_cast<std::uint64_t>(buffer.data());
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    char access[5] = {};
    if (std::sscanf(line.c_str(), "%lx-%lx %4s", &begin, &end, access) != 3 || std::strcmp(access, "rw-p") != 0)
      continue;
    if (end - begin > kLargest || line.find("[stack]") != std::string::npos) continue;
    for (std::uint64_t at = begin; at + sizeof(wire::CtsEntry) <= end; at += sizeof address) {
      auto* const entry = reinterpret_cast<wire::CtsEntry*>(at);
      if (entry->address == address && entry->size.is_of(wire::kSingleReceive)) found.push_back(entry);
    }
  }
  return found;
}

// The receiver writes CTS entries and can change them at any time. What is posted again has as many members as were
// sent.
TEST(Outage, CtsEntryBecomesThatOfAGroup_OnlyItsMessageIsSentAgain) {
  const verbatim::test::Variables variables = {
      {"SOFTVERBS_FAULTS", "drop-request device=0 op=write_imm times=all nth=9"},
      {"SOFTVERBS_DEVICES", "2"},
      {"VERBATIM_TIMEOUT", "12"},
      {"VERBATIM_RETRY_CNT", "2"},
      {"VERBATIM_LANE_TIMEOUT_MS", "200"}};
  const std::string output = verbatim::test::check_in_child(variables, [] {
    std::vector<std::uint8_t> source(64, 7);
    std::vector<std::vector<std::uint8_t>> targets(2, std::vector<std::uint8_t>(64));
    std::vector<std::uint8_t> earlier(64);
    TablePair pair(0);
    ASSERT_TRUE(pair);
    void* const send_handle = pair.reg(pair.send_comm, source);
    void* const handles[] = {pair.reg(pair.recv_comm, targets[0]), pair.reg(pair.recv_comm, targets[1])};
    void* const earlier_handle = pair.reg(pair.recv_comm, earlier);
    for (int i = 0; i < 8; ++i) ASSERT_TRUE(pair.exchange(source, send_handle, earlier, earlier_handle));
    std::vector<void*> requests;
    for (const int i : {0, 1}) {
      requests.push_back(pair.irecv({{targets[static_cast<std::size_t>(i)], i, handles[i]}}));
      requests.push_back(pair.isend_when_possible(source, i, send_handle));
    }
    const std::vector<wire::CtsEntry*> entries = cts_entries(targets[0]);
    EXPECT_GE(entries.size(), 2U);
    for (wire::CtsEntry* const entry : entries) {
      entry->size = {targets[0].size(), wire::CtsSize::of_group(wire::kMaxGroup, wire::CtsFlags::kNone)};
    }
    EXPECT_TRUE(pair.wait_for_all(requests));
    for (const auto& target : targets) EXPECT_EQ(target, source) << "wrong bytes";
  });
  EXPECT_NE(output.find(" is down, the connection waits "), std::string::npos) << output;
}

}  // namespace
}  // namespace conformance
