// Unreliable datagrams: address handles, the 40 bytes of the GRH in front of each received datagram, Q_Keys, and what a
// receiver drops.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/ip.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string_view>
#include <vector>

#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

constexpr std::uint32_t kQkey = 0x1234;
constexpr std::uint32_t kPrivileged = 0x80000000;
constexpr std::size_t kGrh = 40;
constexpr std::size_t kDatagramRegionBytes = 1U << 16;
constexpr EndpointOptions kUd{.type = IBV_QPT_UD, .qkey = kQkey};

ibv_ah_attr path_to(const Device& device, const Address& peer) {
  ibv_ah_attr path{};
  path.port_num = device.port_num;
  path.dlid = peer.lid;
  path.sl = 3;
  if (device.is_roce()) {
    path.is_global = 1;
    path.grh.dgid = peer.gid;
    path.grh.sgid_index = device.gid_index;
    path.grh.hop_limit = 17;
    path.grh.traffic_class = 0x60;
  }
  return path;
}

Ah create_ah(const Device& device, ibv_ah_attr path) {
  Ah ah(verbs().create_ah(device.pd.get(), &path));
  EXPECT_NE(ah, nullptr) << std::strerror(errno);
  return ah;
}

struct DatagramOptions {
  std::uint64_t wr_id = 0;
  std::uint32_t qkey = kQkey;
  ibv_wr_opcode opcode = IBV_WR_SEND;
  __be32 imm = 0;
  unsigned flags = IBV_SEND_SIGNALED;
};

int post_datagram(const Endpoint& from, ibv_ah* ah, std::uint32_t qpn, std::vector<ibv_sge> sges,
                  const DatagramOptions& options = {}) {
  ibv_send_wr wr{};
  wr.wr_id = options.wr_id;
  wr.sg_list = sges.data();
  wr.num_sge = static_cast<int>(sges.size());
  wr.opcode = options.opcode;
  wr.send_flags = options.flags;
  wr.imm_data = options.imm;
  wr.wr.ud.ah = ah;
  wr.wr.ud.remote_qpn = qpn;
  wr.wr.ud.remote_qkey = options.qkey;
  ibv_send_wr* bad = nullptr;
  return ibv_post_send(from.qp(), &wr, &bad);
}

class Datagrams : public testing::Test {
 protected:
  void SetUp() override {
    a.to_ready();
    b.to_ready();
  }

  std::vector<ibv_sge> part(const Region& region, std::size_t length) const {
    if (length == 0) return {};
    return {region.sge(0, length)};
  }
  int send(std::size_t length, const DatagramOptions& options = {}) {
    return post_datagram(a, to_b.get(), b.qp()->qp_num, part(source, length), options);
  }
  void expect_sent(std::uint64_t wr_id = 0) {
    const ibv_wc wc = poll_one(a.send_cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.opcode, IBV_WC_SEND);
    EXPECT_EQ(wc.wr_id, wr_id);
  }
  void expect_dropped(std::size_t length, const DatagramOptions& options = {}) {
    ASSERT_EQ(send(length, options), 0);
    expect_sent(options.wr_id);
    EXPECT_TRUE(stays_empty(b.recv_cq()));
    EXPECT_EQ(a.state(), IBV_QPS_RTS);
    EXPECT_EQ(b.state(), IBV_QPS_RTS);
  }
  // A datagram arrives in the receive that waits.
  void expect_next_arrives(std::uint64_t receive) {
    ASSERT_EQ(send(5, {.wr_id = 999}), 0);
    expect_sent(999);
    const ibv_wc wc = poll_one(b.recv_cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.wr_id, receive);
    EXPECT_EQ(wc.byte_len, kGrh + 5);
  }

  Device device = open_device();
  Region source{device.pd.get(), kDatagramRegionBytes};
  Region target{device.pd.get(), kDatagramRegionBytes, 3};
  Endpoint a{device, kUd};
  Endpoint b{device, kUd};
  Ah to_b = create_ah(device, path_to(device, b.address()));
  const std::size_t mtu = std::size_t{128} << device.port.active_mtu;
};

