// Queue pairs of lines.cu, straight over libibverbs.
#pragma once

#include <cuda.h>
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_check.h"

namespace verbatim::gpu {

constexpr unsigned kDepth = 64;  // of a send queue

[[noreturn]] inline void fail(const std::string& what, int error) {
  throw std::runtime_error(what + ": " + std::strerror(error));
}
struct Address {
  ibv_gid gid;
  std::uint32_t qpn;
  std::uint16_t lid;
};

struct RemoteTarget {
  std::uint64_t address;
  std::uint32_t rkey;
};

// Some QPs on the first device, with one completion queue. Nothing is destroyed: the process ends with them.
class Endpoint {
 public:
  explicit Endpoint(unsigned qps);

  Address address(unsigned qp) const { return {gid_, qps_.at(qp)->qp_num, port_.lid}; }
  void connect(unsigned qp, const Address& peer);
  ibv_mr* register_memory(void* address, std::size_t bytes, bool is_gpu_memory);

  void write(unsigned qp, const void* from, std::uint32_t lkey, std::size_t bytes, std::uint64_t to, std::uint32_t rkey,
             std::uint64_t id, unsigned flags);
  // Up to as many completions as `found` has room for; throws when a request has failed.
  unsigned poll(std::array<ibv_wc, 16>& found);

 private:
  bool is_ethernet() const { return port_.link_layer == IBV_LINK_LAYER_ETHERNET; }

