// Tests that need another process start this program again in a role. Its standard input and output are pipes.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "traffic.h"

namespace conformance {

// The end of a role's process. `status` is 128 + n after signal n, and -1 after a missed deadline.
struct Exit {
  int status;
  std::string output;  // output that the test has not read before
};

class Process {
 public:
  // Starts `role` with table version `api` and adds these variables to the environment ("" removes a variable).
  Process(const std::string& role, int api, const std::vector<std::pair<std::string, std::string>>& environment = {});
  ~Process();  // kills the process if it still runs
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  bool write(const void* data, std::size_t size);
  bool read(void* data, std::size_t size);  // reads all bytes; false at the deadline or end of file
  void kill();
  void stop();  // SIGSTOP; returns when all its threads have stopped
  pid_t pid() const { return pid_; }
  Exit wait(Clock::duration limit = kDeadline);

 private:
  pid_t pid_ = -1;
  verbatim::UniqueFd to_;
  verbatim::UniqueFd from_;
};

// The main function of a role; each test program defines it. Returns the exit status.
int run_role(const std::string& role, int api);

// The main function of a test program. PROGRAM --plugin PATH [GoogleTest's options] runs the suite; PROGRAM --plugin
// PATH --role ROLE --api N runs the role. For slow machines: --largest BYTES limits the size of messages, --shorten N
// divides the repetitions, --pause MICROSECONDS sleeps when there was no progress. `handle_option` is called for each
// other option.
int run_program(int argc, char** argv,
                const std::function<void(const std::string& option, const char* value)>& handle_option = {});

}  // namespace conformance
