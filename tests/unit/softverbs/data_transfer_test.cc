// Every operation transfers exactly the requested bytes, for each topology of two connected QPs.
#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <cstring>

#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

constexpr std::size_t kSizes[] = {0, 1, 63, 64, 65, 4095, 4096, 4097, (1U << 20) + 3};
constexpr std::uint64_t kSeed = 0xDA7A;

// Where the two ends of the connection are.
struct Topology {
  const char* name;
  bool two_devices;
  bool self;  // one QP connected to itself
};

class DataTransfer : public testing::TestWithParam<Topology> {
 protected:
  DataTransfer() {
    if (GetParam().two_devices) other_device_ = open_device(1);
    if (!GetParam().self) other_ = std::make_unique<Endpoint>(far_device());
    connect(near, far());
  }

  const Device& far_device() { return GetParam().two_devices ? other_device_ : device_; }
  Endpoint& far() { return other_ ? *other_ : near; }
  ibv_pd* near_pd() { return device_.pd.get(); }
  ibv_pd* far_pd() { return far_device().pd.get(); }

  ibv_wc sent() { return poll_one(near.send_cq()); }
  ibv_wc received() { return poll_one(far().recv_cq()); }

 private:
  Device device_ = open_device();
  Device other_device_;

 protected:
  Endpoint near{device_};

 private:
  std::unique_ptr<Endpoint> other_;
};

INSTANTIATE_TEST_SUITE_P(Over, DataTransfer,
                         testing::Values(Topology{"OneDevice", false, false}, Topology{"TwoDevices", true, false},
                                         Topology{"OneQp", false, true}),
                         [](const auto& topology) { return topology.param.name; });

void expect_pattern(std::span<const std::byte> bytes, std::uint64_t seed, std::uint64_t start = 0) {
  EXPECT_EQ(find_wrong_byte(bytes, seed, start), std::nullopt) << "of " << bytes.size() << " bytes";
}

TEST(TestPattern, AnyDamage_IsDetected) {
  GuardedBuffer buffer(4096, 3);
  fill_pattern(buffer.bytes(), kSeed);
  EXPECT_EQ(find_wrong_byte(buffer.bytes(), kSeed), std::nullopt);
  EXPECT_EQ(find_wrong_byte(buffer.bytes().subspan(100), kSeed, 100), std::nullopt);
  EXPECT_NE(find_wrong_byte(buffer.bytes(), kSeed + 1), std::nullopt);
  EXPECT_NE(find_wrong_byte(buffer.bytes().subspan(1), kSeed), std::nullopt);     // shifted by a byte
  EXPECT_NE(find_wrong_byte(buffer.bytes().subspan(2048), kSeed), std::nullopt);  // shifted by a block
  buffer.bytes()[4095] ^= std::byte{1};
  EXPECT_EQ(find_wrong_byte(buffer.bytes(), kSeed), 4095U);
  fill_pattern(buffer.bytes(), kSeed);
  EXPECT_EQ(buffer.untouched_outside(0, 4096), "");
  EXPECT_NE(buffer.untouched_outside(1, 4095), "");
  EXPECT_NE(buffer.untouched_outside(0, 4095), "");
  buffer.data()[4096] = std::byte{0};
  EXPECT_NE(buffer.untouched_outside(0, 4096), "");
}

TEST_P(DataTransfer, Send_OfAnySize_ArrivesWhole) {
  for (const std::size_t size : kSizes) {
    SCOPED_TRACE(size);
    const Region source(near_pd(), size + 1, 1);  // a region of 0 bytes cannot be registered
    const Region target(far_pd(), size + 100, 3);
    source.fill(kSeed + size);
    ASSERT_EQ(post_recv(far().qp(), {target.sge(50, size + 1)}, 7), 0);
    ASSERT_EQ(post(near.qp(), IBV_WR_SEND, {source.sge(0, size)}, {.wr_id = 8}), 0);
    const ibv_wc received = this->received();
    EXPECT_EQ(received.status, IBV_WC_SUCCESS);
    EXPECT_EQ(received.wr_id, 7U);
    EXPECT_EQ(received.opcode, IBV_WC_RECV);
    EXPECT_EQ(received.byte_len, size);
    EXPECT_EQ(received.qp_num, far().qp()->qp_num);
    EXPECT_EQ(received.wc_flags & IBV_WC_WITH_IMM, 0U);
    const ibv_wc sent = this->sent();
    EXPECT_EQ(sent.status, IBV_WC_SUCCESS);
    EXPECT_EQ(sent.wr_id, 8U);
    EXPECT_EQ(sent.opcode, IBV_WC_SEND);
    EXPECT_EQ(sent.qp_num, near.qp()->qp_num);
    expect_pattern(target.bytes(50, size), kSeed + size);
    EXPECT_EQ(target.buffer.untouched_outside(50, size), "");
  }
}

