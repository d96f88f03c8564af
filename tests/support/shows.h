// Memory that a device may still be writing.
#pragma once

#include <vector>

namespace verbatim::test {

// Whether it shows these bytes: a copy of it is compared. memcmp(3) reads again what it has found different, and says
// that both are equal when that has changed meanwhile.
template <typename T>
bool shows(std::vector<T> memory, const std::vector<T>& expected) {
  return memory == expected;
}

}  // namespace verbatim::test
