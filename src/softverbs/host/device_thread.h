// Threads of softverbs in other people's programs.
#pragma once

namespace verbatim::softverbs {

// Starts a detached thread that takes no signals: the program's own threads handle them. 0 or an errno.
int start_thread(const char* name, void* (*run)(void*), void* argument);

}  // namespace verbatim::softverbs