TEST_P(DataTransfer, SendWithImm_CarriesTheImmediate) {
  const Region source(near_pd(), 64);
  const Region target(far_pd(), 64);
  source.fill(kSeed);
  ASSERT_EQ(post_recv(far().qp(), {target.sge()}), 0);
  ASSERT_EQ(post(near.qp(), IBV_WR_SEND_WITH_IMM, {source.sge()}, {.imm = htonl(0x01020304)}), 0);
  const ibv_wc received = this->received();
  EXPECT_EQ(received.status, IBV_WC_SUCCESS);
  EXPECT_EQ(received.opcode, IBV_WC_RECV);
  EXPECT_NE(received.wc_flags & IBV_WC_WITH_IMM, 0U);
  EXPECT_EQ(received.imm_data, htonl(0x01020304));
  EXPECT_EQ(received.byte_len, 64U);
  EXPECT_EQ(sent().opcode, IBV_WC_SEND);
  expect_pattern(target.buffer.bytes(), kSeed);
}

TEST_P(DataTransfer, Write_OfAnySize_ChangesExactlyItsTarget) {
  for (const std::size_t size : kSizes) {
    SCOPED_TRACE(size);
    const Region source(near_pd(), size + 1, 5);
    const Region target(far_pd(), size + 200, 2);
    source.fill(kSeed + size);
    ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, size)},
                   {.remote_addr = target.address(77), .rkey = target.mr->rkey}),
              0);
    const ibv_wc sent = this->sent();
    EXPECT_EQ(sent.status, IBV_WC_SUCCESS);
    EXPECT_EQ(sent.opcode, IBV_WC_RDMA_WRITE);
    expect_pattern(target.bytes(77, size), kSeed + size);
    EXPECT_EQ(target.buffer.untouched_outside(77, size), "");
  }
  EXPECT_TRUE(stays_empty(far().recv_cq(), 1ms));  // the target gets no completion
}

TEST_P(DataTransfer, WriteWithImm_ConsumesOneReceive_WithoutUsingItsBuffer) {
  std::uint32_t imm = 0xF0000001;
  for (const std::size_t size : kSizes) {
    SCOPED_TRACE(size);
    const Region source(near_pd(), size + 1, 1);
    const Region target(far_pd(), size + 64, 8);
    const Region receive(far_pd(), 64);
    source.fill(kSeed + size);
    ASSERT_EQ(post_recv(far().qp(), {receive.sge()}, 100 + size), 0);
    ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_WRITE_WITH_IMM, {source.sge(0, size)},
                   {.remote_addr = target.address(31), .rkey = target.mr->rkey, .imm = imm}),
              0);
    const ibv_wc received = this->received();
    EXPECT_EQ(received.status, IBV_WC_SUCCESS);
    EXPECT_EQ(received.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
    EXPECT_EQ(received.wr_id, 100 + size);
    EXPECT_EQ(received.byte_len, size);
    EXPECT_EQ(received.imm_data, imm);
    EXPECT_NE(received.wc_flags & IBV_WC_WITH_IMM, 0U);
    EXPECT_EQ(sent().opcode, IBV_WC_RDMA_WRITE);
    expect_pattern(target.bytes(31, size), kSeed + size);
    EXPECT_EQ(target.buffer.untouched_outside(31, size), "");
    EXPECT_EQ(receive.buffer.untouched_outside(0, 0), "");
    ++imm;
  }
}

TEST_P(DataTransfer, WriteWithImmOfNoBytes_NeedsNoBuffer) {
  ASSERT_EQ(post_recv(far().qp(), {}, 5), 0);
  ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_WRITE_WITH_IMM, {}, {.imm = 42}), 0);
  const ibv_wc received = this->received();
  EXPECT_EQ(received.status, IBV_WC_SUCCESS);
  EXPECT_EQ(received.wr_id, 5U);
  EXPECT_EQ(received.byte_len, 0U);
  EXPECT_EQ(received.imm_data, 42U);
  EXPECT_EQ(sent().status, IBV_WC_SUCCESS);
}

