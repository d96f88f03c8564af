// A device that dies under a connection. SOFTVERBS_FAULTS, which a process reads once, lets it die when the second
// receive is announced.
#include <gtest/gtest.h>

#include "link.h"

namespace verbatim {
namespace {

TEST(DeviceFatal, EndsWhatIsIdleAndWhatIsPending) {
  Link idle;
  ASSERT_NO_FATAL_FAILURE(idle.connect());
  Link busy;
  ASSERT_NO_FATAL_FAILURE(busy.connect());
  std::vector<std::uint8_t> source = pattern(100, 1);
  std::vector<std::uint8_t> target(100);
  const auto send_memory = idle.reg(idle.send(), source);
  const auto recv_memory = busy.reg(busy.recv(), target);
  const RecvBuffer buffer{target.data(), target.size(), 0, recv_memory.get()};
  for (int i = 0; i < 2; ++i) {
    ASSERT_NE(busy.posted([&] { return busy.irecv({&buffer, 1}); }), nullptr);
  }
  const auto end = std::chrono::steady_clock::now() + Link::kPatience;
  const auto all_failed = [&] { return idle.send().error() && idle.recv().error() && busy.recv().error(); };
  while (!all_failed() && std::chrono::steady_clock::now() < end) {
    // It has nothing outstanding that could complete: the device's event alone can tell it.
    EXPECT_EQ(idle.isend(source.data(), source.size(), 0, *send_memory), nullptr);
    idle.recv().progress();
    busy.recv().progress();
  }
  ASSERT_TRUE(all_failed());
  EXPECT_EQ(idle.send().error()->kind, ErrorKind::kSystem);
}

}  // namespace
}  // namespace verbatim
