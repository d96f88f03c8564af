// conformance --plugin PATH [GoogleTest's options]: the suite. The other options are those of run_program.
#include "process.h"

int main(int argc, char** argv) {
  return conformance::run_program(argc, argv);
}