TEST_P(DataTransfer, Read_FetchesExactlyItsRange) {
  for (const std::size_t size : kSizes) {
    SCOPED_TRACE(size);
    const Region remote(far_pd(), size + 100, 9);
    const Region local(near_pd(), size + 100, 4);
    remote.fill(kSeed + size);
    ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_READ, {local.sge(13, size)},
                   {.remote_addr = remote.address(50), .rkey = remote.mr->rkey}),
              0);
    const ibv_wc sent = this->sent();
    EXPECT_EQ(sent.status, IBV_WC_SUCCESS);
    EXPECT_EQ(sent.opcode, IBV_WC_RDMA_READ);
    expect_pattern(local.bytes(13, size), kSeed + size, 50);
    EXPECT_EQ(local.buffer.untouched_outside(13, size), "");
  }
}

TEST_P(DataTransfer,
       ZeroLength_IsNotCheckedAgainstAnyKey) {  // the R_Key is checked only when there are bytes to transfer
  ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_WRITE, {}, {.wr_id = 1, .remote_addr = 0, .rkey = 0xBADBAD}), 0);
  ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_READ, {}, {.wr_id = 2, .remote_addr = 0, .rkey = 0xBADBAD}), 0);
  EXPECT_EQ(sent().status, IBV_WC_SUCCESS);
  EXPECT_EQ(sent().status, IBV_WC_SUCCESS);
}

TEST_P(DataTransfer, InlineBuffer_IsReusableAtOnce_AndNeedsNoKey) {
  const unsigned limit = near.cap().max_inline_data;
  ASSERT_GE(limit, 64U);
  const Region target(far_pd(), 64 * 64);
  std::byte source[64];
  for (unsigned i = 0; i < 64; ++i) {
    const std::size_t size = 1 + i;
    fill_pattern({source, size}, i);
    const ibv_sge sge{reinterpret_cast<std::uint64_t>(source), static_cast<std::uint32_t>(size), 0xDEAD};
    ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_WRITE, {sge},
                   {.flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED,
                    .remote_addr = target.address(64 * i),
                    .rkey = target.mr->rkey}),
              0);
    std::memset(source, 0xEE, sizeof(source));
  }
  for (unsigned i = 0; i < 64; ++i) {
    EXPECT_EQ(sent().status, IBV_WC_SUCCESS);
    expect_pattern(target.bytes(64 * i, 1 + i), i);
  }
  EXPECT_EQ(target.bytes(1, 1)[0], GuardedBuffer::kPoison);  // the byte after the one-byte WRITE
}

TEST_P(DataTransfer, InlineSend_GathersItsSges) {
  const Region target(far_pd(), 64);
  std::byte source[48];
  fill_pattern(source, kSeed);
  const auto at = [&](std::size_t offset, std::uint32_t length) {
    return ibv_sge{reinterpret_cast<std::uint64_t>(source + offset), length, 0};
  };
  ASSERT_EQ(post_recv(far().qp(), {target.sge()}), 0);
  ASSERT_EQ(
      post(near.qp(), IBV_WR_SEND, {at(0, 1), at(1, 30), at(31, 17)}, {.flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED}),
      0);
  std::memset(source, 0, sizeof(source));
  EXPECT_EQ(received().byte_len, 48U);
  EXPECT_EQ(sent().status, IBV_WC_SUCCESS);
  expect_pattern(target.bytes(0, 48), kSeed);
  EXPECT_EQ(target.buffer.untouched_outside(0, 48), "");
}

