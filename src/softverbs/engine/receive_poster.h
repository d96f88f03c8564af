// The private part of a receive ring.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "softverbs/engine/futex_mutex.h"
#include "softverbs/host/layout.h"

namespace verbatim::softverbs {

// The owner's half of a receive ring.
struct ReceivePoster {
  ReceiveRing* ring = nullptr;
  std::byte* entries = nullptr;
  std::uint32_t max_wr = 0;
  std::uint32_t max_sge = 0;
  std::atomic<std::uint32_t> released{0};  // entries whose completion the program has read
  FutexMutex mutex;
};

}  // namespace verbatim::softverbs
