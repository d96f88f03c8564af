// Makes a run that fails shorter, as long as it fails in the same way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "simulation/choice.h"
#include "simulation/job.h"
#include "simulation/run.h"

namespace simulation {

// A run of a choice, and what it has said on stderr.
struct Tried {
  Result result;
  Job job;
  std::string text;
};

// `text` has all that the run has said, and stderr nothing.
Tried try_run(const Choice& choice, const std::string& plugin);

// The first line that says why a run has failed, without what differs from run to run: numbers, and whose it is. Empty:
// no line does.
std::string kind_of_failure(std::string_view text);

struct Shorter {
  Choice choice;
  Tried tried;
  std::size_t runs = 0;  // that were needed
};

// Without a value: the run does not fail. `run` is try_run, or a test's.
std::optional<Shorter> shrink(const Choice& failing, const std::function<Tried(const Choice&)>& run);

}  // namespace simulation
