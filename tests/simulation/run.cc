#include "simulation/run.h"

#include <malloc.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "simulation/descriptors.h"
#include "simulation/faults.h"
#include "support/crash.h"

namespace simulation {
namespace {

constexpr std::size_t kMaxProcesses = 64;
constexpr std::uint64_t kMaxAddresses = 64;
// Of real time, in which a process must end: otherwise a thread waits in the kernel, or loops without a call that the
// simulation sees.
constexpr time_t kRealSeconds = 120;

// While it exists, this process and the children that it makes use one processor: there the turn passes from thread to
// thread faster.
class OneProcessor {
 public:
  OneProcessor() {
    is_known_ = sched_getaffinity(0, sizeof before_, &before_) == 0;
    if (!is_known_) return;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<unsigned>(sched_getcpu()), &one);
    sched_setaffinity(0, sizeof one, &one);
  }
  ~OneProcessor() {
    if (is_known_) sched_setaffinity(0, sizeof before_, &before_);
  }
  OneProcessor(const OneProcessor&) = delete;
  OneProcessor& operator=(const OneProcessor&) = delete;

 private:
  cpu_set_t before_;
  bool is_known_;
};

// Each process has other addresses, so that one is of no use in another process. All threads allocate from one arena,
// which gets holes of all sizes: half of many blocks is freed.
void scatter_addresses(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::size_t hole_bytes = (1 + random() % 1000) * 4096;
  static_cast<void>(mmap(nullptr, hole_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
  std::vector<void*> blocks(2000);
  for (void*& block : blocks) {
    const std::size_t bytes = std::size_t{16} << random() % 14;
    block = std::malloc(bytes + random() % bytes);
  }
  std::shuffle(blocks.begin(), blocks.end(), random);
  for (std::size_t i = 0; i < blocks.size() / 2; ++i) std::free(blocks[i]);
}

// The process keeps the turn until it has ended, so what it does at exit is part of the run, too.
[[noreturn]] void run_process(const Plan& plan, std::size_t process, const std::function<bool(std::size_t)>& job) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::closefrom(STDERR_FILENO + 1);  // the numbers of descriptors are part of the run
  scatter_addresses((plan.seed * kMaxAddresses + plan.addresses) * kMaxProcesses + process);
  enter_process(process);
  const bool passed = job(process);
  const std::size_t threads = threads_left();
  const std::size_t open = descriptors().count();
  if (!passed)
    std::fprintf(stderr, "seed %llu: the job of process %zu has failed\n", static_cast<unsigned long long>(plan.seed),
                 process);
  if (threads != 0) std::fprintf(stderr, "leak: %zu threads have not ended\n", threads);
  if (threads != 0) print_threads();
  if (open != 0) std::fprintf(stderr, "leak: %zu sockets, sets of epoll, event counters or pipes are open\n", open);
  const KeepTurn keep;
  std::exit(passed && threads == 0 && open == 0 ? 0 : 1);
}

bool report_end(const Plan& plan, int status) {
  if (WIFSIGNALED(status)) {
    std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(plan.seed), strsignal(WTERMSIG(status)));
    print_threads();
    verbatim::test::report_crash(status);
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// SIGALRM: as if the time had passed. They stay blocked, also in the children, so that none is lost before the wait.
const sigset_t& watched_signals() {
  static const sigset_t watched = [] {
    std::signal(SIGCHLD, SIG_DFL);
    sigset_t made;
    sigemptyset(&made);
    sigaddset(&made, SIGCHLD);
    sigaddset(&made, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &made, nullptr);
    return made;
  }();
  return watched;
}

// False: no process has ended for too long.
bool wait_for_end_of_a_process() {
  const timespec limit{kRealSeconds, 0};
  const int signal = ::sigtimedwait(&watched_signals(), nullptr, &limit);
  return signal == SIGCHLD || (signal < 0 && errno == EINTR);
}

// Waits for all processes, and gives the turn of one that has ended to others. When one has failed, or has the turn for
// too long, the others are killed.
bool wait_for_processes(const Plan& plan, std::vector<pid_t> pids) {
  bool passed = true;
  for (std::size_t left = pids.size(); left > 0;) {
    for (const pid_t pid : pids) {
      if (!passed && pid != 0) ::kill(pid, SIGKILL);
    }
    int status = 0;
    const pid_t ended = ::waitpid(-1, &status, WNOHANG);
    if (ended < 0) return false;
    if (ended == 0) {
      if (wait_for_end_of_a_process() || !passed) continue;
      passed = false;
      std::fprintf(stderr, "seed %llu: the thread that has the turn does not end its call:\n",
                   static_cast<unsigned long long>(plan.seed));
      print_threads();
      continue;
    }
    const auto process = static_cast<std::size_t>(std::find(pids.begin(), pids.end(), ended) - pids.begin());
    if (process == pids.size()) continue;  // not of this run
    pids[process] = 0;
    --left;
    if (!passed) continue;
    const bool has_died = death_of(process) != kNever && WIFEXITED(status) && WEXITSTATUS(status) == kExitOfDeath;
    if (has_died) count_fault(Fault::kDeath);
    passed = has_died || report_end(plan, status);
    if (passed && left > 0) {
      tcp().close_all_of(process);
      descriptors_changed();
      passed = pass_on_turn_of(process);
    }
  }
  return passed;
}

}  // namespace

Result run(const Plan& plan, std::size_t processes, const std::function<bool(std::size_t)>& job) {
  prepare(plan, processes);
  make_tcp();
  std::fflush(nullptr);
  watched_signals();
  const OneProcessor one;
  std::vector<pid_t> pids;
  for (std::size_t process = 0; process < processes; ++process) {
    const pid_t child = ::fork();
    if (child < 0) std::abort();
    if (child == 0) run_process(plan, process, job);
    pids.push_back(child);
  }
  begin();
  const bool passed = wait_for_processes(plan, std::move(pids));
  return {passed, outcome()};
}

Result run(const Plan& plan, const std::function<bool()>& job) {
  return run(plan, 1, [&job](std::size_t) { return job(); });
}

}  // namespace simulation