TEST_P(DataTransfer, SgeLists_GatherAndScatter) {
  const Region source(near_pd(), 20000, 1);
  const Region second(near_pd(), 5000, 2);
  const Region target(far_pd(), 40000, 3);
  source.fill(1);
  second.fill(2);
  // 100 + 5000 + 1 + 6899 = 12000 bytes into elements of 1 + 7000 + 9000 bytes
  ASSERT_EQ(post_recv(far().qp(), {target.sge(10, 1), target.sge(1000, 7000), target.sge(20000, 9000)}), 0);
  ASSERT_EQ(
      post(near.qp(), IBV_WR_SEND, {source.sge(300, 100), second.sge(), source.sge(0, 1), source.sge(9000, 6899)}), 0);
  EXPECT_EQ(received().byte_len, 12000U);
  EXPECT_EQ(sent().status, IBV_WC_SUCCESS);
  expect_pattern(target.bytes(10, 1), 1, 300);
  expect_pattern(target.bytes(1000, 99), 1, 301);
  expect_pattern(target.bytes(1099, 5000), 2);
  expect_pattern(target.bytes(6099, 1), 1);
  expect_pattern(target.bytes(6100, 1900), 1, 9000);
  expect_pattern(target.bytes(20000, 4999), 1, 10900);
  for (const std::byte byte : target.bytes(24999, 1000)) ASSERT_EQ(byte, GuardedBuffer::kPoison);
  for (const std::byte byte : target.bytes(500, 500)) ASSERT_EQ(byte, GuardedBuffer::kPoison);
}

TEST_P(DataTransfer, Write_Gathers_AndReadScatters) {
  const Region near_region(near_pd(), 10000, 1);
  const Region far_region(far_pd(), 10000, 2);
  near_region.fill(1);
  ASSERT_EQ(
      post(near.qp(), IBV_WR_RDMA_WRITE, {near_region.sge(5000, 3), near_region.sge(0, 4096), near_region.sge(4999, 2)},
           {.remote_addr = far_region.address(100), .rkey = far_region.mr->rkey}),
      0);
  ASSERT_EQ(sent().status, IBV_WC_SUCCESS);
  expect_pattern(far_region.bytes(100, 3), 1, 5000);
  expect_pattern(far_region.bytes(103, 4096), 1);
  expect_pattern(far_region.bytes(4199, 2), 1, 4999);
  EXPECT_EQ(far_region.buffer.untouched_outside(100, 4101), "");

  far_region.fill(3);
  near_region.buffer.poison();
  ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_READ,
                 {near_region.sge(9000, 1), near_region.sge(17, 5000), near_region.sge(6000, 999)},
                 {.remote_addr = far_region.address(1), .rkey = far_region.mr->rkey}),
            0);
  ASSERT_EQ(sent().status, IBV_WC_SUCCESS);
  expect_pattern(near_region.bytes(9000, 1), 3, 1);
  expect_pattern(near_region.bytes(17, 5000), 3, 2);
  expect_pattern(near_region.bytes(6000, 999), 3, 5002);
}

TEST_P(DataTransfer, Writes_ArriveBeforeTheFollowingSend) {
  const Region source(near_pd(), 64 * 1024);
  const Region target(far_pd(), 64 * 1024);
  const Region receive(far_pd(), 8);
  source.fill(kSeed);
  ASSERT_EQ(post_recv(far().qp(), {receive.sge()}), 0);
  for (std::size_t i = 0; i < 16; ++i) {
    ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_WRITE, {source.sge(4096 * i, 4096)},
                   {.flags = 0, .remote_addr = target.address(4096 * i), .rkey = target.mr->rkey}),
              0);
  }
  ASSERT_EQ(post(near.qp(), IBV_WR_SEND, {source.sge(0, 8)}), 0);
  EXPECT_EQ(received().status, IBV_WC_SUCCESS);
  expect_pattern(target.buffer.bytes(), kSeed);  // complete when the receive completes
  EXPECT_EQ(sent().opcode, IBV_WC_SEND);         // the unsignaled WRITEs gave no completion
  EXPECT_TRUE(stays_empty(near.send_cq(), 1ms));
}

TEST_P(DataTransfer, Read_SeesTheEarlierWrite) {
  const Region source(near_pd(), 8192);
  const Region back(near_pd(), 8192);
  const Region target(far_pd(), 8192);
  for (std::uint64_t round = 0; round < 20; ++round) {
    source.fill(round);
    ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_WRITE, {source.sge()},
                   {.flags = 0, .remote_addr = target.address(), .rkey = target.mr->rkey}),
              0);
    ASSERT_EQ(
        post(near.qp(), IBV_WR_RDMA_READ, {back.sge()}, {.remote_addr = target.address(), .rkey = target.mr->rkey}), 0);
    ASSERT_EQ(sent().status, IBV_WC_SUCCESS);
    expect_pattern(back.buffer.bytes(), round);
  }
}

