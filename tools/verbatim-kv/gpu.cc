#include "verbatim-kv/gpu.h"

#include <dlfcn.h>

#include "ranks/failure.h"

namespace verbatim::kv {
namespace {

using ranks::Failure;

constexpr int kSuccess = 0;  // of both
constexpr int kCudaNotReady = 600;
constexpr unsigned kNonBlockingStream = 1;
constexpr int kNcclInProgress = 7;
constexpr int kNcclUint8 = 1;

}  // namespace

SharedLibrary::SharedLibrary(const std::string& name)
    : name_(name), library_(dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
  if (library_ == nullptr) throw Failure(std::string("missing here: ") + dlerror());
}

void* SharedLibrary::look_up(const char* symbol) const {
  void* const found = dlsym(library_, symbol);
  if (found == nullptr) throw Failure(name_ + " has no " + symbol);
  return found;
}

Gpu::Functions::Functions(const std::string& library) : from(library) {
  from.find("cuInit", init);
  from.find("cuDeviceGetCount", count);
  from.find("cuDeviceGet", get);
  from.find("cuDeviceGetName", name);
  from.find("cuDevicePrimaryCtxRetain", retain);
  from.find("cuCtxSetCurrent", set_current);
  from.find("cuMemAlloc_v2", allocate);
  from.find("cuMemcpyDtoDAsync_v2", copy);
  from.find("cuMemcpyHtoD_v2", upload);
  from.find("cuMemcpyDtoH_v2", download);
  from.find("cuStreamCreate", create_stream);
  from.find("cuStreamQuery", query);
  from.find("cuGetErrorName", error_name);
}

Gpu::Gpu(const std::string& library, int rank) : cuda_(library) {
  check(cuda_.init(0), "cuInit");
  int gpus = 0;
  check(cuda_.count(&gpus), "cuDeviceGetCount");
  if (gpus == 0) throw Failure("missing here: a GPU");
  int device = 0;
  check(cuda_.get(&device, rank % gpus), "cuDeviceGet");
  char name[96] = {};
  check(cuda_.name(name, sizeof name - 1, device), "cuDeviceGetName");
  name_ = std::string(name) + " " + std::to_string(rank % gpus) + " of " + std::to_string(gpus);
  void* context = nullptr;  // the one that NCCL finds through the CUDA runtime
  check(cuda_.retain(&context, device), "cuDevicePrimaryCtxRetain");
  check(cuda_.set_current(context), "cuCtxSetCurrent");
}

Gpu::Address Gpu::allocate(std::size_t bytes) {
  Address data = 0;
  check(cuda_.allocate(&data, bytes == 0 ? 1 : bytes), "cuMemAlloc");
  return data;
}

void* Gpu::make_stream() {
  void* stream = nullptr;
  check(cuda_.create_stream(&stream, kNonBlockingStream), "cuStreamCreate");
  return stream;
}

void Gpu::copy(Address to, Address from, std::size_t bytes, void* stream) {
  check(cuda_.copy(to, from, bytes, stream), "cuMemcpyDtoDAsync");
}

void Gpu::upload(Address to, const void* from, std::size_t bytes) {
  check(cuda_.upload(to, from, bytes), "cuMemcpyHtoD");
}

void Gpu::download(void* to, Address from, std::size_t bytes) {
  check(cuda_.download(to, from, bytes), "cuMemcpyDtoH");
}

bool Gpu::idle(void* stream) const {
  const Result result = cuda_.query(stream);
  if (result == kCudaNotReady) return false;
  check(result, "cuStreamQuery");
  return true;
}

void Gpu::check(Result result, const char* what) const {
  if (result == kSuccess) return;
  const char* name = nullptr;
  cuda_.error_name(result, &name);
  throw Failure(std::string(what) + ": " + (name == nullptr ? "error " + std::to_string(result) : name));
}

Nccl::Functions::Functions(const std::string& library) : from(library) {
  from.find("ncclGetVersion", version);
  from.find("ncclGetUniqueId", get_id);
  from.find("ncclCommInitRank", init);
  from.find("ncclCommDestroy", destroy);
  from.find("ncclCommGetAsyncError", async_error);
  from.find("ncclGetErrorString", error_string);
  from.find("ncclGroupStart", group_start);
  from.find("ncclGroupEnd", group_end);
  from.find("ncclSend", send);
  from.find("ncclRecv", recv);
}

Nccl::Nccl(const std::string& library) : nccl_(library) {}

std::string Nccl::version() const {
  int version = 0;
  check(nccl_.version(&version), "ncclGetVersion");
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

Nccl::UniqueId Nccl::make_id() const {
  UniqueId id{};
  check(nccl_.get_id(&id), "ncclGetUniqueId");
  return id;
}

Nccl::Comm Nccl::init(int ranks, const UniqueId& id, int rank) const {
  Comm comm = nullptr;
  check(nccl_.init(&comm, ranks, id, rank), "ncclCommInitRank");
  return comm;
}

void Nccl::destroy(Comm comm) const {
  check(nccl_.destroy(comm), "ncclCommDestroy");
}

void Nccl::group_start() const {
  check(nccl_.group_start(), "ncclGroupStart");
}

void Nccl::group_end() const {
  check(nccl_.group_end(), "ncclGroupEnd");
}

void Nccl::send(Gpu::Address data, std::size_t bytes, int peer, Comm comm, void* stream) const {
  check(nccl_.send(reinterpret_cast<const void*>(data), bytes, kNcclUint8, peer, comm, stream), "ncclSend");
}

void Nccl::recv(Gpu::Address data, std::size_t bytes, int peer, Comm comm, void* stream) const {
  check(nccl_.recv(reinterpret_cast<void*>(data), bytes, kNcclUint8, peer, comm, stream), "ncclRecv");
}

void Nccl::check_async(Comm comm) const {
  Result error = kSuccess;
  check(nccl_.async_error(comm, &error), "ncclCommGetAsyncError");
  if (error != kNcclInProgress) check(error, "NCCL, while data was under way");
}

void Nccl::check(Result result, const char* what) const {
  if (result == kSuccess) return;
  throw Failure(std::string(what) + ": " + nccl_.error_string(result));
}

}  // namespace verbatim::kv
