// The pipe of a completion channel or of a context.
#pragma once

#include "base/unique_fd.h"

namespace verbatim::softverbs {

// A pipe that is readable while events are pending. The program polls the read end.
struct EventPipe {
  UniqueFd read_end;
  UniqueFd write_end;
};

}  // namespace verbatim::softverbs
