// VERBATIM_STATE_DIR: a directory of state sockets, one for each process, by which the tools find the processes of a
// host. Only its user may access it.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

namespace verbatim {

// Value of the setting: there is no directory.
inline constexpr const char* kNoStateDirectory = "none";

// "/tmp/verbatim-1000". It does not depend on the environment: a shell over ssh and a batch job find the same one.
std::string default_state_directory(uid_t user);

// Why the path is not a directory that `user` alone may access; nullopt: it is one. A symbolic link is none.
std::optional<std::string> why_not_private(const std::string& directory, uid_t user);

// The directory of this user: makes it if it does not exist. nullopt: it is not used, and a warning says why.
std::optional<std::string> make_state_directory(const std::string& setting);

// A path within the directory for a socket of this process: its ID and a random number, because processes with PID
// namespaces of their own can share a directory. nullopt: there are no random numbers, and a warning says so.
std::optional<std::string> new_state_socket(const std::string& directory);

// Whether the name is one of new_state_socket.
bool is_state_socket_name(const std::string& name);

// Whether this is the socket of a process that has ended.
bool is_dead_socket(const std::string& path);

// Removes sockets of processes that have ended without removing them. A process that runs is not disturbed.
void remove_dead_sockets(const std::string& directory);

}  // namespace verbatim
