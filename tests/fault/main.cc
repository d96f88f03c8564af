// main of `sweep`; the program has no roles.
#include <iostream>

#include "process.h"

namespace conformance {

int run_role(const std::string& role, int) {
  std::cerr << "no role " << role << "\n";
  return 2;
}

}  // namespace conformance

int main(int argc, char** argv) {
  return conformance::run_program(argc, argv);
}
