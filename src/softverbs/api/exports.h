// Shared by the files that define the C API.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/result.h"
#include "softverbs/api/refusals.h"
#include "softverbs/engine/context.h"
#include "softverbs/engine/objects.h"
#include "softverbs/host/with_memory.h"

namespace verbatim::softverbs {

// For verbs that return an error number. libibverbs leaves it in errno, too, and programs print that.
inline int with_errno(int error) {
  if (error != 0) errno = error;
  return error;
}

// Calls make(), which returns a Result<T*>, and converts to the convention of verbs that create an object: the pointer,
// or nullptr and errno. Only these verbs may find no memory.
template <typename Make>
auto call_and_return_pointer(Make make) {
  decltype(make()) made = system_error("make", ENOMEM);
  if (with_memory([&] { made = make(); }) && made) return *made;
  errno = made.error().sys_errno;
  return static_cast<std::remove_reference_t<decltype(*made)>>(nullptr);
}

Result<EventPipe> make_event_pipe();

// Reads one byte from a pipe; waits for it unless the program made the descriptor non-blocking. False: failed, see
// errno. With the inline engine it also executes work that is due meanwhile, because no other thread would.
bool await_event(int fd, Process& process);

// mlx5dv_reg_dmabuf_mr.
ibv_mr* reg_dmabuf_mr(ibv_pd* pd, std::uint64_t offset, std::size_t length, std::uint64_t iova, int fd, int access,
                      bool data_direct);

// Sets the verbs that the header calls through verbs_context.
void fill_extended_calls(Context& context);

}  // namespace verbatim::softverbs
