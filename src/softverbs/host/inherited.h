#pragma once

#include <new>

namespace verbatim::softverbs {

// For the handler of fork() in the child: keeps an object of the parent that is neither used nor destroyed here,
// because a thread of the parent may have been changing it. Leak checkers find it through this list, if there is
// memory for that. nullptr is ignored.
inline void keep_inherited(const void* object) {
  struct Kept {
    const void* object;
    const Kept* next;
  };
  static const Kept* last = nullptr;
  if (object == nullptr) return;
  if (const Kept* const kept = new (std::nothrow) Kept{object, last}; kept != nullptr) last = kept;
}

}  // namespace verbatim::softverbs
