#include "verbs/device_inventory.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "support/log_lines.h"
#include "support/scratch_directory.h"
#include "unit/support/fake_verbs.h"
#include "unit/support/log_capture.h"

namespace verbatim {
namespace {

class DeviceInventoryTest : public testing::Test {
 protected:
  Result<std::shared_ptr<const DeviceSurvey>> try_open() {
    return DeviceSurvey::open(fake_.table, mlx5_, config_, root_.string());
  }

  std::shared_ptr<const DeviceSurvey> open() {
    auto opened = try_open();
    EXPECT_TRUE(opened);
    return opened ? *opened : nullptr;
  }

  std::string names(const DeviceSurvey& inventory) const {
    std::string all;
    for (const Port& port : inventory.ports) all.append(all.empty() ? "" : " ").append(port.nccl_name);
    return all;
  }

  // Gives the device a PCI address, e.g. "0000:0c:00.0".
  void set_pci_address(FakeDevice& device, const std::string& pci_address) const {
    const std::filesystem::path directory = root_ / "class" / device.device.name;
    std::filesystem::create_directories(directory);
    std::filesystem::create_directories(root_ / "devices" / pci_address / "driver");
    std::filesystem::create_symlink(root_ / "devices" / pci_address, directory / "device");
    directory.string().copy(device.device.ibdev_path, sizeof device.device.ibdev_path - 1);
  }

  std::vector<std::string> infos_with(const char* part) const {
    auto infos = log_.infos();
    std::erase_if(infos, [&](const std::string& line) { return line.find(part) == std::string::npos; });
    return infos;
  }

  void load_peer_memory() const { std::filesystem::create_directories(root_ / "sys/module/nvidia_peermem"); }

