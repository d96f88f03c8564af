#include "merged_plugin.h"

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

namespace conformance {
namespace {

struct Merge {
  int senders = 1;
  int receivers = 1;
  bool apart = false;  // the ends use different devices
};

Merge merge_setting() {
  const char* const text = std::getenv("CONFORMANCE_MERGE");
  if (text == nullptr) return {};
  char* end = nullptr;
  const int senders = static_cast<int>(std::strtol(text, &end, 10));
  if (*end != ':') return {senders, senders, false};
  return {senders, static_cast<int>(std::strtol(end + 1, nullptr, 10)), true};
}

class MergedPlugin final : public netapi::Plugin {
 public:
  using R = nccl::Result;

  MergedPlugin(std::unique_ptr<netapi::Plugin> plugin, const Merge& merge)
      : plugin_(std::move(plugin)), merge_(merge) {}

  int api_version() const override { return plugin_->api_version(); }
  const char* name() const override { return plugin_->name(); }
  const void* table() const override { return plugin_->table(); }

  R init(std::uint64_t comm_id, const netapi::CommConfig& config, void** context) override {
    const R result = plugin_->init(comm_id, config, context);
    return result == R::kSuccess ? make_devices() : result;
  }
  R finalize(void* context) override { return plugin_->finalize(context); }
  R devices(int* count) override {
    *count = static_cast<int>(senders_.size());
    return R::kSuccess;
  }
  R properties(int device, netapi::Properties* properties) override {
    return plugin_->properties(index(senders_, device), properties);
  }
  R make_vdevice(const std::vector<int>& members, int* device) override {
    return plugin_->make_vdevice(members, device);
  }
  R set_net_attr(void* context, const netapi::NetAttr& attributes) override {
    return plugin_->set_net_attr(context, attributes);
  }
  bool has_make_vdevice() const override { return plugin_->has_make_vdevice(); }
  bool has_reg_mr_dmabuf() const override { return plugin_->has_reg_mr_dmabuf(); }
  bool has_set_net_attr() const override { return plugin_->has_set_net_attr(); }

  R listen(void* context, int device, void* handle, void** listen_comm) override {
    return plugin_->listen(context, index(receivers_, device), handle, listen_comm);
  }
  R connect(void* context, int device, void* handle, void** send_comm, const netapi::CommConfig& config) override {
    return plugin_->connect(context, index(senders_, device), handle, send_comm, config);
  }
  R accept(void* listen_comm, void** recv_comm) override { return plugin_->accept(listen_comm, recv_comm); }
  R close_send(void* send_comm) override { return plugin_->close_send(send_comm); }
  R close_recv(void* recv_comm) override { return plugin_->close_recv(recv_comm); }
  R close_listen(void* listen_comm) override { return plugin_->close_listen(listen_comm); }
  R reg_mr(void* comm, void* data, std::size_t size, int type, void** mhandle) override {
    return plugin_->reg_mr(comm, data, size, type, mhandle);
  }
  R reg_mr_dmabuf(void* comm, void* data, std::size_t size, int type, std::uint64_t offset, int fd,
                  void** mhandle) override {
    return plugin_->reg_mr_dmabuf(comm, data, size, type, offset, fd, mhandle);
  }
  R dereg_mr(void* comm, void* mhandle) override { return plugin_->dereg_mr(comm, mhandle); }
  R isend(void* send_comm, void* data, std::size_t size, int tag, void* mhandle, void** request) override {
    return plugin_->isend(send_comm, data, size, tag, mhandle, request);
  }
  R irecv(void* recv_comm, int n, void** data, std::size_t* sizes, int* tags, void** mhandles,
          void** request) override {
    return plugin_->irecv(recv_comm, n, data, sizes, tags, mhandles, request);
  }
  R iflush(void* recv_comm, int n, void** data, int* sizes, void** mhandles, void** request) override {
    return plugin_->iflush(recv_comm, n, data, sizes, mhandles, request);
  }
  R test(void* request, int* done, int* sizes) override { return plugin_->test(request, done, sizes); }

 private:
  // An index that does not exist is passed on as it is, unless a physical device has it.
  int index(const std::vector<int>& devices, int device) const {
    if (device >= 0 && device < static_cast<int>(devices.size())) return devices[static_cast<std::size_t>(device)];
    return device < 0 ? device : device + physical_ + 2 * static_cast<int>(senders_.size());
  }

  R make_devices() {
    if (physical_ != 0) return make_both();
    netapi::Properties properties;
    while (plugin_->properties(physical_, &properties) == R::kSuccess && properties.members.size() == 1) ++physical_;
    return make_both();
  }

  // Each init makes them again: the plugin must return the same devices.
  R make_both() {
    const int count = physical_ / physical_per_device();
    senders_.clear();
    receivers_.clear();
    for (int i = 0; i < count; ++i) {
      std::vector<int> members;
      for (int j = 0; j < merge_.senders; ++j) members.push_back(i * merge_.senders + j);
      if (const R made = make(members, senders_); made != R::kSuccess) return made;
      if (merge_.apart) {
        for (int j = 0; j < merge_.receivers; ++j) {
          if (j == 0) members.clear();
          members.push_back(physical_ - 1 - i * merge_.receivers - j);
        }
      }
      if (const R made = make(members, receivers_); made != R::kSuccess) return made;
    }
    return R::kSuccess;
  }

  R make(const std::vector<int>& members, std::vector<int>& devices) {
    int device = -1;
    const R made = plugin_->make_vdevice(members, &device);
    if (made == R::kSuccess) devices.push_back(device);
    return made;
  }

  const std::unique_ptr<netapi::Plugin> plugin_;
  const Merge merge_;
  int physical_ = 0;
  std::vector<int> senders_;
  std::vector<int> receivers_;
};

}  // namespace

int merged_members() {
  return merge_setting().senders;
}

int physical_per_device() {
  const Merge merge = merge_setting();
  return std::max(merge.senders, merge.receivers);
}

netapi::Opened open_plugin(const std::string& path, int version) {
  netapi::Opened opened = netapi::open_plugin(path, version);
  const Merge merge = merge_setting();
  if (opened.plugin != nullptr && (merge.senders > 1 || merge.receivers > 1)) {
    opened.plugin = std::make_unique<MergedPlugin>(std::move(opened.plugin), merge);
  }
  return opened;
}

}  // namespace conformance
