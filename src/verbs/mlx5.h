// libmlx5 (mlx5dv), opened at run time and always optional: it tells mlx5 devices from others and what they can do.
#pragma once

#include <infiniband/mlx5dv.h>

#include <cstdint>
#include <optional>
#include <string>

#include "base/result.h"

namespace verbatim {

struct Mlx5Capabilities {
  std::uint64_t flags = 0;         // MLX5DV_CONTEXT_FLAGS_*
  std::uint8_t num_lag_ports = 0;  // 0: no LAG, or not known
};

struct Mlx5 {
  decltype(&mlx5dv_is_supported) is_supported = nullptr;
  decltype(&mlx5dv_query_device) query_device = nullptr;

  // Asks the driver of an mlx5 device.
  Result<Mlx5Capabilities> capabilities(ibv_context* context) const;

  // Opens `path` when it is not empty, else libmlx5.so.1, then libmlx5.so. nullopt when there is none, which is no
  // error unless a path was asked for: then one warning is logged. Never closed.
  static std::optional<Mlx5> load(const std::string& path);
};

}  // namespace verbatim
