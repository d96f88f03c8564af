#include "memory/cuda_memory.h"

#include <unistd.h>

#include "base/unique_fd.h"
#include "ranks/failure.h"

namespace verbatim::memory {
namespace {

std::size_t page_bytes() {
  return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

std::size_t round_up(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}

const netapi::Properties& properties_of(const ranks::LoadedPlugin& plugin, int device) {
  return plugin.devices().at(static_cast<std::size_t>(device));
}

}  // namespace

CudaMemory::CudaMemory(const std::string& library, int rank, Allocations allocations)
    : gpu_(library, rank), stream_(gpu_.make_stream()), allocations_(allocations) {}

// CUDA places small allocations between page boundaries.
std::byte* CudaMemory::do_allocate(std::size_t bytes) {
  if (allocations_ == Allocations::kExact) return gpu_.allocate(bytes);
  const std::size_t page = page_bytes();
  std::byte* const data = gpu_.allocate(round_up(bytes, page) + page - 1);
  return data + (page - reinterpret_cast<std::uintptr_t>(data) % page) % page;
}

bool CudaMemory::uses_dmabuf(const ranks::LoadedPlugin& plugin, int device) const {
  return (properties_of(plugin, device).ptr_support & nccl::kPtrDmaBuf) != 0 && plugin->has_reg_mr_dmabuf() &&
         gpu_.exports_dmabufs();
}

const char* CudaMemory::registered_by(const ranks::LoadedPlugin& plugin, int device) const {
  if (uses_dmabuf(plugin, device)) return "regMrDmaBuf";
  const netapi::Properties& properties = properties_of(plugin, device);
  if ((properties.ptr_support & nccl::kPtrCuda) != 0) return "regMr";
  const bool dmabuf = (properties.ptr_support & nccl::kPtrDmaBuf) != 0;
  throw ranks::Failure(
      "--memory cuda: device " + netapi::verbs_name(properties) + " of the plugin takes " +
      (dmabuf ? "GPU memory only as a dma-buf, which " + describe() + " does not export" : "host memory only") +
      ". Next: --plugin-log prints why the plugin does not take GPU memory; or use --memory host");
}

void* CudaMemory::register_at(const ranks::LoadedPlugin& plugin, int device, void* comm, std::byte* data,
                              std::size_t bytes) const {
  const std::string which = registered_by(plugin, device);
  gpu_.make_current();  // as in the threads of NCCL that register memory
  void* mhandle = nullptr;
  nccl::Result result{};
  if (uses_dmabuf(plugin, device)) {
    const std::size_t offset = reinterpret_cast<std::uintptr_t>(data) % page_bytes();
    // The registration keeps a reference to the dma-buf of its own.
    const UniqueFd dmabuf = gpu_.export_dmabuf(data - offset, round_up(offset + bytes, page_bytes()));
    result = plugin->reg_mr_dmabuf(comm, data, bytes, nccl::kPtrCuda, offset, dmabuf.get(), &mhandle);
  } else {
    result = plugin->reg_mr(comm, data, bytes, nccl::kPtrCuda, &mhandle);
  }
  ranks::require(result, which + " of " + std::to_string(bytes) + " bytes of GPU memory");
  return mhandle;
}

const char* kind_name(Kind kind) {
  return kind == Kind::kHost ? "host" : "cuda";
}

std::unique_ptr<Memory> make_memory(Kind kind, const std::string& cuda, int rank, std::optional<Pages> pages) {
  if (kind == Kind::kHost) return make_host_memory(pages);
  try {
    return std::make_unique<CudaMemory>(cuda, rank, CudaMemory::Allocations::kWholePages);
  } catch (const ranks::Failure& failure) {
    throw ranks::Failure(std::string("--memory cuda: ") + failure.what() +
                         ". Next: use a machine with an NVIDIA GPU and its driver, or --memory host");
  }
}

void require_support(const Memory& memory, const ranks::LoadedPlugin& plugin) {
  for (int device = 0; device < static_cast<int>(plugin.devices().size()); ++device) {
    static_cast<void>(memory.registered_by(plugin, device));
  }
}

}  // namespace verbatim::memory
