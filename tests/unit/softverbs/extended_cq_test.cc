// Extended completion queues, extended queries, and the refusal of unsupported extended verbs.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <ctime>

#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

constexpr std::uint64_t kTimestamp = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;
constexpr std::uint64_t kWallclock = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;

std::uint64_t nanoseconds(const timespec& time) {
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
}

std::uint64_t now_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return nanoseconds(now);
}

// A create call returns null and sets errno to `error`.
template <typename Call>
void expect_refused(Call call, int error) {
  errno = 0;
  EXPECT_EQ(call(), nullptr);
  EXPECT_EQ(errno, error);
}

class ExtendedCq : public testing::Test {
 protected:
  static ibv_cq_init_attr_ex attributes(std::uint64_t fields, std::uint32_t mask = 0, std::uint32_t flags = 0) {
    ibv_cq_init_attr_ex attr{};
    attr.cqe = 16;
    attr.wc_flags = fields;
    attr.comp_mask = mask;
    attr.flags = flags;
    return attr;
  }

  ibv_cq_ex* try_create(ibv_cq_init_attr_ex attr) { return ibv_create_cq_ex(device.context.get(), &attr); }

  // `owner` owns the CQ.
  ibv_cq_ex* create(std::uint64_t fields, std::uint32_t flags = 0) {
    ibv_cq_ex* const cq = try_create(attributes(fields, flags != 0 ? IBV_CQ_INIT_ATTR_MASK_FLAGS : 0, flags));
    if (cq == nullptr) throw std::runtime_error("ibv_create_cq_ex failed");
    owner.reset(ibv_cq_ex_to_cq(cq));
    return cq;
  }

  // Sends `count` messages with immediate data from an endpoint to itself; all completions go to the CQ of `owner`.
  void send(int count) {
    EndpointOptions options;
    options.send_cq = options.recv_cq = owner.get();
    endpoint.emplace(device, options);
    connect(*endpoint, *endpoint);
    for (int i = 0; i < count; ++i) {
      ASSERT_EQ(post_recv(endpoint->qp(), {region.sge(512, 256)}, 100 + static_cast<std::uint64_t>(i)), 0);
      ASSERT_EQ(post(endpoint->qp(), IBV_WR_SEND_WITH_IMM, {region.sge(0, 40)},
                     {.wr_id = 1 + static_cast<std::uint64_t>(i), .imm = 0xABCD}),
                0);
    }
  }

  // Repeats ibv_start_poll while the CQ is empty.
  int start(ibv_cq_ex* cq) {
    const auto end = std::chrono::steady_clock::now() + kCompletionTimeout;
    ibv_poll_cq_attr attr{};
    int result = ENOENT;
    while (result == ENOENT && std::chrono::steady_clock::now() < end) result = ibv_start_poll(cq, &attr);
    return result;
  }

  // Starts and ends a poll for each of the next `count` completions, and calls `check` in between.
  template <typename Check>
  void read_each(ibv_cq_ex* cq, int count, Check check) {
    for (int entry = 0; entry < count; ++entry) {
      SCOPED_TRACE(entry);
      ASSERT_EQ(start(cq), 0);
      check();
      ibv_end_poll(cq);
    }
  }

  Device device = open_device();
  Region region{device.pd.get(), 1024};
  Cq owner;
  std::optional<Endpoint> endpoint;
};

TEST_F(ExtendedCq, Receive_HasEveryField) {
  ibv_cq_ex* const cq = create(IBV_WC_STANDARD_FLAGS);
  send(1);
  bool was_received = false;
  read_each(cq, 2, [&] {
    EXPECT_EQ(cq->status, IBV_WC_SUCCESS);
    EXPECT_EQ(ibv_wc_read_qp_num(cq), endpoint->qp()->qp_num);
    EXPECT_EQ(ibv_wc_read_vendor_err(cq), 0U);
    if (ibv_wc_read_opcode(cq) == IBV_WC_SEND) {
      EXPECT_EQ(cq->wr_id, 1U);
    } else {
      was_received = true;
      EXPECT_EQ(ibv_wc_read_opcode(cq), IBV_WC_RECV);
      EXPECT_EQ(cq->wr_id, 100U);
      EXPECT_EQ(ibv_wc_read_byte_len(cq), 40U);
      EXPECT_EQ(ibv_wc_read_imm_data(cq), 0xABCDU);
      EXPECT_EQ(ibv_wc_read_wc_flags(cq), unsigned{IBV_WC_WITH_IMM});
      EXPECT_EQ(ibv_wc_read_src_qp(cq), endpoint->qp()->qp_num);
      EXPECT_EQ(ibv_wc_read_slid(cq), 0U);
      EXPECT_EQ(ibv_wc_read_sl(cq), 0U);
      EXPECT_EQ(ibv_wc_read_dlid_path_bits(cq), 0U);
    }
  });
  EXPECT_TRUE(was_received);
}

