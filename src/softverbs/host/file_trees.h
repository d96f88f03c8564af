// The directories in /dev/shm with the files that programs see in /dev and /sys (files/file_tree). Each process that
// uses one holds a shared flock on it.
#pragma once

#include <string>

namespace verbatim::softverbs {

// The end of a name for mkdtemp(), which replaces it.
constexpr char kRandomPart[] = {'X', 'X', 'X', 'X', 'X', 'X', '\0'};

// The begin of the paths of all trees of the present effective user. Another user's tree may have such a name too: user
// ids differ between user namespaces, and everybody can make files in /dev/shm.
std::string file_tree_prefix();

void remove_directory(const std::string& path);

// Removes a tree that no process uses. A process that finds a tree by its name finds it complete or not at all.
// Allocates no memory: a signal handler may end the process.
void remove_file_tree_if_unused(const char* path);

// The same for all trees of this user: processes that were killed have left theirs.
void remove_unused_file_trees();

}  // namespace verbatim::softverbs