  const ScratchDirectory scratch_;
  const std::filesystem::path root_ = scratch_.path();
  LogCapture log_;
  FakeVerbs fake_;
  Config config_;
  const Mlx5* mlx5_ = nullptr;
};

TEST_F(DeviceInventoryTest, SeveralDevices_ListsEveryActivePort) {
  fake_.add_device("mlx5_0").add_roce_port();
  FakeDevice& two_ports = fake_.add_device("mlx5_1");
  two_ports.add_infiniband_port();
  two_ports.add_roce_port();
  const auto inventory = open();
  ASSERT_TRUE(inventory);
  EXPECT_EQ(names(*inventory), "verbatim_mlx5_0 verbatim_mlx5_1 verbatim_mlx5_1_p2");
  EXPECT_EQ(inventory->devices.size(), 2U);
  EXPECT_TRUE(inventory->skipped.empty());

  const Port& roce = inventory->ports[0];
  EXPECT_TRUE(roce.is_roce());
  EXPECT_EQ(roce.speed_mbps, 200'000U);
  EXPECT_EQ(roce.guid, 0x1122334455667700U);
  EXPECT_EQ(roce.active_mtu, IBV_MTU_4096);
  EXPECT_EQ(roce.max_msg_bytes, std::uint64_t{1} << 30);
  EXPECT_EQ(roce.pci_path, std::nullopt);
  EXPECT_EQ(roce.ptr_support, unsigned{kPtrHost});
  EXPECT_EQ(to_string(roce.gid.gid), "::ffff:10.0.0.1");
  EXPECT_FALSE(roce.adaptive_routing);
  EXPECT_EQ(roce.rail_id, -1);
  EXPECT_EQ(roce.plane_id, -1);

  const Port& infiniband = inventory->ports[1];
  EXPECT_FALSE(infiniband.is_roce());
  EXPECT_EQ(infiniband.lid, 17);
  EXPECT_TRUE(infiniband.adaptive_routing);
  EXPECT_EQ(infiniband.device, inventory->ports[2].device);
  EXPECT_EQ(inventory->ports[2].port_num, 2);
}

TEST_F(DeviceInventoryTest, LastOwnerGone_ClosesEverything) {
  fake_.add_device("mlx5_0").add_roce_port();
  fake_.add_device("mlx5_1").add_roce_port().attributes.state = IBV_PORT_DOWN;
  {
    const auto inventory = open();
    EXPECT_EQ(fake_.live("context"), 1);  // a device without a usable port is closed at once
    EXPECT_EQ(fake_.live("pd"), 1);
    EXPECT_EQ(fake_.live("list"), 0);
  }
  EXPECT_EQ(fake_.live("context"), 0);
  EXPECT_EQ(fake_.live("pd"), 0);
}

TEST_F(DeviceInventoryTest, PortDown_RenamesNoOther) {
  FakeDevice& device = fake_.add_device("mlx5_0");
  device.add_roce_port().attributes.state = IBV_PORT_DOWN;
  device.add_roce_port();
  EXPECT_EQ(names(*open()), "verbatim_mlx5_0_p2");
}

TEST_F(DeviceInventoryTest, FunctionsOfOneNic_HaveDistinctPortNumbers) {
  fake_.add_device("mlx5_0").add_roce_port();
  fake_.add_device("mlx5_1").add_roce_port();  // the second function of the same card: same GUID, port 1 again
  FakeDevice& other = fake_.add_device("mlx5_2");
  other.add_roce_port();
  other.attributes.sys_image_guid = 1;
  const auto inventory = open();
  EXPECT_EQ(inventory->ports[0].topology_port, 1U);
  EXPECT_EQ(inventory->ports[1].topology_port, 2U);
  EXPECT_EQ(inventory->ports[2].topology_port, 1U);
}

TEST_F(DeviceInventoryTest, SeveralDevices_AreOrderedByPciNamePort) {
  for (const char* name : {"mlx5_10", "mlx5_2", "mlx5_0", "mlx5_1"}) fake_.add_device(name).add_roce_port();
  set_pci_address(*fake_.devices()[2], "0000:9a:00.0");  // mlx5_0
  set_pci_address(*fake_.devices()[3], "0000:0c:00.1");  // mlx5_1
  const auto inventory = open();
  EXPECT_EQ(names(*inventory), "verbatim_mlx5_2 verbatim_mlx5_10 verbatim_mlx5_1 verbatim_mlx5_0");
  ASSERT_TRUE(inventory->ports[2].pci_path);
  EXPECT_TRUE(inventory->ports[2].pci_path->ends_with("/devices/0000:0c:00.0"));
}

TEST_F(DeviceInventoryTest, HcaFilter_SelectsAndNumbersRails) {
  for (const char* name : {"mlx5_0", "mlx5_1", "bnxt_0"}) {
    FakeDevice& device = fake_.add_device(name);
    device.add_roce_port();
    device.add_roce_port();
  }
  config_.hca = {"mlx5_0:2:4:1,mlx5_1:1", "NCCL_IB_HCA"};
  const auto inventory = open();
  EXPECT_EQ(names(*inventory), "verbatim_mlx5_0_p2 verbatim_mlx5_1");
  EXPECT_EQ(inventory->ports[0].rail_id, 4);
  EXPECT_EQ(inventory->ports[0].plane_id, 1);
  ASSERT_EQ(inventory->skipped.size(), 3U);
  EXPECT_EQ(inventory->skipped[0].reason, "not selected by NCCL_IB_HCA=mlx5_0:2:4:1,mlx5_1:1");
  EXPECT_EQ(fake_.calls("open_device"), 2);  // devices that are not selected are not opened
  EXPECT_TRUE(log_.warnings().empty());
}

TEST_F(DeviceInventoryTest, MalformedHcaFilter_IsRejectedWithVariableName) {
  fake_.add_device("mlx5_0").add_roce_port();
  config_.hca = {"mlx5_0:x", "NCCL_IB_HCA"};
  const auto opened = try_open();
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().kind, ErrorKind::kUsage);
  test::expect_log_lines(log_.warnings());
}

TEST_F(DeviceInventoryTest, NoUsableDevice_OneWarningGivesEveryReason) {
  fake_.add_device("mlx5_0").add_roce_port().attributes.state = IBV_PORT_DOWN;
  fake_.add_device("mlx5_1").add_roce_port().attributes.state = IBV_PORT_DOWN;
  fake_.add_device("mlx5_2").add_infiniband_port().attributes.state = IBV_PORT_INIT;
  fake_.add_device("mlx5_3").add_roce_port().gids = {std::nullopt};
  fake_.add_device("mlx5_4").add_roce_port().query_errno = EIO;
  fake_.add_device("siw0").device.transport_type = IBV_TRANSPORT_IWARP;
  fake_.add_device("bnxt_0");
  config_.hca = {"^bnxt", "VERBATIM_HCA"};
  const auto opened = try_open();
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().kind, ErrorKind::kUsage);
  test::expect_log_lines(log_.warnings());
  EXPECT_EQ(fake_.live("context"), 0);
  EXPECT_EQ(fake_.live("pd"), 0);
}

// What verbatim-info shows, for every cause but one: a port that is not active for another reason.
TEST_F(DeviceInventoryTest, Survey_KeepsEveryDeviceAndSaysWhatToDo) {
  fake_.add_device("mlx5_0").add_roce_port();
  fake_.add_device("mlx5_1").add_roce_port().attributes.state = IBV_PORT_DOWN;
  fake_.add_device("mlx5_2").add_infiniband_port().attributes.state = IBV_PORT_ARMED;
  fake_.add_device("mlx5_3").add_roce_port().gids = {std::nullopt};
  fake_.add_device("mlx5_4").add_roce_port().query_errno = EIO;
  fake_.add_device("mlx5_5").add_roce_port();
  fake_.add_device("mlx5_6").open_errno = EACCES;
  fake_.add_device("siw0").device.transport_type = IBV_TRANSPORT_IWARP;
  fake_.add_device("bnxt_0");
  config_.hca = {"^bnxt", "NCCL_IB_HCA"};
  config_.gid = {.per_device = {{"mlx5_5", 9U}}, .variable = "NCCL_IB_GID_INDEX"};
  const auto survey = DeviceSurvey::make(fake_.table, nullptr, config_, root_.string(), DeviceSurvey::Unused::kKeep);
  ASSERT_TRUE(survey);
  EXPECT_EQ(survey->devices.size(), 6U);
  ASSERT_EQ(survey->ports.size(), 1U);
  EXPECT_EQ(survey->ports[0].name, "mlx5_0:1");
  EXPECT_TRUE(survey->has_failed);
  EXPECT_TRUE(log_.warnings().empty());
  const std::pair<SkipCause, const char*> expected[] = {
      {SkipCause::kPortDown, "check the cable"},         {SkipCause::kNoSubnetManager, "start a subnet manager"},
      {SkipCause::kNoGid, "give the network interface"}, {SkipCause::kQueryFailed, "look for the driver's reason"},
      {SkipCause::kGidSetting, "set NCCL_IB_GID_INDEX"}, {SkipCause::kOpenFailed, "check that this user may"},
      {SkipCause::kTransport, "none: Verbatim needs"},   {SkipCause::kNotSelected, "if it is to be used, select"}};
  ASSERT_EQ(survey->skipped.size(), std::size(expected));
  for (std::size_t i = 0; i < std::size(expected); ++i) {
    EXPECT_EQ(survey->skipped[i].cause, expected[i].first) << i;
    EXPECT_EQ(next_step(survey->skipped[i], config_).rfind(expected[i].second, 0), 0U) << i;
  }
}

TEST_F(DeviceInventoryTest, DeviceOpenFails_IsSkippedWithErrno) {
  fake_.add_device("mlx5_0").add_roce_port();
  std::vector<std::string> lines;
  for (const auto& [verb, code] : {std::pair{"open_device", EACCES}, {"alloc_pd", ENOMEM}, {"query_device", EIO}}) {
    const LogCapture log;
    fake_.failures = {{verb, code}};
    EXPECT_FALSE(try_open());
    lines.push_back(log.only_warning());
    EXPECT_EQ(fake_.live("context"), 0);
    EXPECT_EQ(fake_.live("pd"), 0);
  }
  test::expect_log_lines(lines);
}

// Without a warning, an operator would not notice the lost bandwidth, because the other devices work.
TEST_F(DeviceInventoryTest, OneDeviceOpenFails_IsWarning) {
  fake_.add_device("mlx5_0").add_roce_port();
  FakeDevice& second = fake_.add_device("mlx5_1");
  std::snprintf(second.device.dev_name, sizeof second.device.dev_name, "uverbs1");
  second.open_errno = EACCES;
  ASSERT_TRUE(try_open());
  test::expect_log_lines(log_.warnings());
}

// EAGAIN is the error for an object beyond the limit of the control group, and of mlx5 for one beyond its own.
TEST_F(DeviceInventoryTest, ControlGroupIsFull_IsTheReason) {
  fake_.add_device("mlx5_0").add_roce_port();
  for (const char* verb : {"open_device", "alloc_pd"}) {
    fake_.failures = {{verb, EAGAIN}};
    const Result<DeviceSurvey> survey =
        DeviceSurvey::make(fake_.table, nullptr, config_, root_.string(), DeviceSurvey::Unused::kKeep);
    ASSERT_TRUE(survey);
    ASSERT_EQ(survey->skipped.size(), 1U);
    EXPECT_EQ(survey->skipped[0].reason, std::string("ibv_") + verb + " failed: Resource temporarily unavailable");
    EXPECT_EQ(
        next_step(survey->skipped[0], config_),
        "compare hca_handle and hca_object of mlx5_0 in the file rdma.max of the control group with 'rdma resource "
        "show': the limit is reached, or the device has nothing left");
  }
}

TEST_F(DeviceInventoryTest, ControlGroupWithLimits_IsNamed) {
  for (const char* name : {"mlx5_0", "mlx5_1"}) fake_.add_device(name).add_roce_port();
  const auto write = [&](const char* file, const char* text) {
    const std::filesystem::path path = root_ / file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  };
  write("proc/self/cgroup", "0::/job/step\n");
  write("sys/fs/cgroup/job/step/rdma.max",
        "mlx5_0 hca_handle=max hca_object=max\nmlx5_1 hca_handle=max hca_object=max\n");
  write("sys/fs/cgroup/job/rdma.max", "mlx5_0 hca_handle=max hca_object=max\nmlx5_1 hca_handle=2 hca_object=max\n");
  open();
  test::expect_log_lines(infos_with("the rdma control group limits"));
}

// 256 MiB, as many GPUs without a large BAR1 have.
TEST_F(DeviceInventoryTest, SmallBar1_IsNamed) {
  FakeDevice& device = fake_.add_device("mlx5_0");
  device.add_roce_port();
  device.dmabuf_errno = 0;
  const auto add_gpu = [&](const char* name, const std::string& regions) {
    const std::filesystem::path directory = root_ / "sys/bus/pci/drivers/nvidia" / name;
    std::filesystem::create_directories(directory);
    std::ofstream(directory / "resource") << regions;
  };
  const std::string bar0 = "0x00000000fa000000 0x00000000faffffff 0x0000000000040200\n";
  const std::string small = "0x00000000e0000000 0x00000000efffffff 0x000000000014220c\n";
  const std::string large = "0x0000380000000000 0x0000381fffffffff 0x000000000014220c\n";
  const std::string none = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
  add_gpu("0000:3b:00.0", bar0 + large + none + small);         // 32-bit BAR0
  add_gpu("0000:3c:00.0", bar0 + none + large + none + small);  // 64-bit BAR0
  add_gpu("0000:3d:00.0", none + none + none);
  add_gpu("module", bar0 + small);
  open();
  EXPECT_TRUE(infos_with("BAR1").empty());
  // The regions of virtual functions come behind the ROM.
  add_gpu("0000:3e:00.0", bar0 + small + none + none + none + none + none + large);
  open();
  test::expect_log_lines(infos_with("BAR1"));
}

TEST_F(DeviceInventoryTest, NoDevice_IsError) {
  EXPECT_EQ(try_open().error().sys_errno, ENODEV);
  EXPECT_EQ(log_.only_warning().rfind("no RDMA: libibverbs finds no device.", 0), 0U) << log_.only_warning();
  EXPECT_EQ(fake_.live("list"), 0);
}

TEST_F(DeviceInventoryTest, DeviceListFails_IsError) {
  fake_.failures["get_device_list"] = ENOSYS;
  EXPECT_EQ(try_open().error().sys_errno, ENOSYS);
  EXPECT_NE(log_.only_warning().find("cannot list devices: Function not implemented"), std::string::npos);
}

TEST_F(DeviceInventoryTest, ForkInitFails_IsIgnored) {
  fake_.add_device("mlx5_0").add_roce_port();
  fake_.failures["fork_init"] = EINVAL;
  EXPECT_TRUE(open());
  EXPECT_EQ(fake_.calls("fork_init"), 1);
}

TEST_F(DeviceInventoryTest, GidIndexMissingOnOneDevice_IsWarning) {
  fake_.add_device("mlx5_0").add_roce_port().gids.emplace_back(fake_gid("::ffff:10.0.0.9", IBV_GID_TYPE_ROCE_V2));
  fake_.add_device("mlx5_1").add_roce_port();
  config_.gid = {.everywhere = 1U, .variable = "NCCL_IB_GID_INDEX"};
  const auto inventory = open();
  EXPECT_EQ(names(*inventory), "verbatim_mlx5_0");
  EXPECT_EQ(inventory->ports[0].gid.index, 1U);
  test::expect_log_lines(log_.warnings());
}

// Names of NCCL's devices begin with "verbatim_".
TEST_F(DeviceInventoryTest, GidIndexOfUnknownDevice_IsWarning) {
  fake_.add_device("mlx5_0").add_roce_port();
  fake_.add_device("mlx5_1").add_roce_port();
  config_.gid = {.per_device = {{"mlx5_0", 0U}, {"verbatim_mlx5_1", 0U}}, .variable = "NCCL_IB_GID_INDEX"};
  open();
  test::expect_log_lines(log_.warnings());
}

TEST_F(DeviceInventoryTest, GidTableWithoutEntries_IsSaid) {
  fake_.add_device("mlx5_0").add_roce_port().gids.clear();
  config_.gid = {.everywhere = 3U, .variable = "VERBATIM_GID_INDEX"};
  EXPECT_FALSE(try_open());
  test::expect_log_lines(log_.warnings());
}

TEST_F(DeviceInventoryTest, PkeyIndexOutOfTable_IsSaid) {
  fake_.add_device("mlx5_0").add_roce_port().attributes.pkey_tbl_len = 128;
  fake_.add_device("mlx5_1").add_roce_port().attributes.pkey_tbl_len = 1;
  config_.pkey_index = 1;
  const auto inventory = open();
  EXPECT_EQ(names(*inventory), "verbatim_mlx5_0");
  test::expect_log_lines(log_.warnings());
}

TEST_F(DeviceInventoryTest, PkeyThatCannotBeRead_IsSaid) {
  fake_.add_device("mlx5_0").add_roce_port().attributes.pkey_tbl_len = 128;
  config_.pkey_index = 5;
  fake_.failures["query_pkey"] = EINVAL;
  EXPECT_FALSE(try_open());
  test::expect_log_lines(log_.warnings());
}

TEST_F(DeviceInventoryTest, DriverFeatures_DeterminePtrSupport) {
  enum Files { kNone, kWithoutDriver, kWithDriver };
  for (const Files files : {kNone, kWithoutDriver, kWithDriver}) {
    for (const bool peer_memory : {false, true}) {
      for (const int dmabuf_errno : {EOPNOTSUPP, EPROTONOSUPPORT, EBADF, EINVAL, 0}) {
        std::filesystem::remove_all(root_);
        fake_.devices().clear();
        FakeDevice& device = fake_.add_device("mlx5_0");
        device.add_roce_port();
        device.dmabuf_errno = dmabuf_errno;
        const bool kernel_driver = files == kWithDriver;
        if (files != kNone) set_pci_address(device, "0000:0c:00.0");
        if (files == kWithoutDriver) std::filesystem::remove(root_ / "devices/0000:0c:00.0/driver");
        if (peer_memory) load_peer_memory();
        const bool dmabuf = dmabuf_errno != EOPNOTSUPP && dmabuf_errno != EPROTONOSUPPORT;
        const unsigned expected =
            kPtrHost | (kernel_driver && peer_memory ? kPtrCuda : 0U) | (dmabuf ? kPtrDmaBuf : 0U);
        EXPECT_EQ(open()->ports[0].ptr_support, expected) << files << peer_memory << dmabuf_errno;
      }
    }
  }
}

TEST_F(DeviceInventoryTest, NoGpuMemory_ReasonIsLoggedOnce) {
  for (const char* name : {"mlx5_0", "mlx5_1"}) {
    FakeDevice& device = fake_.add_device(name);
    device.add_roce_port();
    set_pci_address(device, std::string("0000:0c:00.") + name[5]);
  }
  open();
  EXPECT_TRUE(log_.warnings().empty()) << "there is no GPU";
  test::expect_log_lines(infos_with("GPU memory cannot be registered"));
  std::filesystem::create_directories(root_ / "sys/module/nvidia");
  open();
  test::expect_log_lines(log_.warnings());
}

TEST_F(DeviceInventoryTest, LibraryWithoutDmaBuf_HostMemoryOnly) {
  FakeDevice& device = fake_.add_device("mlx5_0");
  device.add_roce_port();
  device.dmabuf_errno = 0;
  fake_.table.reg_dmabuf_mr = nullptr;
  EXPECT_EQ(open()->ports[0].ptr_support, unsigned{kPtrHost});
}

TEST_F(DeviceInventoryTest, RelaxedOrdering_FollowsSettingAndLibrary) {
  fake_.add_device("mlx5_0").add_roce_port();
  EXPECT_TRUE(open()->devices[0]->relaxed_ordering());
  config_.relaxed_ordering = Switch::kOff;
  EXPECT_FALSE(open()->devices[0]->relaxed_ordering());
  fake_.table.reg_mr_iova2 = nullptr;
  config_.relaxed_ordering = Switch::kAuto;
  EXPECT_FALSE(open()->devices[0]->relaxed_ordering());
  config_.relaxed_ordering = Switch::kOn;
  const auto opened = try_open();
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().kind, ErrorKind::kUsage);
  EXPECT_EQ(log_.only_warning().rfind("VERBATIM_RELAXED_ORDERING=1", 0), 0U) << log_.only_warning();
}