TEST_F(Datagrams, OfAnySize_ArriveBehindTheGrh) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{63}, mtu - 1, mtu}) {
    SCOPED_TRACE(size);
    source.fill(size);
    target.buffer.poison();
    ASSERT_EQ(post_recv(b.qp(), {target.sge(0, kGrh + size)}, 4), 0);
    ASSERT_EQ(send(size, {.wr_id = 2}), 0);
    expect_sent(2);
    const ibv_wc wc = poll_one(b.recv_cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.opcode, IBV_WC_RECV);
    EXPECT_EQ(wc.wr_id, 4U);
    EXPECT_EQ(wc.byte_len, kGrh + size);
    EXPECT_EQ(wc.qp_num, b.qp()->qp_num);
    EXPECT_EQ(wc.src_qp, a.qp()->qp_num);
    EXPECT_EQ(wc.wc_flags, device.is_roce() ? unsigned{IBV_WC_GRH} : 0U);
    EXPECT_EQ(wc.slid, device.port.lid);
    if (!device.is_roce()) {
      EXPECT_EQ(wc.sl, 3);
    }
    EXPECT_EQ(find_wrong_byte(target.bytes(kGrh, size), size), std::nullopt);
    EXPECT_EQ(target.buffer.untouched_outside(0, kGrh + size), "");
  }
}

TEST_F(Datagrams, ImmediateAndInlineData_Arrive) {
  source.fill(9);
  ASSERT_EQ(post_recv(b.qp(), {target.sge(0, 256)}, 1), 0);
  ASSERT_EQ(send(32, {.opcode = IBV_WR_SEND_WITH_IMM, .imm = 0x77, .flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE}), 0);
  source.fill(10);
  expect_sent();
  const ibv_wc wc = poll_one(b.recv_cq());
  EXPECT_EQ(wc.imm_data, 0x77U);
  EXPECT_NE(wc.wc_flags & IBV_WC_WITH_IMM, 0U);
  EXPECT_EQ(find_wrong_byte(target.bytes(kGrh, 32), 9), std::nullopt);
}

// The boundary of the GRH is not one of the SGEs.
TEST_F(Datagrams, SgeLists_AreFilledInOrder) {
  source.fill(6);
  ASSERT_EQ(post_recv(b.qp(), {target.sge(0, 10), target.sge(100, 40), target.sge(200, 100)}, 1), 0);
  ASSERT_EQ(post_datagram(a, to_b.get(), b.qp()->qp_num, {source.sge(0, 5), source.sge(5, 45)}), 0);
  EXPECT_EQ(poll_one(b.recv_cq()).byte_len, 90U);
  EXPECT_EQ(find_wrong_byte(target.bytes(130, 10), 6), std::nullopt);
  EXPECT_EQ(find_wrong_byte(target.bytes(200, 40), 6, 10), std::nullopt);
}

