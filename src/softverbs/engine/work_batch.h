// The state of the ibv_wr_* interface between two of its calls.
#pragma once

#include <cstdint>

namespace verbatim::softverbs {

// The requests built since ibv_wr_start. Guarded by SendQueue::mutex, which is held until ibv_wr_complete or _abort.
struct WorkBatch {
  std::uint32_t next = 0;  // position in the send queue after the requests built so far
  std::uint32_t count = 0;
  int error = 0;  // the first error; a batch with an error is not posted
};

}  // namespace verbatim::softverbs
