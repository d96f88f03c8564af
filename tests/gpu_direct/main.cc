// gpu_direct --plugin PATH [GoogleTest's options]: process.h describes the other options. CUDA_TEST_LIBRARY names the
// libcuda.
#include "buffer.h"
#include "process.h"

int main(int argc, char** argv) {
  gpu_direct::cuda();  // before the plugin looks for devices, as in a program with CUDA
  return conformance::run_program(argc, argv);
}
