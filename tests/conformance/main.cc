// conformance --plugin PATH [GoogleTest's options]: the suite.
// conformance --plugin PATH --role ROLE --api N: the other process of a test that needs two.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>

#include "conformance.h"
#include "process.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  std::string role;
  int api = 0;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--plugin") == 0) conformance::options().plugin = argv[i + 1];
    if (std::strcmp(argv[i], "--role") == 0) role = argv[i + 1];
    if (std::strcmp(argv[i], "--api") == 0) api = std::atoi(argv[i + 1]);
  }
  if (conformance::options().plugin.empty()) {
    std::cerr << "conformance: --plugin PATH is needed\n";
    return 2;
  }
  if (!role.empty()) return conformance::run_role(role, api);
  return RUN_ALL_TESTS();
}
