// The place where the ranks of a job meet that were started separately: rank 0 listens there, and every rank connects.
// HOST:PORT (--root); or unix:NAME, a socket in the abstract namespace of this host, which needs no free port.
#pragma once

#include <cstdint>
#include <string>

#include "base/unique_fd.h"

namespace verbatim::ranks {

// Throws Failure for a text that is neither form.
void check_meeting_point(const std::string& where);

// Listens exactly there. Throws Failure, for example when no interface of this host has the address.
UniqueFd listen_at(const std::string& where);

// Tries again until `deadline_ns`, then throws Failure with the last reason.
UniqueFd connect_to(const std::string& where, std::uint64_t deadline_ns);

// Whether it is a place on this host that needs no port.
bool is_local(const std::string& where);
bool is_local(const UniqueFd& socket);
// Whether the process at the other end of a local socket is one of this user.
bool is_of_this_user(const UniqueFd& local_socket);

// The end of a socket for messages: "10.0.0.1:4711", or "this host" for a local socket.
std::string peer_of(const UniqueFd& socket);

}  // namespace verbatim::ranks
