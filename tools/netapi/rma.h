// One interface to any NCCL RMA plugin, whatever table version it exports. It has the shape of the newest version; what
// older tables lack is filled in as NCCL fills it in. Used by the tools and tests that call a plugin without NCCL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "nccl/net_v12.h"
#include "nccl/types.h"

namespace netapi {

constexpr int kOldestRmaVersion = 13;
constexpr int kNewestRmaVersion = 14;

struct RmaConfig {
  int contexts = 1;
  int traffic_class = nccl::kNetTrafficClassUndefined;
  int rank_stride = 1;  // below v14: 1
};

// Memory of a rank: a handle of a registration, and an offset from its start.
struct RmaPart {
  void* mhandle = nullptr;
  std::uint64_t offset = 0;
};

struct RmaSignal {
  RmaPart word;
  std::uint64_t value = 0;
  std::uint32_t operation = nccl::kSignalAdd;
  bool strong = true;  // below v14: every signal is
};

// A loaded plugin and one of its RMA tables. The destructor unloads the plugin. Results and thread safety are the
// plugin's own. A function that the table does not have returns kInvalidUsage.
class RmaPlugin {
 public:
  RmaPlugin() = default;
  RmaPlugin(const RmaPlugin&) = delete;
  RmaPlugin& operator=(const RmaPlugin&) = delete;
  virtual ~RmaPlugin() = default;

  virtual int api_version() const = 0;
  virtual const char* name() const = 0;
  virtual const void* table() const = 0;  // in the plugin's object

  virtual nccl::Result init(std::uint64_t comm_id, void** context) = 0;
  virtual nccl::Result finalize(void* context) = 0;
  virtual nccl::Result devices(int* count) = 0;
  virtual nccl::Result properties(int device, nccl::v12::NetProperties* properties) = 0;
  virtual nccl::Result listen(void* context, int device, void* handle, void** listen_comm) = 0;
  virtual nccl::Result connect(void* context, void* handles[], int ranks, int rank, void* listen_comm,
                               void** coll_comm) = 0;
  virtual nccl::Result create_context(void* coll_comm, const RmaConfig& config, void** rma_context) = 0;
  virtual nccl::Result reg_mr(void* coll_comm, void* data, std::size_t size, int type, std::uint64_t flags,
                              void** mhandle) = 0;
  virtual nccl::Result reg_mr_dmabuf(void* coll_comm, void* data, std::size_t size, int type, std::uint64_t offset,
                                     int fd, std::uint64_t flags, void** mhandle) = 0;
  virtual nccl::Result dereg_mr(void* coll_comm, void* mhandle) = 0;
  virtual nccl::Result destroy_context(void* rma_context) = 0;
  virtual nccl::Result close_coll(void* coll_comm) = 0;
  virtual nccl::Result close_listen(void* listen_comm) = 0;
  virtual nccl::Result iput(void* rma_context, int context, const RmaPart& source, std::size_t size,
                            const RmaPart& target, std::uint32_t rank, void** request) = 0;
  virtual nccl::Result iput_signal(void* rma_context, int context, const RmaPart& source, std::size_t size,
                                   const RmaPart& target, std::uint32_t rank, const RmaSignal& signal,
                                   void** request) = 0;
  virtual nccl::Result iget(void* rma_context, int context, const RmaPart& remote, std::size_t size,
                            const RmaPart& local, std::uint32_t rank, void** request) = 0;
  virtual nccl::Result iflush(void* rma_context, int context, void* mhandle, std::uint32_t rank, void** request) = 0;
  virtual nccl::Result test(void* coll_comm, void* request, int* done) = 0;
  virtual nccl::Result progress(void* rma_context) = 0;
  virtual nccl::Result query_last_error(void* rma_context, bool* has_error) = 0;
};

struct OpenedRma {
  std::unique_ptr<RmaPlugin> plugin;  // null on failure
  std::string error;                  // the reason of the failure
  std::string path;                   // `name` if it is a path, else the file that was found
};

// `name`: as for open_plugin. Version 0 selects the newest table that the plugin exports.
OpenedRma open_rma_plugin(const std::string& name, int version = 0);

}  // namespace netapi
