#include "base/unique_fd.h"

#include <pthread.h>

#include <bit>

namespace verbatim {

void close_fds_in_children() {
  static std::atomic<bool> is_registered{false};
  if (is_registered.exchange(true)) return;
  // The C library removes the handler when it unloads this library. If registration fails for lack of memory, a peer
  // notices the death of this process by the keepalive only.
  static_cast<void>(::pthread_atfork(nullptr, nullptr, OpenFds::close_all));
}

void OpenFds::close_all() {
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i].load(kOrder) == 0) continue;  // a write would make the child copy the page
    for (std::uint64_t bits = words[i].exchange(0, kOrder); bits != 0; bits &= bits - 1) {
      ::close(static_cast<int>(i * kWordBits) + std::countr_zero(bits));
    }
  }
}

}  // namespace verbatim