  static constexpr std::uint8_t kPort = 1;
  static constexpr std::uint8_t kRoceGid = 3;  // of softverbs: RoCE v2, IPv4

  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_port_attr port_{};
  ibv_gid gid_{};
  std::vector<ibv_qp*> qps_;
};

inline Endpoint::Endpoint(unsigned qps) {
  int count = 0;
  ibv_device** const devices = ibv_get_device_list(&count);
  if (devices == nullptr || count == 0) throw std::runtime_error("no RDMA device: start this with tools/softverbs");
  context_ = ibv_open_device(devices[0]);
  if (context_ == nullptr) fail("ibv_open_device", errno);
  ibv_free_device_list(devices);
  pd_ = ibv_alloc_pd(context_);
  if (pd_ == nullptr) fail("ibv_alloc_pd", errno);
  cq_ = ibv_create_cq(context_, static_cast<int>(4 * kDepth), nullptr, nullptr, 0);
  if (cq_ == nullptr) fail("ibv_create_cq", errno);
  if (const int error = ibv_query_port(context_, kPort, &port_); error != 0) fail("ibv_query_port", error);
  if (ibv_query_gid(context_, kPort, is_ethernet() ? kRoceGid : 0, &gid_) != 0) fail("ibv_query_gid", errno);
  for (unsigned i = 0; i < qps; ++i) {
    ibv_qp_init_attr init{};
    init.send_cq = cq_;
    init.recv_cq = cq_;
    init.qp_type = IBV_QPT_RC;
    init.cap.max_send_wr = kDepth;
    init.cap.max_recv_wr = 1;
    init.cap.max_send_sge = 1;
    init.cap.max_recv_sge = 1;
    init.cap.max_inline_data = sizeof(Word);
    qps_.push_back(ibv_create_qp(pd_, &init));
    if (qps_.back() == nullptr) fail("ibv_create_qp", errno);
  }
}

inline void Endpoint::connect(unsigned qp, const Address& peer) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = kPort;
  attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  int error = ibv_modify_qp(qps_.at(qp), &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (error != 0) fail("ibv_modify_qp to INIT", error);
  attr = {};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = port_.active_mtu;
  attr.dest_qp_num = peer.qpn;
  attr.max_dest_rd_atomic = 1;
  attr.min_rnr_timer = 12;
  attr.ah_attr.port_num = kPort;
  attr.ah_attr.dlid = peer.lid;
  if (is_ethernet()) {
    attr.ah_attr.is_global = 1;
    attr.ah_attr.grh.dgid = peer.gid;
    attr.ah_attr.grh.sgid_index = kRoceGid;
    attr.ah_attr.grh.hop_limit = 64;
  }
  error = ibv_modify_qp(qps_.at(qp), &attr,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                            IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (error != 0) fail("ibv_modify_qp to RTR", error);
  attr = {};
  attr.qp_state = IBV_QPS_RTS;
  attr.timeout = 17;  // 0.5 s
  attr.retry_cnt = 7;
  attr.rnr_retry = 7;
  attr.max_rd_atomic = 1;
  error = ibv_modify_qp(
      qps_.at(qp), &attr,
      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
  if (error != 0) fail("ibv_modify_qp to RTS", error);
}

// The descriptor of a dma-buf with this GPU memory.
int dmabuf_of(void* address, std::size_t bytes) {
  using GetHandle = CUresult (*)(void*, CUdeviceptr, std::size_t, CUmemRangeHandleType, unsigned long long);
  void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) throw std::runtime_error(dlerror());
  const auto get = reinterpret_cast<GetHandle>(dlsym(library, "cuMemGetHandleForAddressRange"));
  if (get == nullptr) throw std::runtime_error("libcuda has no cuMemGetHandleForAddressRange");
  int descriptor = -1;
  const CUresult result =
      get(&descriptor, reinterpret_cast<CUdeviceptr>(address), bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuMemGetHandleForAddressRange: CUresult " + std::to_string(static_cast<int>(result)));
  }
  return descriptor;
}

inline ibv_mr* Endpoint::register_memory(void* address, std::size_t bytes, bool is_gpu_memory) {
  constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  const char* const setting = std::getenv("SOFTVERBS_GPU_MEMORY");
  const bool by_dmabuf = setting == nullptr || std::string_view(setting) != "peer-memory";
  if (is_gpu_memory && by_dmabuf) {
    const int descriptor = dmabuf_of(address, bytes);
    ibv_mr* const mr = ibv_reg_dmabuf_mr(pd_, 0, bytes, reinterpret_cast<std::uint64_t>(address), descriptor, kAccess);
    const int error = errno;
    close(descriptor);
    if (mr == nullptr) fail("ibv_reg_dmabuf_mr of GPU memory", error);
    return mr;
  }
  ibv_mr* const mr = ibv_reg_mr(pd_, address, bytes, kAccess);
  if (mr == nullptr) fail(is_gpu_memory ? "ibv_reg_mr of GPU memory" : "ibv_reg_mr of host memory", errno);
  return mr;
}

inline void Endpoint::write(unsigned qp, const void* from, std::uint32_t lkey, std::size_t bytes, std::uint64_t to,
                            std::uint32_t rkey, std::uint64_t id, unsigned flags) {
  ibv_sge sge{};
  sge.addr = reinterpret_cast<std::uint64_t>(from);
  sge.length = static_cast<std::uint32_t>(bytes);
  sge.lkey = lkey;
  ibv_send_wr request{};
  request.wr_id = id;
  request.sg_list = &sge;
  request.num_sge = 1;
  request.opcode = IBV_WR_RDMA_WRITE;
  request.send_flags = flags;
  request.wr.rdma.remote_addr = to;
  request.wr.rdma.rkey = rkey;
  ibv_send_wr* bad = nullptr;
  if (const int error = ibv_post_send(qps_.at(qp), &request, &bad); error != 0) fail("ibv_post_send", error);
}

inline unsigned Endpoint::poll(std::array<ibv_wc, 16>& found) {
  const int count = ibv_poll_cq(cq_, static_cast<int>(found.size()), found.data());
  if (count < 0) throw std::runtime_error("ibv_poll_cq failed");
  for (int i = 0; i < count; ++i) {
    const ibv_wc_status status = found[static_cast<std::size_t>(i)].status;
    if (status != IBV_WC_SUCCESS) throw std::runtime_error(std::string("RDMA WRITE: ") + ibv_wc_status_str(status));
  }
  return static_cast<unsigned>(count);
}

}  // namespace verbatim::gpu
