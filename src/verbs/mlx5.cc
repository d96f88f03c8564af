#include "verbs/mlx5.h"

#include <cerrno>
#include <climits>
#include <optional>

#include "base/log.h"
#include "verbs/dynamic_library.h"
#include "verbs/errors.h"

namespace verbatim {

std::optional<Mlx5> Mlx5::load(const std::string& path) {
  const DynamicLibrary library =
      path.empty() ? DynamicLibrary::open({"libmlx5.so.1", "libmlx5.so"}) : DynamicLibrary::open({path.c_str()});
  if (!library) {
    if (!path.empty())
      VERBATIM_WARN("cannot open VERBATIM_MLX5_LIBRARY: %s. The plugin continues without libmlx5",
                    library.load_error().c_str());
    return std::nullopt;
  }
  Mlx5 table;
  if (!library.bind("mlx5dv_is_supported", "MLX5_1.8", table.is_supported) ||
      !library.bind("mlx5dv_query_device", "MLX5_1.0", table.query_device)) {
    VERBATIM_INFO("%s is too old: it cannot query devices. The plugin continues without libmlx5",
                  library.name().c_str());
    return std::nullopt;
  }
  library.bind("mlx5dv_modify_qp_lag_port", "MLX5_1.14", table.modify_qp_lag_port);
  library.bind("mlx5dv_get_data_direct_sysfs_path", "MLX5_1.25", table.get_data_direct_sysfs_path);
  library.bind("mlx5dv_reg_dmabuf_mr", "MLX5_1.25", table.reg_dmabuf_mr);
  return table;
}

Result<Mlx5Capabilities> Mlx5::capabilities(ibv_context* context) const {
  mlx5dv_context queried = {};
  queried.comp_mask = MLX5DV_CONTEXT_MASK_NUM_LAG_PORTS;
  if (Status status = check_errno("mlx5dv_query_device", query_device(context, &queried)); !status) {
    return status.error();
  }
  const bool lag_known = (queried.comp_mask & MLX5DV_CONTEXT_MASK_NUM_LAG_PORTS) != 0;
  return Mlx5Capabilities{queried.flags, lag_known ? queried.num_lag_ports : std::uint8_t{0}, modify_qp_lag_port};
}

Result<std::string> Mlx5::data_direct_path(ibv_context* context) const {
  if (get_data_direct_sysfs_path == nullptr || reg_dmabuf_mr == nullptr) return std::string();
  std::string path(PATH_MAX, '\0');
  const int error = get_data_direct_sysfs_path(context, path.data(), path.size());
  if (error == ENODEV || error == EOPNOTSUPP || error == EPROTONOSUPPORT) return std::string();
  if (error != 0) return system_error("mlx5dv_get_data_direct_sysfs_path", error);
  return "/sys" + path.substr(0, path.find('\0'));
}

}  // namespace verbatim
