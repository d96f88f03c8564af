// Memory that libc refuses.
#pragma once

#include <string>

namespace simulation {

// From now on calls for memory by the loaded plugin with this path are counted. The nth returns that there is none.
void refuse_memory(const std::string& path, long nth);
bool has_refused_memory();

}  // namespace simulation
