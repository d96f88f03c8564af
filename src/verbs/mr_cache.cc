#include "verbs/mr_cache.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "base/log.h"
#include "verbs/errors.h"

namespace verbatim {
namespace {

constexpr unsigned kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

std::string limit_text(rlim_t limit) {
  return limit == RLIM_INFINITY ? "unlimited" : std::to_string(limit / 1024) + " KiB";
}

// The memory that the kernel counts against RLIMIT_MEMLOCK: locked by mlock, and pinned by drivers.
std::uint64_t locked_kib() {
  std::uint64_t sum = 0;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmLck:") || line.starts_with("VmPin:")) sum += std::strtoull(line.c_str() + 6, nullptr, 10);
  }
  return sum;
}

// After ENOMEM: cause, next step and the limits.
std::string memlock_advice(const Verbs& verbs, const ibv_pd* pd, MemoryType type, std::size_t bytes, std::size_t live) {
  ibv_device_attr device = {};
  static_cast<void>(verbs.query_device(pd->context, &device));  // 0: not known
  rlimit memlock = {};
  getrlimit(RLIMIT_MEMLOCK, &memlock);
  const std::uint64_t locked = locked_kib();
  std::string cause = "RLIMIT_MEMLOCK is not the cause. Next: ";
  if (device.max_mr > 0 && live >= static_cast<std::size_t>(device.max_mr)) {
    cause = "The device's maximum of registrations (max_mr) is reached. Next: use fewer or larger buffers";
  } else if (device.max_mr_size != 0 && bytes > device.max_mr_size) {
    cause = "The device registers at most " + std::to_string(device.max_mr_size) +
            " bytes at once (max_mr_size). Next: use smaller buffers";
  } else if (type != MemoryType::kDmaBuf && memlock.rlim_cur != RLIM_INFINITY &&  // a dma-buf is not counted
             locked * 1024 + bytes > memlock.rlim_cur) {
    cause =
        "RLIMIT_MEMLOCK is exceeded. Next: raise it (ulimit -l unlimited, LimitMEMLOCK=infinity, --ulimit memlock=-1)";
  } else {
    cause +=
        type == MemoryType::kHost
            ? "free memory of the host or registrations of the device"
            : "look with 'nvidia-smi -q -d MEMORY' whether the GPU's BAR1, through which NICs reach its memory, is "
              "full, and register less GPU memory then";
  }
  return ". " + cause + ". RLIMIT_MEMLOCK is " + limit_text(memlock.rlim_cur) + " (hard " +
         limit_text(memlock.rlim_max) + "), " + std::to_string(locked) + " KiB are locked" +
         (device.max_mr > 0 ? ", the device supports " + std::to_string(device.max_mr) + " registrations" : "") + ", " +
         std::to_string(live) + " registrations exist";
}

// ENOTSUPP of Linux, which user space does not know: NVIDIA's driver does not map a GPU for PCIe (nv_dma_buf_attach).
// NCCL asks for this mapping unless NCCL_IB_DATA_DIRECT is 0.
constexpr int kNotMappedForPcie = 524;

// The next step for an operator, by the type of the memory and the errno.
std::string advice(const char* device, const MrRequest& request, int sys_errno) {
  if (sys_errno == EAGAIN) {
    return std::string(
               ". The limit of the rdma control group is reached, or the device has nothing left. Next: compare "
               "hca_object of ") +
           device + " in the group's file rdma.max with 'rdma resource show'";
  }
  constexpr const char* kIommu =
      "check whether an IOMMU prevents access to GPU memory ('dmesg | grep -i -e iommu -e dmar'; boot with iommu=pt)";
  switch (request.type) {
    case MemoryType::kHost:
      if (sys_errno == EFAULT) return ". Next: check that the application has not freed the memory and may write to it";
      if (sys_errno == EINVAL)
        return ". Next: use other memory; mappings of a device or a file cannot always be pinned";
      return "";
    case MemoryType::kCuda: {
      std::string text = ". Next: load a peer-memory module (nvidia_peermem) and check that this is GPU memory";
      if (sys_errno == EFAULT || sys_errno == EINVAL) text.append("; ").append(kIommu);
      if (request.dmabuf_errno != 0) {
        text.append(". Registration as a dma-buf failed: ").append(std::strerror(request.dmabuf_errno));
      }
      return text;
    }
    case MemoryType::kDmaBuf: {
      std::string next;
      if (sys_errno == EOPNOTSUPP)
        next = "use Linux 5.12 or later, a NIC driver that supports dma-bufs and the open GPU driver";
      if (sys_errno == EFAULT || sys_errno == EINVAL) next = kIommu;
      if (request.data_direct || sys_errno == kNotMappedForPcie)
        next.append(next.empty() ? "" : ", or ").append("set NCCL_IB_DATA_DIRECT=0");
      return next.empty() ? next : ". Next: " + next;
    }
  }
  return "";
}

}  // namespace

const char* memory_name(MemoryType type) {
  constexpr const char* kNames[] = {"host memory", "GPU memory", "a dma-buf"};
  return kNames[static_cast<std::size_t>(type)];
}

