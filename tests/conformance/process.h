// Tests that need another process run this same program in a role: its standard input and output are pipes to the test.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "traffic.h"

namespace conformance {

// What a role leaves behind. Signals count as 128 + their number, a missed deadline as -1.
struct Exit {
  int status;
  std::string output;  // what was not read before
};

class Process {
 public:
  // Starts `role` over table `api` with these variables added to the environment ("" unsets one).
  Process(const std::string& role, int api, const std::vector<std::pair<std::string, std::string>>& environment = {});
  ~Process();  // kills it if it still runs
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  bool write(const void* data, std::size_t size);
  bool read(void* data, std::size_t size);  // all of it, or false at the deadline or end of file
  void kill();
  pid_t pid() const { return pid_; }
  Exit wait(Clock::duration limit = kDeadline);

 private:
  pid_t pid_ = -1;
  verbatim::UniqueFd to_;
  verbatim::UniqueFd from_;
};

// The other process's main, of each program its own: its exit status.
int run_role(const std::string& role, int api);

// A program's main: PROGRAM --plugin PATH [GoogleTest's options] runs the suite, PROGRAM --plugin PATH --role ROLE
// --api N the role. Where a machine is slow: --largest BYTES of a message, --shorten N divides repetitions, --pause
// MICROSECONDS sleeps when nothing has moved. `take` is given each option beside these with its value.
int run_program(int argc, char** argv,
                const std::function<void(const std::string& option, const char* value)>& take = {});

}  // namespace conformance
