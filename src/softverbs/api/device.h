// What libmlx5.so.1 of softverbs finds behind an ibv_device of libibverbs.so.1 of softverbs. The two libraries do not
// link with each other: a program may load the first one without the second one.
#pragma once

#include <infiniband/verbs.h>

#include <climits>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace verbatim::softverbs {

constexpr std::string_view kDeviceNamePrefix = "softverbs";

struct Device : ibv_device {
  bool is_mlx5;  // SOFTVERBS_DATA_DIRECT is set
  // The path of the Data Direct interface below /sys, as the kernel gives it; empty: the device has none.
  char data_direct[PATH_MAX];
  // mlx5dv_reg_dmabuf_mr, with its flag.
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd* pd, std::uint64_t offset, std::size_t length, std::uint64_t iova, int fd, int access,
                           bool data_direct);
};

// nullptr: a device of another libibverbs.
inline const Device* as_softverbs(const ibv_device* device) {
  return std::string_view(device->name).starts_with(kDeviceNamePrefix) ? static_cast<const Device*>(device) : nullptr;
}

}  // namespace verbatim::softverbs