// The layout of Linux: the last 20 bytes are the IPv4 header of the packet.
TEST_F(Datagrams, RoceV2OverIpv4_HasTheIpHeaderInItsGrh) {
  if (!device.is_roce()) GTEST_SKIP() << "InfiniBand";
  ibv_ah_attr path = path_to(device, b.address());
  bool is_found = false;
  for (int index = 0; index < device.port.gid_tbl_len && !is_found; ++index) {
    ibv_gid_entry entry{};
    const auto number = static_cast<std::uint32_t>(index);
    if (verbs().query_gid_ex(device.context.get(), device.port_num, number, &entry, 0, sizeof entry) != 0) continue;
    is_found = entry.gid_type == IBV_GID_TYPE_ROCE_V2 && entry.gid.raw[10] == 0xff && entry.gid.raw[0] == 0;
    path.grh.sgid_index = static_cast<std::uint8_t>(index);
    path.grh.dgid = entry.gid;
  }
  if (!is_found) GTEST_SKIP() << "the port has no IPv4 address";
  const Ah ah = create_ah(device, path);
  ASSERT_EQ(post_recv(b.qp(), {target.sge(0, 256)}, 1), 0);
  ASSERT_EQ(post_datagram(a, ah.get(), b.qp()->qp_num, part(source, 13)), 0);
  const ibv_wc wc = poll_one(b.recv_cq());
  ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(wc.sl, 8 | 2) << "the type of the packet";
  iphdr header{};
  std::memcpy(&header, target.buffer.data() + 20, sizeof header);
  EXPECT_EQ(header.version, 4);
  EXPECT_EQ(header.ihl, 5);
  EXPECT_EQ(header.protocol, IPPROTO_UDP);
  EXPECT_EQ(header.ttl, 17);
  EXPECT_EQ(header.tos, 0x60);
  EXPECT_EQ(ntohs(header.tot_len), 20 + 8 + 12 + 8 + 16 + 4) << "IP, UDP, BTH, DETH, the padded payload, ICRC";
  EXPECT_EQ(std::memcmp(&header.saddr, path.grh.dgid.raw + 12, 4), 0);
  EXPECT_EQ(std::memcmp(&header.daddr, path.grh.dgid.raw + 12, 4), 0);
  std::uint16_t words[10];
  std::memcpy(words, &header, sizeof words);
  std::uint32_t sum = std::accumulate(std::begin(words), std::end(words), 0U);
  sum = (sum & 0xffff) + (sum >> 16);
  EXPECT_EQ(sum, 0xffffU) << "the checksum";
}

