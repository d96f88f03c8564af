// Fills any kind of memory with content and finds wrong bytes in it, as workload/verify.h does for host memory. The
// content of GPU memory passes through a buffer of the host.
#pragma once

#include "memory/memory.h"
#include "workload/verify.h"

namespace verbatim::memory {

void fill(Memory& memory, const workload::Content& content, std::byte* data, std::size_t bytes,
          std::uint64_t offset = 0);
void poison(Memory& memory, const workload::Content& expected, std::byte* data, std::size_t bytes,
            std::uint64_t offset = 0);
workload::Mismatch verify(Memory& memory, const workload::Content& expected, const std::byte* data, std::size_t bytes,
                          std::uint64_t offset = 0, std::size_t unit = 1);

}  // namespace verbatim::memory
