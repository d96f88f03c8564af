#include "softverbs/engine/memory_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "softverbs/engine/copies_in_flight.h"
#include "softverbs/engine/late_writes.h"
#include "softverbs/engine/process.h"
#include "softverbs/engine/qp.h"
#include "softverbs/faults/faults.h"
#include "softverbs/gpu/cuda_driver.h"
#include "softverbs/gpu/exports.h"
#include "softverbs/gpu/gpu.h"
#include "softverbs/gpu/imports.h"
#include "softverbs/gpu/staging.h"
#include "softverbs/host/lock_limit.h"
#include "softverbs/memory/copier.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace verbatim::softverbs {
namespace {

// The high bits of a key are the table index + 1, which is never 0. The low byte differs between uses of the entry,
// between processes, and between lkey and rkey, so that a stale key or a key of the wrong kind is refused.
constexpr std::uint32_t kRemoteVariant = 0x80;

constexpr unsigned kKnownAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                                  IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_HUGETLB |
                                  IBV_ACCESS_OPTIONAL_RANGE;
constexpr unsigned kUnsupportedAccess = IBV_ACCESS_MW_BIND | IBV_ACCESS_ON_DEMAND;

bool populate(std::uintptr_t page, bool writable) {
  return ::madvise(reinterpret_cast<void*>(page), kPageBytes, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0;
}

// Kernels before 5.14 do not know MADV_POPULATE_* and return EINVAL, as newer ones do for read-only memory. A page that
// is known to be writable distinguishes the two cases.
bool is_page_usable(std::uintptr_t page, bool writable) {
  alignas(kPageBytes) static char writable_page[kPageBytes];
  static const bool is_supported = populate(reinterpret_cast<std::uintptr_t>(writable_page), true);
  return !is_supported || populate(page, writable);
}

// Hardware pins pages at registration and fails when it cannot. softverbs pins none, but refuses memory that cannot be
// pinned.
bool is_mapped(std::uintptr_t address, std::size_t length, bool writable) {
  const std::uintptr_t first = address / kPageBytes * kPageBytes;
  const std::uintptr_t last = (address + length - 1) / kPageBytes * kPageBytes;
  constexpr std::size_t kPagesPerCall = 1U << 16;
  std::vector<unsigned char> residency(std::min(kPagesPerCall, (last - first) / kPageBytes + 1));
  for (std::uintptr_t at = first; at <= last; at += kPagesPerCall * kPageBytes) {
    const std::size_t bytes = std::min(kPagesPerCall * kPageBytes, last - at + kPageBytes);
    if (::mincore(reinterpret_cast<void*>(at), bytes, residency.data()) != 0) return false;
  }
  return is_page_usable(first, writable) && is_page_usable(last, writable);
}

// What hardware would pin, counted as the kernel does for RLIMIT_MEMLOCK: the pages of each region separately.
std::atomic<std::uint64_t> g_regions{0};
std::atomic<std::uint64_t> g_locked_bytes{0};
std::atomic<std::uint64_t> g_pinned_bytes{0};  // without dma-bufs, which the kernel does not count

class LockedBytes {
 public:
  LockedBytes(std::uintptr_t begin, std::size_t length, bool is_dmabuf)
      : begin_(begin), length_(length), is_dmabuf_(is_dmabuf) {
    const std::uint64_t bytes = pages(begin, length);
    g_regions.fetch_add(1);
    g_locked_bytes.fetch_add(bytes);
    if (!is_dmabuf) pinned_bytes_ = g_pinned_bytes.fetch_add(bytes) + bytes;
  }
  ~LockedBytes() {
    if (!is_kept_) release(begin_, length_, is_dmabuf_);
  }
  LockedBytes(const LockedBytes&) = delete;
  LockedBytes& operator=(const LockedBytes&) = delete;

  void keep() { is_kept_ = true; }
  // Of the process, this region included; 0 for a dma-buf.
  std::uint64_t pinned_bytes() const { return pinned_bytes_; }
  static void release(std::uintptr_t begin, std::size_t length, bool is_dmabuf) {
    g_regions.fetch_sub(1);
    g_locked_bytes.fetch_sub(pages(begin, length));
    if (!is_dmabuf) g_pinned_bytes.fetch_sub(pages(begin, length));
  }

 private:
  static std::uint64_t pages(std::uintptr_t begin, std::size_t length) {
    return round_up(begin + length, kPageBytes) - begin / kPageBytes * kPageBytes;
  }

  const std::uintptr_t begin_;
  const std::size_t length_;
  const bool is_dmabuf_;
  std::uint64_t pinned_bytes_ = 0;
  bool is_kept_ = false;
};

bool is_access_valid(unsigned access) {
  if ((access & ~(kKnownAccess | kUnsupportedAccess)) != 0) return false;
  const bool remote_changes = (access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) != 0;
  return !remote_changes || (access & IBV_ACCESS_LOCAL_WRITE) != 0;
}

// Drivers for GPU memory pin whole pages of the GPU. What lies behind the allocation in the last page cannot be copied.
constexpr std::uint64_t kGpuPageBytes = 1U << 16;

// A region of GPU memory: its address as the region's table has it, and the number under which it is exported.
struct GpuRegion {
  std::uint64_t address;
  std::uint32_t number;
};

// Memory that is exported for a region until the region is made, or is not.
struct Exported {
  ~Exported() { withdraw_gpu_memory(segment, number); }

  Segment& segment;
  std::uint32_t number;
};

// Whether all bytes belong to allocations of that GPU: a range of addresses may consist of several.
bool is_on_gpu(const GpuAllocation& first, std::uint64_t address, std::size_t length) {
  std::uint64_t end = round_up(first.start + first.bytes, kGpuPageBytes);
  if (address < first.start / kGpuPageBytes * kGpuPageBytes) return false;
  while (end < address + length) {
    const std::optional<GpuAllocation> next = find_gpu_allocation(end);
    if (!next || next->gpu != first.gpu) return false;
    end = round_up(next->start + next->bytes, kGpuPageBytes);
  }
  return true;
}

// Prepares what copies of the memory need.
Result<GpuRegion> prepare_gpu_memory(Process& process, const GpuAllocation& allocation, std::uint64_t address,
                                     std::size_t length, bool data_direct) {
  if (length == 0 || address + length < address) return system_error("register_memory", EINVAL);
  if (!is_on_gpu(allocation, address, length)) return system_error("register_memory", EFAULT);
  const Result<Gpu*> gpu = Gpu::open(allocation.gpu);
  if (!gpu) return gpu.error();
  const CurrentGpu current(**gpu);  // the thread that registers need not have a context
  if (!current.is_set()) return system_error("cuCtxPushCurrent", EIO);
  if (Status prepared = prepare_staging(process.registry(), process.segment()); !prepared) return prepared.error();
  GpuRegion region{mark_gpu_address(allocation.gpu, data_direct, address), 0};
  if (!process.settings().copies_directly) return region;
  if (Status started = start_importer(); !started) return started.error();
  const bool is_one = address + length <= allocation.start + round_up(allocation.bytes, kGpuPageBytes);
  if (is_one) region.number = export_gpu_memory(process.segment(), allocation);
  return region;
}

// What a region consists of.
struct RegionMemory {
  std::uint64_t address;         // marked if it is GPU memory
  bool is_pinned = false;        // it counts against RLIMIT_MEMLOCK
  std::uint32_t gpu_memory = 0;  // as in SharedMr
  Mapping dmabuf = {};
};

Result<Mr*> make_region(Context& context, ibv_pd* pd, RegionMemory memory, std::size_t length, std::uint64_t iova,
                        unsigned access) {
  const std::uint64_t begin = memory.address;
  if (!is_access_valid(access) || length == 0 || begin + length < begin || iova + length < iova) {
    return system_error("register_memory", EINVAL);
  }
  if ((access & kUnsupportedAccess) != 0) return system_error("register_memory", EOPNOTSUPP);
  if (!is_gpu_address(begin) && !is_mapped(begin, length, (access & IBV_ACCESS_LOCAL_WRITE) != 0)) {
    return system_error("register_memory", EFAULT);
  }
  Process& process = *context.process;
  LockedBytes locked(begin, length, !memory.is_pinned);
  if (process.settings().has_lock_limit && exceeds_lock_limit(locked.pinned_bytes())) {
    return system_error("register_memory", ENOMEM);
  }
  if (Faults* all = faults(); all != nullptr) {
    const int error = all->refused_registration(length, g_regions.load(), g_locked_bytes.load());
    if (error != 0) return system_error("register_memory", error);
  }
  auto mr = std::make_unique<Mr>();
  Result<std::uint32_t> index = process.mr_table().allocate(process.settings().max_mr);
  if (!index) return index.error();
  SharedMr& shared = process.segment().mrs[*index];
  shared.pd = pd->handle;
  shared.access = access;
  shared.iova = (access & IBV_ACCESS_ZERO_BASED) != 0 ? 0 : iova;
  shared.length = length;
  shared.address = begin;
  shared.gpu_memory = memory.gpu_memory;
  const std::uint32_t variant = (shared.uses++ + process.me() * 17) % kRemoteVariant;
  const std::uint32_t lkey = (*index + 1) << kKeyVariantBits | variant;
  const std::uint32_t rkey = lkey | kRemoteVariant;

  mr->context = &context.context;
  mr->pd = pd;
  const bool is_mapped_dmabuf = memory.dmabuf.as<std::byte>() != nullptr;  // the program has no address for it
  mr->addr = is_mapped_dmabuf ? nullptr : reinterpret_cast<void*>(cuda_address(begin));
  mr->dmabuf = std::move(memory.dmabuf);
  mr->is_pinned = memory.is_pinned;
  mr->length = length;
  mr->handle = *index;
  mr->lkey = lkey;
  mr->rkey = rkey;
  mr->index = *index;
  shared.lkey.store(lkey, std::memory_order_release);
  shared.rkey.store(rkey, std::memory_order_release);
  static_cast<Pd*>(pd)->users.fetch_add(1, std::memory_order_relaxed);
  locked.keep();
  return mr.release();
}

Result<Mr*> make_gpu_region(Context& context, ibv_pd* pd, const GpuAllocation& allocation, std::uint64_t address,
                            std::size_t length, std::uint64_t iova, unsigned access, bool data_direct = false) {
  Process& process = *context.process;
  const Result<GpuRegion> region = prepare_gpu_memory(process, allocation, address, length, data_direct);
  if (!region) return region.error();
  Exported exported{process.segment(), region->number};
  Result<Mr*> mr =
      make_region(context, pd, {.address = region->address, .gpu_memory = region->number}, length, iova, access);
  if (mr) exported.number = 0;
  return mr;
}

}  // namespace

Result<Mr*> register_memory(Context& context, ibv_pd* pd, void* address, std::size_t length, std::uint64_t iova,
                            unsigned access) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  if (is_gpu_address(begin)) return system_error("register_memory", EFAULT);  // no address of a program
  if (context.process->settings().takes(GpuMemory::kPeerMemory)) {
    if (const std::optional<GpuAllocation> allocation = find_gpu_allocation(begin, length)) {
      return make_gpu_region(context, pd, *allocation, begin, length, iova, access);
    }
  }
  return make_region(context, pd, {.address = begin, .is_pinned = true}, length, iova, access);
}

