// libmlx5 (mlx5dv), opened at run time and optional: identifies mlx5 devices, queries their capabilities, assigns QPs
// to the ports of a LAG, and registers memory for Data Direct.
#pragma once

#include <infiniband/mlx5dv.h>

#include <cstddef>
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

// Headers before release 54 of rdma-core do not declare these two. A region with this access is reached through the
// Data Direct interface, a PCI function of its own beside the GPU (ConnectX-8).
using Mlx5RegDmabufMr = ibv_mr* (*)(ibv_pd* pd, std::uint64_t offset, std::size_t length, std::uint64_t iova, int fd,
                                    int access, int mlx5_access);
inline constexpr int kMlx5DataDirectAccess = 1;  // MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT

struct Mlx5 {
  decltype(&mlx5dv_is_supported) is_supported = nullptr;
  decltype(&mlx5dv_query_device) query_device = nullptr;
  decltype(&mlx5dv_modify_qp_lag_port) modify_qp_lag_port = nullptr;  // optional, as all below
  int (*get_data_direct_sysfs_path)(ibv_context* context, char* buffer, std::size_t bytes) = nullptr;
  Mlx5RegDmabufMr reg_dmabuf_mr = nullptr;

  // `context` must be of an mlx5 device (is_supported).
  Result<Mlx5Capabilities> capabilities(ibv_context* context) const;

  // `context` likewise. The directory in /sys of the device's Data Direct interface. Empty: it has none, or library,
  // kernel or driver do not know Data Direct.
  Result<std::string> data_direct_path(ibv_context* context) const;

  // Opens `path` when it is not empty, else libmlx5.so.1, then libmlx5.so; never closes it. nullopt when it cannot be
  // opened or is too old. Only a `path` that cannot be opened is logged as a warning.
  static std::optional<Mlx5> load(const std::string& path);
};

}  // namespace verbatim
