#include "verbs/sysfs.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "support/scratch_directory.h"

namespace verbatim {
namespace {

class Sysfs : public testing::Test {
 protected:
  Sysfs() {
    std::filesystem::create_directories(class_dir());
    std::filesystem::create_directories(root_ / "sys/devices");
  }

  std::filesystem::path class_dir() const { return root_ / "sys/class/infiniband/mlx5_0"; }

  // Links the device to a directory of this name and returns its PCI path.
  std::optional<std::string> pci_path(const std::string& name) const {
    const std::filesystem::path target = root_ / "sys/devices" / name;
    std::filesystem::create_directories(target);
    std::filesystem::remove(class_dir() / "device");
    std::filesystem::create_symlink(target, class_dir() / "device");
    return sysfs_pci_path(class_dir());
  }

  std::string device(const std::string& name) const {
    return std::filesystem::canonical(root_ / "sys/devices").string() + "/" + name;
  }

  void touch(const std::string& path, const std::string& content = "") const {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << content;
  }

  const ScratchDirectory scratch_;
  const std::filesystem::path root_ = scratch_.path();
};

TEST_F(Sysfs, FunctionsOfOneCard_ShareOnePciPath) {
  EXPECT_EQ(pci_path("pci0000:00/0000:0c:00.0"), device("pci0000:00/0000:0c:00.0"));
  EXPECT_EQ(pci_path("pci0000:00/0000:0c:00.1"), device("pci0000:00/0000:0c:00.0"));
  EXPECT_EQ(pci_path("pci0000:00/0000:0c:02.5"), device("pci0000:00/0000:0c:00.0"));
  EXPECT_EQ(pci_path("pci0000:00/10001:e1:00.1"), device("pci0000:00/10001:e1:00.0"));
}

TEST_F(Sysfs, NonPciDevice_HasNoPciPath) {
  EXPECT_EQ(pci_path("virtual/net/eth0"), std::nullopt);
  EXPECT_EQ(pci_path("0"), std::nullopt);
  EXPECT_EQ(sysfs_pci_path("/nonexistent/mlx5_0"), std::nullopt);
  EXPECT_EQ(sysfs_pci_path(""), std::nullopt);
}

TEST_F(Sysfs, NumaNode_IsReadFromPciDevice) {
  EXPECT_EQ(sysfs_numa_node(class_dir()), std::nullopt);
  pci_path("pci0000:00/0000:0c:00.0");
  touch("sys/devices/pci0000:00/0000:0c:00.0/numa_node", "1\n");
  EXPECT_EQ(sysfs_numa_node(class_dir()), 1);
  touch("sys/devices/pci0000:00/0000:0c:00.0/numa_node", "-1\n");
  EXPECT_EQ(sysfs_numa_node(class_dir()), std::nullopt);
}

TEST_F(Sysfs, Exists_IsTrueForPresentPath) {
  EXPECT_TRUE(sysfs_exists(class_dir()));
  EXPECT_FALSE(sysfs_exists(class_dir() / "no"));
  EXPECT_FALSE(sysfs_exists(""));
}

TEST_F(Sysfs, KernelDriver_IsThatOfTheParentDevice) {
  EXPECT_FALSE(has_kernel_driver(""));
  EXPECT_FALSE(has_kernel_driver(class_dir() / "no"));
  EXPECT_TRUE(has_kernel_driver(class_dir())) << "soft-RoCE has no parent";
  pci_path("pci0000:00/0000:0c:00.0");
  EXPECT_FALSE(has_kernel_driver(class_dir()));
  std::filesystem::create_directories(root_ / "sys/devices/pci0000:00/0000:0c:00.0/driver");
  EXPECT_TRUE(has_kernel_driver(class_dir()));
}

TEST_F(Sysfs, RateFile_GivesSpeed) {
  EXPECT_EQ(sysfs_port_speed_mbps(class_dir(), 1), std::nullopt);
  touch("sys/class/infiniband/mlx5_0/ports/1/rate", "800 Gb/sec (4X XDR)\n");
  touch("sys/class/infiniband/mlx5_0/ports/2/rate", "2.5 Gb/sec (1X SDR)\n");
  touch("sys/class/infiniband/mlx5_0/ports/3/rate", "unknown\n");
  EXPECT_EQ(sysfs_port_speed_mbps(class_dir(), 1), 800'000U);
  EXPECT_EQ(sysfs_port_speed_mbps(class_dir(), 2), 2'500U);
  EXPECT_EQ(sysfs_port_speed_mbps(class_dir(), 3), std::nullopt);
}

TEST_F(Sysfs, PeerMemoryModule_IsDetectedByAnyPath) {
  EXPECT_FALSE(peer_memory_loaded(root_));
  for (const char* sign : {"sys/kernel/mm/memory_peers/nv_mem/version", "sys/kernel/mm/memory_peers/nv_mem_nc/version",
                           "sys/module/nvidia_peermem/refcnt", "sys/module/nv_peer_mem/refcnt"}) {
    touch(sign);
    EXPECT_TRUE(peer_memory_loaded(root_)) << sign;
    std::filesystem::remove_all((root_ / sign).parent_path());
    EXPECT_FALSE(peer_memory_loaded(root_)) << sign;
  }
  touch("proc/modules", "nvidia 5 1 nvidia_peermem, Live 0x0\nnot_nvidia_peermem 1 0 - Live 0x0\n");
  EXPECT_FALSE(peer_memory_loaded(root_));
  touch("proc/modules", "ib_core 5 1 - Live 0x0\nnvidia_peermem 16384 0 - Live 0x0\n");
  EXPECT_TRUE(peer_memory_loaded(root_));
}

}  // namespace
}  // namespace verbatim
