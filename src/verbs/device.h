// An open RDMA device.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"
#include "verbs/handles.h"
#include "verbs/mlx5.h"
#include "verbs/mr_cache.h"
#include "verbs/port.h"
#include "verbs/port_history.h"
#include "verbs/verbs.h"

namespace verbatim {

// Whether a QP in ERR says which packets it has executed.
enum class ExecutedReport : std::uint8_t {
  kNotKnown,
  kRight,
  kWrong,  // or the device refuses a QP that was reset
};

// One context, protection domain and MR cache, shared by all communicators of the process. Owned by the
// DeviceSurvey. Any thread may use it: all state is immutable, atomic, or has its own lock.
class Device {
 public:
  // `mlx5` may be nullptr. A failure is not logged here: the inventory logs it with the other skipped devices.
  static Result<std::unique_ptr<Device>> open(const Verbs& verbs, const Mlx5* mlx5, ibv_device* device,
                                              bool relaxed_ordering);

  // Asks once for the Data Direct interface. `mlx5`: that of open(). An error is logged.
  void find_data_direct(const Mlx5& mlx5);

  const Verbs& verbs() const { return verbs_; }
  const std::string& name() const { return name_; }  // libibverbs' name, "mlx5_0"
  // ".../infiniband/mlx5_0"; the directory does not exist for a device without a kernel driver.
  const std::string& sysfs_path() const { return sysfs_path_; }
  ibv_context* context() const { return context_.get(); }
  ibv_pd* pd() const { return pd_.get(); }
  const ibv_device_attr& attributes() const { return attributes_; }
  bool is_mlx5() const { return is_mlx5_; }
  const Mlx5Capabilities& mlx5_capabilities() const { return mlx5_capabilities_; }
  // The directory in /sys of its Data Direct interface, which is a PCI device of its own; empty: none was found.
  const std::string& data_direct_path() const { return data_direct_path_; }
  // 0: the device supports dma-bufs; else the errno that says why not.
  int dmabuf_errno() const { return dmabuf_errno_; }
  // True for the first caller only, so that the use of peer memory instead of a dma-buf is logged once for each device.
  bool is_first_fallback() const { return !fallback_reported_.exchange(true); }
  // What rma/device_tests.h has found out about it.
  std::atomic<ExecutedReport>& executed_report() const { return executed_report_; }
  bool relaxed_ordering() const { return relaxed_ordering_; }
  // The number of QPs that this process has on the device.
  std::atomic<std::size_t>& live_qps() const { return live_qps_; }
  MrCache& mr_cache() const { return *mr_cache_; }
  PortHistory& history() const { return *history_; }

 private:
  // Rvalue references: if a member before them throws, the handles of the caller destroy `pd` before `context`.
  Device(const Verbs& verbs, std::string name, std::string sysfs_path, UniqueContext&& context, UniquePd&& pd,
         bool relaxed_ordering, Mlx5RegDmabufMr reg_data_direct);

  const Verbs& verbs_;
  const std::string name_;
  const std::string sysfs_path_;
  const UniqueContext context_;
  const UniquePd pd_;
  ibv_device_attr attributes_ = {};
  bool is_mlx5_ = false;
  Mlx5Capabilities mlx5_capabilities_;
  std::string data_direct_path_;
  int dmabuf_errno_ = 0;
  mutable std::atomic<bool> fallback_reported_{false};
  mutable std::atomic<ExecutedReport> executed_report_{ExecutedReport::kNotKnown};
  mutable std::atomic<std::size_t> live_qps_{0};
  const bool relaxed_ordering_;
  const std::unique_ptr<MrCache> mr_cache_;
  const std::unique_ptr<PortHistory> history_;
};

}  // namespace verbatim
