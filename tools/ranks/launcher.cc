#include "ranks/launcher.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/socket.h"
#include "ranks/coordinator.h"
#include "ranks/token.h"

namespace verbatim::ranks {
namespace {

// After an abort ranks exit at once, and the coordinator has already waited for them. After a normal end ranks may
// still have to unload the plugin and to write a report.
constexpr std::uint64_t kKillAfterAbortNs = kNanosecondsPerSecond / 2;
constexpr std::uint64_t kKillAfterFinishNs = 30 * kNanosecondsPerSecond;
constexpr int kReapMs = 20;

// The children of one job.
class Children {
 public:
  explicit Children(int count) : children_(static_cast<std::size_t>(count)) {}
  ~Children() {
    for (const Child& child : children_) {
      if (child.pid > 0) ::kill(child.pid, SIGKILL);
    }
    while (reap(), running()) ::poll(nullptr, 0, kReapMs);
  }
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  void start(int rank, const std::vector<std::string>& arguments) {
    std::vector<char*> argv;
    for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    const pid_t parent = getpid();
    const pid_t pid = fork();
    if (pid < 0) throw Failure(std::string("fork: ") + std::strerror(errno));
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // the rank ends when its launcher ends
      if (getppid() != parent) _exit(static_cast<int>(ExitStatus::kFailed));
      execv("/proc/self/exe", argv.data());
      _exit(static_cast<int>(ExitStatus::kFailed));
    }
    children_[static_cast<std::size_t>(rank)].pid = pid;
  }

  // Returns a rank that ended by a signal or with a failure since the last call.
  std::optional<ProcessExit> reap() {
    for (std::size_t rank = 0; rank < children_.size(); ++rank) {
      Child& child = children_[rank];
      int status = 0;
      if (child.pid <= 0 || waitpid(child.pid, &status, WNOHANG) != child.pid) continue;
      child.pid = 0;
      child.status = status;
      if (WIFSIGNALED(status)) {
        return ProcessExit{"rank " + std::to_string(rank) + " was killed by signal " +
                               std::to_string(WTERMSIG(status)) + " (" + strsignal(WTERMSIG(status)) + ")",
                           true};
      }
      if (is_failure(WEXITSTATUS(status))) {
        return ProcessExit{
            "rank " + std::to_string(rank) + " exited with status " + std::to_string(WEXITSTATUS(status)), false};
      }
    }
    return std::nullopt;
  }

  bool running() const {
    for (const Child& child : children_) {
      if (child.pid > 0) return true;
    }
    return false;
  }

  // The highest exit status of the ranks.
  ExitStatus status() const {
    int worst = 0;
    for (const Child& child : children_) {
      worst =
          std::max(worst, WIFEXITED(child.status) ? WEXITSTATUS(child.status) : static_cast<int>(ExitStatus::kFailed));
    }
    return static_cast<ExitStatus>(worst);
  }

 private:
  struct Child {
    pid_t pid = 0;
    int status = 0;
  };
  std::vector<Child> children_;
};

UniqueFd listen_for_children() {
  sockaddr_storage address{};
  auto& inet = reinterpret_cast<sockaddr_in&>(address);
  inet.sin_family = AF_INET;
  inet.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto listener = tcp_listen(address);
  if (!listener) throw Failure(std::string("listening for ranks: ") + std::strerror(listener.error().sys_errno));
  return std::move(*listener);
}

}  // namespace

ExitStatus launch(const Job& job, int argc, char** argv) {
  UniqueFd listener = listen_for_children();
  const auto address = local_address(listener);
  if (!address) throw Failure("cannot get the address of the listening socket");
  const std::string token = random_token();
  ::setenv(kTokenVariable, token.c_str(), 1);  // inherited by the ranks

  Children children(job.procs);
  for (int rank = 0; rank < job.procs; ++rank) {
    std::vector<std::string> arguments(argv, argv + argc);
    arguments.insert(arguments.end(), {"--root=" + to_string(*address), "--rank=" + std::to_string(rank),
                                       "--nranks=" + std::to_string(job.procs), "--child"});
    children.start(rank, arguments);
  }

  Coordinator coordinator(std::move(listener), job.procs, hash_of(token), job.timeout_s);
  const ExitStatus served = coordinator.serve([&children] { return children.reap(); });
  const std::uint64_t kill_at = monotonic_ns() + (served == ExitStatus::kOk ? kKillAfterFinishNs : kKillAfterAbortNs);
  while (children.running() && monotonic_ns() < kill_at) {
    if (const auto exited = children.reap(); exited && exited->unexplained) {
      print_error(exited->text);
    }
    ::poll(nullptr, 0, kReapMs);
  }
  if (served != ExitStatus::kOk) return served;
  return children.running() ? ExitStatus::kFailed : children.status();
}

}  // namespace verbatim::ranks
