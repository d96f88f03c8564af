// main of `peers` and of `handshake_ends`.
#include "process.h"

int main(int argc, char** argv) {
  return conformance::run_program(argc, argv);
}
