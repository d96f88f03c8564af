#include "verbatim-perf/cost/counters.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/unique_fd.h"
#include "ranks/failure.h"
#include "softverbs-control/process_directory.h"

namespace verbatim::perf::cost {

// A process cannot open its own segment as a second entry of the registry, so a forked child reads the counters.
Reading read_counters() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw ranks::Failure("pipe2: " + std::string(std::strerror(errno)));
  const UniqueFd from(ends[0]);
  UniqueFd to(ends[1]);
  const pid_t me = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) throw ranks::Failure("fork: " + std::string(std::strerror(errno)));
  if (child == 0) {
    bool written = false;
    try {
      const control::ProcessDirectory directory;
      const softverbs::ProcessStats stats = softverbs::read_stats(directory.processes({me}).front().segment());
      const Reading reading{stats.work, stats.doorbells(), stats.polls, stats.empty_polls, stats.objects};
      written = ::write(to.get(), &reading, sizeof reading) == static_cast<ssize_t>(sizeof reading);
    } catch (const std::exception& failure) {
      std::fprintf(stderr, "%s\n", failure.what());
    }
    ::_exit(written ? 0 : 1);
  }
  to = UniqueFd();
  Reading reading;
  const ssize_t got = ::read(from.get(), &reading, sizeof reading);
  ::waitpid(child, nullptr, 0);
  if (got != static_cast<ssize_t>(sizeof reading)) throw ranks::Failure("softverbs' counters cannot be read");
  return reading;
}

nlohmann::ordered_json difference(const Reading& before, const Reading& after) {
  const softverbs::WorkStats& from = before.work;
  const softverbs::WorkStats& to = after.work;
  nlohmann::ordered_json opcodes = nlohmann::ordered_json::object();
  for (std::size_t i = 0; i < to.sends.size(); ++i) {
    if (to.sends[i] != from.sends[i]) opcodes[softverbs::kSendOpcodeNames[i]] = to.sends[i] - from.sends[i];
  }
  return {{"post_send", to.posts + to.completes - from.posts - from.completes},
          {"send_requests", to.send_requests() - from.send_requests()},
          {"by_opcode", opcodes},
          {"post_recv", to.receive_posts - from.receive_posts},
          {"recv_requests", to.receives - from.receives},
          {"doorbells", after.doorbells - before.doorbells},
          {"inline_bytes", to.inline_bytes - from.inline_bytes},
          {"completions", to.completions - from.completions},
          {"polls", after.polls - before.polls},
          {"empty_polls", after.empty_polls - before.empty_polls}};
}

}  // namespace verbatim::perf::cost
