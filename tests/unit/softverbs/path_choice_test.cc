//: in softverbs_devices_test
//: test softverbs-path-choice-{layer} layer=roce,ib filter=PathChoice.* use=control,device
//:   + SOFTVERBS_LINK_LAYER={layer} SOFTVERBS_PATHS=4

// SOFTVERBS_PATHS=4: the statistics show the path of the fabric that each QP uses.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <regex>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

constexpr std::uint32_t kPaths = 4;
constexpr std::uint32_t kPathPairs = 8;
constexpr std::size_t kPathBytes = 1000;
constexpr std::uint32_t kLabel = 0x12340;  // a multiple of 8

std::string stats(const std::string& arguments) {
  const std::string command =
      std::string(std::getenv("SOFTVERBS_CONTROL")) + " stats " + arguments + " " + std::to_string(getpid());
  FILE* const output = popen(command.c_str(), "r");
  if (output == nullptr) throw std::runtime_error("popen");
  std::string all;
  char text[4096];
  for (std::size_t length = 0; (length = std::fread(text, 1, sizeof text, output)) > 0;) all.append(text, length);
  EXPECT_EQ(pclose(output), 0);
  return all;
}

struct QpLine {
  std::optional<std::uint64_t> path;
  std::optional<std::uint64_t> udp_source_port;
  std::uint64_t bytes = 0;
};

// The QPs of this process in `softverbs stats --json`, by number.
std::map<std::uint32_t, QpLine> qps_of_this_process() {
  const std::string json = stats("--json");
  static const std::regex number(R"re("qpn": (\d+))re");
  std::map<std::uint32_t, QpLine> all;
  for (std::sregex_iterator at(json.begin(), json.end(), number), end; at != end; ++at) {
    const auto next = std::next(at) == end ? json.end() : json.begin() + std::next(at)->position();
    const std::string qp(json.begin() + at->position(), next);
    const auto field = [&](const std::string& name) -> std::optional<std::uint64_t> {
      std::smatch found;
      if (!std::regex_search(qp, found, std::regex("\"" + name + "\": (\\d+)"))) return std::nullopt;
      return std::stoull(found[1]);
    };
    all[static_cast<std::uint32_t>(std::stoul((*at)[1]))] = {field("path"), field("udp_source_port"),
                                                             field("bytes").value_or(0)};
  }
  return all;
}

// Pairs of QPs of device 0, connected with consecutive flow labels from `label` on, or without labels. Each sender
// sends one message.
class PathChoice : public testing::Test {
 protected:
  void connect_pairs(std::optional<std::uint32_t> label) {
    for (std::uint32_t i = 0; i < kPathPairs; ++i) {
      senders.push_back(std::make_unique<Endpoint>(device));
      receivers.push_back(std::make_unique<Endpoint>(device));
      connect_to(*senders[i], *receivers[i], label ? *label + i : 0);
      connect_to(*receivers[i], *senders[i], label ? *label + i : 0);
      const SendOptions target{.remote_addr = region.address(), .rkey = region.mr->rkey};
      ASSERT_EQ(post(senders[i]->qp(), IBV_WR_RDMA_WRITE, {region.sge()}, target), 0);
      ASSERT_EQ(poll_one(senders[i]->send_cq()).status, IBV_WC_SUCCESS);
    }
  }

  static void connect_to(Endpoint& endpoint, const Endpoint& peer, std::uint32_t flow_label) {
    endpoint.to_init();
    ibv_qp_attr attr = endpoint.rtr_attr(peer.address());
    attr.ah_attr.grh.flow_label = flow_label;
    ASSERT_EQ(verbs().modify_qp(endpoint.qp(), &attr, kRtrMask), 0);
    endpoint.to_rts();
  }

  static std::uint32_t flow_label_of(const Endpoint& endpoint) {
    ibv_qp_attr attr{};
    ibv_qp_init_attr init{};
    EXPECT_EQ(verbs().query_qp(endpoint.qp(), &attr, IBV_QP_AV, &init), 0);
    return attr.ah_attr.grh.flow_label;
  }

  const Device device = open_device();
  const Region region{device.pd.get(), kPathBytes};
  std::vector<std::unique_ptr<Endpoint>> senders;
  std::vector<std::unique_ptr<Endpoint>> receivers;
};

