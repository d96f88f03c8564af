// Shared by the files that define the C API.
#pragma once

#include <cerrno>
#include <new>

#include "base/result.h"
#include "softverbs/api/refusals.h"
#include "softverbs/engine/context.h"
#include "softverbs/engine/objects.h"

namespace verbatim::softverbs {

// For verbs that return an error number. libibverbs leaves it in errno, too, and programs print that.
inline int with_errno(int error) {
  if (error != 0) errno = error;
  return error;
}

// Converts to the convention of verbs that create an object: the pointer, or nullptr and errno.
template <typename T>
T* pointer_or_errno(const Result<T*>& result) {
  if (result) return *result;
  errno = result.error().sys_errno;
  return nullptr;
}

// The same for a call that creates the object. An exception must not cross the C API.
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

// Reads one byte from a pipe; waits for it unless the program made the descriptor non-blocking. False: failed, see
// errno. With the inline engine it also executes work that is due meanwhile, because no other thread would.
bool await_event(int fd, Process& process);

// Sets the verbs that the header calls through verbs_context.
void fill_extended_calls(Context& context);

}  // namespace verbatim::softverbs
