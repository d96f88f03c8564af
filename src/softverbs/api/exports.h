// Shared by the files that define the C API.
#pragma once

#include <cerrno>
#include <new>

#include "base/result.h"
#include "softverbs/engine/objects.h"

#define SOFTVERBS_EXPORT __attribute__((visibility("default")))

namespace verbatim::softverbs {

// The verbs' convention for calls that make something: nullptr and errno.
template <typename T>
T* pointer_or_errno(const Result<T*>& result) {
  if (result) return *result;
  errno = result.error().sys_errno;
  return nullptr;
}

// The same of a call that makes it. No exception may cross the C API.
template <typename Make>
auto call_and_return_pointer(Make make) -> decltype(pointer_or_errno(make())) {
  try {
    return pointer_or_errno(make());
  } catch (const std::bad_alloc&) {
    errno = ENOMEM;
    return nullptr;
  }
}

Result<EventPipe> make_event_pipe();

// Takes one byte from a pipe, waiting for it unless the program made the descriptor non-blocking. False with errno.
// With the inline engine nobody else would do work that falls due meanwhile.
bool await_event(int fd, Process& process);

// The verbs that the header calls through verbs_context.
void fill_extended_calls(Context& context);

}  // namespace verbatim::softverbs
