#include "net/transfer/endpoint.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <set>

#include "net/transfer/endpoint_block.h"
#include "unit/support/fake_verbs.h"
#include "unit/support/log_capture.h"

namespace verbatim {
namespace {

class EndpointTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (FakeDevice* fake : {&first_fake_, &second_fake_}) {
      fake->add_roce_port();
      fake->attributes.max_cqe = 100000;
      fake->attributes.max_qp_wr = 4096;
      fake->attributes.max_sge = 4;
      Result<std::unique_ptr<Device>> device = Device::open(fake_.table, nullptr, &fake->device, false);
      ASSERT_TRUE(device);
      devices_.push_back(std::move(*device));
    }
    for (std::size_t i = 0; i < devices_.size(); ++i) {
      Port& port = ports_[i];
      port.device = devices_[i].get();
      port.name = devices_[i]->name() + ":1";
      port.link_layer = IBV_LINK_LAYER_ETHERNET;
      port.active_mtu = IBV_MTU_4096;
      port.max_msg_bytes = std::uint64_t{1} << 31;
      port.gid = {3, fake_gid("::ffff:10.0.0.1", 0).gid, RoceVersion::kV2};
    }
  }

  Result<Endpoint> create(std::vector<const Port*> ports, std::size_t qps) {
    EndpointSizes sizes;
    sizes.qps = qps;
    sizes.caps = {.send_wr = 256, .recv_wr = 16, .inline_bytes = 64};
    return Endpoint::create(std::move(ports), sizes, config_);
  }

  static Result<bool> connect(Endpoint& endpoint, const wire::Hello& peer, const Config& config,
                              int traffic_class = -1) {
    VerbBudget budget = VerbBudget::unlimited();
    return endpoint.connect(peer, config, traffic_class, budget);
  }

  static wire::Hello remote(std::size_t qps) {
    wire::Hello hello;
    wire::HelloDevice device;
    device.link_layer = IBV_LINK_LAYER_ETHERNET;
    device.mtu = IBV_MTU_1024;
    device.max_message_bytes = 1000 * 1000;
    device.speed_mbps = 100'000;
    device.name = "mlx5_7";
    hello.host = "node2";
    hello.devices.push_back(device);
    for (std::size_t i = 0; i < qps; ++i) hello.qps.push_back({.number = static_cast<std::uint32_t>(900 + i)});
    return hello;
  }

  std::vector<ibv_qp_attr> moved_to(ibv_qp_state state) const {
    std::vector<ibv_qp_attr> found;
    for (const FakeVerbs::Modification& one : fake_.modifications()) {
      if (one.attributes.qp_state == state) found.push_back(one.attributes);
    }
    return found;
  }

  FakeVerbs fake_;
  FakeDevice& first_fake_ = fake_.add_device("mlx5_0");
  FakeDevice& second_fake_ = fake_.add_device("mlx5_1");
  std::vector<std::unique_ptr<Device>> devices_;
  Port ports_[2];
  Config config_;
};

class EndpointBlockTest : public EndpointTest {
 protected:
  // Flows of three, three and one endpoints. On each device the QP numbers must rise in the order of the block, and
  // each QP must use a CQ of its own endpoint.
  void expect_order(std::vector<const Port*> ports, std::size_t qps) {
    const std::size_t flows[] = {3, 3, 1};
    EndpointSizes sizes;
    sizes.qps = qps;
    sizes.caps = {.send_wr = 4, .recv_wr = 1};
    // In slices, with all budgets that end at different steps.
    EndpointBlock block(ports, sizes, config_, flows);
    Result<bool> done = false;
    for (std::size_t calls = 0; done && !*done; ++calls) {
      VerbBudget budget;
      ASSERT_TRUE(budget.take(calls % (kVerbsPerCall - 2)));
      done = block.advance(budget);
    }
    ASSERT_TRUE(done);
    const std::vector<Endpoint>* const made = &block.endpoints();
    ASSERT_EQ(made->size(), 7U);
    for (std::size_t device = 0; device < ports.size(); ++device) {
      std::uint32_t last = 0;
      for (const auto& [first, end] : {std::pair(0U, 3U), std::pair(3U, 6U), std::pair(6U, 7U)}) {
        for (std::size_t qp = device; qp < qps; qp += ports.size()) {
          for (std::size_t i = first; i < end; ++i) {
            const EndpointQp& one = (*made)[i].qps()[qp];
            EXPECT_EQ(one.device, device);
            EXPECT_GT(one.qp->qp_num, last);
            last = one.qp->qp_num;
          }
        }
      }
    }
    for (const Endpoint& endpoint : *made) {
      for (const EndpointQp& one : endpoint.qps()) {
        EXPECT_TRUE(std::any_of(endpoint.cqs().begin(), endpoint.cqs().end(),
                                [&](const UniqueCq& cq) { return cq.get() == one.qp->send_cq; }));
      }
      for (std::size_t i = 0; i < ports.size(); ++i) {
        EXPECT_EQ(endpoint.cqs()[i]->context, ports[i]->device->context());
      }
    }
    EXPECT_EQ(fake_.live("qp"), static_cast<int>(7 * qps)) << "QPs of a first attempt are destroyed";
  }
};

