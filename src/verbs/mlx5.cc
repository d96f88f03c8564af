#include "verbs/mlx5.h"

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

}  // namespace verbatim
