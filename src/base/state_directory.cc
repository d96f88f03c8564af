#include "base/state_directory.h"

#include <dirent.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <span>

#include "base/log.h"
#include "base/random.h"
#include "base/unique_fd.h"

namespace verbatim {
namespace {

constexpr std::size_t kRandomDigits = 8;
// Between bind() and listen() a socket looks like that of a process that has ended.
constexpr time_t kMinAgeS = 10;

bool is_younger(const std::string& path, time_t age_s) {
  struct stat found {};
  return ::lstat(path.c_str(), &found) != 0 || std::time(nullptr) - found.st_mtime < age_s;
}

void warn_not_used(const std::string& directory, const std::string& why) {
  VERBATIM_WARN(
      "the state directory %s (VERBATIM_STATE_DIR) is not used, so verbatim-top and verbatim-exporter do not find this "
      "process: %s. Next: remove it, name another one, or none",
      directory.c_str(), why.c_str());
}

}  // namespace

std::string default_state_directory(uid_t user) {
  return "/tmp/verbatim-" + std::to_string(user);
}

std::optional<std::string> why_not_private(const std::string& directory, uid_t user) {
  struct stat found {};
  if (::lstat(directory.c_str(), &found) != 0) return std::string("lstat: ") + std::strerror(errno);
  if (S_ISLNK(found.st_mode)) return "it is a symbolic link";
  if (!S_ISDIR(found.st_mode)) return "it is not a directory";
  if (found.st_uid != user) return "it belongs to the user " + std::to_string(found.st_uid);
  if ((found.st_mode & (S_IRWXG | S_IRWXO)) == 0) return std::nullopt;
  char mode[8];
  std::snprintf(mode, sizeof mode, "%o", found.st_mode & 07777);
  return "other users may access it (mode " + std::string(mode) + ")";
}

std::optional<std::string> make_state_directory(const std::string& setting) {
  if (setting == kNoStateDirectory) return std::nullopt;
  const uid_t user = ::geteuid();
  const std::string directory = setting.empty() ? default_state_directory(user) : setting;
  if (::mkdir(directory.c_str(), S_IRWXU) != 0 && errno != EEXIST) {
    warn_not_used(directory, std::string("mkdir: ") + std::strerror(errno));
    return std::nullopt;
  }
  if (const std::optional<std::string> why = why_not_private(directory, user)) {
    warn_not_used(directory, *why);
    return std::nullopt;
  }
  return directory;
}

std::optional<std::string> new_state_socket(const std::string& directory) {
  std::uint32_t number = 0;
  if (!fill_random(std::as_writable_bytes(std::span(&number, 1)))) return std::nullopt;
  char name[32];
  std::snprintf(name, sizeof name, "/%d-%08x", static_cast<int>(::getpid()), number);
  return directory + name;
}

bool is_state_socket_name(const std::string& name) {
  const std::size_t dash = name.find('-');
  return dash != std::string::npos && dash != 0 && name.size() == dash + 1 + kRandomDigits &&
         name.find_first_not_of("0123456789") == dash &&
         name.find_first_not_of("0123456789abcdef", dash + 1) == std::string::npos;
}

bool is_dead_socket(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) return false;
  path.copy(address.sun_path, path.size());
  struct stat found {};
  if (::lstat(path.c_str(), &found) != 0 || !S_ISSOCK(found.st_mode)) return false;
  const UniqueFd probe(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  return probe && ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 &&
         errno == ECONNREFUSED;
}

void remove_dead_sockets(const std::string& directory) {
  const std::unique_ptr<DIR, int (*)(DIR*)> list(::opendir(directory.c_str()), ::closedir);
  if (list == nullptr) return;
  while (const dirent* entry = ::readdir(list.get())) {
    const std::string name = entry->d_name;
    if (!is_state_socket_name(name)) continue;
    // A process of another PID namespace is not found by its ID: then only the socket shows whether it runs.
    const bool no_such_process = ::kill(static_cast<pid_t>(std::atol(name.c_str())), 0) != 0 && errno == ESRCH;
    if (!no_such_process) continue;
    std::string path = directory;
    path.append("/").append(name);
    if (!is_younger(path, kMinAgeS) && is_dead_socket(path)) ::unlink(path.c_str());
  }
}

}  // namespace verbatim