TEST_F(EndpointBlockTest, RisingQpNumbers_AreInBlockOrder) {
  expect_order({&ports_[0]}, 1);
  EXPECT_EQ(fake_.live("cq"), 0);
  expect_order({&ports_[0]}, 4);
  expect_order({&ports_[0], &ports_[1]}, 5);
}

TEST_F(EndpointBlockTest, AnyQpNumbers_AreSortedIntoBlockOrder) {
  const auto falling = [](std::uint32_t made) { return 100000 - made; };
  const auto scattered = [](std::uint32_t made) { return made * 7919 % 10007 + 1; };
  for (const auto& number : {std::function<std::uint32_t(std::uint32_t)>(falling), {scattered}}) {
    fake_.qp_number = number;
    for (const std::size_t qps : {1U, 2U, 4U}) expect_order({&ports_[0]}, qps);
    for (const std::size_t qps : {1U, 2U, 3U, 4U}) expect_order({&ports_[0], &ports_[1]}, qps);
  }
}

TEST_F(EndpointBlockTest, FailedQp_LeavesNothingAllocated) {
  fake_.failures["create_qp"] = ENOMEM;
  const std::size_t flows[] = {2};
  EndpointBlock block({&ports_[0]}, {}, config_, flows);
  VerbBudget budget = VerbBudget::unlimited();
  EXPECT_FALSE(block.advance(budget));
  EXPECT_EQ(fake_.live("cq"), 0);
}

TEST_F(EndpointBlockTest, ManyEndpoints_AskForPortAndGidOnce) {
  const std::size_t flows[] = {100, 100};
  EndpointSizes sizes;
  sizes.qps = 2;
  EndpointBlock block({&ports_[0], &ports_[1]}, sizes, config_, flows);
  VerbBudget budget = VerbBudget::unlimited();
  const int before = fake_.calls("query_port");
  Result<bool> done = block.advance(budget);
  ASSERT_TRUE(done);
  EXPECT_TRUE(*done);
  EXPECT_EQ(fake_.calls("query_port") - before, 2) << "one for each port";
  EXPECT_EQ(fake_.live("qp"), 400);
}

// Also where a device gives out numbers that need another layout of the CQs, and where it refuses a QP: the QPs of a
// first attempt are destroyed in slices too.
TEST_F(EndpointBlockTest, EachCall_MakesFewVerbs) {
  const auto verbs = [&] {
    int all = 0;
    for (const char* verb : {"query_port", "query_gid_ex", "query_gid", "create_cq", "create_qp", "modify_qp",
                             "destroy_qp", "destroy_cq"}) {
      all += fake_.calls(verb);
    }
    return all;
  };
  ports_[0].gid.index = 0;  // as in the table of the device
  const auto falling = [](std::uint32_t made) { return 100000 - made; };
  const auto rising = [](std::uint32_t made) { return made; };
  for (const auto& number : {std::function<std::uint32_t(std::uint32_t)>(rising), {falling}}) {
    for (const int refused : {0, 150}) {
      fake_.qp_number = number;
      int made = 0;
      fake_.on_create_qp = [&] { return ++made == refused ? ENOMEM : 0; };
      const std::size_t flows[] = {40, 10};
      EndpointSizes sizes;
      sizes.qps = 4;
      EndpointBlock block({&ports_[0]}, sizes, config_, flows);
      Result<bool> done = false;
      int calls = 0;
      for (; done && !*done; ++calls) {
        VerbBudget budget;
        const int before = verbs();
        done = block.advance(budget);
        EXPECT_LE(verbs() - before, static_cast<int>(kVerbsPerCall));
      }
      EXPECT_EQ(static_cast<bool>(done), refused == 0);
      EXPECT_EQ(fake_.live("qp"), refused == 0 ? 200 : 0);
      EXPECT_GT(calls, 15);
    }
  }
}