Result<Mr*> register_dmabuf(Context& context, ibv_pd* pd, std::uint64_t offset, std::size_t length, std::uint64_t iova,
                            int fd, unsigned access, bool data_direct) {
  const Settings& settings = context.process->settings();
  const bool takes_gpu_memory = settings.takes(GpuMemory::kDmabuf) && cuda::driver() != nullptr;
  if (!settings.dmabuf && !takes_gpu_memory) return system_error("reg_dmabuf_mr", EOPNOTSUPP);
  // As in Linux, mlx5/mr.c, reg_user_mr_dmabuf_by_data_direct.
  if (data_direct && iova % kPageBytes != 0) return system_error("reg_dmabuf_mr", EOPNOTSUPP);
  if (data_direct && context.device >= settings.data_direct.size()) return system_error("reg_dmabuf_mr", EINVAL);
  if (::fcntl(fd, F_GETFD) < 0) return system_error("reg_dmabuf_mr", EBADF);
  if (takes_gpu_memory) {
    if (const std::optional<GpuAllocation> allocation = find_gpu_allocation(iova, length)) {
      return make_gpu_region(context, pd, *allocation, iova, length, iova, access, data_direct);
    }
  }
  if (!settings.dmabuf) return system_error("reg_dmabuf_mr", EINVAL);  // not the dma-buf of the memory at `iova`
  // An access beyond the end of the file would be a SIGBUS. The size of a dma-buf is found by seeking, too.
  const off_t before = ::lseek(fd, 0, SEEK_CUR);
  const off_t size = ::lseek(fd, 0, SEEK_END);
  if (before >= 0) ::lseek(fd, before, SEEK_SET);
  if (length == 0 || offset + length < offset || size < 0 || offset + length > static_cast<std::uint64_t>(size)) {
    return system_error("reg_dmabuf_mr", EINVAL);
  }
  const std::uint64_t first_page = offset / kPageBytes * kPageBytes;
  const std::size_t mapped_bytes = offset - first_page + length;
  const bool writable = (access & IBV_ACCESS_LOCAL_WRITE) != 0;
  void* const address = ::mmap(nullptr, mapped_bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd,
                               static_cast<off_t>(first_page));
  if (address == MAP_FAILED) return system_error("reg_dmabuf_mr", errno);
  const auto begin = reinterpret_cast<std::uintptr_t>(address) + (offset - first_page);
  return make_region(context, pd, {.address = begin, .dmabuf = Mapping(address, mapped_bytes)}, length, iova, access);
}

