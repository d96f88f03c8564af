// Measuring processes: started with variables of their own, waited for, and what they leave.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace verbatim::perf {

// Runs `arguments` with these variables added and waits for the end; the output goes to `log`. Throws Failure with it
// when the process fails.
void run_process(const std::vector<std::string>& arguments, const std::vector<std::string>& variables,
                 const std::filesystem::path& log);

}  // namespace verbatim::perf