// Only QPs that go to another endpoint need a CQ each.
TEST_F(EndpointBlockTest, FallingQpNumbersOfOneEndpoint_ShareOneCq) {
  fake_.qp_number = [](std::uint32_t made) { return 100000 - made; };
  const Result<Endpoint> endpoint = create({&ports_[0]}, 4);
  ASSERT_TRUE(endpoint);
  EXPECT_EQ(endpoint->cqs().size(), 1U);
  for (std::size_t i = 1; i < 4; ++i) EXPECT_GT(endpoint->qps()[i].qp->qp_num, endpoint->qps()[i - 1].qp->qp_num);
}

TEST_F(EndpointTest, Qps_AreDistributedOverPorts) {
  Result<Endpoint> endpoint = create({&ports_[0], &ports_[1]}, 5);
  ASSERT_TRUE(endpoint);
  EXPECT_EQ(endpoint->cqs().size(), 2U);
  ASSERT_EQ(endpoint->qps().size(), 5U);
  for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(endpoint->qps()[i].device, i % 2);
  EXPECT_EQ(moved_to(IBV_QPS_INIT).size(), 5U);
  wire::Hello hello;
  endpoint->add_to_hello(hello);
  EXPECT_EQ(hello.devices.size(), 2U);
  EXPECT_EQ(hello.qps.size(), 5U);
  EXPECT_FALSE(hello.qps[0].has_ece);
}

TEST_F(EndpointTest, DifferentMtuAndMessageLimit_SmallerIsUsed) {
  Result<Endpoint> endpoint = create({&ports_[0]}, 2);
  ASSERT_TRUE(endpoint);
  ASSERT_TRUE(*connect(*endpoint, remote(2), config_, 104));
  const std::vector<ibv_qp_attr> ready = moved_to(IBV_QPS_RTR);
  ASSERT_EQ(ready.size(), 2U);
  EXPECT_EQ(ready[0].path_mtu, IBV_MTU_1024);
  EXPECT_EQ(ready[1].dest_qp_num, 901U);
  EXPECT_EQ(ready[0].ah_attr.grh.traffic_class, 104);
  EXPECT_EQ(moved_to(IBV_QPS_RTS).size(), 2U);
  EXPECT_EQ(endpoint->max_message_bytes(), 1000U * 1000U / 128 * 128);
  EXPECT_NE(endpoint->describe_path(0, "node1").find("node1 mlx5_0:1 GID 0 ::ffff:10.0.0.1"), std::string::npos);
  EXPECT_NE(endpoint->describe_path(0, "node1").find("node2 mlx5_7"), std::string::npos);
}

// Devices take the UDP source port from the low 14 bits of the label, and choose one themselves for 0.
TEST_F(EndpointTest, RoceQps_HaveFlowLabelsThatFollowOneAnother) {
  for (const std::uint64_t attempt : {std::uint64_t{0}, std::uint64_t{2030}, std::uint64_t{2031}, ~std::uint64_t{0}}) {
    Result<Endpoint> endpoint = create({&ports_[0]}, 8);
    ASSERT_TRUE(endpoint);
    wire::Hello hello = remote(8);
    hello.attempt = attempt;
    const std::size_t before = moved_to(IBV_QPS_RTR).size();
    Result<bool> connected = false;
    while (connected && !*connected) connected = connect(*endpoint, hello, config_);
    ASSERT_TRUE(connected);
    const std::vector<ibv_qp_attr> ready = moved_to(IBV_QPS_RTR);
    ASSERT_EQ(ready.size(), before + 8);
    const std::uint32_t first = ready[before].ah_attr.grh.flow_label;
    EXPECT_NE(first, 0U);
    EXPECT_EQ(first % 8, 0U);
    for (std::uint32_t i = 0; i < 8; ++i) {
      EXPECT_EQ(ready[before + i].ah_attr.grh.flow_label, first + i);
      EXPECT_EQ(endpoint->qps()[i].path.flow_label, first + i);
    }
    EXPECT_LT(first + wire::kMaxQps, 1U << 14);
  }
}