// The receiver answers to the address that the datagram came from. With each GID of the port, and without GRH.
TEST_F(Datagrams, AddressOfACompletion_LeadsToTheSender) {
  std::vector<ibv_ah_attr> paths;
  if (!device.is_roce()) paths.push_back(path_to(device, b.address()));
  for (int index = 0; index < device.port.gid_tbl_len; ++index) {
    ibv_gid_entry entry{};
    const auto number = static_cast<std::uint32_t>(index);
    if (verbs().query_gid_ex(device.context.get(), device.port_num, number, &entry, 0, sizeof entry) != 0) continue;
    paths.push_back(path_to(device, b.address()));
    paths.back().is_global = 1;
    paths.back().grh.sgid_index = static_cast<std::uint8_t>(index);
    paths.back().grh.dgid = entry.gid;
    paths.back().grh.hop_limit = 9;
    paths.back().grh.traffic_class = 0x20;
  }
  ASSERT_FALSE(paths.empty());
  for (const ibv_ah_attr& path : paths) {
    SCOPED_TRACE(path.is_global != 0 ? int{path.grh.sgid_index} : -1);
    target.buffer.poison();
    const Ah ah = create_ah(device, path);
    ASSERT_EQ(post_recv(b.qp(), {target.sge(0, 256)}, 1), 0);
    ASSERT_EQ(post_datagram(a, ah.get(), b.qp()->qp_num, part(source, 24)), 0);
    expect_sent();
    ibv_wc wc = poll_one(b.recv_cq());
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ((wc.wc_flags & IBV_WC_GRH) != 0, path.is_global != 0);

    auto* const grh = reinterpret_cast<ibv_grh*>(target.buffer.data());
    ibv_ah_attr back{};
    ASSERT_EQ(verbs().init_ah_from_wc(device.context.get(), device.port_num, &wc, grh, &back), 0);
    EXPECT_EQ(back.dlid, device.port.lid);
    EXPECT_EQ(back.is_global, path.is_global);
    if (path.is_global != 0) {
      EXPECT_EQ(back.grh.sgid_index, path.grh.sgid_index);
      EXPECT_EQ(std::memcmp(&back.grh.dgid, &path.grh.dgid, sizeof(ibv_gid)), 0);
      EXPECT_EQ(back.grh.hop_limit, 9);
      EXPECT_EQ(back.grh.traffic_class, 0x20);
    }
    const Ah answer(verbs().create_ah_from_wc(device.pd.get(), &wc, grh, device.port_num));
    ASSERT_NE(answer, nullptr);
    ASSERT_EQ(post_recv(a.qp(), {target.sge(1000, 256)}, 2), 0);
    ASSERT_EQ(post_datagram(b, answer.get(), wc.src_qp, part(source, 7)), 0);
    EXPECT_EQ(poll_one(b.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(poll_one(a.recv_cq()).byte_len, kGrh + 7);
  }
}

TEST_F(Datagrams, ManyFromTwoSenders_ArriveInOrder) {
  constexpr std::uint32_t kCount = 500;
  Endpoint c(device, kUd);
  c.to_ready();
  const auto post_receive = [&](std::uint64_t number) {
    return post_recv(b.qp(), {target.sge(number % 32 * 64, 44)}, number);
  };
  std::uint64_t posted = 0;
  while (posted < 32) ASSERT_EQ(post_receive(posted++), 0);
  auto* const numbers = reinterpret_cast<std::uint32_t*>(source.buffer.data());
  std::uint32_t expected[2] = {0, 0};
  for (std::uint32_t sent = 0; sent < kCount; ++sent) {
    numbers[sent % 16] = sent;
    const std::vector<ibv_sge> sges{source.sge(sent % 16 * 4, 4)};
    for (const Endpoint* const from : {&a, &c}) {
      ASSERT_EQ(post_datagram(*from, to_b.get(), b.qp()->qp_num, sges), 0);
    }
    EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(poll_one(c.send_cq()).status, IBV_WC_SUCCESS);
    for (const ibv_wc& wc : poll(b.recv_cq(), 2)) {
      std::uint32_t number = 0;
      std::memcpy(&number, target.bytes(wc.wr_id % 32 * 64 + kGrh, 4).data(), 4);
      EXPECT_EQ(number, expected[wc.src_qp == c.qp()->qp_num ? 1 : 0]++);
      ASSERT_EQ(post_receive(posted++), 0);
    }
  }
}

TEST_F(Datagrams, OneQp_SendsToSeveral) {
  Endpoint c(device, kUd);
  c.to_ready();
  for (std::uint64_t round = 0; round < 10; ++round) {
    ASSERT_EQ(post_recv(b.qp(), {target.sge(0, 64)}, 2 * round), 0);
    ASSERT_EQ(post_recv(c.qp(), {target.sge(64, 64)}, 2 * round + 1), 0);
    ASSERT_EQ(post_datagram(a, to_b.get(), b.qp()->qp_num, part(source, 4)), 0);
    ASSERT_EQ(post_datagram(a, to_b.get(), c.qp()->qp_num, part(source, 5)), 0);
    EXPECT_EQ(poll(a.send_cq(), 2).size(), 2U);
    EXPECT_EQ(poll_one(b.recv_cq()).byte_len, kGrh + 4);
    EXPECT_EQ(poll_one(c.recv_cq()).byte_len, kGrh + 5);
  }
}

TEST_F(Datagrams, ToItself_Arrives) {
  ASSERT_EQ(post_recv(a.qp(), {target.sge(0, 64)}, 1), 0);
  ASSERT_EQ(post_datagram(a, to_b.get(), a.qp()->qp_num, part(source, 4)), 0);
  EXPECT_EQ(poll_one(a.recv_cq()).src_qp, a.qp()->qp_num);
}

TEST_F(Datagrams, SharedReceiveQueue_ReceivesForSeveralQps) {
  const Srq srq = create_srq(device.pd.get());
  EndpointOptions options = kUd;
  options.srq = srq.get();
  Endpoint c(device, options);
  Endpoint d(device, options);
  c.to_ready();
  d.to_ready();
  ASSERT_EQ(post_srq_recv(srq.get(), {target.sge(0, 64)}, 1), 0);
  ASSERT_EQ(post_srq_recv(srq.get(), {target.sge(64, 64)}, 2), 0);
  ASSERT_EQ(post_datagram(a, to_b.get(), d.qp()->qp_num, part(source, 4)), 0);
  EXPECT_EQ(poll_one(d.recv_cq()).wr_id, 1U);
  ASSERT_EQ(post_datagram(a, to_b.get(), c.qp()->qp_num, part(source, 24)), 0);
  EXPECT_EQ(poll_one(c.recv_cq()).wr_id, 2U);
}

TEST_F(Datagrams, WithoutReceive_IsDropped) {
  expect_dropped(8, {.wr_id = 1});
  ASSERT_EQ(post_recv(b.qp(), {target.sge(0, 64)}, 3), 0);
  EXPECT_TRUE(stays_empty(b.recv_cq()));
  expect_next_arrives(3);
}

TEST_F(Datagrams, LongerThanReceive_IsDropped_AndLeavesTheReceive) {
  ASSERT_EQ(post_recv(b.qp(), {target.sge(0, kGrh + 5)}, 3), 0);
  expect_dropped(6);
  expect_next_arrives(3);
}

// The standard demands that nothing is sent and that no error is reported.
TEST_F(Datagrams, LongerThanMtu_IsNotSent) {
  ASSERT_EQ(post_recv(b.qp(), {target.sge(0, 2 * mtu)}, 3), 0);
  expect_dropped(mtu + 1);
  expect_next_arrives(3);
}

TEST_F(Datagrams, WrongQkey_IsDropped) {
  ASSERT_EQ(post_recv(b.qp(), {target.sge(0, 64)}, 3), 0);
  expect_dropped(8, {.qkey = kQkey + 1});
  expect_next_arrives(3);
}

// A key with its highest bit set stands for the key of the sender's QP.
TEST_F(Datagrams, PrivilegedQkey_IsThatOfTheSender) {
  ASSERT_EQ(post_recv(b.qp(), {target.sge(0, 64)}, 3), 0);
  ASSERT_EQ(send(8, {.qkey = kPrivileged | 0x777}), 0);
  EXPECT_EQ(poll_one(b.recv_cq()).wr_id, 3U);
  ibv_qp_attr attr{};
  attr.qkey = kQkey + 1;
  ASSERT_EQ(verbs().modify_qp(a.qp(), &attr, IBV_QP_QKEY), 0);
  expect_sent();
  ASSERT_EQ(post_recv(b.qp(), {target.sge(0, 64)}, 4), 0);
  expect_dropped(8, {.qkey = kPrivileged | kQkey});
  ASSERT_EQ(verbs().modify_qp(b.qp(), &attr, IBV_QP_QKEY), 0);
  ASSERT_EQ(send(8, {.qkey = kPrivileged}), 0);
  EXPECT_EQ(poll_one(b.recv_cq()).wr_id, 4U);
}

TEST_F(Datagrams, ToAnotherAddressOrUnknownQp_IsDropped) {
  ASSERT_EQ(post_recv(b.qp(), {target.sge(0, 64)}, 3), 0);
  ibv_ah_attr path = path_to(device, b.address());
  path.dlid = static_cast<std::uint16_t>(path.dlid + 77);
  path.grh.dgid.raw[15] ^= 0x55;
  const Ah wrong = create_ah(device, path);
  ASSERT_EQ(post_datagram(a, wrong.get(), b.qp()->qp_num, part(source, 8)), 0);
  expect_sent();
  ASSERT_EQ(post_datagram(a, to_b.get(), 0xfffff0, part(source, 8)), 0);
  expect_sent();
  EXPECT_TRUE(stays_empty(b.recv_cq()));
  expect_next_arrives(3);
}

TEST_F(Datagrams, ToQpOfAnotherTypeOrState_IsDropped) {
  Endpoint connected(device);
  Endpoint other(device);
  connect(connected, other);
  Endpoint initial(device, kUd);
  initial.to_init();
  for (const Endpoint* const to : {&connected, &initial}) {
    ASSERT_EQ(post_recv(to->qp(), {target.sge(0, 64)}, 3), 0);
    ASSERT_EQ(post_datagram(a, to_b.get(), to->qp()->qp_num, part(source, 8)), 0);
    expect_sent();
    EXPECT_TRUE(stays_empty(to->recv_cq()));
  }
}

TEST_F(Datagrams, QpInRtr_Receives) {
  Endpoint c(device, kUd);
  c.to_init();
  ASSERT_EQ(post_recv(c.qp(), {target.sge(0, 64)}, 3), 0);
  c.to_rtr({});
  ASSERT_EQ(post_datagram(a, to_b.get(), c.qp()->qp_num, part(source, 8)), 0);
  EXPECT_EQ(poll_one(c.recv_cq()).wr_id, 3U);
}

TEST_F(Datagrams, LocalError_StopsTheSendQueue_UntilRts) {
  ASSERT_EQ(post_recv(b.qp(), {target.sge(0, 64)}, 3), 0);
  ibv_sge wrong = source.sge(0, 8);
  wrong.lkey ^= 1;
  ASSERT_EQ(post_datagram(a, to_b.get(), b.qp()->qp_num, {wrong}), 0);
  EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_LOC_PROT_ERR);
  EXPECT_EQ(a.state(), IBV_QPS_SQE);
  ASSERT_EQ(send(8), 0);
  EXPECT_EQ(poll_one(a.send_cq()).status, IBV_WC_WR_FLUSH_ERR);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  ASSERT_EQ(verbs().modify_qp(a.qp(), &attr, IBV_QP_STATE), 0);
  expect_next_arrives(3);
}

TEST_F(Datagrams, ReceiveWithWrongKey_FailsTheReceiver) {
  ibv_sge wrong = target.sge(0, 64);
  wrong.lkey ^= 1;
  ASSERT_EQ(post_recv(b.qp(), {wrong}, 1), 0);
  ASSERT_EQ(send(8), 0);
  expect_sent();
  EXPECT_EQ(poll_one(b.recv_cq()).status, IBV_WC_LOC_PROT_ERR);
  EXPECT_EQ(b.state(), IBV_QPS_ERR);
}

TEST_F(Datagrams, OtherOperations_AreRefused) {
  for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ,
                                     IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD}) {
    EXPECT_EQ(post(a.qp(), opcode, {source.sge(0, 8)}), EINVAL) << opcode;
  }
}

