// lifecycle --plugin PATH [GoogleTest's options]: the suite.
#include <gtest/gtest.h>

#include <cstring>
#include <iostream>

#include "conformance.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--plugin") == 0) conformance::options().plugin = argv[i + 1];
  }
  if (conformance::options().plugin.empty()) {
    std::cerr << "lifecycle: --plugin PATH is needed\n";
    return 2;
  }
  return RUN_ALL_TESTS();
}