TEST_F(DeviceInventoryTest, AdaptiveRoutingSetting_OverridesLinkLayer) {
  FakeDevice& device = fake_.add_device("mlx5_0");
  device.add_roce_port();
  device.add_infiniband_port();
  config_.adaptive_routing = Switch::kOn;
  EXPECT_TRUE(open()->ports[0].adaptive_routing);
  config_.adaptive_routing = Switch::kOff;
  EXPECT_FALSE(open()->ports[1].adaptive_routing);
}

TEST_F(DeviceInventoryTest, Mlx5Library_DeterminesIsMlx5) {
  fake_.add_device("mlx5_0").add_roce_port();
  EXPECT_FALSE(open()->devices[0]->is_mlx5());

  Mlx5 library;
  mlx5_ = &library;
  library.is_supported = [](ibv_device*) { return false; };
  library.query_device = [](ibv_context*, mlx5dv_context*) {
    ADD_FAILURE() << "not an mlx5 device";
    return 0;
  };
  EXPECT_FALSE(open()->devices[0]->is_mlx5());

  library.is_supported = [](ibv_device* device) { return std::string(device->name) == "mlx5_0"; };
  library.query_device = [](ibv_context*, mlx5dv_context* attributes) {
    attributes->flags = 5;
    return 0;
  };
  const auto inventory = open();
  EXPECT_TRUE(inventory->devices[0]->is_mlx5());
  EXPECT_EQ(inventory->devices[0]->mlx5_capabilities().flags, 5U);
}