TEST_F(Datagrams, AddressHandleOfAnotherPd_IsRefused) {
  const Pd other = alloc_pd(device);
  ibv_ah_attr path = path_to(device, b.address());
  const Ah foreign(verbs().create_ah(other.get(), &path));
  ASSERT_NE(foreign, nullptr);
  EXPECT_EQ(post_datagram(a, foreign.get(), b.qp()->qp_num, part(source, 8)), EINVAL);
  EXPECT_EQ(post_datagram(a, nullptr, b.qp()->qp_num, part(source, 8)), EINVAL);
}

TEST_F(Datagrams, InvalidAddress_IsRefused) {
  const auto create_error = [&](auto change) {
    ibv_ah_attr path = path_to(device, b.address());
    change(path);
    errno = 0;
    const Ah ah(verbs().create_ah(device.pd.get(), &path));
    return ah ? 0 : errno;
  };
  EXPECT_EQ(create_error([](ibv_ah_attr&) {}), 0);
  EXPECT_EQ(create_error([](ibv_ah_attr& path) { path.port_num = 9; }), EINVAL);
  EXPECT_EQ(create_error([](ibv_ah_attr& path) {
              path.is_global = 1;
              path.grh.sgid_index = 200;
            }),
            EINVAL);
  EXPECT_EQ(create_error([](ibv_ah_attr& path) {
              path.is_global = 0;
              path.dlid = 0;
            }),
            EINVAL)
      << "RoCE needs a GRH, InfiniBand without a GRH needs a LID";
}

