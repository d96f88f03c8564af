// The ibv_wr_* interface: work requests built by function calls between ibv_wr_start and ibv_wr_complete, for QPs that
// were made with IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

namespace verbatim::softverbs {

struct Qp;

// IBV_QP_EX_WITH_*: what a QP may be asked to offer.
constexpr std::uint64_t kSupportedSendOps = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM |
                                            IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM |
                                            IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |
                                            IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;

// What lies between ibv_wr_start and its end; under SendQueue::mutex, which is held all that time.
struct WorkBatch {
  std::uint32_t next = 0;  // position in the queue after the requests built so far
  std::uint32_t count = 0;
  int error = 0;  // the first one: nothing of the batch is posted then
};

// Fills the table through which the calls go.
void set_work_request_calls(Qp& qp, std::uint64_t send_ops);

}  // namespace verbatim::softverbs
