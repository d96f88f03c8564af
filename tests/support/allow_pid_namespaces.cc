//: program allow_pid_namespaces

// usage: allow_pid_namespaces COMMAND [ARGUMENT...]
// Runs COMMAND with the right to start children in new PID namespaces. An ordinary user gets this right only inside of
// a new user namespace, and only for a PID namespace that belongs to it.
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <string>

namespace {

int wait_for(pid_t child) {
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return 1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

bool is_allowed() {
  const pid_t child = fork();
  if (child == 0) {
    const int own = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC);
    _exit(unshare(CLONE_NEWPID) == 0 && setns(own, CLONE_NEWPID) == 0 ? 0 : 1);
  }
  return wait_for(child) == 0;
}

bool write_file(const char* path, const std::string& text) {
  const int fd = open(path, O_WRONLY | O_CLOEXEC);
  const bool is_written = fd >= 0 && write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  close(fd);
  return is_written;
}

// Returns in a child, which is the first process of a PID namespace. False: not allowed.
bool enter_namespaces() {
  // The user becomes root there, because only root keeps its capabilities when it executes COMMAND.
  const std::string user = std::to_string(geteuid());
  if (unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS) != 0) return false;
  if (!write_file("/proc/self/uid_map", "0 " + user + " 1")) return false;
  const pid_t child = fork();
  if (child != 0) _exit(wait_for(child));
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  return mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("proc", "/proc", "proc", 0, nullptr) == 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || (!is_allowed() && (!enter_namespaces() || !is_allowed()))) {
    std::fputs("allow_pid_namespaces: this system does not allow new PID namespaces\n", stderr);
    return 77;  // skipped
  }
  execv(argv[1], argv + 1);
  std::perror(argv[1]);
  return 1;
}
