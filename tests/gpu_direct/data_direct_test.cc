// Data Direct: what NCCL gets as devices, and that GPU memory, and no other, is registered for it.
#include <algorithm>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "gpu_test.h"

namespace gpu_direct {
namespace {

// What a process with this setting finds: "NAME PCI-PATH FORCE-FLUSH" of each device, or "FORCE-FLUSH" of two as one.
std::vector<std::string> described_devices(int version, const char* variable, const char* value,
                                           std::string_view what = "device ") {
  conformance::Process process(
      "describe", version, {{"SOFTVERBS_DEVICES", "2"}, {"SOFTVERBS_DATA_DIRECT", "5356:41:00.0"}, {variable, value}});
  const conformance::Exit end = process.wait();
  EXPECT_EQ(end.status, 0) << end.output;
  std::vector<std::string> found;
  std::istringstream lines(end.output);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(what)) found.push_back(line.substr(what.size()));
  }
  std::sort(found.begin(), found.end());
  return found;
}

TEST(DataDirect, Devices_AreThoseOfTheSetting) {
  const std::string with = "verbatim_softverbs0_dma /sys/devices/pci5356:41/5356:41:00.0 1";
  const auto names_and_flush = [&](const char* variable, const char* value, int version) {
    std::vector<std::string> all = described_devices(version, variable, value);
    for (std::string& device : all) {
      if (device != with) device = device.substr(0, device.find(' ')) + device.substr(device.rfind(' '));
    }
    return all;
  };
  using Devices = std::vector<std::string>;
  const Devices only{with, "verbatim_softverbs1 0"};
  for (const int version : {10, 11, 12}) EXPECT_EQ(names_and_flush("NCCL_IB_DATA_DIRECT", "", version), only);
  EXPECT_EQ(names_and_flush("NCCL_IB_DATA_DIRECT", "1", 12), only);
  EXPECT_EQ(names_and_flush("NCCL_IB_DATA_DIRECT", "2", 12),
            (Devices{"verbatim_softverbs0 0", with, "verbatim_softverbs1 0"}));
  const Devices none{"verbatim_softverbs0 0", "verbatim_softverbs1 0"};
  EXPECT_EQ(names_and_flush("NCCL_IB_DATA_DIRECT", "0", 12), none);
  EXPECT_EQ(names_and_flush("VERBATIM_DATA_DIRECT", "0", 12), none);
  // The second one has the interface.
  EXPECT_EQ(described_devices(12, "NCCL_IB_DATA_DIRECT", "1", "merged "), Devices{"1"});
  EXPECT_EQ(described_devices(12, "NCCL_IB_DATA_DIRECT", "0", "merged "), Devices{"0"});
  // Their NCCL knows no Data Direct.
  for (const int version : {6, 7, 8, 9}) EXPECT_EQ(names_and_flush("VERBATIM_DATA_DIRECT", "2", version), none);
}

// With SOFTVERBS_FAULTS='fail verb=mlx5dv_reg_dmabuf_mr count=all errno=EINVAL'.
class DataDirectRefused : public GpuTest {};
ONE_VERSION(DataDirectRefused, 12);

TEST_P(DataDirectRefused, GpuMemoryOnly_HasOneLine) {
  constexpr std::size_t kSize = 100'000;
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  Buffer gpu({0, Kind::kAllocated, How::kDmabuf}, kSize);
  void* mhandle = nullptr;
  nccl::Result result{};
  service().run([&] {
    result = register_memory(net(), link.recv_comm, gpu.data(), kSize, gpu.place(), &mhandle, {}, gpu.start());
  });
  EXPECT_EQ(result, nccl::Result::kSystemError);
  EXPECT_EQ(mhandle, nullptr);
  const std::vector<std::string> warnings = take_warnings();
  ASSERT_EQ(warnings.size(), 1U) << joined(warnings);
  EXPECT_NE(warnings[0].find("softverbs0: mlx5dv_reg_dmabuf_mr of "), std::string::npos) << warnings[0];
  EXPECT_NE(warnings[0].find(" failed: Invalid argument. Next: "), std::string::npos) << warnings[0];
  exchange(link, {{kSize}}, {.from = {}, .to = {}});
}

}  // namespace
}  // namespace gpu_direct
