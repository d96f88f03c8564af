#include "softverbs/files/served_path.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "softverbs/files/next.h"

namespace verbatim::softverbs {
namespace {

std::atomic<bool> g_has_directory{false};

// A test without a system call for paths from a directory outside of the tree. The README names what it leaves out.
bool may_lead_into_tree(const char* path) {
  for (const char* part : {"infiniband", "pci", "devices", "uverbs"}) {
    if (std::strstr(path, part) != nullptr) return true;
  }
  return false;
}

}  // namespace

bool has_directory() {
  return g_has_directory.load(std::memory_order_relaxed);
}

void note_directory() {
  g_has_directory.store(true, std::memory_order_relaxed);
}

std::optional<std::string> visible(const char* path) {
  const std::optional<std::string_view> found = FileTree::instance().visible_path(path);
  return found ? std::optional<std::string>(*found) : std::nullopt;
}

Path::Path(const char* given, int directory) : given_(given), directory_(directory) {
  if (given == nullptr) return;
  if (*given == '/') {
    if (given[1] == 'd' || given[1] == 's' || given[1] == '/' || given[1] == '.') find_absolute(given);
  } else if (*given != '\0' && (has_directory() || may_lead_into_tree(given))) {
    find_relative();
  }
  if (is_served_ && std::strstr(given, "..") != nullptr) resolve_parents();
}

std::optional<std::uint32_t> Path::device_node() const {
  if (!is_served()) return std::nullopt;
  const std::optional<std::uint32_t> device = parse_device_node(visible_);
  return device && next_access(get(), F_OK) == 0 ? device : std::nullopt;
}

void Path::find_absolute(const char* given) {
  char plain[PATH_MAX];
  std::size_t length = 0;
  for (const char* from = given; *from != '\0'; ++from) {
    if (*from == '/' && (from[1] == '/' || (from[1] == '.' && (from[2] == '/' || from[2] == '\0')))) {
      if (from[1] == '.') ++from;
      continue;
    }
    if (length == sizeof plain - 1) return;
    plain[length++] = *from;
  }
  plain[length] = '\0';
  if (!FileTree::is_candidate(plain)) return;
  const bool slash = length > 1 && plain[length - 1] == '/';
  located_ = FileTree::instance().locate({plain, length - (slash ? 1 : 0)});
  if (located_.empty()) return;
  visible_.assign(plain, length - (slash ? 1 : 0));
  if (slash) located_ += '/';
  is_served_ = true;
}

void Path::find_relative() {
  char base[PATH_MAX];
  if (directory_ == AT_FDCWD) {
    if (next_getcwd(base, sizeof base) == nullptr) return;
  } else {
    char link[32];
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", directory_);
    const ssize_t length = next_readlink(link, base, sizeof base - 1);
    if (length <= 0) return;
    base[length] = '\0';
  }
  if (const std::optional<std::string> above = softverbs::visible(base)) {
    visible_ = *above + "/" + given_;
    located_ = std::string(base) + "/" + given_;
    is_served_ = true;
    return;
  }
  // `base` has no links, so each leading ".." removes a name from it.
  std::string_view above = base;
  const char* rest = given_;
  while (rest[0] == '.' && (rest[1] == '/' || (rest[1] == '.' && rest[2] == '/'))) {
    if (rest[1] == '.') above = above.substr(0, above.rfind('/'));
    rest += rest[1] == '.' ? 3 : 2;
    rest += std::strspn(rest, "/");
  }
  find_absolute((std::string(above) + "/" + rest).c_str());
}

void Path::resolve_parents() {
  const std::size_t last = ("/" + located_ + "/").rfind("/../");
  if (last == std::string::npos) return;
  const std::size_t end = std::min(last + 2, located_.size());
  char resolved[PATH_MAX];
  if (next_realpath(located_.substr(0, end).c_str(), resolved) == nullptr) return;
  const std::string parent = softverbs::visible(resolved).value_or(resolved);
  const std::string path = (parent == "/" ? "" : parent) + (end < located_.size() ? located_.substr(end) : "");
  is_served_ = false;
  find_absolute(path.c_str());
  if (!is_served_) located_ = path.empty() ? "/" : path;
}

}  // namespace verbatim::softverbs
