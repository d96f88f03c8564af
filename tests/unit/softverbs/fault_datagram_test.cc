//: in softverbs_fault_test

// Faults of messages without acknowledgement: UC messages and datagrams. A message that is lost stays lost, and its
// request completes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "qp_pair_fixture.h"

namespace verbatim::test {
namespace {

constexpr std::size_t kGrhBytes = 40;
constexpr std::size_t kSlotBytes = 64;

// Two QPs without acknowledgements; `a` sends one message of 8 bytes at a time to `b`.
class Unreliable {
 public:
  explicit Unreliable(ibv_qp_type type)
      : type_(type),
        source(device.pd.get(), 4096),
        target(device.pd.get(), 4096),
        a(device, {.type = type}),
        b(device, {.type = type}) {
    connect(a, b);
    if (type != IBV_QPT_UD) return;
    ibv_ah_attr path = a.rtr_attr(b.address()).ah_attr;
    ah.reset(verbs().create_ah(device.pd.get(), &path));
  }

  int receive(std::uint64_t number) const {
    return post_recv(b.qp(), {target.sge(number * kSlotBytes, kSlotBytes)}, number);
  }
  int send(std::uint64_t number) const {
    ibv_sge sge = source.sge(0, 8);
    ibv_send_wr request{};
    request.wr_id = number;
    request.sg_list = &sge;
    request.num_sge = 1;
    request.opcode = IBV_WR_SEND_WITH_IMM;
    request.imm_data = static_cast<std::uint32_t>(number);
    request.send_flags = IBV_SEND_SIGNALED;
    if (type_ == IBV_QPT_UD) {
      request.wr.ud.ah = ah.get();
      request.wr.ud.remote_qpn = b.qp()->qp_num;
      request.wr.ud.remote_qkey = 0x1234;
    }
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(a.qp(), &request, &bad);
  }
  // Sends messages 0 to count - 1, each of which completes, and returns those that arrive.
  std::vector<std::uint32_t> arrived_of(std::uint64_t count) const {
    for (std::uint64_t number = 0; number < count; ++number) EXPECT_EQ(receive(number % 64), 0);
    for (std::uint64_t number = 0; number < count; ++number) {
      EXPECT_EQ(send(number), 0);
      const ibv_wc sent = poll_one(a.send_cq());
      EXPECT_EQ(sent.status, IBV_WC_SUCCESS);
      EXPECT_EQ(sent.wr_id, number);
    }
    std::vector<std::uint32_t> arrived;
    for (ibv_wc wc{}; ibv_poll_cq(b.recv_cq(), 1, &wc) == 1;) {
      EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
      EXPECT_EQ(wc.byte_len, 8 + (type_ == IBV_QPT_UD ? kGrhBytes : 0));
      arrived.push_back(wc.imm_data);
    }
    EXPECT_EQ(a.state(), IBV_QPS_RTS);
    EXPECT_EQ(b.state(), IBV_QPS_RTS);
    return arrived;
  }

 private:
  const ibv_qp_type type_;