// A libmlx5 for which the first device has a Data Direct interface, and the second one none.
Mlx5 with_data_direct() {
  Mlx5 library;
  library.is_supported = [](ibv_device*) { return true; };
  library.query_device = [](ibv_context*, mlx5dv_context*) { return 0; };
  library.reg_dmabuf_mr = [](ibv_pd*, std::uint64_t, std::size_t, std::uint64_t, int, int, int) -> ibv_mr* {
    return nullptr;
  };
  library.get_data_direct_sysfs_path = [](ibv_context* context, char* buffer, std::size_t) {
    if (context->device->name != std::string_view("mlx5_0")) return ENODEV;
    std::strcpy(buffer, "/devices/pci0009:00/0009:01:00.0");
    return 0;
  };
  return library;
}

TEST_F(DeviceInventoryTest, DataDirectSetting_ChoosesTheDevices) {
  const Mlx5 library = with_data_direct();
  mlx5_ = &library;
  for (const char* name : {"mlx5_0", "mlx5_1"}) {
    FakeDevice& device = fake_.add_device(name);
    device.dmabuf_errno = 0;
    device.add_roce_port();
    device.add_roce_port();
    set_pci_address(device, name == std::string_view("mlx5_0") ? "0000:0c:00.0" : "0000:0d:00.0");
  }
  EXPECT_EQ(config_.data_direct, DataDirect::kOnly);
  const auto only = open();
  EXPECT_EQ(names(*only), "verbatim_mlx5_0_dma verbatim_mlx5_0_p2_dma verbatim_mlx5_1 verbatim_mlx5_1_p2");
  EXPECT_EQ(only->ports[0].pci_path, "/sys/devices/pci0009:00/0009:01:00.0");
  EXPECT_EQ(only->ports[0].name, "mlx5_0:1");
  EXPECT_TRUE(only->ports[0].data_direct && only->ports[1].data_direct);
  EXPECT_FALSE(only->ports[2].data_direct || only->ports[3].data_direct);
  EXPECT_EQ(only->ports[0].ptr_support, unsigned{kPtrHost | kPtrDmaBuf});
  test::expect_log_lines(infos_with("(for NCCL verbatim_mlx5_0_dma)"));

  config_.data_direct = DataDirect::kBoth;
  const auto both = open();
  EXPECT_EQ(names(*both),
            "verbatim_mlx5_0_dma verbatim_mlx5_0_p2_dma verbatim_mlx5_0 verbatim_mlx5_0_p2 verbatim_mlx5_1 "
            "verbatim_mlx5_1_p2");
  EXPECT_EQ(both->devices.size(), 2U);
  EXPECT_FALSE(both->ports[2].data_direct);
  // NCCL shares the bandwidth of a port by GUID and number. All fakes have the same GUID.
  const std::uint32_t numbers[] = {1, 2, 1, 2, 3, 4};
  for (std::size_t i = 0; i < both->ports.size(); ++i) EXPECT_EQ(both->ports[i].topology_port, numbers[i]) << i;

  config_.data_direct = DataDirect::kOff;
  EXPECT_EQ(names(*open()), "verbatim_mlx5_0 verbatim_mlx5_0_p2 verbatim_mlx5_1 verbatim_mlx5_1_p2");
}

