//: program softverbs_installation_test sources=support/child.cc link=verbs_test,verbs,gtest
//: test softverbs-installation needs=softverbs_mlx5 VERBS_TEST_LIBRARY={softverbs}

// The variables of softverbs, their refusal when malformed, and the installed file names. A process reads the variables
// once, so each case runs in a child process; the parent never opens the library.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <utility>

#include "support/child.h"
#include "support/verbs_fixture.h"
#include "verbs/device_inventory.h"

namespace verbatim::test {
namespace {

int device_count() {
  int count = 0;
  ibv_device** const list = verbs().get_device_list(&count);
  if (list != nullptr) verbs().free_device_list(list);
  return count;
}

int devices_with(const std::string& variable, const std::string& value) {
  return run_in_child({{variable, value}}, device_count).status;
}

// 0 when `check` is true for the first device with this variable set.
int first_device_with(const std::string& variable, const std::string& value,
                      const std::function<bool(const Device&)>& check) {
  const ChildResult result =
      run_in_child({{"SOFTVERBS_DEVICES", "1"}, {variable, value}}, [&] { return check(open_device()) ? 0 : 1; });
  EXPECT_EQ(result.stderr_text, "");
  return result.status;
}

TEST(Settings, DeviceCount_IsListed) {
  EXPECT_EQ(devices_with("SOFTVERBS_DEVICES", "0"), 0);
  EXPECT_EQ(devices_with("SOFTVERBS_DEVICES", "1"), 1);
  EXPECT_EQ(devices_with("SOFTVERBS_DEVICES", "16"), 16);
  EXPECT_EQ(devices_with("SOFTVERBS_DEVICES", ""), 1);  // the same as unset
}

TEST(Settings, MalformedValue_IsNamed_AndNoDeviceIsListed) {
  const std::pair<const char*, const char*> cases[] = {
      {"SOFTVERBS_DEVICES", "17"},      {"SOFTVERBS_DEVICES", "-1"},      {"SOFTVERBS_DEVICES", "two"},
      {"SOFTVERBS_DEVICES", "1x"},      {"SOFTVERBS_DEVICES", " 1"},      {"SOFTVERBS_DEVICES", "99999999999999999999"},
      {"SOFTVERBS_ENGINE", "Thread"},   {"SOFTVERBS_LINK_LAYER", "opa"},  {"SOFTVERBS_MTU", "1000"},
      {"SOFTVERBS_SPEED_GBPS", "123"},  {"SOFTVERBS_NAMESPACE", "../up"}, {"SOFTVERBS_MAX_QP_WR", "0"},
      {"SOFTVERBS_MAX_SGE", "1000000"},
  };
  for (const auto& [name, value] : cases) {
    const ChildResult result = run_in_child({{name, value}}, [] { return device_count() + device_count(); });
    EXPECT_EQ(result.status, 0) << name << "=" << value;
    EXPECT_NE(result.stderr_text.find(std::string(name) + "=" + value), std::string::npos) << result.stderr_text;
    EXPECT_EQ(std::count(result.stderr_text.begin(), result.stderr_text.end(), '\n'), 1)
        << result.stderr_text;  // printed once
  }
}

TEST(Settings, LinkLayer_IsReported) {
  EXPECT_EQ(first_device_with("SOFTVERBS_LINK_LAYER", "ib", [](const Device& device) { return !device.is_roce(); }), 0);
  EXPECT_EQ(first_device_with("SOFTVERBS_LINK_LAYER", "roce", [](const Device& device) { return device.is_roce(); }),
            0);
}

TEST(Settings, PortAttributes_AreReported) {
  EXPECT_EQ(first_device_with("SOFTVERBS_MTU", "1024",
                              [](const Device& device) { return device.port.active_mtu == IBV_MTU_1024; }),
            0);
  EXPECT_EQ(first_device_with("SOFTVERBS_MAX_MSG_SZ", "65536",
                              [](const Device& device) { return device.port.max_msg_sz == 65536; }),
            0);
  for (const unsigned gbps : {10U, 25U, 40U, 50U, 100U, 200U, 400U, 800U}) {
    EXPECT_EQ(first_device_with("SOFTVERBS_SPEED_GBPS", std::to_string(gbps),
                                [&](const Device& device) {
                                  return port_speed_mbps(device.port.active_speed, device.port.active_width) ==
                                         gbps * 1000;
                                }),
              0)
        << gbps;
  }
}

TEST(Settings, SpeedOfEachDevice_IsReported) {
  const ChildResult result = run_in_child({{"SOFTVERBS_DEVICES", "3"}, {"SOFTVERBS_SPEED_GBPS", "100,25"}}, [] {
    for (const auto& [device, gbps] : {std::pair{0U, 100U}, {1U, 25U}, {2U, 25U}}) {
      const ibv_port_attr port = open_device(device).port;
      if (port_speed_mbps(port.active_speed, port.active_width) != gbps * 1000) return 1;
    }
    return 0;
  });
  EXPECT_EQ(result.status, 0) << result.stderr_text;
}

TEST(Settings, Limits_AreReported_AndEnforced) {
  EXPECT_EQ(first_device_with("SOFTVERBS_MAX_QP_WR", "77",
                              [](const Device& device) {
                                const Endpoint fits(device, {.send_wr = 77, .recv_wr = 77});
                                try {
                                  const Endpoint too_deep(device, {.send_wr = 78});
                                } catch (const std::exception&) {
                                  return device.attr.max_qp_wr == 77;
                                }
                                return false;
                              }),
            0);
  EXPECT_EQ(first_device_with("SOFTVERBS_MAX_INLINE", "0",
                              [](const Device& device) {
                                const Endpoint without(device, {.inline_bytes = 0});
                                try {
                                  const Endpoint with(device, {.inline_bytes = 1});
                                } catch (const std::exception&) {
                                  return true;
                                }
                                return false;
                              }),
            0);
  EXPECT_EQ(first_device_with("SOFTVERBS_MAX_SGE", "3", [](const Device& device) { return device.attr.max_sge == 3; }),
            0);
  EXPECT_EQ(first_device_with("SOFTVERBS_MAX_CQE", "500",
                              [](const Device& device) {
                                const Cq fits = create_cq(device, 500);
                                return device.attr.max_cqe == 500 &&
                                       verbs().create_cq(device.context.get(), 501, nullptr, nullptr, 0) == nullptr;
                              }),
            0);
}

// Creating one object more than the limit fails; after one was destroyed it succeeds.
TEST(Settings, ObjectLimits_AreEnforced) {
  EXPECT_EQ(first_device_with("SOFTVERBS_MAX_QP", "3",
                              [](const Device& device) {
                                std::vector<std::unique_ptr<Endpoint>> qps;
                                for (int i = 0; i < 3; ++i) qps.push_back(std::make_unique<Endpoint>(device));
                                try {
                                  const Endpoint fourth(device);
                                  return false;
                                } catch (const std::exception&) {
                                  qps.pop_back();
                                }
                                const Endpoint again(device);
                                return true;
                              }),
            0);
  EXPECT_EQ(first_device_with("SOFTVERBS_MAX_MR", "2",
                              [](const Device& device) {
                                std::byte bytes[64];
                                const Mr first = reg_mr(device.pd.get(), bytes, sizeof(bytes));
                                Mr second = reg_mr(device.pd.get(), bytes, sizeof(bytes));
                                if (verbs().reg_mr(device.pd.get(), bytes, sizeof(bytes), 0) != nullptr) return false;
                                if (errno != ENOMEM) return false;
                                second.reset();
                                second = reg_mr(device.pd.get(), bytes, sizeof(bytes));
                                return true;
                              }),
            0);
}

// NCCL opens libibverbs.so before libibverbs.so.1, and libmlx5.so before libmlx5.so.1. Both names must lead to
// softverbs' library and not to the system's.
TEST(Installation, BothLibraries_HaveBothNames) {
  const std::filesystem::path directory = std::filesystem::path(std::getenv("VERBS_TEST_LIBRARY")).parent_path();
  for (const std::string name : {"libibverbs.so", "libmlx5.so"}) {
    ASSERT_TRUE(std::filesystem::exists(directory / name)) << name;
    EXPECT_TRUE(std::filesystem::equivalent(directory / name, directory / (name + ".1"))) << name;
  }
}

TEST(Installation, AnyDevice_IsNotAnMlx5Device) {
  const std::filesystem::path directory = std::filesystem::path(std::getenv("VERBS_TEST_LIBRARY")).parent_path();
  const ChildResult result = run_in_child({}, [&] {
    void* const mlx5 = dlopen((directory / "libmlx5.so.1").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (mlx5 == nullptr) return 1;
    using IsSupported = bool (*)(ibv_device*);
    const auto is_supported = reinterpret_cast<IsSupported>(dlvsym(mlx5, "mlx5dv_is_supported", "MLX5_1.8"));
    if (is_supported == nullptr) {
      std::fprintf(stderr, "%s\n", dlerror());
      return 2;
    }
    return is_supported(open_device().context->device) ? 3 : 0;
  });
  EXPECT_EQ(result.status, 0) << result.stderr_text;
}

}  // namespace
}  // namespace verbatim::test