// The low bits of the labels of connections with one QP must differ too.
TEST_F(EndpointTest, RoceConnectionsWithOneQp_HaveDifferentLowBits) {
  std::set<std::uint32_t> low_bits;
  for (std::uint64_t connection = 0; connection < 64; ++connection) {
    Result<Endpoint> endpoint = create({&ports_[0]}, 1);
    ASSERT_TRUE(endpoint);
    wire::Hello hello = remote(1);
    hello.attempt = connection * 0x9e3779b97f4a7c15;
    ASSERT_TRUE(*connect(*endpoint, hello, config_));
    low_bits.insert(endpoint->qps()[0].path.flow_label % 8);
  }
  EXPECT_EQ(low_bits.size(), 8U);
}

// The driver gives the QPs to the ports in turn as it creates them. Only a connection with a QP for each port assigns
// them itself.
TEST_F(EndpointTest, Lag_QpsOfConnectionUseAllPorts) {
  Mlx5 mlx5;
  mlx5.is_supported = [](ibv_device*) { return true; };
  mlx5.query_device = [](ibv_context*, mlx5dv_context* attributes) {
    attributes->num_lag_ports = 2;
    return 0;
  };
  mlx5.modify_qp_lag_port = [](ibv_qp*, std::uint8_t) { return 0; };
  Result<std::unique_ptr<Device>> device = Device::open(fake_.table, &mlx5, &first_fake_.device, false);
  ASSERT_TRUE(device);
  Port port = ports_[0];
  port.device = device->get();
  std::set<std::vector<int>> used;
  for (std::uint64_t attempt = 0; attempt < 2; ++attempt) {
    for (const std::size_t qps : {std::size_t{1}, std::size_t{2}, std::size_t{3}}) {
      Result<Endpoint> endpoint = create({&port}, qps);
      ASSERT_TRUE(endpoint);
      wire::Hello hello = remote(qps);
      hello.attempt = attempt << 48 | 1;  // those of a process are odd
      Result<bool> connected = false;
      while (connected && !*connected) connected = connect(*endpoint, hello, config_);
      ASSERT_TRUE(connected);
      std::vector<int> lag_ports;
      for (const EndpointQp& end : endpoint->qps()) lag_ports.push_back(end.lag_port);
      used.insert(lag_ports);
    }
  }
  EXPECT_EQ(used, (std::set<std::vector<int>>{{0}, {1, 2}, {2, 1}, {1, 2, 1}, {2, 1, 2}}));
}

TEST_F(EndpointTest, AddressNotResolved_ConnectContinuesAtThatQp) {
  Result<Endpoint> endpoint = create({&ports_[0]}, 3);
  ASSERT_TRUE(endpoint);
  // The first QP goes to RTS, the second one not even to RTR.
  fake_.on_modify_qp = [&] { return moved_to(IBV_QPS_RTS).size() == 1 ? ETIMEDOUT : 0; };
  for (int attempts = 1; attempts <= 3; ++attempts) {
    const int calls = fake_.calls("modify_qp");
    while (fake_.calls("modify_qp") < calls + (attempts == 1 ? 3 : 1)) {
      const Result<bool> connected = connect(*endpoint, remote(3), config_);
      ASSERT_TRUE(connected);
      ASSERT_FALSE(*connected);
    }
    ASSERT_TRUE(endpoint->unresolved());
    EXPECT_EQ(endpoint->unresolved()->sys_errno, ETIMEDOUT);
    EXPECT_EQ(endpoint->next_qp(), 1U);
  }
  fake_.on_modify_qp = {};
  Result<bool> connected = false;
  while (connected && !*connected) connected = connect(*endpoint, remote(3), config_);
  ASSERT_TRUE(connected);
  EXPECT_FALSE(endpoint->unresolved());
  const std::vector<ibv_qp_attr> ready = moved_to(IBV_QPS_RTR);
  ASSERT_EQ(ready.size(), 3U) << "each QP once";
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(ready[i].dest_qp_num, 900 + i);
  EXPECT_EQ(moved_to(IBV_QPS_RTS).size(), 3U);
  EXPECT_EQ(endpoint->max_message_bytes(), 1000U * 1000U / 128 * 128);
}