TEST_F(Datagrams, AddressHandle_KeepsItsPd) {
  Pd other = alloc_pd(device);
  ibv_ah_attr path = path_to(device, b.address());
  Ah ah(verbs().create_ah(other.get(), &path));
  ASSERT_NE(ah, nullptr);
  EXPECT_EQ(verbs().dealloc_pd(other.get()), EBUSY);
  ah.reset();
}

TEST_F(Datagrams, AttributesOfConnections_AreRefused) {
  Endpoint c(device, kUd);
  ibv_qp_attr init = c.init_attr();
  EXPECT_EQ(verbs().modify_qp(c.qp(), &init, kInitMask), EINVAL) << "no access flags";
  EXPECT_EQ(verbs().modify_qp(c.qp(), &init, kUdInitMask & ~IBV_QP_QKEY), EINVAL);
  ASSERT_EQ(verbs().modify_qp(c.qp(), &init, kUdInitMask), 0);
  ibv_qp_attr rtr = c.rtr_attr(b.address());
  EXPECT_EQ(verbs().modify_qp(c.qp(), &rtr, kUcRtrMask), EINVAL);
  ASSERT_EQ(verbs().modify_qp(c.qp(), &rtr, kUdRtrMask), 0);
  ibv_qp_attr rts = c.rts_attr();
  EXPECT_EQ(verbs().modify_qp(c.qp(), &rts, IBV_QP_STATE), EINVAL) << "without the PSN";
  ASSERT_EQ(verbs().modify_qp(c.qp(), &rts, kUdRtsMask), 0);
  ibv_qp_attr found{};
  ibv_qp_init_attr created{};
  ASSERT_EQ(verbs().query_qp(c.qp(), &found, IBV_QP_QKEY, &created), 0);
  EXPECT_EQ(found.qkey, kQkey);
  EXPECT_EQ(created.qp_type, IBV_QPT_UD);
}