TEST_F(ExtendedCq, BatchWithoutFurtherEntries_Ends) {
  for (const std::uint32_t flags : {std::uint32_t{0}, std::uint32_t{IBV_CREATE_CQ_ATTR_SINGLE_THREADED}}) {
    ibv_cq_ex* const cq = create(0, flags);
    ibv_poll_cq_attr attr{};
    EXPECT_EQ(ibv_start_poll(cq, &attr), ENOENT);
    EXPECT_EQ(ibv_start_poll(cq, &attr), ENOENT) << "an empty poll needs no ibv_end_poll";
    send(3);
    int found = 0;
    while (found < 6) {
      ASSERT_EQ(start(cq), 0);
      do {
        ++found;
      } while (ibv_next_poll(cq) == 0);
      ibv_end_poll(cq);
    }
    EXPECT_EQ(found, 6);
    EXPECT_EQ(ibv_start_poll(cq, &attr), ENOENT);
    endpoint.reset();
    owner.reset();
  }
}

TEST_F(ExtendedCq, PlainPoll_ReadsEntries) {
  create(IBV_WC_STANDARD_FLAGS);
  send(1);
  EXPECT_EQ(poll(owner.get(), 2).size(), 2U);
}

TEST_F(ExtendedCq, ReadEntries_AreReusable) {
  ibv_cq_ex* const cq = create(0);
  for (int round = 0; round < 20; ++round) {  // 16 entries, of which each round uses 4
    SCOPED_TRACE(round);
    send(2);
    read_each(cq, 4, [&] { EXPECT_EQ(cq->status, IBV_WC_SUCCESS); });
    if (HasFatalFailure()) return;
    endpoint.reset();
  }
}

TEST_F(ExtendedCq, Timestamps_FollowTheClocks) {
  ibv_cq_ex* const cq = create(kTimestamp | kWallclock);
  const std::uint64_t before = now_ns(CLOCK_MONOTONIC);
  const std::uint64_t wall_before = now_ns(CLOCK_REALTIME);
  send(2);
  std::uint64_t last = before;
  read_each(cq, 4, [&] {
    EXPECT_GE(ibv_wc_read_completion_ts(cq), last);
    last = ibv_wc_read_completion_ts(cq);
    EXPECT_LE(last, now_ns(CLOCK_MONOTONIC));
    const std::uint64_t wall = ibv_wc_read_completion_wallclock_ns(cq);
    constexpr std::uint64_t kSlackNs = 1'000'000'000;  // the two clocks are not read at the same time
    EXPECT_GE(wall + kSlackNs, wall_before);
    EXPECT_LE(wall, now_ns(CLOCK_REALTIME) + kSlackNs);
  });
  ibv_values_ex values{};
  values.comp_mask = IBV_VALUES_MASK_RAW_CLOCK;
  ASSERT_EQ(ibv_query_rt_values_ex(device.context.get(), &values), 0);
  EXPECT_GE(nanoseconds(values.raw_clock), last);
}

TEST_F(ExtendedCq, UnsupportedField_IsRefused) {
  const auto expect_no_cq = [&](const ibv_cq_init_attr_ex& attr, int error) {
    expect_refused([&] { return try_create(attr); }, error);
  };
  for (const std::uint64_t field : {IBV_WC_EX_WITH_CVLAN, IBV_WC_EX_WITH_FLOW_TAG, IBV_WC_EX_WITH_TM_INFO}) {
    SCOPED_TRACE(field);
    expect_no_cq(attributes(field), EOPNOTSUPP);
  }
  expect_no_cq(attributes(0, IBV_CQ_INIT_ATTR_MASK_FLAGS, IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN), EOPNOTSUPP);
  expect_no_cq(attributes(0, IBV_CQ_INIT_ATTR_MASK_PD), EOPNOTSUPP);
  ibv_cq_init_attr_ex attr = attributes(0);
  attr.comp_vector = static_cast<std::uint32_t>(device.context->num_comp_vectors);
  expect_no_cq(attr, EINVAL);
}

