// Shared files that only this user can access, and their mappings.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "base/result.h"
#include "base/unique_fd.h"
#include "softverbs/host/mapping.h"

namespace verbatim::softverbs {

enum class OpenMode { kExisting, kCreateOrOpen, kCreateNew };

// EACCES, with a line on stderr, when the file belongs to another user or grants access to other users.
Result<UniqueFd> open_shm(const std::string& path, OpenMode mode);

// Whether any page of the file has memory yet.
bool is_backed(const UniqueFd& fd);

Result<Mapping> map_shm(const UniqueFd& fd, std::size_t bytes);

// Allocates the memory of a range now. A page that cannot be allocated at its first access would be a SIGBUS.
Status back_with_memory(const UniqueFd& fd, std::size_t offset, std::size_t bytes);

}  // namespace verbatim::softverbs
