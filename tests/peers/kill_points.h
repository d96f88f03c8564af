// The places in the life of a process at which it may be killed or stopped: before each verb, after each system call
// that did something, and for each message over TCP before it, in the middle of it and after it.
#pragma once

#include <optional>
#include <string>

namespace conformance {

// Where a process has got to.
struct KillPoint {
  int sent = 0;    // whole messages over TCP
  int posted = 0;  // calls of ibv_post_send that have returned
  std::string place;
};

// From now on the calling thread's calls are such places. At the `nth`, or where that is 0 at the one called `name`,
// the process writes a line to standard output and sends itself `signal`.
void signal_at(int signal, long nth, const std::string& name);
// Until here.
void stop_counting();

// Out of what the process has written; nullopt: it has come through.
std::optional<KillPoint> parse_kill_point(const std::string& output);

}  // namespace conformance
