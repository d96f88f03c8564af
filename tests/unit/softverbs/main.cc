// The suite's own main: the same program is the peer process of its tests.
#include <gtest/gtest.h>

#include <string_view>

#include "support/verbs_peer.h"

int main(int argc, char** argv) {
  if (argc == 2 && std::string_view(argv[1]) == verbatim::test::kPeerArgument) return verbatim::test::run_peer();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
