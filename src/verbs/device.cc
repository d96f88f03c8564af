#include "verbs/device.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "verbs/errors.h"

namespace verbatim {
namespace {

// 0 if the device supports dma-bufs, else the errno that says why not: ENOSYS for a libibverbs without the verb. The
// probe registers fd -1: a driver without support fails with EOPNOTSUPP or EPROTONOSUPPORT before it looks at the fd.
int probe_dmabuf(const Verbs& verbs, ibv_pd* pd) {
  if (verbs.reg_dmabuf_mr == nullptr) return ENOSYS;
  constexpr std::size_t kProbeBytes = 4096;
  const Result<UniqueMr> mr =
      adopt("ibv_reg_dmabuf_mr", verbs.reg_dmabuf_mr(pd, 0, kProbeBytes, 0, -1, 0), verbs.dereg_mr);
  if (mr || (mr.error().sys_errno != EOPNOTSUPP && mr.error().sys_errno != EPROTONOSUPPORT)) return 0;
  return mr.error().sys_errno;
}

}  // namespace

Device::Device(const Verbs& verbs, std::string name, std::string sysfs_path, UniqueContext&& context, UniquePd&& pd,
               bool relaxed_ordering, Mlx5RegDmabufMr reg_data_direct)
    : verbs_(verbs),
      name_(std::move(name)),
      sysfs_path_(std::move(sysfs_path)),
      context_(std::move(context)),
      pd_(std::move(pd)),
      relaxed_ordering_(relaxed_ordering),
      mr_cache_(std::make_unique<MrCache>(verbs, pd_.get(), name_.c_str(), relaxed_ordering, reg_data_direct)),
      history_(std::make_unique<PortHistory>(sysfs_path_)) {}

Result<std::unique_ptr<Device>> Device::open(const Verbs& verbs, const Mlx5* mlx5, ibv_device* found,
                                             bool relaxed_ordering) {
  Result<UniqueContext> context = adopt("ibv_open_device", verbs.open_device(found), verbs.close_device);
  if (!context) return context.error();
  Result<UniquePd> pd = adopt("ibv_alloc_pd", verbs.alloc_pd(context->get()), verbs.dealloc_pd);
  if (!pd) return pd.error();
  std::unique_ptr<Device> device(new Device(verbs, verbs.get_device_name(found), found->ibdev_path, *std::move(context),
                                            *std::move(pd), relaxed_ordering,
                                            mlx5 != nullptr ? mlx5->reg_dmabuf_mr : nullptr));
  const Status queried = check_errno("ibv_query_device", verbs.query_device(device->context(), &device->attributes_));
  if (!queried) return queried.error();
  device->is_mlx5_ = mlx5 != nullptr && mlx5->is_supported(found);
  if (device->is_mlx5_) {
    if (const auto capabilities = mlx5->capabilities(device->context())) device->mlx5_capabilities_ = *capabilities;
  }
  device->dmabuf_errno_ = probe_dmabuf(verbs, device->pd());
  return device;
}

void Device::find_data_direct(const Mlx5& mlx5) {
  if (!is_mlx5_ || dmabuf_errno_ != 0) return;
  if (Result<std::string> path = mlx5.data_direct_path(context())) {
    data_direct_path_ = *std::move(path);
  } else {
    VERBATIM_WARN("%s: %s failed: %s; it is used without Data Direct. Next: look for the driver's reason in 'dmesg'",
                  name_.c_str(), path.error().operation, std::strerror(path.error().sys_errno));
  }
}

}  // namespace verbatim
