// A net plugin that records which memory another plugin gets from NCCL: tests/gpu/run uses it to show that registered
// user buffers themselves reach the plugin.
//
//   WATCH_PLUGIN  path of the plugin that does the work; its tables v11 and v12 are copied
//   WATCH_FILE    each finalize appends these lines; %p is the process ID
//
//       memory PID BEGIN BYTES TYPE SENDS SENT_BYTES RECEIVES    for each registered range; BEGIN has 16 hexadecimal
//       digits,
//                                                                TYPE is host, cuda or dmabuf
//       flushes PID COUNT
#include <dlfcn.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

#include "nccl/net_v11.h"
#include "nccl/net_v12.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT nccl::v11::Net ncclNetPlugin_v11;
EXPORT nccl::v12::Net ncclNetPlugin_v12;

nccl::v11::Net ncclNetPlugin_v11{};
nccl::v12::Net ncclNetPlugin_v12{};

namespace {

using nccl::Result;

struct Range {
  std::size_t bytes = 0;
  const char* type = "";
  std::uint64_t sends = 0;
  std::uint64_t sent_bytes = 0;
  std::uint64_t receives = 0;
};

// All calls of a process. Ranges stay after deregistration: the buffers of a test live as long as its communicator.
class Record {
 public:
  void registered(const void* data, std::size_t bytes, const char* type) {
    const std::lock_guard lock(mutex_);
    Range& range = ranges_[reinterpret_cast<std::uintptr_t>(data)];
    if (bytes > range.bytes) range.bytes = bytes;
    range.type = type;
  }

  void sent(const void* data, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    Range* const range = find(data);
    if (range == nullptr) return;
    ++range->sends;
    range->sent_bytes += bytes;
  }

  void received(const void* data) {
    const std::lock_guard lock(mutex_);
    if (Range* const range = find(data)) ++range->receives;
  }

  void flushed() {
    const std::lock_guard lock(mutex_);
    ++flushes_;
  }

  // The counts since the last call.
  void write() {
    const char* const pattern = std::getenv("WATCH_FILE");
    if (pattern == nullptr) return;
    std::string path = pattern;
    if (const auto at = path.find("%p"); at != std::string::npos) path.replace(at, 2, std::to_string(getpid()));
    const std::lock_guard lock(mutex_);
    std::FILE* const file = std::fopen(path.c_str(), "ae");
    if (file == nullptr) {
      std::perror(path.c_str());
      return;
    }
    for (auto& [begin, range] : ranges_) {
      std::fprintf(file, "memory %d %016" PRIxPTR " %016" PRIxPTR " %s %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", getpid(),
                   begin, begin + range.bytes, range.type, range.sends, range.sent_bytes, range.receives);
    }
    std::fprintf(file, "flushes %d %" PRIu64 "\n", getpid(), flushes_);
    std::fclose(file);
    ranges_.clear();
    flushes_ = 0;
  }

 private:
  Range* find(const void* data) {
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    auto after = ranges_.upper_bound(address);
    if (after == ranges_.begin()) return nullptr;
    const auto found = --after;
    return address - found->first < found->second.bytes ? &found->second : nullptr;
  }

  std::mutex mutex_;
  std::map<std::uintptr_t, Range> ranges_;
  std::uint64_t flushes_ = 0;
};

Record& record() {
  static Record only;
  return only;
}

// The table of the watched plugin, one for each version.
template <typename Net>
Net inner{};

template <typename Net>
struct Watch {
  static Result reg_mr(void* comm, void* data, std::size_t size, int type, void** mhandle) {
    const Result result = inner<Net>.regMr(comm, data, size, type, mhandle);
    if (result == Result::kSuccess) record().registered(data, size, type == nccl::kPtrCuda ? "cuda" : "host");
    return result;
  }

  static Result reg_mr_dmabuf(void* comm, void* data, std::size_t size, int type, std::uint64_t offset, int fd,
                              void** mhandle) {
    const Result result = inner<Net>.regMrDmaBuf(comm, data, size, type, offset, fd, mhandle);
    if (result == Result::kSuccess) record().registered(data, size, "dmabuf");
    return result;
  }

  static Result isend(void* comm, void* data, std::size_t size, int tag, void* mhandle, void* profiler_handle,
                      void** request) {
    const Result result = inner<Net>.isend(comm, data, size, tag, mhandle, profiler_handle, request);
    if (result == Result::kSuccess && *request != nullptr) record().sent(data, size);
    return result;
  }

  static Result irecv(void* comm, int n, void** data, std::size_t* sizes, int* tags, void** mhandles,
                      void** profiler_handles, void** request) {
    const Result result = inner<Net>.irecv(comm, n, data, sizes, tags, mhandles, profiler_handles, request);
    if (result == Result::kSuccess && *request != nullptr) {
      for (int i = 0; i < n; ++i) record().received(data[i]);
    }
    return result;
  }

  static Result iflush(void* comm, int n, void** data, int* sizes, void** mhandles, void** request) {
    record().flushed();
    return inner<Net>.iflush(comm, n, data, sizes, mhandles, request);
  }

  static Result finalize(void* context) {
    record().write();
    return inner<Net>.finalize(context);
  }

  static void wrap(void* library, const char* symbol, Net& table) {
    const void* const found = dlsym(library, symbol);
    if (found == nullptr) {
      std::fprintf(stderr, "watch: the plugin has no %s\n", symbol);
      return;
    }
    inner<Net> = *static_cast<const Net*>(found);
    table = inner<Net>;
    table.regMr = reg_mr;
    table.regMrDmaBuf = reg_mr_dmabuf;
    table.isend = isend;
    table.irecv = irecv;
    table.iflush = iflush;
    table.finalize = finalize;
  }
};

void* library = nullptr;

__attribute__((constructor)) void load() {
  const char* const path = std::getenv("WATCH_PLUGIN");
  if (path != nullptr) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "watch: WATCH_PLUGIN: %s\n", path == nullptr ? "not set" : dlerror());
    return;
  }
  Watch<nccl::v11::Net>::wrap(library, "ncclNetPlugin_v11", ncclNetPlugin_v11);
  Watch<nccl::v12::Net>::wrap(library, "ncclNetPlugin_v12", ncclNetPlugin_v12);
}

__attribute__((destructor)) void unload() {
  if (library != nullptr) dlclose(library);
}

}  // namespace
