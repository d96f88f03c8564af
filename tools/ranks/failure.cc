#include "ranks/failure.h"

#include <cerrno>
#include <cstdio>

namespace verbatim::ranks {

void print_error(const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, what.c_str());
}

}  // namespace verbatim::ranks