TEST_F(DeviceInventoryTest, NoDmaBufs_NoDataDirect) {
  const Mlx5 library = with_data_direct();
  mlx5_ = &library;
  fake_.add_device("mlx5_0").add_roce_port();
  EXPECT_EQ(names(*open()), "verbatim_mlx5_0");
}

TEST_F(DeviceInventoryTest, DataDirectRefused_DeviceIsUsedWithoutIt) {
  Mlx5 library = with_data_direct();
  library.get_data_direct_sysfs_path = [](ibv_context*, char*, std::size_t) { return EIO; };
  mlx5_ = &library;
  FakeDevice& device = fake_.add_device("mlx5_0");
  device.dmabuf_errno = 0;
  device.add_roce_port();
  EXPECT_EQ(names(*open()), "verbatim_mlx5_0");
  test::expect_log_lines(log_.warnings());
  config_.data_direct = DataDirect::kOff;
  EXPECT_EQ(names(*open()), "verbatim_mlx5_0");
  EXPECT_EQ(log_.warnings().size(), 1U) << "it is not asked for";
}

// A kernel whose active_speed has 8 bits reports XDR as NDR.
TEST_F(DeviceInventoryTest, SpeedAboveNdr_IsReadFromSysfs) {
  FakeDevice& device = fake_.add_device("mlx5_0");
  set_pci_address(device, "0000:0c:00.0");
  ibv_port_attr& port = device.add_roce_port().attributes;
  port.active_speed = 128;
  port.active_width = 2;
  std::filesystem::create_directories(root_ / "class/mlx5_0/ports/1");
  std::ofstream(root_ / "class/mlx5_0/ports/1/rate") << "800 Gb/sec (4X XDR)\n";
  EXPECT_EQ(open()->ports[0].speed_mbps, 800'000U);
  std::ofstream(root_ / "class/mlx5_0/ports/1/rate") << "10 Gb/sec (4X SDR)\n";
  EXPECT_EQ(open()->ports[0].speed_mbps, 400'000U);
}

TEST_F(DeviceInventoryTest, GrhRequired_IsKept) {
  FakeDevice& device = fake_.add_device("mlx5_0");
  device.add_roce_port();
  device.add_roce_port().attributes.flags = IBV_QPF_GRH_REQUIRED;
  EXPECT_FALSE(open()->ports[0].grh_required);
  EXPECT_TRUE(open()->ports[1].grh_required);
}

TEST_F(DeviceInventoryTest, SpeedMissingInAttributes_IsReadFromSysfs) {
  FakeDevice& device = fake_.add_device("mlx5_0");
  set_pci_address(device, "0000:0c:00.0");
  device.add_roce_port().attributes.active_speed = 0;
  EXPECT_EQ(open()->ports[0].speed_mbps, 10'000U);
  std::filesystem::create_directories(root_ / "class/mlx5_0/ports/1");
  std::ofstream(root_ / "class/mlx5_0/ports/1/rate") << "800 Gb/sec (4X XDR)\n";
  EXPECT_EQ(open()->ports[0].speed_mbps, 800'000U);
}

TEST(PortSpeed, EveryRateAndWidth_GivesMbps) {
  EXPECT_EQ(port_speed_mbps(1, 1), 2'500U);
  EXPECT_EQ(port_speed_mbps(2, 2), 20'000U);
  EXPECT_EQ(port_speed_mbps(4, 2), 40'000U);
  EXPECT_EQ(port_speed_mbps(8, 2), 40'000U);
  EXPECT_EQ(port_speed_mbps(16, 2), 56'000U);
  EXPECT_EQ(port_speed_mbps(32, 2), 100'000U);
  EXPECT_EQ(port_speed_mbps(64, 2), 200'000U);
  EXPECT_EQ(port_speed_mbps(128, 2), 400'000U);
  EXPECT_EQ(port_speed_mbps(128, 4), 800'000U);
  EXPECT_EQ(port_speed_mbps(64, 8), 600'000U);
  EXPECT_EQ(port_speed_mbps(64, 16), 100'000U);
  EXPECT_EQ(port_speed_mbps(0, 2), 0U);
  EXPECT_EQ(port_speed_mbps(64, 3), 0U);
}

}  // namespace
}  // namespace verbatim
