// The ibv_wr_* interface: function calls between ibv_wr_start and ibv_wr_complete build work requests. For QPs that
// were created with IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

namespace verbatim::softverbs {

struct Qp;

// The operations (IBV_QP_EX_WITH_*) that a program may request for a QP.
constexpr std::uint64_t kSupportedSendOps = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM |
                                            IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM |
                                            IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |
                                            IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;

// The requests built since ibv_wr_start. Guarded by SendQueue::mutex, which is held until ibv_wr_complete or _abort.
struct WorkBatch {
  std::uint32_t next = 0;  // position in the send queue after the requests built so far
  std::uint32_t count = 0;
  int error = 0;  // the first error; a batch with an error is not posted
};

// Sets the QP's function pointers for the ibv_wr_* calls.
void set_work_request_calls(Qp& qp, std::uint64_t send_ops);

}  // namespace verbatim::softverbs
