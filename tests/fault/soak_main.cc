// A link that stays down is to end the connection, with one line. A QP retries for at least half a second, much longer
// than a link flap. How many rounds the soak has depends on the machine.
//: program soak sources=soak.cc,lifecycle/process_resources.cc link=conformance_harness,libdl
//: all timeout=300 SOFTVERBS_ENGINE=thread VERBATIM_CLOSE_TIMEOUT_MS=500 VERBATIM_RECONNECT_S=0 VERBATIM_TIMEOUT=15
//:   + VERBATIM_RETRY_CNT=7
//: test soak full args='--plugin {plugin} --seconds 10'
//: test soak-finds-a-corrupted-byte args='--plugin {mutate} --seconds 0 --wrong-expected 1' MUTATE_PLUGIN={plugin}
//:   + MUTATE_MODE=flip-byte

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
