//: in softverbs_devices_test
//: test softverbs-reset-{engine} engine=thread,inline filter=Reset.* use=device SOFTVERBS_ENGINE={engine}

// What a QP that is reset leaves in its completion queue. As by the drivers of NICs, its completions are removed.
#include <gtest/gtest.h>

#include <cstdint>

#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

TEST(Reset, CompletionsOfTheQp_MakeRoomInTheQueue) {
  const Device device = open_device();
  const Region source(device.pd.get(), 32);
  const Region target(device.pd.get(), 32);
  const auto write = [&](Endpoint& from, std::uint64_t wr_id, ibv_wr_opcode opcode = IBV_WR_RDMA_WRITE) {
    const unsigned flags = opcode == IBV_WR_RDMA_WRITE ? IBV_SEND_SIGNALED : 0;
    return post(from.qp(), opcode, {source.sge()},
                {.wr_id = wr_id, .flags = flags, .remote_addr = target.address(), .rkey = target.mr->rkey});
  };
  const Cq cq = create_cq(device, 16);
  const auto entries = static_cast<std::uint64_t>(cq->cqe);
  const EndpointOptions shared{.send_wr = static_cast<unsigned>(entries), .send_cq = cq.get()};
  Endpoint a(device, shared);
  Endpoint other(device, shared);
  Endpoint peers[] = {Endpoint(device), Endpoint(device)};
  connect(a, peers[0]);
  connect(other, peers[1]);
  for (std::uint64_t i = 0; i < entries / 2; ++i) ASSERT_EQ(write(i % 4 == 1 ? other : a, i), 0);
  // What is announced last has been executed: its completions are in the queue, or about to be.
  for (Endpoint* const from : {&a, &other}) {
    Endpoint& to = peers[from == &a ? 0 : 1];
    ASSERT_EQ(post_recv(to.qp(), {}), 0);
    ASSERT_EQ(write(*from, 0, IBV_WR_RDMA_WRITE_WITH_IMM), 0);
    poll_one(to.recv_cq());
  }
  a.to_reset();
  peers[0].to_reset();
  connect(a, peers[0]);
  const std::uint64_t of_other = entries / 8;
  for (std::uint64_t i = 0; i < entries - of_other; ++i) ASSERT_EQ(write(a, 200 + i), 0);
  std::uint64_t next = 200;
  std::uint64_t next_of_other = 1;
  for (const ibv_wc& wc : poll(cq.get(), entries)) {
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    std::uint64_t& expected = wc.qp_num == a.qp()->qp_num ? next : next_of_other;
    EXPECT_EQ(wc.wr_id, expected);
    expected += wc.qp_num == a.qp()->qp_num ? 1U : 4U;
  }
  EXPECT_EQ(next, 200 + entries - of_other);
  EXPECT_EQ(next_of_other, 1 + 4 * of_other);
}

}  // namespace
}  // namespace verbatim::test
