// The libmlx5.so.1 of softverbs (path in MLX5_TEST_LIBRARY): it has the symbols and versions that programs request, and
// supports no device.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <infiniband/mlx5dv.h>

#include <cerrno>
#include <cstdlib>

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

TEST_F(Mlx5Library, AnyDevice_IsNotSupported) {
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

}  // namespace
