#include "net/connect/connector.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <chrono>

#include "support/fake_verbs.h"
#include "support/log_capture.h"

namespace verbatim {
namespace {

sockaddr_storage ipv4(const char* text) {
  sockaddr_storage address{};
  auto& v4 = reinterpret_cast<sockaddr_in&>(address);
  v4.sin_family = AF_INET;
  EXPECT_EQ(::inet_pton(AF_INET, text, &v4.sin_addr), 1);
  return address;
}

class ConnectorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    FakeDevice& device = fake_.add_device("mlx5_0");
    device.add_roce_port();
    device.attributes.max_cqe = 100000;
    device.attributes.max_qp_wr = 4096;
    device.attributes.max_sge = 4;
    Result<std::unique_ptr<Device>> opened = Device::open(fake_.table, nullptr, &device.device, false);
    ASSERT_TRUE(opened);
    device_ = std::move(*opened);
    port_.device = device_.get();
    port_.name = "mlx5_0:1";
    port_.link_layer = IBV_LINK_LAYER_ETHERNET;
    port_.max_msg_bytes = 1U << 30;
    config_.qp_order = QpOrder::kNative;
    Result<sockaddr_storage> listening = listener_.add(handle_.secret);
    ASSERT_TRUE(listening);
    handle_.address = *listening;
    handle_.device_count = 1;
  }

  FakeVerbs fake_;
  std::unique_ptr<Device> device_;
  Port port_;
  Config config_;
  const std::string host_name_ = "node1";
  const CommSettings comm_settings_{.config = config_, .host_name = host_name_};
  EndpointPools pools_;
  EndpointPool pool_{config_, pools_};
  Listener listener_{ipv4("127.0.0.1")};
  wire::Handle handle_;
};

// No interface has this address, as after it was removed: an attempt from it fails.
TEST_F(ConnectorTest, AddressOfInterfaceFails_ConnectsFromAnyAddress) {
  const LogCapture log;
  const sockaddr_storage removed = ipv4("203.0.113.7");
  const ConnectSettings settings{comm_settings_, pool_, listener_, removed, "eth7 203.0.113.7", {}, -1};
  Connector connector(settings, {&port_}, handle_, -1, 1);
  std::vector<ConnectRequest> requests;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (requests.empty() && std::chrono::steady_clock::now() < end) {
    ASSERT_TRUE(connector.advance()) << testing::PrintToString(log.warnings());
    Result<std::vector<ConnectRequest>> found = listener_.poll(handle_.secret);
    ASSERT_TRUE(found);
    requests = std::move(*found);
  }
  ASSERT_EQ(requests.size(), 1U) << "the hello has arrived";
  EXPECT_TRUE(log.warnings().empty());
}

}  // namespace
}  // namespace verbatim