void MrReleaser::operator()(const MrEntry* entry) const {
  if (Status status = cache->drop(entry, has_whole_range); !status) {
    log_destroy_failure("memory region", cache->device_, status.error().sys_errno);
  }
}

MrCache::MrCache(const Verbs& verbs, ibv_pd* pd, const char* device, bool relaxed_ordering,
                 Mlx5RegDmabufMr reg_data_direct)
    : verbs_(verbs),
      pd_(pd),
      device_(device),
      relaxed_ordering_(relaxed_ordering),
      reg_data_direct_(reg_data_direct),
      page_bytes_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))),
      zero_byte_page_(static_cast<std::byte*>(std::aligned_alloc(page_bytes_, page_bytes_)), std::free) {
  if (zero_byte_page_ == nullptr) throw std::bad_alloc();
}

MrCache::~MrCache() {
  const std::size_t live = size();
  if (live == 0) return;
  try {
    VERBATIM_WARN("%s is closed with %zu memory registrations that were not released: %s", device_, live,
                  describe_some().c_str());
  } catch (...) {  // std::bad_alloc
    VERBATIM_WARN("%s is closed with %zu memory registrations that were not released", device_, live);
  }
}

Result<MrRef> MrCache::acquire(const MrRequest& wanted) {
  MrRequest request = wanted;
  if (request.bytes == 0) {
    request = {.address = zero_byte_page_.get(), .bytes = 1, .type = MemoryType::kHost, .ordering = wanted.ordering};
  }
  const auto address = reinterpret_cast<std::uintptr_t>(request.address);
  const std::uintptr_t in_page = address & (page_bytes_ - 1);
  const std::uintptr_t last_page = std::numeric_limits<std::uintptr_t>::max() - page_bytes_;
  if (address > last_page || request.bytes > last_page - address) {
    return Error{ErrorKind::kArgument, EINVAL, "memory range"};
  }
  const std::uintptr_t start = address - in_page;
  const std::size_t bytes = (in_page + request.bytes + page_bytes_ - 1) & ~(page_bytes_ - 1);

  const RegistrationKind key{request.type, request.ordering, request.data_direct};
  std::uint64_t dmabuf_offset = 0;
  if (request.type == MemoryType::kDmaBuf) {
    const std::uint64_t offset_in_page = request.dmabuf.offset & (page_bytes_ - 1);
    if (offset_in_page != 0 && offset_in_page != in_page) return Error{ErrorKind::kArgument, EINVAL, "dma-buf offset"};
    dmabuf_offset = request.dmabuf.offset - offset_in_page;
    // Checked here, because a driver without dma-bufs refuses every descriptor with the same error.
    if (::fcntl(request.dmabuf.fd, F_GETFD) < 0) {
      const int error = errno;
      if (request.suppress_log_for == nullptr || !request.suppress_log_for(error)) {
        VERBATIM_WARN("%s: fcntl of the descriptor %d of a dma-buf failed: %s", device_, request.dmabuf.fd,
                      std::strerror(error));
      }
      return system_error("descriptor of a dma-buf", error);
    }
  }

  {
    const MutexLock lock(mutex_);
    if (MrRef existing = find_cover(key, start, bytes)) return existing;
  }
  Result<UniqueMr> mr = register_range(request, start, bytes, dmabuf_offset);
  if (!mr) return mr.error();

  auto fresh = std::make_unique<Slot>();
  fresh->mr = *std::move(mr);
  fresh->lkey = fresh->mr->lkey;
  fresh->rkey = fresh->mr->rkey;
  fresh->bytes = bytes;
  fresh->references = 1;
  fresh->whole_references = 1;
  // Another thread can have registered the range in the meantime. Then its registration is used, and `fresh` is
  // deregistered after the lock is released.
  const MutexLock lock(mutex_);
  if (MrRef existing = find_cover(key, start, bytes)) return existing;
  const auto ranges = ranges_.try_emplace(key).first;
  ranges->second.max_bytes = std::max(ranges->second.max_bytes, bytes);
  const auto position = ranges->second.by_start.emplace(start, std::move(fresh));
  position->second->ranges = ranges;
  position->second->position = position;
  ++size_;
  return MrRef(position->second.get(), MrReleaser{this, true});
}

MrRef MrCache::find_cover(const RegistrationKind& key, std::uintptr_t start, std::size_t bytes) {
  const auto ranges = ranges_.find(key);
  if (ranges == ranges_.end()) return {};
  auto& by_start = ranges->second.by_start;
  const std::uintptr_t end = start + bytes;
  for (auto candidate = by_start.upper_bound(start); candidate != by_start.begin();) {
    --candidate;
    // Ranges with a lower start cannot reach `end` either.
    if (end - candidate->first > ranges->second.max_bytes) return {};
    Slot& slot = *candidate->second;
    if (candidate->first + slot.bytes < end || slot.whole_references == 0) continue;
    const bool is_whole = candidate->first == start && slot.bytes == bytes;
    ++slot.references;
    if (is_whole) ++slot.whole_references;
    return MrRef(&slot, MrReleaser{this, is_whole});
  }
  return {};
}

