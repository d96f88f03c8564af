// Runs a measuring process with environment variables of its own and waits for its end.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace verbatim::perf {

// Runs `arguments` with `variables` ("NAME=value") added to the environment and waits for the end. The output goes to
// `log`. Throws Failure, with the output, when the process fails.
void run_process(const std::vector<std::string>& arguments, const std::vector<std::string>& variables,
                 const std::filesystem::path& log);

}  // namespace verbatim::perf
