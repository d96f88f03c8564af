// Implements the Plugin interface for each table version. All differences between the versions are in this file.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <climits>
#include <memory>
#include <utility>

#include "nccl/net_v10.h"
#include "nccl/net_v11.h"
#include "nccl/net_v12.h"
#include "nccl/net_v6.h"
#include "nccl/net_v7.h"
#include "nccl/net_v8.h"
#include "nccl/net_v9.h"
#include "netapi/library.h"
#include "netapi/log.h"
#include "netapi/plugin.h"

namespace netapi {

template <int kVersion>
struct Abi;
template <>
struct Abi<6> {
  using Net = nccl::v6::Net;
  using Properties = nccl::v6::NetProperties;
};
template <>
struct Abi<7> {
  using Net = nccl::v7::Net;
  using Properties = nccl::v7::NetProperties;
};
template <>
struct Abi<8> {
  using Net = nccl::v8::Net;
  using Properties = nccl::v8::NetProperties;
};
template <>
struct Abi<9> {
  using Net = nccl::v9::Net;
  using Properties = nccl::v9::NetProperties;
  using VDevice = nccl::v9::NetVDeviceProps;
};
template <>
struct Abi<10> {
  using Net = nccl::v10::Net;
  using Properties = nccl::v10::NetProperties;
  using VDevice = nccl::v10::NetVDeviceProps;
  using Config = nccl::v10::NetCommConfig;
};
template <>
struct Abi<11> {
  using Net = nccl::v11::Net;
  using Properties = nccl::v11::NetProperties;
  using VDevice = nccl::v11::NetVDeviceProps;
  using Config = nccl::v11::NetCommConfig;
  using Attr = nccl::v11::NetAttr;
};
template <>
struct Abi<12> {
  using Net = nccl::v12::Net;
  using Properties = nccl::v12::NetProperties;
  using VDevice = nccl::v12::NetVDeviceProps;
  using Config = nccl::v12::NetCommConfig;
  using Attr = nccl::v12::NetAttr;
};

template <int kVersion>
class Table final : public Plugin {
 public:
  using Net = typename Abi<kVersion>::Net;
  using R = nccl::Result;

  Table(Library library, const Net* net) : library_(std::move(library)), net_(net) {}

  int api_version() const override { return kVersion; }
  const char* name() const override { return net_->name; }
  const void* table() const override { return net_; }

  R init([[maybe_unused]] std::uint64_t comm_id, [[maybe_unused]] const CommConfig& config, void** context) override {
    *context = nullptr;
    if constexpr (kVersion >= 11) {
      typename Abi<kVersion>::Config neutral{config.traffic_class};
      return net_->init(context, comm_id, &neutral, &log_line_of_plugin, nullptr);
    } else {
      if (users_ == 0) {
        R result{};
        if constexpr (kVersion == 10) {
          result = net_->init(&log_line_of_plugin, nullptr);
        } else {
          result = net_->init(&log_line_of_plugin);
        }
        if (result != R::kSuccess) return result;
      }
      ++users_;
      return R::kSuccess;
    }
  }

  R finalize([[maybe_unused]] void* context) override {
    if constexpr (kVersion >= 11) {
      return net_->finalize(context);
    } else {
      if (users_ > 0) --users_;
      return R::kSuccess;
    }
  }

  R devices(int* count) override { return net_->devices(count); }

  R properties(int device, Properties* out) override {
    typename Abi<kVersion>::Properties in{};
    const R result = net_->getProperties(device, &in);
    if (result != R::kSuccess) return result;
    *out = {};
    if (in.name != nullptr) out->name = in.name;
    if (in.pciPath != nullptr) out->pci_path = in.pciPath;
    out->guid = in.guid;
    out->ptr_support = in.ptrSupport;
    out->speed = in.speed;
    out->port = in.port;
    out->latency = in.latency;
    out->max_comms = in.maxComms;
    out->max_recvs = in.maxRecvs;
    if constexpr (kVersion >= 7) {
      out->device_type = in.netDeviceType;
      out->device_version = in.netDeviceVersion;
    }
    if constexpr (kVersion >= 8) out->reg_is_global = in.regIsGlobal;
    if constexpr (kVersion >= 9) {
      out->force_flush = in.forceFlush;
      const int members = std::clamp(in.vProps.ndevs, 0, static_cast<int>(std::size(in.vProps.devs)));
      out->members.assign(in.vProps.devs, in.vProps.devs + members);
      out->max_p2p_bytes = in.maxP2pBytes;
      out->max_coll_bytes = in.maxCollBytes;
    } else {
      out->members = {device};
      out->max_p2p_bytes = kMaxBytesBeforeV9;
      out->max_coll_bytes = kMaxCollBytesBeforeV9;
    }
    if constexpr (kVersion >= 11) out->max_multi_request_size = in.maxMultiRequestSize;
    if constexpr (kVersion >= 12) {
      out->rail_id = in.railId;
      out->plane_id = in.planeId;
    }
    return R::kSuccess;
  }

  R make_vdevice([[maybe_unused]] const std::vector<int>& members, [[maybe_unused]] int* device) override {
    if constexpr (kVersion >= 9) {
      typename Abi<kVersion>::VDevice fused{};
      if (net_->makeVDevice == nullptr) return R::kInvalidUsage;
      if (members.size() > std::size(fused.devs)) return R::kInvalidArgument;
      fused.ndevs = static_cast<int>(members.size());
      std::copy(members.begin(), members.end(), fused.devs);
      return net_->makeVDevice(device, &fused);
    } else {
      return R::kInvalidUsage;
    }
  }