Result<UniqueMr> MrCache::register_range(const MrRequest& request, std::uintptr_t start, std::size_t bytes,
                                         std::uint64_t dmabuf_offset) const {
  const bool atomic = request.ordering == MrOrdering::kAtomic || request.ordering == MrOrdering::kRelaxedAtomic;
  const bool relaxed =
      relaxed_ordering_ && (request.ordering == MrOrdering::kRelaxed || request.ordering == MrOrdering::kRelaxedAtomic);
  const unsigned access = kAccess | (relaxed ? unsigned{IBV_ACCESS_RELAXED_ORDERING} : 0U) |
                          (atomic ? unsigned{IBV_ACCESS_REMOTE_ATOMIC} : 0U);
  const auto registered = [&]() -> Result<UniqueMr> {
    void* address = reinterpret_cast<void*>(start);
    if (request.type == MemoryType::kDmaBuf) {
      if (request.data_direct) {
        ibv_mr* mr = reg_data_direct_(pd_, dmabuf_offset, bytes, start, request.dmabuf.fd, static_cast<int>(access),
                                      kMlx5DataDirectAccess);
        return adopt("mlx5dv_reg_dmabuf_mr", mr, verbs_.dereg_mr);
      }
      if (verbs_.reg_dmabuf_mr == nullptr) return system_error("ibv_reg_dmabuf_mr", EOPNOTSUPP);
      ibv_mr* mr = verbs_.reg_dmabuf_mr(pd_, dmabuf_offset, bytes, start, request.dmabuf.fd, static_cast<int>(access));
      return adopt("ibv_reg_dmabuf_mr", mr, verbs_.dereg_mr);
    }
    if (relaxed) {
      return adopt("ibv_reg_mr_iova2", verbs_.reg_mr_iova2(pd_, address, bytes, start, access), verbs_.dereg_mr);
    }
    return adopt("ibv_reg_mr", verbs_.reg_mr(pd_, address, bytes, static_cast<int>(access)), verbs_.dereg_mr);
  };
  Result<UniqueMr> mr = registered();
  if (mr) return mr;
  const Error& error = mr.error();
  if (request.suppress_log_for != nullptr && request.suppress_log_for(error.sys_errno)) return mr;
  VERBATIM_WARN("%s: %s of %zu bytes of %s at 0x%" PRIxPTR " failed: %s%s", device_, error.operation, bytes,
                memory_name(request.type), start, std::strerror(error.sys_errno),
                (error.sys_errno == ENOMEM ? memlock_advice(verbs_, pd_, request.type, bytes, size())
                                           : advice(device_, request, error.sys_errno))
                    .c_str());
  return Error{error.kind, error.sys_errno, error.operation, true};
}

Status MrCache::release(MrRef ref) {
  if (!ref) return {};
  const bool has_whole_range = ref.get_deleter().has_whole_range;
  return drop(ref.release(), has_whole_range);
}

Status MrCache::drop(const MrEntry* entry, bool has_whole_range) {
  std::unique_ptr<Slot> last;  // deregistered outside the lock
  {
    const MutexLock lock(mutex_);
    const auto position = static_cast<const Slot*>(entry)->position;
    if (has_whole_range) --position->second->whole_references;
    if (--position->second->references > 0) return {};
    last = std::move(position->second);
    last->ranges->second.by_start.erase(position);
    if (last->ranges->second.by_start.empty()) ranges_.erase(last->ranges);
    --size_;
  }
  return check_errno("ibv_dereg_mr", destroy_verbs_object(verbs_.dereg_mr, last->mr.release()));
}

std::optional<MrRegion> MrCache::find(std::uintptr_t address, std::size_t bytes) const {
  const MutexLock lock(mutex_);
  for (const auto& [kind, ranges] : ranges_) {
    for (const auto& [start, slot] : ranges.by_start) {
      if (start <= address && bytes <= slot->bytes && address - start <= slot->bytes - bytes) {
        return MrRegion{kind.type, start, slot->bytes};
      }
    }
  }
  return std::nullopt;
}

std::string MrCache::describe_some() const {
  constexpr std::size_t kMaxDescribed = 3;
  const MutexLock lock(mutex_);
  std::string text;
  std::size_t described = 0;
  for (const auto& [kind, ranges] : ranges_) {
    for (const auto& [start, slot] : ranges.by_start) {
      if (described == kMaxDescribed) return text + ", ...";
      char region[96];
      std::snprintf(region, sizeof region, "%s%zu bytes of %s at 0x%zx in use %zu times", described == 0 ? "" : ", ",
                    slot->bytes, memory_name(kind.type), static_cast<std::size_t>(start), slot->references);
      text += region;
      ++described;
    }
  }
  return text;
}

std::size_t MrCache::size() const {
  const MutexLock lock(mutex_);
  return size_;
}

}  // namespace verbatim
