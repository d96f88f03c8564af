#include "support/cuda/memory.h"

#include <sys/mman.h>
#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

namespace standin {
namespace {

constexpr std::size_t kAddresses = std::size_t{64} << 30;
constexpr std::size_t kOffsets = 1024;  // the first address is at one of so many places

template <typename Map>
typename Map::iterator containing(Map& map, CUdeviceptr address) {
  const auto next = map.upper_bound(address);
  if (next == map.begin()) return map.end();
  const auto found = std::prev(next);
  return address - found->first < found->second.bytes ? found : map.end();
}

}  // namespace

bool Memory::reserve() {
  const std::size_t bytes = kAddresses + kOffsets * kGranularity;
  void* const area = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (area == MAP_FAILED) return false;
  // An address of one process means nothing in another, also where address space layout randomization is off.
  std::uint16_t random = 0;
  if (getrandom(&random, sizeof random, 0) != sizeof random) return false;
  begin_ = (reinterpret_cast<CUdeviceptr>(area) + kGranularity - 1) / kGranularity * kGranularity;
  begin_ += random % (kOffsets - 1) * kGranularity;
  end_ = begin_ + kAddresses;
  return true;
}

CUdeviceptr Memory::take_addresses(std::size_t bytes, std::size_t alignment) {
  CUdeviceptr start = begin_;
  for (const auto& [taken, length] : occupied_) {
    if (taken >= start && taken - start >= bytes) break;
    start = (std::max(start, taken + length) + alignment - 1) / alignment * alignment;
  }
  if (start >= end_ || end_ - start < bytes) return 0;
  occupied_[start] = bytes;
  return start;
}

Range& Memory::add(CUdeviceptr start, Range range) {
  range.buffer_id = next_buffer_id();
  return ranges.insert_or_assign(start, std::move(range)).first->second;
}

std::map<CUdeviceptr, Range>::iterator Memory::find(CUdeviceptr address) {
  return containing(ranges, address);
}

std::map<CUdeviceptr, HostRange>::iterator Memory::find_host(CUdeviceptr address) {
  return containing(host_ranges, address);
}

bool Memory::is_pinned(const void* address, std::size_t bytes) {
  const auto start = reinterpret_cast<CUdeviceptr>(address);
  const auto found = find_host(start);
  return found != host_ranges.end() && found->second.bytes - (start - found->first) >= bytes;
}

std::vector<CUdeviceptr> Memory::mappings(CUdeviceptr address, std::size_t bytes) {
  std::vector<CUdeviceptr> starts;
  CUdeviceptr next = address;
  while (next < address + bytes) {
    const auto found = ranges.find(next);
    if (found == ranges.end() || found->second.kind != Range::Kind::kMapped) return {};
    starts.push_back(next);
    next += found->second.bytes;
  }
  return next == address + bytes ? starts : std::vector<CUdeviceptr>();
}

bool Memory::covers(CUdeviceptr address, std::size_t bytes) {
  auto found = find(address);
  while (found != ranges.end()) {
    const std::size_t behind = found->second.bytes - (address - found->first);
    if (behind >= bytes) return true;
    if (found->second.kind != Range::Kind::kMapped) return false;
    address += behind;
    bytes -= behind;
    found = find(address);
    if (found != ranges.end() && found->second.kind != Range::Kind::kMapped) return false;
  }
  return false;
}

bool Memory::is_staged(CUdeviceptr address, const Context& context) {
  const auto found = find(address);
  if (found == ranges.end() || found->second.kind == Range::Kind::kMapped) return false;
  const int device = found->second.backing->device();
  return device != context.device && context.peers.count(device) == 0;
}

CUresult Memory::view(CUdeviceptr address, std::size_t bytes, const Context& context, CUmemAccess_flags access,
                      View& result) {
  if (!covers(address, bytes)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  while (bytes > 0) {
    const auto& [start, range] = *find(address);
    if (range.kind == Range::Kind::kMapped &&
        (range.access[static_cast<std::size_t>(context.device)] & access) != access) {
      return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    const auto part = std::min<std::size_t>(bytes, range.bytes - (address - start));
    result.parts.push_back({range.backing->data() + (address - start), part, range.backing});
    address += part;
    bytes -= part;
  }
  return CUDA_SUCCESS;
}

CUmemGenericAllocationHandle Memory::hold(std::shared_ptr<Backing> backing) {
  const CUmemGenericAllocationHandle handle = backing->id();
  HeldMemory& held = handles[handle];
  held.backing = std::move(backing);
  ++held.references;
  return handle;
}

void Memory::forget(const Context& context) {
  for (auto range = ranges.begin(); range != ranges.end();) {
    if (range->second.owner == &context) {
      give_addresses(range->first);
      range = ranges.erase(range);
    } else {
      ++range;
    }
  }
  std::erase_if(host_ranges, [&](const auto& entry) { return entry.second.owner == &context; });
}

}  // namespace standin

using standin::Backing;
using standin::Call;
using standin::driver;
using standin::Memory;
using standin::Range;

STANDIN_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  Call call(Call::kContext | Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  Memory& memory = *driver().memory;
  auto backing = Backing::create(call.context().device, bytes, CU_MEM_HANDLE_TYPE_NONE);
  if (backing == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  // As the driver does: small allocations share pages with others.
  *address = memory.take_addresses(bytes, bytes < standin::kGranularity / 2 ? 512 : standin::kGranularity);
  if (*address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  memory.add(*address, {.kind = Range::Kind::kAllocated, .backing = backing, .bytes = bytes, .owner = &call.context()});
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
  Call call(Call::kContext | Call::kNoKernel);
  if (call.error() != CUDA_SUCCESS) return call.error();
  if (address == 0) return CUDA_SUCCESS;
  Memory& memory = *driver().memory;
  // The driver waits for the work of the GPU before it frees.
  driver().drain(call.lock());
  const auto found = memory.ranges.find(address);
  if (found == memory.ranges.end() || found->second.kind != Range::Kind::kAllocated) return CUDA_ERROR_INVALID_VALUE;
  memory.ranges.erase(found);
  memory.give_addresses(address);
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemGetInfo_v2(size_t* available, size_t* total) {
  Call call(Call::kContext);
  if (call.error() != CUDA_SUCCESS) return call.error();
  *total = standin::kDeviceBytes;
  *available = standin::kDeviceBytes - Backing::used_bytes(call.context().device);
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr* start, size_t* bytes, CUdeviceptr address) {
  const Call call(Call::kDriver);
  if (call.error() != CUDA_SUCCESS) return call.error();
  Memory& memory = *driver().memory;
  const auto found = memory.find(address);
  if (found == memory.ranges.end()) return CUDA_ERROR_NOT_FOUND;
  if (start != nullptr) *start = found->first;
  if (bytes != nullptr) *bytes = found->second.bytes;
  return CUDA_SUCCESS;
}

// Needs no context. Fails for host memory that the driver does not know.
STANDIN_EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  const Call call(Call::kDriver);
  if (call.error() != CUDA_SUCCESS) return call.error();
  Memory& memory = *driver().memory;
  const auto device = memory.find(address);
  const auto host = memory.find_host(address);
  const bool on_device = device != memory.ranges.end();
  if (!on_device && host == memory.host_ranges.end()) return CUDA_ERROR_INVALID_VALUE;
  const auto answer = [value](auto result) {
    std::memcpy(value, &result, sizeof result);
    return CUDA_SUCCESS;
  };
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return answer(on_device ? unsigned{CU_MEMORYTYPE_DEVICE} : unsigned{CU_MEMORYTYPE_HOST});
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return answer(on_device ? device->second.buffer_id : host->second.buffer_id);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return answer(on_device ? device->second.backing->device() : host->second.owner->device);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      return answer(on_device && device->second.kind == Range::Kind::kAllocated ? 1 : 0);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return answer(on_device ? device->first : host->first);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return answer(on_device ? device->second.bytes : host->second.bytes);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      return answer(on_device && device->second.kind == Range::Kind::kMapped
                        ? static_cast<unsigned long long>(device->second.backing->handle_types())
                        : 0ULL);
  }
  return CUDA_ERROR_INVALID_VALUE;
}
