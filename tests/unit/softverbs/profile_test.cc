// SOFTVERBS_PROFILE, and the settings with which the devices behave as those of a driver where it differs from the best
// case.
#include <gtest/gtest.h>

#include <cerrno>

#include "qp_pair_fixture.h"
#include "support/child.h"

namespace verbatim::test {
namespace {

// The bytes that a WRITE with `num_sge` 0 and a list sends.
std::size_t bytes_of_empty_write() {
  const Pair pair;
  pair.source.fill(1);
  ibv_sge segment = pair.source.sge(0, 48);
  ibv_send_wr work{};
  work.opcode = IBV_WR_RDMA_WRITE;
  work.sg_list = &segment;
  work.send_flags = IBV_SEND_SIGNALED;
  work.wr.rdma.remote_addr = pair.target.address();
  work.wr.rdma.rkey = pair.target.mr->rkey;
  ibv_send_wr* refused = nullptr;
  EXPECT_EQ(ibv_post_send(pair.a.qp(), &work, &refused), 0);
  EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
  return pair.target.buffer.untouched_outside(0, 0).empty() ? 0 : segment.length;
}

TEST(Profile, OfIrdma_IsOverriddenByASetting) {
  check_in_child({{"SOFTVERBS_PROFILE", "irdma"}}, [] { EXPECT_EQ(bytes_of_empty_write(), 48U); });
  check_in_child({{"SOFTVERBS_PROFILE", "irdma"}, {"SOFTVERBS_EMPTY_WRITE", "empty"}},
                 [] { EXPECT_EQ(bytes_of_empty_write(), 0U); });
  check_in_child({{"SOFTVERBS_PROFILE", "standard"}}, [] { EXPECT_EQ(bytes_of_empty_write(), 0U); });
}

TEST(Profile, Unknown_IsRefused) {
  const std::string line = check_in_child({{"SOFTVERBS_PROFILE", "mlx4"}}, [] {
    int count = 1;
    EXPECT_EQ(verbs().get_device_list(&count), nullptr);
    EXPECT_EQ(errno, EINVAL);
    EXPECT_EQ(count, 0);
  });
  EXPECT_NE(line.find("SOFTVERBS_PROFILE=mlx4 is refused: the value must be one of standard, mlx5, bnxt_re, irdma"),
            std::string::npos)
      << line;
}

int to_init(const Endpoint& endpoint) {
  ibv_qp_attr attr = endpoint.init_attr();
  return verbs().modify_qp(endpoint.qp(), &attr, kInitMask);
}

TEST(QpReuse, Refused_QpThatWasResetStaysThere) {
  check_in_child({{"SOFTVERBS_QP_REUSE", "refused"}}, [] {
    Pair pair;
    pair.a.to_error();
    pair.a.to_reset();
    EXPECT_EQ(to_init(pair.a), EINVAL);
    EXPECT_EQ(pair.a.state(), IBV_QPS_RESET);
    Endpoint unconnected(pair.device);
    EXPECT_EQ(to_init(unconnected), 0);
    unconnected.to_reset();
    EXPECT_EQ(to_init(unconnected), EINVAL);
    pair.b.destroy();
    Endpoint new_one(pair.device);  // destroying the other one has reset it, too
    connect(new_one, new_one);
    EXPECT_EQ(new_one.state(), IBV_QPS_RTS);
  });
}

}  // namespace
}  // namespace verbatim::test
