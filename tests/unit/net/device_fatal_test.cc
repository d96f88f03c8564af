//: program unit_net_fatal link=net,gtest
//: test unit-net-fatal-{engine} engine=thread,inline SOFTVERBS_ENGINE={engine}
//:   + SOFTVERBS_FAULTS='device-fatal after=1 op=write'

// A device that dies under a connection. SOFTVERBS_FAULTS, which a process reads once, lets it die when the second
// receive is announced.
#include <gtest/gtest.h>

#include "connected_comms.h"

namespace verbatim {
namespace {

TEST(DeviceFatal, IdleAndBusyComms_BothFail) {
  ConnectedComms idle;
  ASSERT_NO_FATAL_FAILURE(idle.connect());
  ConnectedComms busy;
  ASSERT_NO_FATAL_FAILURE(busy.connect());
  Buffers idle_buffers(idle, 100);
  Buffers busy_buffers(busy, 100);
  for (int i = 0; i < 2; ++i) {
    ASSERT_NE(busy.posted([&] { return busy_buffers.irecv(100); }), nullptr);
  }
  ASSERT_TRUE(ConnectedComms::eventually([&] {
    // It has nothing outstanding that could complete: only the event of the device reports the failure.
    EXPECT_EQ(idle_buffers.isend(100), nullptr);
    idle.recv().progress();
    busy.recv().progress();
    return idle.send().error() && idle.recv().error() && busy.recv().error();
  }));
  EXPECT_EQ(idle.send().error()->kind, ErrorKind::kSystem);
}

}  // namespace
}  // namespace verbatim
