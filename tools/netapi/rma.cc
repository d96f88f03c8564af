#include "netapi/rma.h"

#include <dlfcn.h>

#include <type_traits>
#include <utility>

#include "nccl/rma_v13.h"
#include "nccl/rma_v14.h"
#include "netapi/library.h"
#include "netapi/log.h"

namespace netapi {
namespace {

template <typename Rma>
struct RmaConfigOf;
template <>
struct RmaConfigOf<nccl::rma_v13::Rma> {
  using Type = nccl::rma_v13::RmaConfig;
};
template <>
struct RmaConfigOf<nccl::rma_v14::Rma> {
  using Type = nccl::rma_v14::RmaConfig;
};

template <typename Rma>
class RmaTable final : public RmaPlugin {
 public:
  RmaTable(Library library, const Rma& table) : library_(std::move(library)), table_(table) {}

  int api_version() const override { return kVersion; }
  const char* name() const override { return table_.name; }
  const void* table() const override { return &table_; }

  nccl::Result init(std::uint64_t comm_id, void** context) override {
    return table_.init(context, comm_id, log_line_of_plugin);
  }
  nccl::Result finalize(void* context) override { return table_.finalize(context); }
  nccl::Result devices(int* count) override { return table_.devices(count); }
  nccl::Result properties(int device, nccl::v12::NetProperties* properties) override {
    return table_.getProperties(device, properties);
  }
  nccl::Result listen(void* context, int device, void* handle, void** listen_comm) override {
    return table_.listen(context, device, handle, listen_comm);
  }
  nccl::Result connect(void* context, void* handles[], int ranks, int rank, void* listen_comm,
                       void** coll_comm) override {
    return table_.connect(context, handles, ranks, rank, listen_comm, coll_comm);
  }
  nccl::Result create_context(void* coll_comm, const RmaConfig& config, void** rma_context) override {
    typename RmaConfigOf<Rma>::Type given{};
    given.nContexts = config.contexts;
    given.trafficClass = config.traffic_class;
    if constexpr (kVersion == 13) {
      nccl::NetDeviceHandle* device_handle = nullptr;
      return table_.createContext(coll_comm, &given, rma_context, &device_handle);
    } else {
      given.rankStride = config.rank_stride;
      return table_.createContext(coll_comm, &given, rma_context);
    }
  }
  nccl::Result reg_mr(void* coll_comm, void* data, std::size_t size, int type, std::uint64_t flags,
                      void** mhandle) override {
    if constexpr (kVersion == 13) {
      void* second = nullptr;
      return table_.regMrSym(coll_comm, data, size, type, flags, mhandle, &second);
    } else {
      return table_.regMrSym(coll_comm, data, size, type, flags, mhandle);
    }
  }
  nccl::Result reg_mr_dmabuf(void* coll_comm, void* data, std::size_t size, int type, std::uint64_t offset, int fd,
                             std::uint64_t flags, void** mhandle) override {
    if (table_.regMrSymDmaBuf == nullptr) return nccl::Result::kInvalidUsage;
    if constexpr (kVersion == 13) {
      void* second = nullptr;
      return table_.regMrSymDmaBuf(coll_comm, data, size, type, offset, fd, flags, mhandle, &second);
    } else {
      return table_.regMrSymDmaBuf(coll_comm, data, size, type, offset, fd, flags, mhandle);
    }
  }
  nccl::Result dereg_mr(void* coll_comm, void* mhandle) override { return table_.deregMrSym(coll_comm, mhandle); }
  nccl::Result destroy_context(void* rma_context) override { return table_.destroyContext(rma_context); }
  nccl::Result close_coll(void* coll_comm) override { return table_.closeColl(coll_comm); }
  nccl::Result close_listen(void* listen_comm) override { return table_.closeListen(listen_comm); }

