// Says in the output of a test that a process which it has started has crashed: its own exit status does not.
#pragma once

#include <sys/wait.h>

#include <csignal>
#include <cstdio>

namespace verbatim::test {

// `status`: of waitpid. tools/run_tests repeats no test with this line in its output. Signals that tests send do not
// count.
inline void report_crash(int status) {
  if (!WIFSIGNALED(status)) return;
  for (const int signal : {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV}) {
    if (WTERMSIG(status) == signal) std::fprintf(stderr, "a process of this test has crashed: signal %d\n", signal);
  }
}

}  // namespace verbatim::test
