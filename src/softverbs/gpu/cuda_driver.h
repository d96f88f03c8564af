// CUDA's driver interface, as far as softverbs uses it. Nothing is linked: the functions are found in the libcuda that
// the program has loaded, and a program without CUDA is left alone. The declarations follow the manual of the driver
// interface (docs.nvidia.com/cuda/cuda-driver-api).
#pragma once

#include <cstddef>
#include <cstdint>

namespace verbatim::softverbs::cuda {

using Status = int;
using Address = unsigned long long;
using Context = void*;
using Stream = void*;
using Event = void*;
using AllocationHandle = unsigned long long;

constexpr Status kSuccess = 0;
constexpr Status kNotReady = 600;
constexpr Status kHostMemoryAlreadyRegistered = 712;
constexpr Status kPeerAccessAlreadyEnabled = 704;

enum PointerAttribute : int {
  kMemoryType = 2,
  kBufferId = 7,
  kDeviceOrdinal = 9,
  kIsLegacyIpcCapable = 10,
  kRangeStart = 11,
  kRangeSize = 12,
  kAllowedHandleTypes = 14,
};
constexpr unsigned kDeviceMemory = 2;  // a value of kMemoryType

constexpr int kPosixDescriptor = 1;  // a handle type
constexpr unsigned kLazyPeerAccess = 1;
constexpr int kDeviceLocation = 1;
constexpr int kReadWrite = 3;

struct IpcHandle {
  char bytes[64];
};
struct Location {
  int type;
  int id;
};
struct AccessDescription {
  Location location;
  int flags;
};

// Other threads may capture graphs. What they capture does not concern the calls of a thread in this mode.
constexpr int kRelaxedCaptureMode = 2;

constexpr unsigned kNonBlockingStream = 1;
constexpr unsigned kEventWithoutTiming = 2;
constexpr unsigned kPortableHostMemory = 1;

struct Driver {
  Status (*pointer_get_attribute)(void* data, PointerAttribute attribute, Address pointer);
  Status (*primary_context_retain)(Context* context, int device);
  Status (*context_set_current)(Context context);
  Status (*context_push)(Context context);
  Status (*context_pop)(Context* context);
  Status (*thread_exchange_capture_mode)(int* mode);  // nullptr: not in this version
  Status (*stream_create)(Stream* stream, unsigned flags);
  Status (*event_create)(Event* event, unsigned flags);
  Status (*event_record)(Event event, Stream stream);
  Status (*event_query)(Event event);
  Status (*copy_to_device)(Address to, const void* from, std::size_t bytes, Stream stream);
  Status (*copy_to_host)(void* to, Address from, std::size_t bytes, Stream stream);
  Status (*copy_on_device)(Address to, Address from, std::size_t bytes, Stream stream);
  Status (*host_register)(void* memory, std::size_t bytes, unsigned flags);
  // For memory of other GPUs and processes
  Status (*device_can_access_peer)(int* is_possible, int device, int peer);
  Status (*context_enable_peer_access)(Context peer, unsigned flags);
  Status (*ipc_get_handle)(IpcHandle* handle, Address memory);
  Status (*ipc_open_handle)(Address* memory, IpcHandle handle, unsigned flags);
  Status (*ipc_close_handle)(Address memory);
  Status (*memory_retain_handle)(AllocationHandle* handle, void* memory);
  Status (*memory_export)(void* shareable, AllocationHandle handle, int type, unsigned long long flags);
  Status (*memory_import)(AllocationHandle* handle, void* shareable, int type);
  Status (*memory_release)(AllocationHandle handle);
  Status (*address_reserve)(Address* start, std::size_t bytes, std::size_t alignment, Address wanted,
                            unsigned long long flags);
  Status (*address_free)(Address start, std::size_t bytes);
  Status (*memory_map)(Address start, std::size_t bytes, std::size_t offset, AllocationHandle handle,
                       unsigned long long flags);
  Status (*memory_unmap)(Address start, std::size_t bytes);
  Status (*memory_set_access)(Address start, std::size_t bytes, const AccessDescription* access, std::size_t count);
  Status (*error_name)(Status status, const char** name);
};

// nullptr unless the program has loaded libcuda. Thread-safe.
const Driver* driver();

// "CUDA_ERROR_...", or the number.
const char* name_of(const Driver& driver, Status status);

}  // namespace verbatim::softverbs::cuda
