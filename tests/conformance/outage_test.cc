// Lanes that are lost under connections, through the plugin's table.
#include <string>
#include <utility>
#include <vector>

#include "support/child.h"
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
      TablePair pair(device);
      ASSERT_TRUE(pair);
      std::vector<std::uint8_t> source(64);
      std::vector<std::uint8_t> target(64);
      void* const send_handle = pair.reg(pair.send_comm, source);
      void* const recv_handle = pair.reg(pair.recv_comm, target, nccl::kPtrCuda);
      ASSERT_TRUE(pair.exchange(source, send_handle, target, recv_handle));
      for (int i = 0; i < 16; ++i) ASSERT_TRUE(pair.flush(target, recv_handle)) << i;
      EXPECT_TRUE(pair.exchange(source, send_handle, target, recv_handle));
    });
  }
}

}  // namespace
}  // namespace conformance
