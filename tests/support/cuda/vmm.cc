// Memory in two steps: cuMemCreate makes it, cuMemMap gives it an address, cuMemSetAccess gives GPUs access to it.
#include <algorithm>
#include <iterator>
#include <utility>

#include "support/cuda/memory.h"

using standin::Backing;
using standin::Call;
using standin::driver;
using standin::kGranularity;
using standin::Memory;
using standin::Range;

namespace {

bool is_known(const CUmemAllocationProp& properties) {
  return properties.type == CU_MEM_ALLOCATION_TYPE_PINNED && properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
         (static_cast<unsigned>(properties.requestedHandleTypes) &
          ~unsigned{CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR}) == 0;
}

bool is_granular(CUdeviceptr value) {
  return value % kGranularity == 0;
}

}  // namespace

STANDIN_EXPORT CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp* properties,
                                                      CUmemAllocationGranularity_flags) {
  const Call call(Call::kDriver);
  if (call.error() != CUDA_SUCCESS) return call.error();
  if (!is_known(*properties)) return CUDA_ERROR_INVALID_VALUE;
  if (!driver().is_device(properties->location.id)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                                    const CUmemAllocationProp* properties, unsigned long long flags) {
  const Call call(Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  if (flags != 0 || bytes == 0 || !is_granular(bytes) || !is_known(*properties)) return CUDA_ERROR_INVALID_VALUE;
  if (!driver().is_device(properties->location.id)) return CUDA_ERROR_INVALID_DEVICE;
  auto backing =
      Backing::create(properties->location.id, bytes, static_cast<unsigned>(properties->requestedHandleTypes));
  if (backing == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = driver().memory->hold(std::move(backing));
  return CUDA_SUCCESS;
}

// Memory that is mapped stays until it is unmapped.
STANDIN_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  const Call call(Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  auto& handles = driver().memory->handles;
  const auto found = handles.find(handle);
  if (found == handles.end()) return CUDA_ERROR_INVALID_VALUE;
  if (--found->second.references == 0) handles.erase(found);
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr,
                                            unsigned long long flags) {
  const Call call(Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  if (flags != 0 || bytes == 0 || !is_granular(bytes) || (alignment & (alignment - 1)) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *address = driver().memory->take_addresses(bytes, std::max(alignment, kGranularity));
  if (*address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  driver().memory->reservations[*address] = bytes;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  const Call call(Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  Memory& memory = *driver().memory;
  const auto found = memory.reservations.find(address);
  if (found == memory.reservations.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  const auto mapped = memory.ranges.lower_bound(address);
  if (mapped != memory.ranges.end() && mapped->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  memory.reservations.erase(found);
  memory.give_addresses(address);
  return CUDA_SUCCESS;
}

// Until cuMemSetAccess no GPU has access, also not the one that owns the memory.
STANDIN_EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                                 unsigned long long flags) {
  const Call call(Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  Memory& memory = *driver().memory;
  const auto held = memory.handles.find(handle);
  if (held == memory.handles.end() || flags != 0 || offset != 0) return CUDA_ERROR_INVALID_VALUE;
  if (bytes == 0 || !is_granular(bytes) || !is_granular(address)) return CUDA_ERROR_INVALID_VALUE;
  if (bytes > held->second.backing->bytes()) return CUDA_ERROR_INVALID_VALUE;
  const auto behind = memory.reservations.upper_bound(address);
  if (behind == memory.reservations.begin()) return CUDA_ERROR_INVALID_VALUE;
  const auto& [start, reserved] = *std::prev(behind);
  if (address - start >= reserved || reserved - (address - start) < bytes) return CUDA_ERROR_INVALID_VALUE;
  const auto next = memory.ranges.lower_bound(address);
  if (next != memory.ranges.end() && next->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  if (memory.find(address) != memory.ranges.end()) return CUDA_ERROR_INVALID_VALUE;
  memory.add(address, {.kind = Range::Kind::kMapped, .backing = held->second.backing, .bytes = bytes});
  return CUDA_SUCCESS;
}

// Does not wait for copies: one that is still queued faults.
STANDIN_EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  const Call call(Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  const auto starts = driver().memory->mappings(address, bytes);
  if (starts.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (const CUdeviceptr start : starts) driver().memory->ranges.erase(start);
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* accesses,
                                       size_t count) {
  const Call call(Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  Memory& memory = *driver().memory;
  const auto starts = memory.mappings(address, bytes);
  if (starts.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (const CUdeviceptr start : starts) {
    Range& range = memory.ranges.at(start);
    for (const CUmemAccessDesc* access = accesses; access != accesses + count; ++access) {
      const int device = access->location.id;
      if (access->location.type != CU_MEM_LOCATION_TYPE_DEVICE || !driver().is_device(device)) {
        return CUDA_ERROR_INVALID_DEVICE;
      }
      const int owner = range.backing->device();
      if (device != owner && !driver().can_access_peer(device, owner)) return CUDA_ERROR_INVALID_DEVICE;
      range.access[static_cast<std::size_t>(device)] = access->flags;
    }
  }
  return CUDA_SUCCESS;
}

// The handle with which the memory was mapped, also when it has been released meanwhile. Only of mapped memory.
STANDIN_EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  const Call call(Call::kDriver);
  if (call.error() != CUDA_SUCCESS) return call.error();
  Memory& memory = *driver().memory;
  const auto found = memory.find(reinterpret_cast<CUdeviceptr>(address));
  if (found == memory.ranges.end() || found->second.kind != Range::Kind::kMapped) return CUDA_ERROR_INVALID_VALUE;
  *handle = memory.hold(found->second.backing);
  return CUDA_SUCCESS;
}
