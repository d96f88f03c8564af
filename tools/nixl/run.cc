#include "nixl/run.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <vector>

#include "base/clock.h"
#include "nixl/programs.h"
#include "ranks/scratch_directory.h"

namespace verbatim::nixl {
namespace {

using ranks::ExitStatus;
using ranks::Failure;

constexpr int kCannotStart = 127;  // as in a shell
constexpr int kPollMs = 20;
constexpr std::size_t kMostText = 4000;

// A process that is killed, with the processes that it has started, when this object ends.
class Child {
 public:
  Child(std::vector<std::string> arguments, const std::string& log) {
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ < 0) throw Failure("fork: " + std::string(std::strerror(errno)));
    if (pid_ > 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // its ranks do the same with it as their parent
    if (::getppid() != parent) ::_exit(kCannotStart);
    const int out = ::open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    ::dup2(out, STDOUT_FILENO);
    ::dup2(out, STDERR_FILENO);
    ::setenv(kLinkLayer, kInfiniBand, 0);
    // Without TCP, to which UCX falls back without a message. NIXL needs CUDA's transport where it sees a GPU.
    ::setenv("UCX_TLS", ::access("/dev/nvidiactl", F_OK) == 0 ? "rc,ud,cuda_copy" : "rc,ud", 0);
    ::execvp(argv[0], argv.data());
    ::_exit(kCannotStart);
  }
  ~Child() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  // The exit status; nothing when a signal ended the process. Throws Failure after the timeout.
  std::optional<int> wait(int timeout_s) {
    const std::uint64_t end = monotonic_ns() + static_cast<std::uint64_t>(timeout_s) * kNanosecondsPerSecond;
    int status = 0;
    while (::waitpid(pid_, &status, WNOHANG) != pid_) {
      if (monotonic_ns() > end) {
        throw Failure("NIXL has not finished in " + std::to_string(timeout_s) + " s (--timeout)", ExitStatus::kTimeout);
      }
      ::poll(nullptr, 0, kPollMs);
    }
    pid_ = 0;
    return WIFEXITED(status) ? std::optional(WEXITSTATUS(status)) : std::nullopt;
  }

 private:
  pid_t pid_ = -1;
};

std::string text_of(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  std::string all = text.str();
  while (!all.empty() && all.back() == '\n') all.pop_back();
  return all.substr(all.size() - std::min(all.size(), kMostText));
}

ranks::Json run_program(const Python& python, std::vector<std::string> arguments, const ranks::Scratch& directory) {
  for (const ProgramFile& file : kProgramFiles) std::ofstream(directory / file.name) << file.text;
  const std::filesystem::path result = directory / "result.json";
  const std::filesystem::path log = directory / "log";
  arguments.insert(arguments.begin(), {python.path, "-B", (directory / "nixl_main.py").string(), result.string()});
  Child child(std::move(arguments), log.string());
  const std::optional<int> status = child.wait(python.timeout_s);
  if (status == kCannotStart) {
    throw Failure("--python " + python.path +
                  ": cannot be started. Next: name a Python that has NIXL (on PyPI: nixl-cu12) and numpy");
  }
  if (status != 0) {
    const std::string text = text_of(log);
    throw Failure(text.empty() ? "NIXL's process ended without a message" : text);
  }
  ranks::Json json = ranks::Json::parse(std::ifstream(result), nullptr, false);
  if (json.is_discarded()) throw Failure("--python " + python.path + ": has not written a result: " + text_of(log));
  return json;
}

}  // namespace

std::string version(const Python& python) {
  return run_program(python, {}, ranks::Scratch("nixl")).at("over");
}

ranks::Json run(const Python& python, const std::string& program, const ranks::Json& plan) {
  const ranks::Scratch directory("nixl");
  const std::filesystem::path path = directory / "plan.json";
  std::ofstream file(path);
  file << plan.dump();
  file.close();
  if (!file) throw Failure("cannot write " + path.string());
  return run_program(python, {program, path.string()}, directory);
}

}  // namespace verbatim::nixl
