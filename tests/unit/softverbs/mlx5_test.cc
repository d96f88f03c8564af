//: in softverbs_devices_test
//: test softverbs-mlx5 filter=Mlx5* use=device MLX5_TEST_LIBRARY={softverbs_mlx5} SOFTVERBS_DATA_DIRECT=5356:41:00.0
//:   + SOFTVERBS_DMABUF=1

// The libmlx5.so.1 of softverbs (path in MLX5_TEST_LIBRARY): it has the symbols and versions that programs request, and
// supports softverbs' devices if SOFTVERBS_DATA_DIRECT is set. It is here, for the first of two devices.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <infiniband/mlx5dv.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string>

#include "base/unique_fd.h"
#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

class Mlx5Library : public testing::Test {
 protected:
  void SetUp() override {
    const char* const path = std::getenv("MLX5_TEST_LIBRARY");
    ASSERT_NE(path, nullptr);
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library, nullptr) << dlerror();
  }
  void TearDown() override {
    if (library != nullptr) dlclose(library);
  }
  template <typename Function>
  Function* find(const char* name, const char* version) {
    return reinterpret_cast<Function*>(dlvsym(library, name, version));
  }

  void* library = nullptr;
};

TEST_F(Mlx5Library, DeviceOfAnotherLibibverbs_IsNotSupported) {
  auto* const is_supported = find<decltype(mlx5dv_is_supported)>("mlx5dv_is_supported", "MLX5_1.8");
  ASSERT_NE(is_supported, nullptr);
  ibv_device device{};
  EXPECT_FALSE(is_supported(&device));
}

TEST_F(Mlx5Library, CallThatNeedsMlx5Device_IsRefused) {
  auto* const open_device = find<decltype(mlx5dv_open_device)>("mlx5dv_open_device", "MLX5_1.7");
  ASSERT_NE(open_device, nullptr);
  ibv_device device{};
  mlx5dv_context_attr attributes{};
  errno = 0;
  EXPECT_EQ(open_device(&device, &attributes), nullptr);
  EXPECT_EQ(errno, EOPNOTSUPP);
  auto* const init_obj = find<decltype(mlx5dv_init_obj)>("mlx5dv_init_obj", "MLX5_1.2");
  ASSERT_NE(init_obj, nullptr);
  mlx5dv_obj object{};
  EXPECT_EQ(init_obj(&object, 0), EOPNOTSUPP);
}

TEST_F(Mlx5Library, Symbols_HaveTheirVersions) {
  const struct {
    const char* name;
    const char* version;
  } known[] = {
      {"mlx5dv_query_device", "MLX5_1.0"},
      {"mlx5dv_create_cq", "MLX5_1.1"},
      {"mlx5dv_set_context_attr", "MLX5_1.2"},
      {"mlx5dv_create_wq", "MLX5_1.3"},
      {"mlx5dv_get_clock_info", "MLX5_1.4"},
      {"mlx5dv_create_flow_action_esp", "MLX5_1.5"},
      {"mlx5dv_create_flow", "MLX5_1.6"},
      {"mlx5dv_devx_obj_create", "MLX5_1.7"},
      {"mlx5dv_devx_qp_query", "MLX5_1.8"},
      {"mlx5dv_devx_get_async_cmd_comp", "MLX5_1.9"},
      {"mlx5dv_dr_domain_create", "MLX5_1.10"},
      {"mlx5dv_devx_get_event", "MLX5_1.11"},
      {"mlx5dv_alloc_var", "MLX5_1.12"},
      {"mlx5dv_pp_free", "MLX5_1.13"},
      {"mlx5dv_modify_qp_lag_port", "MLX5_1.14"},
      {"mlx5dv_dr_action_create_dest_devx_tir", "MLX5_1.15"},
      {"mlx5dv_dr_action_create_flow_sampler", "MLX5_1.16"},
      {"mlx5dv_modify_qp_udp_sport", "MLX5_1.17"},
      {"mlx5dv_reserved_qpn_alloc", "MLX5_1.18"},
      {"_mlx5dv_query_port", "MLX5_1.19"},
      {"_mlx5dv_mkey_check", "MLX5_1.20"},
      {"mlx5dv_get_vfio_device_list", "MLX5_1.21"},
      {"mlx5dv_dr_aso_other_domain_link", "MLX5_1.22"},
      {"mlx5dv_devx_create_eq", "MLX5_1.23"},
      {"mlx5dv_crypto_login_create", "MLX5_1.24"},
      {"mlx5dv_reg_dmabuf_mr", "MLX5_1.25"},
      {"mlx5dv_get_data_direct_sysfs_path", "MLX5_1.25"},
      {"__mlx5dv_create_flow", "MLX5_1.25.1"},
      {"mlx5dv_devx_uar_export_dmabuf_fd", "MLX5_1.26"},
      {"mlx5dv_var_import", "MLX5_1.27"},
  };
  for (const auto& symbol : known) {
    EXPECT_NE(dlvsym(library, symbol.name, symbol.version), nullptr) << symbol.name << '@' << symbol.version;
    EXPECT_EQ(dlvsym(library, symbol.name, "MLX5_1.99"), nullptr) << symbol.name;
  }
}

