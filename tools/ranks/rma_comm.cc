#include "ranks/rma_comm.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "nccl/types.h"
#include "ranks/failure.h"
#include "ranks/loaded_plugin.h"
#include "ranks/plugin_log.h"

namespace verbatim::ranks {
namespace {

netapi::Properties rma_properties_of(const nccl::v12::NetProperties& in) {
  netapi::Properties out;
  if (in.name != nullptr) out.name = in.name;
  if (in.pciPath != nullptr) out.pci_path = in.pciPath;
  out.guid = in.guid;
  out.ptr_support = in.ptrSupport;
  out.reg_is_global = in.regIsGlobal;
  out.force_flush = in.forceFlush;
  out.speed = in.speed;
  out.port = in.port;
  out.latency = in.latency;
  out.max_comms = in.maxComms;
  out.max_recvs = in.maxRecvs;
  out.device_type = in.netDeviceType;
  out.device_version = in.netDeviceVersion;
  out.max_p2p_bytes = in.maxP2pBytes;
  out.max_coll_bytes = in.maxCollBytes;
  return out;
}

}  // namespace

RmaComm::RmaComm(const std::string& name, int api_version, std::uint64_t comm_id) {
  netapi::OpenedRma opened = netapi::open_rma_plugin(name, api_version);
  if (opened.plugin == nullptr) {
    const char* const next =
        opened.path.empty() ? ". Next: give the path of the plugin's file"
                            : ". Next: use a plugin that exports ncclRmaPlugin_v13 or v14, or a mode or operation over "
                              "the net table";
    throw Failure(opened.error + next);
  }
  plugin_ = std::move(opened.plugin);
  path_ = opened.path;
  choose_log_formatting(plugin_->name());
  if (plugin_->init(comm_id, &instance_) != nccl::Result::kSuccess) {
    throw Failure(
        "init of the RMA table failed. Next: --plugin-log shows why; with Verbatim, look at "
        "VERBATIM_RMA, and at whether the devices execute atomics (ibv_devinfo -v)");
  }
  int devices = 0;
  require(plugin_->devices(&devices), "devices");
  if (devices <= 0) throw Failure("the plugin has no device. Next: ibv_devices shows what the host has");
  for (int device = 0; device < devices; ++device) {
    nccl::v12::NetProperties properties{};
    require(plugin_->properties(device, &properties), "getProperties");
    devices_.push_back(rma_properties_of(properties));
  }
}

void RmaComm::connect(CoordinatorConnection& coordinator, int rank, int ranks, int contexts) {
  using HandleBytes = std::array<char, nccl::kNetHandleMaxBytes>;
  alignas(16) HandleBytes own{};
  void* listen = nullptr;
  require(plugin_->listen(instance_, rank % static_cast<int>(devices_.size()), own.data(), &listen), "listen");
  std::vector<HandleBytes> all = coordinator.all_gather_values(own);
  std::vector<void*> handles;
  for (HandleBytes& handle : all) handles.push_back(handle.data());
  require(plugin_->connect(instance_, handles.data(), ranks, rank, listen, &coll_), "connect");
  require(plugin_->close_listen(listen), "closeListen");
  require(plugin_->create_context(coll_, {.contexts = contexts}, &contexts_), "createContext");
}

void* RmaComm::register_memory(void* data, std::size_t bytes, std::uint64_t flags) {
  void* handle = nullptr;
  require(plugin_->reg_mr(coll_, data, bytes, nccl::kPtrHost, flags, &handle), "regMrSym");
  registered_.push_back(handle);
  return handle;
}

int RmaComm::max_recvs() const {
  int least = devices_.front().max_recvs;
  for (const netapi::Properties& device : devices_) least = std::min(least, device.max_recvs);
  return std::max(least, 1);
}

void RmaComm::close() {
  require(plugin_->destroy_context(std::exchange(contexts_, nullptr)), "destroyContext");
  for (void* const handle : registered_) require(plugin_->dereg_mr(coll_, handle), "deregMrSym");
  require(plugin_->close_coll(std::exchange(coll_, nullptr)), "closeColl");
  require(plugin_->finalize(std::exchange(instance_, nullptr)), "finalize");
}

}  // namespace verbatim::ranks