TEST_P(DataTransfer, BothDirectionsAtOnce_ArriveWhole) {
  const Region near_region(near_pd(), 100000);
  const Region far_region(far_pd(), 100000);
  fill_pattern(near_region.bytes(0, 50000), 1);
  fill_pattern(far_region.bytes(50000, 50000), 2);
  ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_WRITE, {near_region.sge(0, 50000)},
                 {.remote_addr = far_region.address(0), .rkey = far_region.mr->rkey}),
            0);
  ASSERT_EQ(post(far().qp(), IBV_WR_RDMA_WRITE, {far_region.sge(50000, 50000)},
                 {.remote_addr = near_region.address(50000), .rkey = near_region.mr->rkey}),
            0);
  EXPECT_EQ(poll_one(near.send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(poll_one(far().send_cq()).status, IBV_WC_SUCCESS);
  expect_pattern(far_region.bytes(0, 50000), 1);
  expect_pattern(near_region.bytes(50000, 50000), 2);
}

class Atomics : public DataTransfer {
 protected:
  void SetUp() override {
    if (near.device().attr.atomic_cap == IBV_ATOMIC_NONE) GTEST_SKIP() << "the device has no atomics";
  }
  int post_atomic(ibv_wr_opcode opcode, std::uint64_t remote_addr, std::uint32_t rkey, std::uint64_t compare_add,
                  std::uint64_t swap, const ibv_sge& result) {
    return post_atomic(opcode, remote_addr, rkey, compare_add, swap, std::vector<ibv_sge>{result});
  }
  int post_atomic(ibv_wr_opcode opcode, std::uint64_t remote_addr, std::uint32_t rkey, std::uint64_t compare_add,
                  std::uint64_t swap, std::vector<ibv_sge> result) {
    ibv_send_wr wr{};
    wr.sg_list = result.data();
    wr.num_sge = static_cast<int>(result.size());
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.wr.atomic.remote_addr = remote_addr;
    wr.wr.atomic.rkey = rkey;
    wr.wr.atomic.compare_add = compare_add;
    wr.wr.atomic.swap = swap;
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(near.qp(), &wr, &bad);
  }
  static std::uint64_t word(const Region& region, std::size_t offset) {
    std::uint64_t value = 0;
    std::memcpy(&value, region.buffer.data() + offset, sizeof(value));
    return value;
  }
  void allow_atomics() {  // the QPs of the fixture are connected without this permission
    near.to_reset();
    if (&far() != &near) far().to_reset();
    for (Endpoint* end : {&near, &far()}) {
      if (end->state() == IBV_QPS_RTS) continue;  // a QP that is connected to itself
      Endpoint& peer = end == &near ? far() : near;
      ibv_qp_attr attr = end->init_attr();
      attr.qp_access_flags |= IBV_ACCESS_REMOTE_ATOMIC;
      ASSERT_EQ(verbs().modify_qp(end->qp(), &attr, kInitMask), 0);
      end->to_rtr(peer.address());
      end->to_rts();
    }
  }
  static constexpr int kAtomicAccess = kAllAccess | IBV_ACCESS_REMOTE_ATOMIC;
};

INSTANTIATE_TEST_SUITE_P(Over, Atomics,
                         testing::Values(Topology{"OneDevice", false, false}, Topology{"TwoDevices", true, false},
                                         Topology{"OneQp", false, true}),
                         [](const auto& topology) { return topology.param.name; });

TEST_P(Atomics, FetchAndAdd_ReturnsTheOldValue) {
  allow_atomics();
  const Region result(near_pd(), 8);
  const Region target(far_pd(), 32, 0, kAtomicAccess);
  const std::uint64_t start = 0xFFFFFFFFFFFFFFF0;
  std::memcpy(target.buffer.data() + 8, &start, sizeof(start));
  for (std::uint64_t i = 0; i < 20; ++i) {
    ASSERT_EQ(post_atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, target.address(8), target.mr->rkey, 3, 0, result.sge()), 0);
    const ibv_wc wc = sent();
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.opcode, IBV_WC_FETCH_ADD);
    EXPECT_EQ(word(result, 0), start + 3 * i);
  }
  EXPECT_EQ(word(target, 8), start + 60);  // wraps around
  EXPECT_EQ(target.buffer.untouched_outside(8, 8), "");
}