TEST_F(Datagrams, ExtendedRequestsAndCompletions_Work) {
  EndpointOptions options = kUd;
  options.send_ops = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
  Endpoint c(device, options);
  c.to_ready();
  ibv_cq_init_attr_ex wanted{};
  wanted.cqe = 16;
  wanted.wc_flags = IBV_WC_STANDARD_FLAGS;
  ibv_cq_ex* const received =
      verbs_get_ctx_op(device.context.get(), create_cq_ex)->create_cq_ex(device.context.get(), &wanted);
  ASSERT_NE(received, nullptr);
  const Cq owner(ibv_cq_ex_to_cq(received));
  EndpointOptions receiver = kUd;
  receiver.recv_cq = owner.get();
  Endpoint d(device, receiver);
  d.to_ready();
  source.fill(5);
  ASSERT_EQ(post_recv(d.qp(), {target.sge(0, 128)}, 1), 0);

  ibv_qp_ex* const extended = verbs().qp_to_qp_ex(c.qp());
  ibv_wr_start(extended);
  extended->wr_id = 8;
  extended->wr_flags = IBV_SEND_SIGNALED;
  ibv_wr_send_imm(extended, 3);
  ibv_wr_set_ud_addr(extended, to_b.get(), d.qp()->qp_num, kQkey);
  ibv_wr_set_sge(extended, source.mr->lkey, source.address(), 64);
  ASSERT_EQ(ibv_wr_complete(extended), 0);
  EXPECT_EQ(poll_one(c.send_cq()).wr_id, 8U);

  ibv_poll_cq_attr poll_attr{};
  int polled = ENOENT;
  for (int i = 0; i < 5000 && polled == ENOENT; ++i) {
    polled = ibv_start_poll(received, &poll_attr);
    if (polled == ENOENT) usleep(1000);
  }
  ASSERT_EQ(polled, 0);
  EXPECT_EQ(received->status, IBV_WC_SUCCESS);
  EXPECT_EQ(ibv_wc_read_byte_len(received), kGrh + 64);
  EXPECT_EQ(ibv_wc_read_src_qp(received), c.qp()->qp_num);
  EXPECT_EQ(ibv_wc_read_slid(received), device.port.lid);
  EXPECT_EQ(ibv_wc_read_imm_data(received), 3U);
  EXPECT_EQ((ibv_wc_read_wc_flags(received) & IBV_WC_GRH) != 0, device.is_roce());
  ibv_end_poll(received);
  EXPECT_EQ(find_wrong_byte(target.bytes(kGrh, 64), 5), std::nullopt);

  ibv_wr_start(extended);
  ibv_wr_send(extended);
  ibv_wr_set_sge(extended, source.mr->lkey, source.address(), 64);
  EXPECT_EQ(ibv_wr_complete(extended), EINVAL) << "a request without an address";
}

