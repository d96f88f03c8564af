#include <cstdio>
#include <exception>
#include <variant>

#include "verbatim-perf/launcher.h"
#include "verbatim-perf/options.h"
#include "verbatim-perf/rank.h"

int main(int argc, char** argv) {
  using namespace verbatim::perf;
  try {
    const auto parsed = parse_options(argc, argv);
    if (const auto* const leave = std::get_if<Leave>(&parsed)) {
      std::fputs(leave->text.c_str(), leave->status == ExitStatus::kOk ? stdout : stderr);
      return static_cast<int>(leave->status);
    }
    const auto& options = std::get<Options>(parsed);
    return static_cast<int>(options.root.empty() ? launch(options, argc, argv) : run_rank(options));
  } catch (const Failure& failure) {
    std::fprintf(stderr, "verbatim-perf: %s\n", failure.what());
    return static_cast<int>(failure.status);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "verbatim-perf: %s\n", failure.what());
    return static_cast<int>(ExitStatus::kFailed);
  }
}
