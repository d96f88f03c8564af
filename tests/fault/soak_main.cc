// main of `soak`: reads its options.
#include <cstdlib>

#include "process.h"
#include "soak.h"

namespace conformance {

int run_role(const std::string& role, int api) {
  return fault::soak_role(role, api);
}

}  // namespace conformance

int main(int argc, char** argv) {
  return conformance::run_program(argc, argv, [](const std::string& option, const char* value) {
    const auto number = static_cast<unsigned>(std::strtoul(value, nullptr, 10));
    if (option == "--seconds") fault::soak_options().seconds = number;
    if (option == "--seed") fault::soak_options().seed = number;
    if (option == "--wrong-expected") fault::soak_options().wrong_expected = number != 0;
  });
}