// The attempt may have blocked for a second.
TEST_F(EndpointTest, AddressNotResolved_ExhaustsBudget) {
  Result<Endpoint> endpoint = create({&ports_[0]}, 1);
  ASSERT_TRUE(endpoint);
  fake_.on_modify_qp = [] { return ETIMEDOUT; };
  VerbBudget budget;
  const Result<bool> connected = endpoint->connect(remote(1), config_, -1, budget);
  ASSERT_TRUE(connected);
  EXPECT_FALSE(*connected);
  EXPECT_FALSE(budget.take(1));
}

TEST_F(EndpointTest, OtherErrorOfRtr_IsFinal) {
  Result<Endpoint> endpoint = create({&ports_[0]}, 1);
  ASSERT_TRUE(endpoint);
  fake_.on_modify_qp = [] { return ENETUNREACH; };
  const Result<bool> connected = connect(*endpoint, remote(1), config_);
  ASSERT_FALSE(connected);
  EXPECT_EQ(connected.error().sys_errno, ENETUNREACH);
}

TEST_F(EndpointTest, DifferentQpCount_IsRejected) {
  Result<Endpoint> endpoint = create({&ports_[0]}, 2);
  ASSERT_TRUE(endpoint);
  EXPECT_EQ(connect(*endpoint, remote(3), config_).error().kind, ErrorKind::kRemote);
  EXPECT_TRUE(moved_to(IBV_QPS_RTR).empty());
}

TEST_F(EndpointTest, CqBeyondDeviceLimit_IsRejectedWithRemedy) {
  first_fake_.attributes.max_cqe = 500;
  devices_[0] = *Device::open(fake_.table, nullptr, &first_fake_.device, false);
  ports_[0].device = devices_[0].get();
  const LogCapture log;
  ASSERT_TRUE(create({&ports_[0]}, 1));
  EXPECT_FALSE(create({&ports_[0]}, 2));
  EXPECT_NE(log.only_warning().find("VERBATIM_QPS_PER_CONNECTION"), std::string::npos);
}

TEST_F(EndpointTest, GrantedQueueDepths_AreReported) {
  first_fake_.attributes.max_qp_wr = 40;
  devices_[0] = *Device::open(fake_.table, nullptr, &first_fake_.device, false);
  ports_[0].device = devices_[0].get();
  Result<Endpoint> endpoint = create({&ports_[0]}, 1);
  ASSERT_TRUE(endpoint);
  EXPECT_EQ(endpoint->qps()[0].send_wr, 40U);
  EXPECT_EQ(endpoint->qps()[0].recv_wr, 16U);
}

TEST_F(EndpointTest, Ece_IsSentOnlyWhenBothEndsUseIt) {
  first_fake_.ece_errno = 0;
  wire::Hello peer = remote(1);

  Result<Endpoint> with_ece = create({&ports_[0]}, 1);
  wire::Hello hello;
  with_ece->add_to_hello(hello);
  EXPECT_TRUE(hello.qps[0].has_ece);

  // The peer's hello has no options: none are set, and the reply has none.
  ASSERT_TRUE(*connect(*with_ece, peer, config_));
  wire::Hello reply;
  with_ece->add_to_hello(reply);
  EXPECT_FALSE(reply.qps[0].has_ece);

  config_.ece = false;
  Result<Endpoint> without_ece = create({&ports_[0]}, 1);
  wire::Hello empty;
  without_ece->add_to_hello(empty);
  EXPECT_FALSE(empty.qps[0].has_ece);
  peer.qps[0].has_ece = true;
  ASSERT_TRUE(*connect(*without_ece, peer, config_));
  EXPECT_FALSE(fake_.ece_set.has_value());
}

TEST_F(EndpointTest, FailedVerb_LeavesNothingAllocated) {
  for (const char* verb : {"create_cq", "create_qp", "modify_qp"}) {
    fake_.failures = {{verb, ENOMEM}};
    EXPECT_FALSE(create({&ports_[0], &ports_[1]}, 4)) << verb;
    EXPECT_EQ(fake_.live("qp"), 0) << verb;
    EXPECT_EQ(fake_.live("cq"), 0) << verb;
  }
}

}  // namespace
}  // namespace verbatim