// What the parent of TwoProcesses does, in its child: answers each datagram with one of the same content.
int answer_datagrams(int from_parent, int to_parent, unsigned ordinal, int count) {
  const Device device = open_device(ordinal);
  const Region region(device.pd.get(), kDatagramRegionBytes);
  Endpoint endpoint(device, kUd);
  endpoint.to_ready();
  const auto post_receive = [&](std::uint64_t at) {
    return post_recv(endpoint.qp(), {region.sge(at * 8192, 8192)}, at);
  };
  for (std::uint64_t at = 0; at < 8; ++at) {
    if (post_receive(at) != 0) return 2;
  }
  const Address address = endpoint.address();
  if (write(to_parent, &address, sizeof address) != static_cast<ssize_t>(sizeof address)) return 3;
  for (int i = 0; i < count; ++i) {
    ibv_wc wc = poll_one(endpoint.recv_cq());
    if (wc.status != IBV_WC_SUCCESS) return 4;
    std::byte* const bytes = region.buffer.data() + wc.wr_id * 8192;
    const Ah ah(verbs().create_ah_from_wc(device.pd.get(), &wc, reinterpret_cast<ibv_grh*>(bytes), device.port_num));
    if (!ah) return 5;
    if (post_datagram(endpoint, ah.get(), wc.src_qp, {region.sge(wc.wr_id * 8192 + kGrh, wc.byte_len - kGrh)}) != 0) {
      return 6;
    }
    if (poll_one(endpoint.send_cq()).status != IBV_WC_SUCCESS) return 7;
    if (post_receive(wc.wr_id) != 0) return 8;
  }
  char byte = 0;
  return read(from_parent, &byte, 1) == 0 ? 0 : 9;
}

TEST(DatagramProcesses, Datagrams_AreAnswered) {
  constexpr int kRounds = 20;
  for (const unsigned ordinal : {0U, 1U}) {
    SCOPED_TRACE(ordinal);
    int to_child[2];
    int to_parent[2];
    ASSERT_EQ(pipe(to_child), 0);
    ASSERT_EQ(pipe(to_parent), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      close(to_child[1]);
      close(to_parent[0]);
      int status = 99;
      try {
        status = answer_datagrams(to_child[0], to_parent[1], ordinal, kRounds);
      } catch (...) {
      }
      std::exit(status);
    }
    close(to_child[0]);
    close(to_parent[1]);
    {
      const Device device = open_device();
      const Region region(device.pd.get(), kDatagramRegionBytes);
      Endpoint endpoint(device, kUd);
      endpoint.to_ready();
      Address peer{};
      ASSERT_EQ(read(to_parent[0], &peer, sizeof peer), static_cast<ssize_t>(sizeof peer));
      const Ah ah = create_ah(device, path_to(device, peer));
      for (int round = 0; round < kRounds; ++round) {
        const std::size_t size = static_cast<std::size_t>(round) * 200;
        region.fill(static_cast<std::uint64_t>(round));
        ASSERT_EQ(post_recv(endpoint.qp(), {region.sge(8192, 8192)}, 1), 0);
        ASSERT_EQ(post_datagram(endpoint, ah.get(), peer.qp_num, {region.sge(0, size)}), 0);
        EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
        const ibv_wc wc = poll_one(endpoint.recv_cq());
        ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
        EXPECT_EQ(wc.src_qp, peer.qp_num);
        EXPECT_EQ(wc.byte_len, kGrh + size);
        EXPECT_EQ(find_wrong_byte(region.bytes(8192 + kGrh, size), static_cast<std::uint64_t>(round)), std::nullopt);
      }
      close(to_child[1]);
      int status = 0;
      ASSERT_EQ(waitpid(child, &status, 0), child);
      EXPECT_EQ(status, 0);
      // To a process that has ended.
      ASSERT_EQ(post_datagram(endpoint, ah.get(), peer.qp_num, {region.sge(0, 8)}), 0);
      EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
      EXPECT_EQ(endpoint.state(), IBV_QPS_RTS);
    }
    close(to_parent[0]);
  }
}

}  // namespace
}  // namespace verbatim::test
