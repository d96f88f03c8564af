// An order between a thread that often stores and loads two flags, and one that rarely does.
#pragma once

namespace verbatim {

// A full fence in every thread of the process (membarrier). What another thread stored before it, this thread sees
// after it; and what this thread stored before it, every later load of the other thread sees. So the other thread needs
// no fence between a store and a load, only the compiler must keep their order. False where the kernel does not have
// it (Linux 4.14).
bool fence_all_threads() noexcept;

}  // namespace verbatim