TEST_P(Atomics, CompareAndSwap_SwapsOnlyEqualValues) {
  allow_atomics();
  const Region result(near_pd(), 8);
  const Region target(far_pd(), 8, 0, kAtomicAccess);
  std::memset(target.buffer.data(), 0, 8);
  ASSERT_EQ(post_atomic(IBV_WR_ATOMIC_CMP_AND_SWP, target.address(), target.mr->rkey, 0, 77, result.sge()), 0);
  const ibv_wc wc = sent();
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(wc.opcode, IBV_WC_COMP_SWAP);
  EXPECT_EQ(word(result, 0), 0U);
  EXPECT_EQ(word(target, 0), 77U);
  ASSERT_EQ(post_atomic(IBV_WR_ATOMIC_CMP_AND_SWP, target.address(), target.mr->rkey, 0, 99, result.sge()), 0);
  EXPECT_EQ(sent().status, IBV_WC_SUCCESS);
  EXPECT_EQ(word(result, 0), 77U);
  EXPECT_EQ(word(target, 0), 77U);
}

TEST_P(Atomics, Result_MayBeScattered) {
  allow_atomics();
  const Region result(near_pd(), 32);
  const Region target(far_pd(), 8, 0, kAtomicAccess);
  const std::uint64_t start = 0x0123456789ABCDEF;
  std::memcpy(target.buffer.data(), &start, sizeof(start));
  ASSERT_EQ(post_atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, target.address(), target.mr->rkey, 1, 0,
                        std::vector<ibv_sge>{result.sge(28, 4), result.sge(0, 4)}),
            0);
  const ibv_wc wc = sent();
  if (wc.status == IBV_WC_LOC_LEN_ERR || wc.status == IBV_WC_LOC_QP_OP_ERR) return;  // a device may require one element
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(std::memcmp(result.buffer.data() + 28, &start, 4), 0);
  EXPECT_EQ(std::memcmp(result.buffer.data(), reinterpret_cast<const std::byte*>(&start) + 4, 4), 0);
  for (const std::byte between : result.bytes(4, 24)) EXPECT_EQ(between, GuardedBuffer::kPoison);
  EXPECT_EQ(result.buffer.untouched_outside(0, 32), "");  // nor after the element of four bytes
}

TEST_P(Atomics, MisalignedAddress_IsInvalidRequest) {
  allow_atomics();
  const Region result(near_pd(), 8);
  const Region target(far_pd(), 32, 0, kAtomicAccess);
  ASSERT_EQ(post_atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, target.address(4), target.mr->rkey, 1, 0, result.sge()), 0);
  EXPECT_EQ(sent().status, IBV_WC_REM_INV_REQ_ERR);
  EXPECT_EQ(target.buffer.untouched_outside(0, 0), "");
}

TEST_P(Atomics, RegionWithoutPermission_IsAccessError) {
  allow_atomics();
  const Region result(near_pd(), 8);
  const Region target(far_pd(), 8);
  ASSERT_EQ(post_atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, target.address(), target.mr->rkey, 1, 0, result.sge()), 0);
  EXPECT_EQ(sent().status, IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(target.buffer.untouched_outside(0, 0), "");
}

TEST_P(Atomics, QpWithoutPermission_IsInvalidRequest) {
  const Region result(near_pd(), 8);
  const Region target(far_pd(), 8, 0, kAtomicAccess);
  ASSERT_EQ(post_atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, target.address(), target.mr->rkey, 1, 0, result.sge()), 0);
  EXPECT_EQ(sent().status, IBV_WC_REM_INV_REQ_ERR);
  EXPECT_EQ(target.buffer.untouched_outside(0, 0), "");
}

TEST_P(DataTransfer, RegionWithIova_IsAddressedByIova) {
  const Region source(near_pd(), 4096);
  GuardedBuffer target(4096);
  source.fill(kSeed);
  constexpr std::uint64_t kIova = 0x10000;
  const Mr mr(verbs().reg_mr_iova(far_pd(), target.data(), target.size(), kIova, kAllAccess));
  ASSERT_NE(mr, nullptr);
  ASSERT_EQ(post(near.qp(), IBV_WR_RDMA_WRITE, {source.sge(0, 1000)}, {.remote_addr = kIova + 96, .rkey = mr->rkey}),
            0);
  EXPECT_EQ(sent().status, IBV_WC_SUCCESS);
  expect_pattern(target.bytes().subspan(96, 1000), kSeed);
  EXPECT_EQ(target.untouched_outside(96, 1000), "");
}

}  // namespace
}  // namespace verbatim::test