 public:
  Device device = open_device();
  Region source;
  Region target;
  Ah ah;
  Endpoint a;
  Endpoint b;
};

class UnreliableFaults : public testing::TestWithParam<ibv_qp_type> {};

INSTANTIATE_TEST_SUITE_P(Type, UnreliableFaults, testing::Values(IBV_QPT_UC, IBV_QPT_UD),
                         [](const auto& type) { return type.param == IBV_QPT_UC ? "UC" : "UD"; });

using Numbers = std::vector<std::uint32_t>;

TEST_P(UnreliableFaults, LostRequest_DoesNotArrive) {
  with_faults("drop-request op=send_imm nth=2 count=2", [] {
    EXPECT_EQ(Unreliable(GetParam()).arrived_of(5), (Numbers{0, 3, 4}));
  });
}

TEST_P(UnreliableFaults, RefusedReceive_DropsTheMessage) {
  with_faults("rnr op=send_imm nth=2", [] { EXPECT_EQ(Unreliable(GetParam()).arrived_of(4), (Numbers{0, 2, 3})); });
}

TEST_P(UnreliableFaults, LostAcknowledgement_DoesNotMatter) {
  with_faults("drop-ack op=send_imm count=all times=all", [] {
    EXPECT_EQ(Unreliable(GetParam()).arrived_of(4), (Numbers{0, 1, 2, 3}));
  });
}

TEST_P(UnreliableFaults, Loss_DropsSomeMessages_TheSameInEachRun) {
  Numbers first;
  for (int run = 0; run < 2; ++run) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    with_faults("seed=3;loss rate=0.5", [&] {
      const Numbers arrived = Unreliable(GetParam()).arrived_of(48);
      EXPECT_GT(arrived.size(), 8U);
      EXPECT_LT(arrived.size(), 40U);
      EXPECT_EQ(std::set(arrived.begin(), arrived.end()).size(), arrived.size());
      EXPECT_GT(write(ends[1], arrived.data(), arrived.size() * sizeof arrived[0]), 0);
    });
    Numbers arrived(48);
    const ssize_t bytes = read(ends[0], arrived.data(), arrived.size() * sizeof arrived[0]);
    ASSERT_GT(bytes, 0);
    arrived.resize(static_cast<std::size_t>(bytes) / sizeof arrived[0]);
    if (run == 0) first = arrived;
    EXPECT_EQ(arrived, first);
    close(ends[0]);
    close(ends[1]);
  }
}

TEST_P(UnreliableFaults, Delay_KeepsMessageAndOrder) {
  with_faults("delay by=2ms count=3", [] {
    const Stopwatch watch;
    EXPECT_EQ(Unreliable(GetParam()).arrived_of(4), (Numbers{0, 1, 2, 3}));
    EXPECT_GE(watch.elapsed(), std::chrono::milliseconds(6));
  });
}

TEST_P(UnreliableFaults, FailedRequest_StopsTheSendQueue) {
  with_faults("complete op=send_imm nth=2 status=LOC_QP_OP_ERR", [] {
    const Unreliable pair(GetParam());
    EXPECT_EQ(pair.receive(0), 0);
    EXPECT_EQ(pair.send(0), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(pair.send(1), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_LOC_QP_OP_ERR);
    EXPECT_EQ(pair.a.state(), IBV_QPS_SQE);
    EXPECT_EQ(pair.b.state(), IBV_QPS_RTS);
  });
}

TEST_P(UnreliableFaults, FailedReceive_FailsTheReceiverOnly) {
  with_faults("complete op=recv nth=2 status=LOC_PROT_ERR", [] {
    const Unreliable pair(GetParam());
    for (std::uint64_t number = 0; number < 2; ++number) {
      EXPECT_EQ(pair.receive(number), 0);
      EXPECT_EQ(pair.send(number), 0);
      EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    }
    const std::vector<ibv_wc> received = poll(pair.b.recv_cq(), 2);
    EXPECT_EQ(received.back().status, IBV_WC_LOC_PROT_ERR);
    EXPECT_EQ(pair.a.state(), IBV_QPS_RTS);
    EXPECT_EQ(pair.b.state(), IBV_QPS_ERR);
  });
}

TEST_P(UnreliableFaults, LinkDown_LosesMessages_UntilItIsUp) {
  with_faults("link-down after=2 for=50ms", [] {
    const Unreliable pair(GetParam());
    for (std::uint64_t number = 0; number < 3; ++number) EXPECT_EQ(pair.receive(number), 0);
    const Stopwatch watch;
    std::uint64_t sent = 0;
    for (; sent < 3; ++sent) {
      EXPECT_EQ(pair.send(sent), 0);
      EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
    }
    const bool is_sent_in_time = watch.elapsed() < std::chrono::milliseconds(50);
    // Messages arrive again when the port is up.
    std::set<std::uint32_t> arrived;
    for (int i = 0; i < 1000 && arrived.size() < 3; ++i) {
      usleep(5000);
      EXPECT_EQ(pair.send(sent++), 0);
      EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
      for (ibv_wc wc{}; ibv_poll_cq(pair.b.recv_cq(), 1, &wc) == 1;) arrived.insert(wc.imm_data);
    }
    EXPECT_EQ(arrived.size(), 3U);
    if (is_sent_in_time) {
      EXPECT_FALSE(arrived.contains(2)) << "it was sent while the port was down";
    }
    EXPECT_EQ(pair.a.state(), IBV_QPS_RTS);
  });
}

TEST(DatagramFaults, CreateAh_Fails) {
  with_faults("fail verb=create_ah errno=ENOSPC", [] {
    const Device device = open_device();
    const Endpoint endpoint(device);
    ibv_ah_attr path = endpoint.rtr_attr(endpoint.address()).ah_attr;
    EXPECT_EQ(verbs().create_ah(device.pd.get(), &path), nullptr);
    EXPECT_EQ(errno, ENOSPC);
    EXPECT_NE(Ah(verbs().create_ah(device.pd.get(), &path)), nullptr);
  });
}

}  // namespace
}  // namespace verbatim::test
