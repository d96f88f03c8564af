// Each case has a process of its own, with its own settings and faults.
//: program isolated sources=support/child.cc link=gtest,netapi,wire,threads,libdl
//: all protocol=gtest timeout=240 CONFORMANCE_PLUGIN={plugin}
//: test conformance-isolated
// Lanes are lost on devices as those of these drivers.
//: test conformance-outage-{} filter=Outage.* SOFTVERBS_PROFILE={variant}
//:   mlx5
//:   bnxt_re full
//:   irdma full

// Lanes that are lost under connections, through the plugin's table.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/child.h"
#include "support/shows.h"
#include "table_pair.h"
#include "wire/cts.h"

namespace conformance {
namespace {

void in_child(const std::string& faults, const std::function<void()>& body) {
  verbatim::test::check_in_child({{"SOFTVERBS_FAULTS", faults},
                                  {"SOFTVERBS_DEVICES", "2"},
                                  {"VERBATIM_TIMEOUT", "12"},
                                  {"VERBATIM_RETRY_CNT", "2"},
                                  {"VERBATIM_RECONNECT_S", "60"},
                                  {"VERBATIM_LANE_TIMEOUT_MS", "200"}},
                                 body);
}

// The CTS entries of this receive buffer in the memory of this process: in the sender's ring, which the receiver
// writes, and in the receiver's copy of it.
[[gnu::no_sanitize_address]] std::vector<verbatim::wire::CtsEntry*> cts_entries(
    const std::vector<std::uint8_t>& buffer) {
  constexpr std::uint64_t kLargest = std::uint64_t{1} << 30;  // the memory of a sanitizer's own is larger
  std::vector<verbatim::wire::CtsEntry*> found;
  const std::uint64_t address = reinterpret_cast<std::uint64_t>(buffer.data());
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    char access[5] = {};
    if (std::sscanf(line.c_str(), "%lx-%lx %4s", &begin, &end, access) != 3 || std::strcmp(access, "rw-p") != 0)
      continue;
    if (end - begin > kLargest || line.find("[stack]") != std::string::npos) continue;
    for (std::uint64_t at = begin; at + sizeof(verbatim::wire::CtsEntry) <= end; at += sizeof address) {
      auto* const entry = reinterpret_cast<verbatim::wire::CtsEntry*>(at);
      if (entry->address == address && entry->size.is_of(verbatim::wire::kSingleReceive)) found.push_back(entry);
    }
  }
  return found;
}

// Flushes that are posted while every port is left out post no READ that could complete.
TEST(Outage, FlushesWithoutAnyPort_AreDone) {
  for (const auto& [device, faults] : {std::pair{0, "link-down device=0 after=4 op=read for=500ms"},
                                       {TablePair::kMerged,
                                        "drop-request op=read device=0 nth=5 times=all;"
                                        "drop-request op=read device=1 nth=5 times=all"}}) {
    SCOPED_TRACE(faults);
    in_child(faults, [device = device] {
      std::vector<std::uint8_t> source(64);
      std::vector<std::uint8_t> target(64);
      TablePair pair(device);
      ASSERT_TRUE(pair);
      void* const send_handle = pair.reg(pair.send_comm, source);
      void* const recv_handle = pair.reg(pair.recv_comm, target, nccl::kPtrCuda);
      ASSERT_TRUE(pair.exchange(source, send_handle, target, recv_handle));
      for (int i = 0; i < 16; ++i) ASSERT_TRUE(pair.flush(target, recv_handle)) << i;
      EXPECT_TRUE(pair.exchange(source, send_handle, target, recv_handle));
    });
  }
}

// All receives have arrived, as far as the receiver knows, and it makes no calls: the monitor reports that to the
// sender. A receive with optional completion is not among them, also if it is a group.
TEST(Outage, OptionalGroupIsLostAndReceiverIsIdle_EveryByteArrives) {
  in_child("drop-request device=0 op=write times=all nth=3", [] {
    std::vector<std::uint8_t> source(128, 7);
    std::vector<std::uint8_t> target(128);
    TablePair pair(0);
    ASSERT_TRUE(pair);
    const std::span<std::uint8_t> from(source);
    const std::span<std::uint8_t> to(target);
    void* const send_handle = pair.reg(pair.send_comm, source);
    void* const recv_handle = pair.reg(pair.recv_comm, target);
    ASSERT_TRUE(pair.exchange(from.first(8), send_handle, to.first(8), recv_handle));
    void* const receive = pair.irecv({{to.first(64), 0, recv_handle}, {to.subspan(64), 1, recv_handle}}, true);
    ASSERT_TRUE(pair.wait(receive));
    std::vector<void*> sends;
    for (int tag = 0; tag < 2; ++tag) {
      sends.push_back(pair.isend_when_possible(from.subspan(static_cast<std::size_t>(tag) * 64, 64), tag, send_handle));
    }
    EXPECT_TRUE(pair.wait_for_all(sends));
    // The sends' completions do not say that the bytes are visible, and that of the receive said nothing.
    EXPECT_TRUE(TablePair::eventually([&] { return verbatim::test::shows(target, source); })) << "wrong bytes";
  });
}

// The receiver writes CTS entries and can change them at any time. What is posted again has as many members as were
// sent.
TEST(Outage, CtsEntryBecomesThatOfAGroup_OnlyItsMessageIsSentAgain) {
  in_child("drop-request device=0 op=write_imm times=all nth=9", [] {
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
    const std::vector<verbatim::wire::CtsEntry*> entries = cts_entries(targets[0]);
    EXPECT_GE(entries.size(), 2U);
    for (verbatim::wire::CtsEntry* const entry : entries) {
      entry->size = {targets[0].size(),
                     verbatim::wire::CtsSize::of_group(verbatim::wire::kMaxGroup, verbatim::wire::CtsFlags::kNone)};
    }
    EXPECT_TRUE(pair.wait_for_all(requests));
    for (const auto& target : targets) EXPECT_EQ(target, source) << "wrong bytes";
  });
}

}  // namespace
}  // namespace conformance
