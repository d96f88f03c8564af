// libmlx5.so.1 of softverbs: Data Direct. Without SOFTVERBS_DATA_DIRECT none of the devices is an mlx5 device; with it
// all of them are, with no other ability.
#include <infiniband/mlx5dv.h>

#include <cstring>

#include "softverbs/api/device.h"
#include "softverbs/api/refusals.h"

namespace verbatim::softverbs {
namespace {

const Device* as_mlx5(const ibv_device* device) {
  const Device* const own = as_softverbs(device);
  return own != nullptr && own->is_mlx5 ? own : nullptr;
}

constexpr int kDataDirectAccess = 1;  // MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT, which headers before release 54 lack

}  // namespace
}  // namespace verbatim::softverbs

using namespace verbatim::softverbs;

extern "C" {

SOFTVERBS_EXPORT bool mlx5dv_is_supported(ibv_device* device) {
  return as_mlx5(device) != nullptr;
}

SOFTVERBS_EXPORT int mlx5dv_query_device(ibv_context* context, mlx5dv_context* attributes) {
  if (as_mlx5(context->device) == nullptr) return EOPNOTSUPP;
  attributes->version = 0;
  attributes->flags = 0;
  attributes->comp_mask = 0;
  return 0;
}

// The errors are those of Linux, mlx5/std_types.c, and of rdma-core, providers/mlx5/verbs.c.
SOFTVERBS_EXPORT int mlx5dv_get_data_direct_sysfs_path(ibv_context* context, char* buffer, std::size_t bytes) {
  const Device* const device = as_mlx5(context->device);
  if (device == nullptr) return EOPNOTSUPP;
  const std::string_view path = device->data_direct;
  if (path.empty()) return ENODEV;
  if (path.size() >= bytes) return ENOSPC;
  std::memcpy(buffer, path.data(), path.size() + 1);
  return 0;
}

SOFTVERBS_EXPORT ibv_mr* mlx5dv_reg_dmabuf_mr(ibv_pd* pd, std::uint64_t offset, std::size_t length, std::uint64_t iova,
                                              int fd, int access, int mlx5_access) {
  const Device* const device = as_mlx5(pd->context->device);
  if (device == nullptr || (mlx5_access & ~kDataDirectAccess) != 0) {
    errno = device == nullptr ? EOPNOTSUPP : EINVAL;
    return nullptr;
  }
  return device->reg_dmabuf_mr(pd, offset, length, iova, fd, access, mlx5_access != 0);
}

}  // extern "C"
