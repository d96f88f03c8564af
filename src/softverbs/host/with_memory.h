// Where memory runs out. An exception must leave neither the C API nor a thread of the device.
#pragma once

#include <new>

namespace verbatim::softverbs {

// Calls body(). False: memory ran out meanwhile. No other place catches an exception.
template <typename Body>
[[nodiscard]] bool with_memory(Body body) {
  try {
    body();
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

}  // namespace verbatim::softverbs
