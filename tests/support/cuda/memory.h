// Memory of the GPUs. The address of device memory is reserved without access: a load or a store by the CPU crashes, a
// system call that is given the address fails. The bytes are in a memfd that is mapped at another place, which only
// the driver calls know. A memfd goes away with the last process that has it open or mapped, however that process ends.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "support/cuda/driver.h"

namespace standin {

constexpr std::size_t kGranularity = std::size_t{2} << 20;  // of large allocations and of everything that cuMemMap maps

// The bytes of one allocation, as this process has them mapped.
class Backing {
 public:
  // Null: the device or the process has no memory or no descriptor left.
  static std::shared_ptr<Backing> create(int device, std::size_t bytes, unsigned handle_types);
  // The memory behind a descriptor of this or another process: a path in /proc. Null: no such memory.
  static std::shared_ptr<Backing> open(const char* path);
  ~Backing();
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;

  int fd() const { return fd_; }
  unsigned long long id() const { return id_; }  // unique in this process
  ino_t inode() const { return inode_; }
  std::byte* data() const { return data_; }
  int device() const { return label_.device; }
  std::size_t bytes() const { return label_.bytes; }
  unsigned handle_types() const { return label_.handle_types; }
  static std::size_t used_bytes(int device);

 private:
  // Behind the bytes in the file, for processes that import it.
  struct Label {
    unsigned long long magic;
    int device;
    unsigned handle_types;
    std::size_t bytes;
  };
  Backing(int fd, const Label& label, bool created);
  bool map();

  int fd_;
  Label label_;
  bool created_;
  unsigned long long id_;
  ino_t inode_ = 0;
  std::byte* data_ = nullptr;
};

// Device memory that has an address.
struct Range {
  enum class Kind { kAllocated, kImported, kMapped };  // by cuMemAlloc, cuIpcOpenMemHandle, cuMemMap

  Kind kind;
  std::shared_ptr<Backing> backing;
  std::size_t bytes;
  Context* owner = nullptr;                             // not of mapped memory, which belongs to the process
  std::array<CUmemAccess_flags, kMaxDevices> access{};  // of mapped memory, for each device
  unsigned opened = 0;                                  // of imported memory: calls of cuIpcOpenMemHandle
  unsigned long long buffer_id = 0;
};

// A CUmemGenericAllocationHandle: so many calls of cuMemRelease are due.
struct HeldMemory {
  std::shared_ptr<Backing> backing;
  unsigned references = 0;
};

// Host memory that is pinned.
struct HostRange {
  std::size_t bytes;
  Context* owner;
  bool allocated;  // by cuMemHostAlloc
  unsigned long long buffer_id;
};

// One side of a copy, when it is executed. It keeps the bytes, also when the memory is unmapped meanwhile.
struct View {
  struct Part {
    std::byte* data;
    std::size_t bytes;
    std::shared_ptr<Backing> backing;
  };
  std::vector<Part> parts;
};

class Memory {
 public:
  bool reserve();

  // Addresses: the first free ones that fit, so a freed address comes back soon. 0: none left.
  CUdeviceptr take_addresses(std::size_t bytes, std::size_t alignment);
  void give_addresses(CUdeviceptr start) { occupied_.erase(start); }
  bool is_device_address(CUdeviceptr address) const { return address >= begin_ && address < end_; }

  Range& add(CUdeviceptr start, Range range);
  // The memory at an address; end(): none.
  std::map<CUdeviceptr, Range>::iterator find(CUdeviceptr address);
  // The mappings that fill these addresses exactly; empty: they do not.
  std::vector<CUdeviceptr> mappings(CUdeviceptr address, std::size_t bytes);
  // Whether all addresses are memory: of one allocation, or mapped without a gap.
  bool covers(CUdeviceptr address, std::size_t bytes);
  // Whether the context's GPU has no access of its own, and the driver copies through buffers in host memory.
  bool is_staged(CUdeviceptr address, const Context& context);
  // CUDA_ERROR_ILLEGAL_ADDRESS: no memory, or this GPU has no such access to it.
  CUresult view(CUdeviceptr address, std::size_t bytes, const Context& context, CUmemAccess_flags access, View& result);

  bool is_pinned(const void* address, std::size_t bytes);
  std::map<CUdeviceptr, HostRange>::iterator find_host(CUdeviceptr address);
  unsigned long long next_buffer_id() { return ++last_buffer_id_; }
  // The handle of this memory, with one more reference.
  CUmemGenericAllocationHandle hold(std::shared_ptr<Backing> backing);
  // Frees what belongs to a context that is destroyed.
  void forget(const Context& context);

  std::map<CUdeviceptr, Range> ranges;
  std::map<CUdeviceptr, HostRange> host_ranges;
  std::map<CUdeviceptr, std::size_t> reservations;  // of cuMemAddressReserve
  std::map<CUmemGenericAllocationHandle, HeldMemory> handles;

 private:
  CUdeviceptr begin_ = 0;
  CUdeviceptr end_ = 0;
  std::map<CUdeviceptr, std::size_t> occupied_;
  unsigned long long last_buffer_id_ = 0;
};

}  // namespace standin
