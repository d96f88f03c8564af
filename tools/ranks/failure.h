// When the exit status of one rank ends the whole job.
#pragma once

#include "cli/exit_status.h"

namespace verbatim::ranks {

using cli::ExitStatus;
using cli::Failure;
using cli::print_error;

// Whether the whole job ends as soon as one rank exits with `status`.
constexpr bool is_failure(int status) {
  return status >= static_cast<int>(ExitStatus::kUsage) && status != static_cast<int>(ExitStatus::kRejected) &&
         status != static_cast<int>(ExitStatus::kRecompute);
}

}  // namespace verbatim::ranks
