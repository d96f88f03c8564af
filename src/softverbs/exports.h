// Shared by the files that define the C API.
#pragma once

#include <cerrno>

#include "base/result.h"
#include "softverbs/objects.h"

#define SOFTVERBS_EXPORT __attribute__((visibility("default")))

namespace verbatim::softverbs {

// The verbs' convention for calls that make something: nullptr and errno.
template <typename T>
T* answer_pointer(const Result<T*>& result) {
  if (result) return *result;
  errno = result.error().sys_errno;
  return nullptr;
}

Result<EventPipe> make_event_pipe();

// Takes one byte from a pipe, waiting for it unless the program made the descriptor non-blocking. False with errno.
// With the inline engine nobody else would do work that falls due meanwhile.
bool await_event(int fd, Process& process);

}  // namespace verbatim::softverbs
