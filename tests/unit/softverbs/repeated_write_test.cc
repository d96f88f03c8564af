// A device may use a fast path for the second WRITE of a connection. The fast path must make the same checks, so each
// case here begins with a WRITE that succeeds.
#include <gtest/gtest.h>

#include <functional>
#include <memory>

#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

struct Case {
  const char* name;
  ibv_wc_status status;
  std::function<void(class RepeatedWrite&)> break_request;
};

class RepeatedWrite : public testing::TestWithParam<Case> {
 public:
  RepeatedWrite() { connect(a, b); }

  int write() {
    return post(a.qp(), IBV_WR_RDMA_WRITE, {sge}, {.flags = flags, .remote_addr = remote_addr, .rkey = rkey});
  }

  const Device device = open_device();
  const Pd other_pd = alloc_pd(device);
  const Region source{device.pd.get(), 4096};
  const Region not_writable{device.pd.get(), 4096, 0, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ};
  const Region other_domain{other_pd.get(), 4096};
  Region target{device.pd.get(), 4096};
  Endpoint a{device};
  Endpoint b{device};
  ibv_sge sge = source.sge(0, 8);
  unsigned flags = IBV_SEND_SIGNALED;
  std::uint64_t remote_addr = target.address();
  std::uint32_t rkey = target.mr->rkey;
};

TEST_P(RepeatedWrite, SecondWrite_IsChecked_LikeTheFirst) {
  source.fill(1);
  ASSERT_EQ(write(), 0);
  ASSERT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
  source.fill(2);
  GetParam().break_request(*this);
  ASSERT_EQ(write(), 0);
  EXPECT_EQ(poll_one(a.send_cq()).status, GetParam().status);
  if (GetParam().status == IBV_WC_SUCCESS) {
    EXPECT_EQ(find_wrong_byte(target.bytes(0, sge.length), 2), std::nullopt);
    EXPECT_EQ(target.buffer.untouched_outside(0, sge.length), "");
    EXPECT_EQ(a.state(), IBV_QPS_RTS);
    return;
  }
  EXPECT_EQ(find_wrong_byte(target.bytes(0, 8), 1), std::nullopt) << "the invalid WRITE was executed";
  EXPECT_EQ(target.buffer.untouched_outside(0, 8), "");
  EXPECT_EQ(a.state(), IBV_QPS_ERR);
}

INSTANTIATE_TEST_SUITE_P(
    Of, RepeatedWrite,
    testing::Values(
        Case{"Valid", IBV_WC_SUCCESS, [](RepeatedWrite&) {}},
        Case{"ValidOfOddSize", IBV_WC_SUCCESS, [](RepeatedWrite& test) { test.sge.length = 4093; }},
        Case{"ValidInline", IBV_WC_SUCCESS,
             [](RepeatedWrite& test) {
               test.flags |= IBV_SEND_INLINE;
               test.sge.lkey = 0;  // not checked for inline data
             }},
        Case{"UnknownLocalKey", IBV_WC_LOC_PROT_ERR, [](RepeatedWrite& test) { test.sge.lkey ^= 0x100; }},
        Case{"RemoteKeyAsLocalKey", IBV_WC_LOC_PROT_ERR,
             [](RepeatedWrite& test) { test.sge.lkey = test.source.mr->rkey; }},
        Case{"BeyondTheSource", IBV_WC_LOC_PROT_ERR, [](RepeatedWrite& test) { test.sge.addr += 4089; }},
        Case{"BeforeTheSource", IBV_WC_LOC_PROT_ERR, [](RepeatedWrite& test) { test.sge.addr -= 1; }},
        Case{"SourceOfAnotherDomain", IBV_WC_LOC_PROT_ERR,
             [](RepeatedWrite& test) { test.sge = test.other_domain.sge(0, 8); }},
        Case{"UnknownRemoteKey", IBV_WC_REM_ACCESS_ERR, [](RepeatedWrite& test) { test.rkey ^= 0x100; }},
        Case{"LocalKeyAsRemoteKey", IBV_WC_REM_ACCESS_ERR,
             [](RepeatedWrite& test) { test.rkey = test.target.mr->lkey; }},
        Case{"BeyondTheTarget", IBV_WC_REM_ACCESS_ERR, [](RepeatedWrite& test) { test.remote_addr += 4089; }},
        Case{"BeforeTheTarget", IBV_WC_REM_ACCESS_ERR, [](RepeatedWrite& test) { test.remote_addr -= 1; }},
        Case{"TargetOfAnotherDomain", IBV_WC_REM_ACCESS_ERR,
             [](RepeatedWrite& test) {
               test.remote_addr = test.other_domain.address();
               test.rkey = test.other_domain.mr->rkey;
             }},
        Case{"TargetWithoutRemoteWrite", IBV_WC_REM_ACCESS_ERR,
             [](RepeatedWrite& test) {
               test.remote_addr = test.not_writable.address();
               test.rkey = test.not_writable.mr->rkey;
             }},
        Case{"TargetDeregistered", IBV_WC_REM_ACCESS_ERR, [](RepeatedWrite& test) { test.target.mr.reset(); }},
        Case{"QpWithoutRemoteWrite", IBV_WC_REM_INV_REQ_ERR,
             [](RepeatedWrite& test) {
               ibv_qp_attr attr{};
               attr.qp_state = IBV_QPS_RTS;
               attr.qp_access_flags = IBV_ACCESS_REMOTE_READ;
               ASSERT_EQ(verbs().modify_qp(test.b.qp(), &attr, IBV_QP_STATE | IBV_QP_ACCESS_FLAGS), 0);
             }},
        Case{"QpInErrorState", IBV_WC_RETRY_EXC_ERR, [](RepeatedWrite& test) { test.b.to_error(); }},
        Case{"ResetQp", IBV_WC_RETRY_EXC_ERR, [](RepeatedWrite& test) { test.b.to_reset(); }},
        Case{"DestroyedQp", IBV_WC_RETRY_EXC_ERR, [](RepeatedWrite& test) { test.b.destroy(); }},
        Case{"QpOfAnotherConnection", IBV_WC_RETRY_EXC_ERR,
             [](RepeatedWrite& test) {
               test.b.to_reset();
               test.b.connect({test.b.address()});
             }}),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace verbatim::test
