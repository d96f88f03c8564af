// The options of nccl-tests that have no effect on a plugin without NCCL and GPU kernels. They exist so that command
// lines of nccl-tests run: an option that changes nothing here is accepted, with a note where it would have changed
// something there; one that asks for something else than verbatim-perf does is refused by its name.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace verbatim::perf {

// Adds the options. `notes` gets a line for each that is accepted with another value than nccl-tests' default; it must
// live until the options are parsed.
void add_nccl_tests_options(CLI::App& app, std::vector<std::string>& notes);

}  // namespace verbatim::perf
