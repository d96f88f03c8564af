// Definitions of exported functions that softverbs does not support. The functions ignore their arguments, so none are
// declared.
#pragma once

#include <cerrno>

#define SOFTVERBS_EXPORT __attribute__((visibility("default")))

#define SOFTVERBS_REFUSES(name) \
  SOFTVERBS_EXPORT int name() { \
    return EOPNOTSUPP;          \
  }

using VoidPointer = void*;

#define SOFTVERBS_RETURNS_NULL(name)    \
  SOFTVERBS_EXPORT VoidPointer name() { \
    errno = EOPNOTSUPP;                 \
    return nullptr;                     \
  }

#define SOFTVERBS_RETURNS_MINUS_ONE(name) \
  SOFTVERBS_EXPORT long name() {          \
    errno = EOPNOTSUPP;                   \
    return -1;                            \
  }

#define SOFTVERBS_IGNORES(name) \
  SOFTVERBS_EXPORT void name() {}
