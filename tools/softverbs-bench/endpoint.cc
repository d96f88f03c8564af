#include "softverbs-bench/endpoint.h"

#include <algorithm>

#include "verbs/errors.h"

namespace verbatim::bench {
namespace {

// 67 ms and seven retries: the benchmark ends within a second after its peer process has died.
constexpr std::uint8_t kTimeout = 14;
constexpr std::uint8_t kRetryCount = 7;

}  // namespace

Result<Endpoint> Endpoint::open(std::byte* area, std::size_t bytes) {
  auto config = Config::from_environment();
  if (!config) return config.error();
  auto verbs = Verbs::load(config->verbs_library);
  if (!verbs) return verbs.error();
  Endpoint endpoint;
  endpoint.verbs_ = *std::move(verbs);
  const Verbs& table = *endpoint.verbs_;
  auto inventory = DeviceSurvey::open(table, *config);
  if (!inventory) return inventory.error();
  endpoint.inventory_ = *std::move(inventory);
  endpoint.port_ = &endpoint.inventory_->ports.front();
  endpoint.area_ = area;
  const Device& device = *endpoint.port_->device;
  const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  auto mr = adopt("ibv_reg_mr", table.reg_mr(device.pd(), area, bytes, access), table.dereg_mr);
  if (!mr) return mr.error();
  endpoint.mr_ = *std::move(mr);
  auto cq =
      adopt("ibv_create_cq", table.create_cq(device.context(), 2 * kDepth, nullptr, nullptr, 0), table.destroy_cq);
  if (!cq) return cq.error();
  endpoint.cq_ = *std::move(cq);
  auto qp = make_qp(*endpoint.port_, endpoint.cq_.get(), {.send_wr = kDepth, .inline_bytes = 8}, *config);
  if (!qp) return qp.error();
  endpoint.qp_ = *std::move(qp);
  return endpoint;
}

RemoteArea Endpoint::local() const {
  return {qp_address(*port_, qp_.qp.get()), reinterpret_cast<std::uint64_t>(area_), mr_->rkey};
}

Status Endpoint::connect(const RemoteArea& remote) {
  remote_ = remote;
  Config config;
  config.timeout = kTimeout;
  config.retry_count = kRetryCount;
  const QpConnection connection{
      .remote = remote.qp, .path = {.mtu = port_->active_mtu}, .peer_reads = responder_reads(*port_->device)};
  const auto connected = connect_qp(qp_.qp.get(), *port_, connection, config);
  return connected ? Status() : Status(connected.error());
}

Status Endpoint::write(std::size_t offset, std::size_t remote_offset, std::size_t bytes, bool signalled, bool inlined) {
  ibv_sge sge{reinterpret_cast<std::uint64_t>(area_ + offset), static_cast<std::uint32_t>(bytes), mr_->lkey};
  ibv_send_wr wr{};
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = (signalled ? unsigned{IBV_SEND_SIGNALED} : 0U) |
                  (inlined && bytes <= qp_.inline_bytes ? unsigned{IBV_SEND_INLINE} : 0U);
  wr.wr.rdma.remote_addr = remote_.address + remote_offset;
  wr.wr.rdma.rkey = remote_.rkey;
  ibv_send_wr* bad = nullptr;
  return check_errno("ibv_post_send", ibv_post_send(qp_.qp.get(), &wr, &bad));
}

Result<unsigned> Endpoint::poll() {
  ibv_wc wc{};
  const int found = ibv_poll_cq(cq_.get(), 1, &wc);
  if (found < 0) return check_errno("ibv_poll_cq", found).error();
  if (found == 1 && wc.status != IBV_WC_SUCCESS) return Error{ErrorKind::kRemote, 0, "RDMA WRITE"};
  return static_cast<unsigned>(found);
}

}  // namespace verbatim::bench
