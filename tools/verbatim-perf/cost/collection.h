// Counts the instructions of a part of the program, in a process that runs under callgrind.
#pragma once

#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#define VERBATIM_HAS_CALLGRIND 1
#else  // require_callgrind() throws Failure
#define CALLGRIND_TOGGLE_COLLECT
#define CALLGRIND_DUMP_STATS_AT(text) static_cast<void>(text)
#define VERBATIM_HAS_CALLGRIND 0
#endif

#include <string>

#include "ranks/failure.h"

namespace verbatim::perf::cost {

// Throws Failure when the program was built without callgrind's header.
inline void require_callgrind() {
  if (VERBATIM_HAS_CALLGRIND == 0)
    throw ranks::Failure("built without valgrind/callgrind.h. Next: install valgrind and build again");
}

// Collects instructions while `work` runs. Callgrind adds them to what it has collected since the last dump.
template <typename Work>
void counted(Work work) {
  CALLGRIND_TOGGLE_COLLECT;
  work();
  CALLGRIND_TOGGLE_COLLECT;
}

// Ends what was collected under this label; the counts are divided by `divisor`.
inline void dump(const std::string& label, int divisor) {
  const std::string text = label + " " + std::to_string(divisor);
  CALLGRIND_DUMP_STATS_AT(text.c_str());
}

}  // namespace verbatim::perf::cost
