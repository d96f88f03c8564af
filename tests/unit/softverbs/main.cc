// main of the softverbs test programs: with kPeerArgument the program is the peer process of a test.
#include <gtest/gtest.h>

#include <string_view>

#include "support/verbs_peer.h"

// A forked child opens a device, which starts a thread. ThreadSanitizer does not allow that by default.
extern "C" const char* __tsan_default_options() {
  return "die_after_fork=0";
}

namespace {

// The tests fork, so ibv_fork_init is called before any other verb.
class ForkSafety : public testing::Environment {
  void SetUp() override { EXPECT_EQ(verbatim::test::verbs().fork_init(), 0); }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string_view(argv[1]) == verbatim::test::kPeerArgument) return verbatim::test::run_peer();
  testing::InitGoogleTest(&argc, argv);
  testing::AddGlobalTestEnvironment(new ForkSafety);
  return RUN_ALL_TESTS();
}