TEST_F(PathChoice, ConsecutiveFlowLabels_UseAllPaths) {
  connect_pairs(kLabel);
  const std::map<std::uint32_t, QpLine> all = qps_of_this_process();
  std::map<std::uint64_t, std::uint64_t> bytes;  // by path
  for (std::uint32_t i = 0; i < kPathPairs; ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(flow_label_of(*senders[i]), kLabel + i);
    const QpLine& sender = all.at(senders[i]->qp()->qp_num);
    const QpLine& receiver = all.at(receivers[i]->qp()->qp_num);
    ASSERT_TRUE(sender.path);
    EXPECT_LT(*sender.path, kPaths);
    EXPECT_EQ(sender.bytes, kPathBytes);
    EXPECT_EQ(receiver.path, sender.path) << "the same addresses and port";
    bytes[*sender.path] += sender.bytes;
    if (device.is_roce()) {
      EXPECT_EQ(sender.udp_source_port, ibv_flow_label_to_udp_sport(kLabel + i));
    } else {
      EXPECT_EQ(sender.udp_source_port, std::nullopt);
    }
  }
  if (!device.is_roce()) {
    EXPECT_EQ(bytes.size(), 1U) << "one path between two LIDs";
    return;
  }
  ASSERT_EQ(bytes.size(), kPaths);
  for (const auto& [path, carried] : bytes) EXPECT_EQ(carried, kPathPairs / kPaths * kPathBytes) << path;
}

TEST_F(PathChoice, WithoutFlowLabels_QpNumbersDecide) {
  if (!device.is_roce()) GTEST_SKIP() << "the path depends on LIDs only";
  connect_pairs(std::nullopt);
  const std::map<std::uint32_t, QpLine> all = qps_of_this_process();
  std::map<std::uint64_t, std::uint64_t> path_of_port;
  for (std::uint32_t i = 0; i < kPathPairs; ++i) {
    EXPECT_EQ(flow_label_of(*senders[i]), 0U);
    const std::uint32_t numbers[]{senders[i]->qp()->qp_num, receivers[i]->qp()->qp_num};
    std::uint64_t label = std::uint64_t{numbers[0]} * numbers[1];
    label ^= label >> 20;
    label ^= label >> 40;
    for (const std::uint32_t qpn : numbers) {
      const QpLine& qp = all.at(qpn);
      EXPECT_EQ(qp.udp_source_port, ibv_flow_label_to_udp_sport(static_cast<std::uint32_t>(label & 0xfffff)));
      ASSERT_TRUE(qp.path && qp.udp_source_port);
      EXPECT_EQ(path_of_port.try_emplace(*qp.udp_source_port, *qp.path).first->second, *qp.path);
    }
  }
  // The same ports as labels give the same paths.
  for (const auto& [port, path] : path_of_port) {
    const Endpoint receiver(device);
    Endpoint sender(device);
    const auto label = static_cast<std::uint32_t>(port & 0x3fff);
    connect_to(sender, receiver, label != 0 ? label : 0x4001);  // of both labels the port is 0xc000
    const QpLine qp = qps_of_this_process().at(sender.qp()->qp_num);
    EXPECT_EQ(qp.udp_source_port, port);
    EXPECT_EQ(qp.path, path);
  }
}

TEST_F(PathChoice, QpWithoutAddress_HasNoPath) {
  Endpoint endpoint(device);
  const std::uint32_t qpn = endpoint.qp()->qp_num;
  EXPECT_EQ(qps_of_this_process().at(qpn).path, std::nullopt);
  endpoint.to_init();
  EXPECT_EQ(qps_of_this_process().at(qpn).path, std::nullopt);
  endpoint.to_rtr(endpoint.address());
  EXPECT_NE(qps_of_this_process().at(qpn).path, std::nullopt);
  endpoint.to_reset();
  const QpLine after = qps_of_this_process().at(qpn);
  EXPECT_EQ(after.path, std::nullopt);
  EXPECT_EQ(after.udp_source_port, std::nullopt);
}

TEST_F(PathChoice, Table_ShowsPathAndPort) {
  Endpoint endpoint(device);
  endpoint.to_init();
  EXPECT_EQ(stats("--qps").find(" path "), std::string::npos);
  endpoint.to_rtr(endpoint.address());
  const QpLine qp = qps_of_this_process().at(endpoint.qp()->qp_num);
  ASSERT_TRUE(qp.path);
  std::string expected = "   path " + std::to_string(*qp.path);
  if (device.is_roce()) expected += ", UDP source port " + std::to_string(qp.udp_source_port.value_or(0));
  const std::string table = stats("--qps");
  EXPECT_NE(table.find(expected + "\n"), std::string::npos) << table;
}

}  // namespace
}  // namespace verbatim::test
