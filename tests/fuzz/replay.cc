// main for compilers without libFuzzer: runs each input file of the command line once.
#include <fstream>
#include <iterator>
#include <string_view>
#include <vector>

#include "fuzz.h"

int main(int argc, char** argv) {
  int inputs = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]).starts_with("-")) continue;  // libFuzzer's options
    std::ifstream file(argv[i], std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    fuzz::require(file.is_open() && !bytes.empty(), "an input file is readable and not empty");
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
    ++inputs;
  }
  fuzz::require(inputs > 0, "the command line names an input file");
  std::printf("%d inputs\n", inputs);
  return 0;
}
