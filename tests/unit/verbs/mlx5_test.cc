#include "verbs/mlx5.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "unit/support/fake_verbs.h"
#include "unit/support/log_capture.h"
#include "verbs/qp.h"

namespace verbatim {
namespace {

TEST(Mlx5, NamedLibraryAnswersNo_IsNotSupported) {
  const std::optional<Mlx5> mlx5 = Mlx5::load(FAKE_MLX5_NO);
  ASSERT_TRUE(mlx5);
  EXPECT_FALSE(mlx5->is_supported(nullptr));
}

TEST(Mlx5, NamedLibraryAnswersYes_IsSupported) {
  const std::optional<Mlx5> mlx5 = Mlx5::load(FAKE_MLX5_YES);
  ASSERT_TRUE(mlx5);
  EXPECT_TRUE(mlx5->is_supported(nullptr));
}

TEST(Mlx5, NamedLibraryMissing_GivesOneWarning) {
  const LogCapture log;
  EXPECT_FALSE(Mlx5::load("/nonexistent/libmlx5.so"));
  EXPECT_EQ(log.only_warning().rfind("cannot open VERBATIM_MLX5_LIBRARY: /nonexistent", 0), 0U) << log.only_warning();
}

TEST(Mlx5, LibraryWithoutFunctions_IsNotUsed) {
  const LogCapture log;
  EXPECT_FALSE(Mlx5::load(FAKE_VERBS));
  EXPECT_TRUE(log.warnings().empty());
  EXPECT_EQ(log.infos().size(), 1U);
}

TEST(Mlx5, QueryDevice_ReturnsCapabilities) {
  Mlx5 mlx5;
  mlx5.query_device = [](ibv_context*, mlx5dv_context* attributes) {
    EXPECT_NE(attributes->comp_mask & MLX5DV_CONTEXT_MASK_NUM_LAG_PORTS, 0U);
    attributes->flags = MLX5DV_CONTEXT_FLAGS_CQE_V1;
    attributes->num_lag_ports = 2;
    return 0;
  };
  const Result<Mlx5Capabilities> capabilities = mlx5.capabilities(nullptr);
  ASSERT_TRUE(capabilities);
  EXPECT_EQ(capabilities->flags, std::uint64_t{MLX5DV_CONTEXT_FLAGS_CQE_V1});
  EXPECT_EQ(capabilities->num_lag_ports, 2);
}

// What a libmlx5 of release 54 and later answers.
struct DataDirectAnswers {
  int path_errno = 0;
  std::string path = "/devices/pci0009:00/0009:00:00.0/0009:01:00.0";
};
DataDirectAnswers g_answers;

Mlx5 with_data_direct(const DataDirectAnswers& answers) {
  g_answers = answers;
  Mlx5 mlx5;
  mlx5.reg_dmabuf_mr = [](ibv_pd*, std::uint64_t, std::size_t, std::uint64_t, int, int, int) -> ibv_mr* {
    return nullptr;
  };
  mlx5.get_data_direct_sysfs_path = [](ibv_context*, char* buffer, std::size_t bytes) {
    EXPECT_GT(bytes, g_answers.path.size());
    if (g_answers.path_errno == 0) std::strcpy(buffer, g_answers.path.c_str());
    return g_answers.path_errno;
  };
  return mlx5;
}

TEST(Mlx5, DataDirectPath_IsBelowSys) {
  ibv_context context = {};
  const Result<std::string> path = with_data_direct({}).data_direct_path(&context);
  ASSERT_TRUE(path);
  EXPECT_EQ(*path, "/sys/devices/pci0009:00/0009:00:00.0/0009:01:00.0");
}

TEST(Mlx5, NoDataDirect_IsNoError) {
  ibv_context context = {};
  // No interface; a kernel, a driver or a provider that does not know the call.
  for (const int error : {ENODEV, EPROTONOSUPPORT, EOPNOTSUPP}) {
    const Result<std::string> path = with_data_direct({.path_errno = error}).data_direct_path(&context);
    ASSERT_TRUE(path) << error;
    EXPECT_EQ(*path, "");
  }
  for (const bool has_path : {false, true}) {  // an old libmlx5
    Mlx5 old = with_data_direct({});
    if (has_path) old.reg_dmabuf_mr = nullptr;
    if (!has_path) old.get_data_direct_sysfs_path = nullptr;
    EXPECT_EQ(*old.data_direct_path(&context), "");
  }
}

TEST(Mlx5, DataDirectPathRefused_IsAnError) {
  ibv_context context = {};
  const Result<std::string> path = with_data_direct({.path_errno = ENOSPC}).data_direct_path(&context);
  ASSERT_FALSE(path);
  EXPECT_EQ(path.error().sys_errno, ENOSPC);
}

// The ports that QPs were assigned to.
std::vector<int> g_lag_ports;

// The port of a QP that is connected with this index.
int lag_port_of(Device& device, std::size_t index) {
  Port port;
  port.device = &device;
  port.link_layer = IBV_LINK_LAYER_INFINIBAND;
  const Config config;
  const Result<RcQp> made = make_qp(port, nullptr, {}, config);
  if (!made) return -1;
  QpConnection connection = to_oneself(port, made->qp.get(), 0, config);
  connection.lag_index = index;
  const Result<ConnectedQp> connected = connect_qp(made->qp.get(), port, connection, config);
  return connected ? connected->lag_port : -1;
}

TEST(Mlx5, Lag_QpIsAssignedToPort) {
  FakeVerbs fake;
  Mlx5 mlx5;
  mlx5.is_supported = [](ibv_device*) { return true; };
  mlx5.query_device = [](ibv_context*, mlx5dv_context* attributes) {
    attributes->num_lag_ports = 2;
    return 0;
  };
  mlx5.modify_qp_lag_port = [](ibv_qp*, std::uint8_t port) {
    g_lag_ports.push_back(port);
    return g_lag_ports.size() == 3 ? EOPNOTSUPP : 0;
  };
  g_lag_ports.clear();
  const auto device = Device::open(fake.table, &mlx5, &fake.add_device("mlx5_0").device, false);
  ASSERT_TRUE(device);
  EXPECT_EQ(lag_index(**device, 0, 0, 1), std::nullopt) << "fewer QPs than ports";
  EXPECT_EQ(lag_index(**device, 0, 1, 2), 1U);
  EXPECT_EQ(lag_index(**device, std::uint64_t{1} << 48, 1, 2), 0U) << "another connection begins with another port";
  EXPECT_EQ(lag_port_of(**device, 0), 1);
  EXPECT_EQ(lag_port_of(**device, 1), 2);
  EXPECT_EQ(lag_port_of(**device, 0), 0) << "refused by the driver";
  EXPECT_EQ(lag_port_of(**device, 2), 0) << "no such port";
  EXPECT_EQ(g_lag_ports, (std::vector<int>{1, 2, 1}));
}

TEST(Mlx5, NoLag_QpsAreNotAssigned) {
  FakeVerbs fake;
  Mlx5 mlx5;
  mlx5.is_supported = [](ibv_device*) { return true; };
  static std::uint8_t ports;
  mlx5.query_device = [](ibv_context*, mlx5dv_context* attributes) {
    attributes->num_lag_ports = ports;
    return 0;
  };
  for (ports = 0; ports < 2; ++ports) {
    mlx5.modify_qp_lag_port = [](ibv_qp*, std::uint8_t) {
      ADD_FAILURE() << "there is no LAG";
      return 0;
    };
    const auto device = Device::open(fake.table, &mlx5, &fake.add_device("mlx5_0").device, false);
    ASSERT_TRUE(device);
    EXPECT_EQ(lag_index(**device, 0, 0, 2), std::nullopt);
    EXPECT_EQ(lag_port_of(**device, 1), 0);
  }
  mlx5.modify_qp_lag_port = nullptr;  // an old library, with a LAG
  const auto device = Device::open(fake.table, &mlx5, &fake.add_device("mlx5_0").device, false);
  ASSERT_TRUE(device);
  EXPECT_EQ(lag_port_of(**device, 1), 0);
}

TEST(Mlx5, FieldNotInCompMask_IsIgnored) {
  Mlx5 mlx5;
  mlx5.query_device = [](ibv_context*, mlx5dv_context* attributes) {
    attributes->comp_mask = 0;
    attributes->num_lag_ports = 9;
    return 0;
  };
  EXPECT_EQ(mlx5.capabilities(nullptr)->num_lag_ports, 0);
  mlx5.query_device = [](ibv_context*, mlx5dv_context*) { return EOPNOTSUPP; };
  EXPECT_EQ(mlx5.capabilities(nullptr).error().sys_errno, EOPNOTSUPP);
}

}  // namespace
}  // namespace verbatim
