// libmlx5 (mlx5dv), opened at run time and optional: identifies mlx5 devices, queries their capabilities, and assigns
// QPs to the ports of a LAG.
#pragma once

#include <infiniband/mlx5dv.h>

#include <cstdint>
#include <optional>
#include <string>

#include "base/result.h"

namespace verbatim {

struct Mlx5Capabilities {
  std::uint64_t flags = 0;                                            // MLX5DV_CONTEXT_FLAGS_*
  std::uint8_t num_lag_ports = 0;                                     // 0: no LAG, or unknown
  decltype(&mlx5dv_modify_qp_lag_port) modify_qp_lag_port = nullptr;  // nullptr: libmlx5 is too old
};

struct Mlx5 {
  decltype(&mlx5dv_is_supported) is_supported = nullptr;
  decltype(&mlx5dv_query_device) query_device = nullptr;
  decltype(&mlx5dv_modify_qp_lag_port) modify_qp_lag_port = nullptr;  // optional

  // `context` must be of an mlx5 device (is_supported).
  Result<Mlx5Capabilities> capabilities(ibv_context* context) const;

  // Opens `path` when it is not empty, else libmlx5.so.1, then libmlx5.so; never closes it. nullopt when it cannot be
  // opened or is too old. Only a `path` that cannot be opened is logged as a warning.
  static std::optional<Mlx5> load(const std::string& path);
};

}  // namespace verbatim