void forget_regions_of_parent() {
  g_regions.store(0);
  g_locked_bytes.store(0);
  g_pinned_bytes.store(0);
}

void deregister_memory(Mr& mr) {
  Process& process = *context_of(mr.context).process;
  SharedMr& shared = process.segment().mrs[mr.index];
  shared.rkey.store(0, std::memory_order_seq_cst);
  shared.lkey.store(0, std::memory_order_seq_cst);
  // Every access holds the lock of the QP that sends from this region or receives into it, and looks up the key after
  // it has taken that lock. When each of these locks was free once, no access uses the old key.
  process.for_each_qp([&](Qp& qp) {
    if (qp.pd != mr.pd && (qp.srq == nullptr || qp.srq->pd != mr.pd)) return;
    qp.execution.wait_for_holder();
    qp.shared->lock.wait_for_holder();
  });
  // What the device holds back it has acknowledged, so it is written and not dropped. Later it must not be written.
  const std::uint32_t device = context_of(mr.context).device;
  while (show_late_writes(process.view(), process.me(), device, path_to(shared.address)) == CopyResult::kProcessDead) {
  }
  await_copies(process.segment());
  await_gpu_copies(process);
  await_requested_copies(process.segment());
  LockedBytes::release(shared.address, mr.length, !mr.is_pinned);
  withdraw_gpu_memory(process.segment(), shared.gpu_memory);
  process.mr_table().release(mr.index);
  static_cast<Pd*>(mr.pd)->users.fetch_sub(1, std::memory_order_release);
  delete &mr;
}

}  // namespace verbatim::softverbs
