#pragma once

#include <forward_list>

namespace verbatim::softverbs {

// For the handler of fork() in the child: keeps an object of the parent that is neither used nor destroyed here,
// because a thread of the parent may have been changing it. Leak checkers find it through this list. nullptr is
// ignored.
inline void keep_inherited(const void* object) {
  static auto& objects = *new std::forward_list<const void*>;
  if (object != nullptr) objects.push_front(object);
}

}  // namespace verbatim::softverbs
