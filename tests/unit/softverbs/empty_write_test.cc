//: in softverbs_devices_test
//: test softverbs-empty-write filter=EmptyWrite.* use=device SOFTVERBS_EMPTY_WRITE=first-sge

// SOFTVERBS_EMPTY_WRITE=first-sge: RDMA WRITEs with num_sge 0, as rdma-core's irdma sends them.
#include <gtest/gtest.h>

#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

class EmptyWrite : public testing::Test {
 protected:
  void SetUp() override {
    connect(a_, b_);
    source_.fill(1);
    target_.fill(2);
  }

  // Posts a WRITE with `num_sge` 0 and returns the bytes at the target that it has changed.
  std::size_t write(ibv_wr_opcode opcode, ibv_sge* list) {
    if (opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
      EXPECT_EQ(post_recv(b_.qp(), {}), 0);
    }
    ibv_send_wr work{};
    work.opcode = opcode;
    work.sg_list = list;
    work.send_flags = IBV_SEND_SIGNALED;
    work.wr.rdma.remote_addr = target_.address();
    work.wr.rdma.rkey = target_.mr->rkey;
    ibv_send_wr* refused = nullptr;
    EXPECT_EQ(ibv_post_send(a_.qp(), &work, &refused), 0);
    EXPECT_EQ(poll_one(a_.send_cq()).status, IBV_WC_SUCCESS);
    std::size_t changed = 0;
    while (changed < 64 && target_.bytes(0, 64)[changed] == source_.bytes(0, 64)[changed]) ++changed;
    return changed;
  }

  Device device_ = open_device();
  Region source_{device_.pd.get(), 64};
  Region target_{device_.pd.get(), 64};
  Endpoint a_{device_};
  Endpoint b_{device_};
};

TEST_F(EmptyWrite, PlainWriteWithList_SendsFirstSegment) {
  ibv_sge segment = source_.sge(0, 48);
  EXPECT_EQ(write(IBV_WR_RDMA_WRITE, &segment), 48U);
}

TEST_F(EmptyWrite, NullList_SendsNothing) {
  EXPECT_EQ(write(IBV_WR_RDMA_WRITE, nullptr), 0U);
}

TEST_F(EmptyWrite, SegmentOfLengthZero_SendsNothing) {
  ibv_sge segment = source_.sge(0, 0);
  EXPECT_EQ(write(IBV_WR_RDMA_WRITE, &segment), 0U);
}

TEST_F(EmptyWrite, WriteWithImmediate_SendsNothing) {
  ibv_sge segment = source_.sge(0, 48);
  EXPECT_EQ(write(IBV_WR_RDMA_WRITE_WITH_IMM, &segment), 0U);
}

}  // namespace
}  // namespace verbatim::test
