// conformance --plugin PATH [GoogleTest's options] runs the suite. process.h describes the other options.
#include "process.h"

int main(int argc, char** argv) {
  return conformance::run_program(argc, argv);
}
