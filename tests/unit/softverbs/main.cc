// The suite's own main: the same program is the peer process of its tests.
#include <gtest/gtest.h>

#include <string_view>

#include "support/verbs_peer.h"

// A forked child of the suite opens a device, whose thread ThreadSanitizer would not let it start.
extern "C" const char* __tsan_default_options() {
  return "die_after_fork=0";
}

namespace {

// The suite starts processes, so it does what such a program must do before any other verb.
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
