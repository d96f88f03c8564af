// The points at which the test can kill or stop a process: before each verb, after each system call that had an effect,
// and for each message over TCP before it, in the middle of it and after it.
#pragma once

#include <optional>
#include <string>

namespace conformance {

// The point at which a process was killed or stopped, and what it had done before.
struct KillPoint {
  int sent = 0;    // complete messages over TCP
  int posted = 0;  // calls of ibv_post_send that have returned
  std::string name;
};

// From now on the calls of the calling thread pass kill points. At the `nth` point, or when `nth` is 0 at the point
// called `name`, the process writes a line to standard output and sends itself `signal`.
void signal_at(int signal, long nth, const std::string& name);
// The calling thread passes no further kill points.
void stop_counting();

// Parses the output of the process; nullopt when it reached no kill point that was chosen.
std::optional<KillPoint> parse_kill_point(const std::string& output);

}  // namespace conformance
