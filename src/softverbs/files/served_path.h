// The paths that programs give to libc: which of them name a file of the tree.
#pragma once

#include <fcntl.h>

#include <cstdint>
#include <optional>
#include <string>

#include "softverbs/files/file_tree.h"

namespace verbatim::softverbs {

// Whether this process has opened a directory of the tree or made it its working directory. Until then no relative path
// begins inside the tree. Never reset: a child of vfork(), which shares this memory, may set it.
bool has_directory();
void note_directory();

// The path that programs see for a path inside the tree; nullopt for others.
std::optional<std::string> visible(const char* path);

// The path argument of a call.
class Path {
 public:
  Path(const char* given, int directory = AT_FDCWD);

  // What to pass to libc.
  const char* get() const { return located_.empty() ? given_ : located_.c_str(); }
  int directory() const { return located_.empty() ? directory_ : AT_FDCWD; }

  bool is_served() const { return is_served_; }
  const std::string& visible() const { return visible_; }
  // False also for a node that does not exist.
  std::optional<std::uint32_t> device_node() const;

 private:
  void find_absolute(const char* given);
  void find_relative();
  // The parent of a directory of the tree need not be served: it is then the one of the system.
  void resolve_parents();

  const char* const given_;
  const int directory_;
  bool is_served_ = false;
  std::string visible_;
  std::string located_;  // also a path of the system, if `given_` led out of the tree
};

}  // namespace verbatim::softverbs
