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
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/child.h"
#include "support/shows.h"
#include "table_pair.h"

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

}  // namespace
}  // namespace conformance