  R set_net_attr([[maybe_unused]] void* context, [[maybe_unused]] const NetAttr& attributes) override {
    if (!has_set_net_attr()) return R::kInvalidUsage;
    if constexpr (kVersion >= 11) {
      const auto convert = [](const nccl::v12::NetCommAttr& in) {
        return decltype(Abi<kVersion>::Attr::sendCommAttr){in.maxConcurrentPeers, in.minConcurrentPeers,
                                                           in.maxFlowsPerPeer, in.minFlowsPerPeer};
      };
      typename Abi<kVersion>::Attr own{convert(attributes.sendCommAttr), convert(attributes.recvCommAttr),
                                       attributes.op, attributes.algo, attributes.proto};
      return net_->setNetAttr(context, &own);
    } else {
      return R::kInvalidUsage;
    }
  }

  bool has_make_vdevice() const override {
    if constexpr (kVersion >= 9) {
      return net_->makeVDevice != nullptr;
    } else {
      return false;
    }
  }

  bool has_reg_mr_dmabuf() const override { return net_->regMrDmaBuf != nullptr; }

  bool has_set_net_attr() const override {
    if constexpr (kVersion >= 11) {
      return net_->setNetAttr != nullptr;
    } else {
      return false;
    }
  }

  R listen([[maybe_unused]] void* context, int device, void* handle, void** listen_comm) override {
    if constexpr (kVersion >= 11) {
      return net_->listen(context, device, handle, listen_comm);
    } else {
      return net_->listen(device, handle, listen_comm);
    }
  }

  R connect([[maybe_unused]] void* context, int device, void* handle, void** send_comm,
            [[maybe_unused]] const CommConfig& config) override {
    [[maybe_unused]] nccl::NetDeviceHandle* offload = nullptr;
    if constexpr (kVersion >= 11) {
      return net_->connect(context, device, handle, send_comm, &offload);
    } else if constexpr (kVersion == 10) {
      typename Abi<kVersion>::Config own{config.traffic_class};
      return net_->connect(device, &own, handle, send_comm, &offload);
    } else if constexpr (kVersion >= 7) {
      return net_->connect(device, handle, send_comm, &offload);
    } else {
      return net_->connect(device, handle, send_comm);
    }
  }

  R accept(void* listen_comm, void** recv_comm) override {
    if constexpr (kVersion >= 7) {
      nccl::NetDeviceHandle* offload = nullptr;
      return net_->accept(listen_comm, recv_comm, &offload);
    } else {
      return net_->accept(listen_comm, recv_comm);
    }
  }

  R close_send(void* send_comm) override { return net_->closeSend(send_comm); }
  R close_recv(void* recv_comm) override { return net_->closeRecv(recv_comm); }
  R close_listen(void* listen_comm) override { return net_->closeListen(listen_comm); }

  R reg_mr(void* comm, void* data, std::size_t size, int type, void** mhandle) override {
    if constexpr (kVersion >= 8) {
      return net_->regMr(comm, data, size, type, mhandle);
    } else {
      if (size > INT_MAX) return R::kInvalidArgument;
      return net_->regMr(comm, data, static_cast<int>(size), type, mhandle);
    }
  }

  R reg_mr_dmabuf(void* comm, void* data, std::size_t size, int type, std::uint64_t offset, int fd,
                  void** mhandle) override {
    if (net_->regMrDmaBuf == nullptr) return R::kInvalidUsage;
    return net_->regMrDmaBuf(comm, data, size, type, offset, fd, mhandle);
  }

  R dereg_mr(void* comm, void* mhandle) override { return net_->deregMr(comm, mhandle); }

  R isend(void* send_comm, void* data, std::size_t size, int tag, void* mhandle, void** request) override {
    if constexpr (kVersion >= 10) {
      return net_->isend(send_comm, data, size, tag, mhandle, nullptr, request);
    } else if constexpr (kVersion == 9) {
      return net_->isend(send_comm, data, size, tag, mhandle, request);
    } else {
      if (size > kMaxBytesBeforeV9) return R::kInvalidArgument;
      return net_->isend(send_comm, data, static_cast<int>(size), tag, mhandle, request);
    }
  }

  R irecv(void* recv_comm, int n, void** data, std::size_t* sizes, int* tags, void** mhandles,
          void** request) override {
    if constexpr (kVersion >= 10) {
      return net_->irecv(recv_comm, n, data, sizes, tags, mhandles, nullptr, request);
    } else if constexpr (kVersion == 9) {
      return net_->irecv(recv_comm, n, data, sizes, tags, mhandles, request);
    } else {
      int narrow[kMaxGroup];
      if (n > kMaxGroup) return R::kInvalidArgument;
      for (int i = 0; i < n; ++i) {
        if (sizes[i] > kMaxBytesBeforeV9) return R::kInvalidArgument;
        narrow[i] = static_cast<int>(sizes[i]);
      }
      return net_->irecv(recv_comm, n, data, narrow, tags, mhandles, request);
    }
  }

  R iflush(void* recv_comm, int n, void** data, int* sizes, void** mhandles, void** request) override {
    return net_->iflush(recv_comm, n, data, sizes, mhandles, request);
  }
  R test(void* request, int* done, int* sizes) override { return net_->test(request, done, sizes); }

 private:
  Library library_;  // first member: destroyed, and so unloaded, last
  const Net* net_;
  int users_ = 0;  // up to v10: inits not yet finalized
};

}  // namespace netapi