TEST_F(ExtendedCq, ExtendedDeviceQuery_BeginsWithThePlainOne) {
  verbs_context* const extended = verbs_get_ctx_op(device.context.get(), query_device_ex);
  ASSERT_NE(extended, nullptr);
  ibv_device_attr_ex attr{};
  ASSERT_EQ(extended->query_device_ex(device.context.get(), nullptr, &attr, sizeof attr), 0);
  EXPECT_EQ(std::memcmp(&attr.orig_attr, &device.attr, sizeof device.attr), 0);
  EXPECT_EQ(attr.phys_port_cnt_ex, device.attr.phys_port_cnt);
  EXPECT_NE(attr.hca_core_clock, 0U);
  EXPECT_EQ(attr.completion_timestamp_mask, ~std::uint64_t{0});
  EXPECT_EQ(attr.odp_caps.general_caps, 0U);
  // For a program that was built against a smaller struct, only that many bytes are written.
  ibv_device_attr_ex small{};
  small.hca_core_clock = 1;
  ASSERT_EQ(extended->query_device_ex(device.context.get(), nullptr, &small, sizeof(ibv_device_attr) + 4), 0);
  EXPECT_EQ(small.hca_core_clock, 1U);
  EXPECT_EQ(small.orig_attr.max_qp, device.attr.max_qp);
  const ibv_query_device_ex_input input{.comp_mask = 1};
  EXPECT_EQ(extended->query_device_ex(device.context.get(), &input, &attr, sizeof attr), EINVAL);
}

TEST_F(ExtendedCq, ExtendedSrq_IsBasicOnly) {
  verbs_context* const extended = verbs_get_ctx_op(device.context.get(), create_srq_ex);
  ASSERT_NE(extended, nullptr);
  ibv_srq_init_attr_ex attr{};
  attr.attr = {.max_wr = 4, .max_sge = 1, .srq_limit = 0};
  attr.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD;
  attr.srq_type = IBV_SRQT_BASIC;
  attr.pd = device.pd.get();
  const Srq srq(extended->create_srq_ex(device.context.get(), &attr));
  ASSERT_NE(srq, nullptr);
  EXPECT_EQ(post_srq_recv(srq.get(), {region.sge(0, 8)}), 0);
  for (const ibv_srq_type type : {IBV_SRQT_XRC, IBV_SRQT_TM}) {
    attr.srq_type = type;
    expect_refused([&] { return extended->create_srq_ex(device.context.get(), &attr); }, EOPNOTSUPP);
  }
}

TEST_F(ExtendedCq, OtherExtendedVerbs_AreRefused) {
  ibv_context* const context = device.context.get();
  ibv_pd* const pd = device.pd.get();
  expect_refused([&] { return ibv_alloc_mw(pd, IBV_MW_TYPE_1); }, EOPNOTSUPP);
  ibv_td_init_attr td{};
  expect_refused([&] { return ibv_alloc_td(context, &td); }, EOPNOTSUPP);
  ibv_alloc_dm_attr dm{};
  expect_refused([&] { return ibv_alloc_dm(context, &dm); }, EOPNOTSUPP);
  expect_refused([&] { return ibv_alloc_null_mr(pd); }, EOPNOTSUPP);
  ibv_counters_init_attr counters{};
  expect_refused([&] { return ibv_create_counters(context, &counters); }, EOPNOTSUPP);
  ibv_parent_domain_init_attr domain{};
  expect_refused([&] { return ibv_alloc_parent_domain(context, &domain); }, EOPNOTSUPP);
  ibv_xrcd_init_attr xrcd{};
  errno = 0;
  EXPECT_EQ(ibv_open_xrcd(context, &xrcd), nullptr);
  EXPECT_TRUE(errno == EOPNOTSUPP || errno == ENOSYS) << errno;  // the header's inline function chooses one of them
  ibv_sge sge = region.sge();
  EXPECT_EQ(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1), EOPNOTSUPP);
}

}  // namespace
}  // namespace verbatim::test
