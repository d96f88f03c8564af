// One interface to any NCCL net plugin, whatever table version it exports. It has the shape of the newest version; what
// older tables lack is filled in as NCCL fills it in. Used by the tools and tests that call a plugin without NCCL.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "nccl/net_v12.h"
#include "nccl/types.h"

namespace netapi {

constexpr int kOldestVersion = 6;
constexpr int kNewestVersion = 12;
constexpr int kOldestWithOptionalReceives = 9;  // nccl::kNetOptionalRecvCompletion; before v9 *request is not an input

// The largest n that NCCL passes to irecv, iflush and test.
constexpr int kMaxGroup = 64;
// The size limits that NCCL applies with a table of v8 or older. NCCL itself rejects larger isends and irecvs.
constexpr std::size_t kMaxBytesBeforeV9 = std::size_t{1} << 30;
constexpr std::size_t kMaxCollBytesBeforeV9 = std::size_t{512} << 20;

struct CommConfig {
  int traffic_class = nccl::kNetTrafficClassUndefined;
};

struct Properties {
  std::string name;
  std::string pci_path;
  std::uint64_t guid = 0;
  int ptr_support = 0;
  int reg_is_global = 0;  // below v8: 0
  int force_flush = 0;    // below v9: 0
  int speed = 0;          // Mbit/s
  int port = 0;
  float latency = 0;
  int max_comms = 0;
  int max_recvs = 0;
  nccl::NetDeviceType device_type = nccl::NetDeviceType::kHost;  // below v7: a host device
  int device_version = nccl::kNetDeviceInvalidVersion;
  std::vector<int> members;             // below v9: the device itself
  std::size_t max_p2p_bytes = 0;        // below v9: kMaxBytesBeforeV9
  std::size_t max_coll_bytes = 0;       // below v9: kMaxCollBytesBeforeV9
  int max_multi_request_size = 1;       // below v11: 1
  int rail_id = nccl::kNetIdUndefined;  // below v12: rail and plane are undefined
  int plane_id = nccl::kNetIdUndefined;
};

// The name for people. Verbatim gives NCCL the name of the verbs device with a prefix, and suffixes for ports above 1
// and for Data Direct.
std::string verbs_name(const Properties& properties);

using NetAttr = nccl::v12::NetAttr;

// A loaded plugin and one of its tables. The destructor unloads the plugin, so all comms and contexts must be closed
// and finalized before. Results are the plugin's own, with two exceptions: sizes that an old table cannot express
// return kInvalidArgument, as in NCCL, and a function that the table does not have returns kInvalidUsage. Thread safety
// is that of the plugin. init and finalize must not run at the same time.
class Plugin {
 public:
  Plugin() = default;
  Plugin(const Plugin&) = delete;
  Plugin& operator=(const Plugin&) = delete;
  virtual ~Plugin() = default;

  virtual int api_version() const = 0;
  virtual const char* name() const = 0;
  // The table itself, an nccl::vN::Net, for tests of details that this class hides.
  virtual const void* table() const = 0;

  // From v11 on each call creates a context. Up to v10 the first call initialises the plugin, later calls only count,
  // and the context is null.
  virtual nccl::Result init(std::uint64_t comm_id, const CommConfig& config, void** context) = 0;
  virtual nccl::Result finalize(void* context) = 0;  // up to v10 only decrements the count
  virtual nccl::Result devices(int* count) = 0;
  virtual nccl::Result properties(int device, Properties* properties) = 0;
  virtual nccl::Result make_vdevice(const std::vector<int>& members, int* device) = 0;
  virtual nccl::Result set_net_attr(void* context, const NetAttr& attributes) = 0;
  virtual bool has_make_vdevice() const = 0;
  virtual bool has_reg_mr_dmabuf() const = 0;
  virtual bool has_set_net_attr() const = 0;

  // `handle` is nccl::kNetHandleMaxBytes long and must be the same memory in all calls of one connect. Only v10 passes
  // `config` here; from v11 on it is part of the context.
  virtual nccl::Result listen(void* context, int device, void* handle, void** listen_comm) = 0;
  virtual nccl::Result connect(void* context, int device, void* handle, void** send_comm,
                               const CommConfig& config = {}) = 0;
  virtual nccl::Result accept(void* listen_comm, void** recv_comm) = 0;
  virtual nccl::Result close_send(void* send_comm) = 0;
  virtual nccl::Result close_recv(void* recv_comm) = 0;
  virtual nccl::Result close_listen(void* listen_comm) = 0;

  virtual nccl::Result reg_mr(void* comm, void* data, std::size_t size, int type, void** mhandle) = 0;
  virtual nccl::Result reg_mr_dmabuf(void* comm, void* data, std::size_t size, int type, std::uint64_t offset, int fd,
                                     void** mhandle) = 0;
  virtual nccl::Result dereg_mr(void* comm, void* mhandle) = 0;

  virtual nccl::Result isend(void* send_comm, void* data, std::size_t size, int tag, void* mhandle, void** request) = 0;
  // `*request` is passed to the plugin unchanged, including nccl::kNetOptionalRecvCompletion.
  virtual nccl::Result irecv(void* recv_comm, int n, void** data, std::size_t* sizes, int* tags, void** mhandles,
                             void** request) = 0;
  virtual nccl::Result iflush(void* recv_comm, int n, void** data, int* sizes, void** mhandles, void** request) = 0;
  virtual nccl::Result test(void* request, int* done, int* sizes) = 0;
};

struct Opened {
  std::unique_ptr<Plugin> plugin;  // null on failure
  std::string error;               // the reason of the failure
  std::string path = {};           // `name` if it is a path, else the file that was found
};

// Opens a plugin as NCCL opens the one that NCCL_NET_PLUGIN names: `name` is a path or a file on the library path, or
// NAME stands for libnccl-net-NAME.so there. If neither is found, libnccl-net-NAME.so of the same installation or build
// directory as the running program is opened. Version 0 selects the newest table that the plugin exports.
Opened open_plugin(const std::string& name, int version = 0);

}  // namespace netapi