  nccl::Result iput(void* rma_context, int context, const RmaPart& source, std::size_t size, const RmaPart& target,
                    std::uint32_t rank, void** request) override {
    return table_.iput(rma_context, context, source.offset, source.mhandle, size, target.offset, target.mhandle, rank,
                       request);
  }
  nccl::Result iput_signal(void* rma_context, int context, const RmaPart& source, std::size_t size,
                           const RmaPart& target, std::uint32_t rank, const RmaSignal& signal,
                           void** request) override {
    if constexpr (kVersion == 13) {
      return table_.iputSignal(rma_context, context, source.offset, source.mhandle, size, target.offset, target.mhandle,
                               rank, signal.word.offset, signal.word.mhandle, signal.value, signal.operation, request);
    } else {
      return table_.iputSignal(rma_context, context, source.offset, source.mhandle, size, target.offset, target.mhandle,
                               rank, signal.word.offset, signal.word.mhandle, signal.value, signal.operation,
                               signal.strong, request);
    }
  }
  nccl::Result iget(void* rma_context, int context, const RmaPart& remote, std::size_t size, const RmaPart& local,
                    std::uint32_t rank, void** request) override {
    if (table_.iget == nullptr) return nccl::Result::kInvalidUsage;
    return table_.iget(rma_context, context, remote.offset, remote.mhandle, size, local.offset, local.mhandle, rank,
                       request);
  }
  nccl::Result iflush(void* rma_context, int context, void* mhandle, std::uint32_t rank, void** request) override {
    if (table_.iflush == nullptr) return nccl::Result::kInvalidUsage;
    return table_.iflush(rma_context, context, mhandle, rank, request);
  }
  nccl::Result test(void* coll_comm, void* request, int* done) override {
    return table_.test(coll_comm, request, done);
  }
  nccl::Result progress(void* rma_context) override {
    if constexpr (kVersion == 13) {
      return table_.ginProgress != nullptr ? table_.ginProgress(rma_context) : nccl::Result::kSuccess;
    } else {
      return table_.rmaProgress != nullptr ? table_.rmaProgress(rma_context) : nccl::Result::kSuccess;
    }
  }
  nccl::Result query_last_error(void* rma_context, bool* has_error) override {
    if (table_.queryLastError == nullptr) return nccl::Result::kInvalidUsage;
    return table_.queryLastError(rma_context, has_error);
  }

 private:
  static constexpr int kVersion = std::is_same_v<Rma, nccl::rma_v13::Rma> ? 13 : 14;

  const Library library_;
  const Rma& table_;
};

// NCCL's order: the newest version first, and v13 also by the name of the GIN table.
template <typename Rma>
std::unique_ptr<RmaPlugin> open_rma_table(Library& library, const char* symbol) {
  const void* const table = ::dlsym(library.get(), symbol);
  if (table == nullptr) return nullptr;
  return std::make_unique<RmaTable<Rma>>(std::move(library), *static_cast<const Rma*>(table));
}

}  // namespace

OpenedRma open_rma_plugin(const std::string& name, int version) {
  std::string error;
  Library library = open_library(name, error);
  if (library == nullptr) return {nullptr, error, {}};
  const std::string path = path_of(library, name);
  std::unique_ptr<RmaPlugin> plugin;
  if (version == 0 || version == 14) plugin = open_rma_table<nccl::rma_v14::Rma>(library, "ncclRmaPlugin_v14");
  if (plugin == nullptr && (version == 0 || version == 13)) {
    plugin = open_rma_table<nccl::rma_v13::Rma>(library, "ncclRmaPlugin_v13");
    if (plugin == nullptr) plugin = open_rma_table<nccl::rma_v13::Rma>(library, "ncclGinPlugin_v13");
  }
  if (plugin != nullptr) return {std::move(plugin), {}, path};
  const std::string which = version == 0 ? "" : " v" + std::to_string(version);
  return {nullptr, path + " does not export an RMA table" + which, path};
}

}  // namespace netapi
