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
      VERBATIM_WARN("VERBATIM_MLX5_LIBRARY cannot be opened, going on without: %s", library.load_error().c_str());
    return std::nullopt;
  }
  Mlx5 table;
  if (!library.bind("mlx5dv_is_supported", "MLX5_1.8", table.is_supported) ||
      !library.bind("mlx5dv_query_device", "MLX5_1.0", table.query_device)) {
    VERBATIM_INFO("%s is too old to be asked about devices, going on without", library.name().c_str());
    return std::nullopt;
  }
  return table;
}

Result<Mlx5Capabilities> Mlx5::capabilities(ibv_context* context) const {
  mlx5dv_context answer = {};
  answer.comp_mask = MLX5DV_CONTEXT_MASK_NUM_LAG_PORTS;
  if (Status status = check_errno("mlx5dv_query_device", query_device(context, &answer)); !status) {
    return status.error();
  }
  const bool lag_known = (answer.comp_mask & MLX5DV_CONTEXT_MASK_NUM_LAG_PORTS) != 0;
  return Mlx5Capabilities{answer.flags, lag_known ? answer.num_lag_ports : std::uint8_t{0}};
}

}  // namespace verbatim
