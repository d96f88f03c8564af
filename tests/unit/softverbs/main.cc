// The suite's own main: the same program is the peer process of its tests.
#include <gtest/gtest.h>

#include <string_view>

#include "support/verbs_peer.h"

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