class Mlx5DataDirect : public Mlx5Library {
 protected:
  static constexpr int kDataDirect = 1;  // MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT
  static constexpr std::size_t kBytes = 4096;

  void SetUp() override {
    Mlx5Library::SetUp();
    get_path = find<int(ibv_context*, char*, std::size_t)>("mlx5dv_get_data_direct_sysfs_path", "MLX5_1.25");
    reg_mr = find<ibv_mr*(ibv_pd*, std::uint64_t, std::size_t, std::uint64_t, int, int, int)>("mlx5dv_reg_dmabuf_mr",
                                                                                              "MLX5_1.25");
    ASSERT_TRUE(get_path != nullptr && reg_mr != nullptr);
    ASSERT_EQ(ftruncate(file.get(), kBytes), 0);
  }
  // 0, or the errno.
  int error_of(const Device& device, std::uint64_t iova, int fd, int mlx5_access) {
    errno = 0;
    const Mr mr(reg_mr(device.pd.get(), 0, kBytes, iova, fd, kAllAccess, mlx5_access));
    return mr != nullptr ? 0 : errno;
  }

  int (*get_path)(ibv_context*, char*, std::size_t) = nullptr;
  ibv_mr* (*reg_mr)(ibv_pd*, std::uint64_t, std::size_t, std::uint64_t, int, int, int) = nullptr;
  Device with = open_device(0);
  Device without = open_device(1);
  UniqueFd file{memfd_create("dmabuf", MFD_CLOEXEC)};  // SOFTVERBS_DMABUF is 1
};

TEST_F(Mlx5DataDirect, AllDevices_AreMlx5Devices) {
  auto* const is_supported = find<decltype(mlx5dv_is_supported)>("mlx5dv_is_supported", "MLX5_1.8");
  auto* const query = find<decltype(mlx5dv_query_device)>("mlx5dv_query_device", "MLX5_1.0");
  for (const Device* device : {&with, &without}) {
    EXPECT_TRUE(is_supported(device->context->device));
    mlx5dv_context attributes{};
    attributes.flags = 1;
    attributes.comp_mask = MLX5DV_CONTEXT_MASK_NUM_LAG_PORTS;
    EXPECT_EQ(query(device->context.get(), &attributes), 0);
    EXPECT_EQ(attributes.flags, 0U);
    EXPECT_EQ(attributes.comp_mask, 0U);
  }
}

TEST_F(Mlx5DataDirect, SysfsPath_NeedsRoomAndAnInterface) {
  const std::string path = "/devices/pci5356:41/5356:41:00.0";
  std::string buffer(64, 'x');
  ASSERT_EQ(get_path(with.context.get(), buffer.data(), path.size() + 1), 0);
  EXPECT_STREQ(buffer.c_str(), path.c_str());
  EXPECT_EQ(buffer[path.size() + 1], 'x');
  EXPECT_EQ(get_path(with.context.get(), buffer.data(), path.size()), ENOSPC);
  EXPECT_EQ(get_path(without.context.get(), buffer.data(), buffer.size()), ENODEV);
}

TEST_F(Mlx5DataDirect, Registration_HasTheErrorsOfTheDriver) {
  EXPECT_EQ(error_of(with, 0, file.get(), kDataDirect), 0);
  EXPECT_EQ(error_of(with, 0, file.get(), 0), 0);
  EXPECT_EQ(error_of(without, 0, file.get(), 0), 0);
  EXPECT_EQ(error_of(with, 0, -1, kDataDirect), EBADF);
  EXPECT_EQ(error_of(with, 512, file.get(), 0), 0);
  EXPECT_EQ(error_of(with, 512, file.get(), kDataDirect), EOPNOTSUPP) << "within a page";
  EXPECT_EQ(error_of(without, 0, file.get(), kDataDirect), EINVAL) << "no interface";
  EXPECT_EQ(error_of(with, 0, file.get(), 2), EINVAL) << "no such flag";
}

}  // namespace
}  // namespace verbatim::test
