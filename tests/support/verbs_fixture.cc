#include "support/verbs_fixture.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <cerrno>
#include <cstring>

namespace verbatim::test {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::runtime_error(what + ": " + std::strerror(errno));  // gtest reports it as a failure of the test
}

template <typename T>
T owned(typename T::pointer object, const char* verb) {
  if (object == nullptr) throw_errno(verb);
  return T(object);
}

void check(int result, const char* verb) {
  if (result == 0) return;
  errno = result;
  throw_errno(verb);
}

bool is_roce_v2(const ibv_gid_entry& entry) {
  return entry.gid_type == IBV_GID_TYPE_ROCE_V2;
}

// Fills in the first active port and its GID; false when no port is active.
bool describe(Device& device) {
  check(verbs().query_device(device.context.get(), &device.attr), "ibv_query_device");
  for (std::uint8_t port = 1; port <= device.attr.phys_port_cnt; ++port) {
    check(query_port(device.context.get(), port, &device.port), "ibv_query_port");
    if (device.port.state != IBV_PORT_ACTIVE) continue;
    device.port_num = port;
    for (int index = 0; index < device.port.gid_tbl_len; ++index) {
      ibv_gid_entry entry{};
      if (verbs().query_gid_ex(device.context.get(), port, static_cast<std::uint32_t>(index), &entry, 0,
                               sizeof(entry)) != 0) {
        continue;
      }
      if (device.is_roce() && !is_roce_v2(entry)) continue;
      device.gid_index = static_cast<std::uint8_t>(index);
      device.gid = entry.gid;
      return true;
    }
  }
  return false;
}

int mask_of(ibv_qp_type type, int rc, int uc, int ud) {
  return type == IBV_QPT_UD ? ud : type == IBV_QPT_UC ? uc : rc;
}

}  // namespace

void expect_destroyed(int result, const char* what) {
  EXPECT_EQ(result, 0) << "destroying " << what;
}

Device open_device(unsigned ordinal) {
  int count = 0;
  ibv_device** const list = verbs().get_device_list(&count);
  if (list == nullptr) throw_errno("ibv_get_device_list");
  const std::unique_ptr<ibv_device*, void (*)(ibv_device**)> list_owner(list, verbs().free_device_list);
  for (int i = 0; i < count; ++i) {
    Device device;
    device.context = owned<Context>(verbs().open_device(list[i]), "ibv_open_device");
    if (!describe(device) || ordinal-- != 0) continue;
    device.pd = alloc_pd(device);
    return device;
  }
  throw std::runtime_error("too few devices with an active port: the suite needs two");
}

Pd alloc_pd(const Device& device) {
  return owned<Pd>(verbs().alloc_pd(device.context.get()), "ibv_alloc_pd");
}

Mr reg_mr(ibv_pd* pd, void* address, std::size_t length, int access) {
  return owned<Mr>(verbs().reg_mr(pd, address, length, access), "ibv_reg_mr");
}

Cq create_cq(const Device& device, unsigned cqe, ibv_comp_channel* channel, void* cq_context) {
  return owned<Cq>(verbs().create_cq(device.context.get(), static_cast<int>(cqe), cq_context, channel, 0),
                   "ibv_create_cq");
}

Srq create_srq(ibv_pd* pd, unsigned max_wr, unsigned max_sge) {
  ibv_srq_init_attr attr{};
  attr.attr.max_wr = max_wr;
  attr.attr.max_sge = max_sge;
  return owned<Srq>(verbs().create_srq(pd, &attr), "ibv_create_srq");
}

ibv_qp* create_qp_ex(ibv_context* context, ibv_qp_init_attr_ex& attr) {
  verbs_context* const extended = verbs_get_ctx_op(context, create_qp_ex);
  if (extended != nullptr) return extended->create_qp_ex(context, &attr);
  errno = EOPNOTSUPP;
  return nullptr;
}

Endpoint::Endpoint(const Device& device, const EndpointOptions& options) : device_(&device), options_(options) {
  if (options_.send_cq == nullptr) own_send_cq_ = create_cq(device);
  if (options_.recv_cq == nullptr) own_recv_cq_ = create_cq(device);
  ibv_qp_init_attr attr{};
  attr.send_cq = options_.send_cq != nullptr ? options_.send_cq : own_send_cq_.get();
  attr.recv_cq = options_.recv_cq != nullptr ? options_.recv_cq : own_recv_cq_.get();
  attr.srq = options_.srq;
  attr.cap = {options_.send_wr, options_.recv_wr, options_.send_sge, options_.recv_sge, options_.inline_bytes};
  attr.qp_type = options_.type;
  attr.sq_sig_all = options_.signal_all ? 1 : 0;
  ibv_pd* const pd = options_.pd != nullptr ? options_.pd : device.pd.get();
  if (options_.send_ops) {
    ibv_qp_init_attr_ex extended{};
    std::memcpy(&extended, &attr, sizeof attr);  // both structs begin with the same fields
    extended.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    extended.pd = pd;
    extended.send_ops_flags = *options_.send_ops;
    qp_ = owned<Qp>(create_qp_ex(pd->context, extended), "ibv_create_qp_ex");
    attr.cap = extended.cap;
  } else {
    qp_ = owned<Qp>(verbs().create_qp(pd, &attr), "ibv_create_qp");
  }
  cap_ = attr.cap;
}

Address Endpoint::address() const {
  const std::uint32_t some_psn = (qp_->qp_num * 2654435761U) & 0xFFFFFF;  // any 24 bits that differ from the peer's
  return {qp_->qp_num, options_.psn.value_or(some_psn), device_->port.lid,
          device_->is_roce() ? std::uint16_t{1} : std::uint16_t{0}, device_->gid};
}

ibv_qp_state Endpoint::state() const {
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  check(verbs().query_qp(qp_.get(), &attr, IBV_QP_STATE, &init), "ibv_query_qp");
  return attr.qp_state;
}

ibv_qp_attr Endpoint::init_attr() const {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.pkey_index = 0;
  attr.port_num = device_->port_num;
  attr.qp_access_flags = static_cast<unsigned>(options_.access);
  attr.qkey = options_.qkey;
  return attr;
}

ibv_qp_attr Endpoint::rtr_attr(const Address& peer) const {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = device_->port.active_mtu;
  attr.dest_qp_num = peer.qp_num;
  attr.rq_psn = peer.psn;
  attr.max_dest_rd_atomic = 1;
  attr.min_rnr_timer = options_.timers.min_rnr_timer;
  attr.ah_attr.port_num = device_->port_num;
  attr.ah_attr.dlid = peer.lid;
  if (peer.is_roce != 0) {
    attr.ah_attr.is_global = 1;
    attr.ah_attr.grh.dgid = peer.gid;
    attr.ah_attr.grh.sgid_index = device_->gid_index;
    attr.ah_attr.grh.hop_limit = 64;
  }
  return attr;
}

ibv_qp_attr Endpoint::rts_attr() const {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  attr.sq_psn = address().psn;
  attr.max_rd_atomic = 1;
  attr.timeout = options_.timers.timeout;
  attr.retry_cnt = options_.timers.retry_count;
  attr.rnr_retry = options_.timers.rnr_retry;
  return attr;
}

void Endpoint::to_init() {
  ibv_qp_attr attr = init_attr();
  check(verbs().modify_qp(qp(), &attr, mask_of(options_.type, kInitMask, kInitMask, kUdInitMask)),
        "ibv_modify_qp to INIT");
}

void Endpoint::to_rtr(const Address& peer) {
  ibv_qp_attr attr = rtr_attr(peer);
  check(verbs().modify_qp(qp(), &attr, mask_of(options_.type, kRtrMask, kUcRtrMask, kUdRtrMask)),
        "ibv_modify_qp to RTR");
}

void Endpoint::to_rts() {
  ibv_qp_attr attr = rts_attr();
  check(verbs().modify_qp(qp(), &attr, mask_of(options_.type, kRtsMask, kUcRtsMask, kUdRtsMask)),
        "ibv_modify_qp to RTS");
}

void Endpoint::to_error() {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_ERR;
  check(verbs().modify_qp(qp(), &attr, IBV_QP_STATE), "ibv_modify_qp to ERR");
}

void Endpoint::to_reset() {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RESET;
  check(verbs().modify_qp(qp(), &attr, IBV_QP_STATE), "ibv_modify_qp to RESET");
}

void Endpoint::connect(const Address& peer) {
  to_init();
  to_rtr(peer);
  to_rts();
}

void connect(Endpoint& a, Endpoint& b) {
  a.connect(b.address());
  if (&a != &b) b.connect(a.address());
}

int post(ibv_qp* qp, ibv_wr_opcode opcode, std::vector<ibv_sge> sges, const SendOptions& options) {
  ibv_send_wr wr{};
  wr.wr_id = options.wr_id;
  wr.sg_list = sges.data();
  wr.num_sge = static_cast<int>(sges.size());
  wr.opcode = opcode;
  wr.send_flags = options.flags;
  wr.imm_data = options.imm;
  wr.wr.rdma.remote_addr = options.remote_addr;
  wr.wr.rdma.rkey = options.rkey;
  ibv_send_wr* bad = nullptr;
  const int result = ibv_post_send(qp, &wr, &bad);
  if (result != 0) {
    EXPECT_EQ(bad, &wr);
  }
  return result;
}

int post_atomic(ibv_qp* qp, ibv_wr_opcode opcode, ibv_sge result, const SendOptions& target, std::uint64_t compare_add,
                std::uint64_t swap) {
  ibv_send_wr wr{};
  wr.wr_id = target.wr_id;
  wr.sg_list = &result;
  wr.num_sge = 1;
  wr.opcode = opcode;
  wr.send_flags = target.flags;
  wr.wr.atomic = {.remote_addr = target.remote_addr, .compare_add = compare_add, .swap = swap, .rkey = target.rkey};
  ibv_send_wr* bad = nullptr;
  return ibv_post_send(qp, &wr, &bad);
}

namespace {

template <typename PostOne>
int post_receive(PostOne post_one, std::vector<ibv_sge>& sges, std::uint64_t wr_id) {
  ibv_recv_wr wr{};
  wr.wr_id = wr_id;
  wr.sg_list = sges.data();
  wr.num_sge = static_cast<int>(sges.size());
  ibv_recv_wr* bad = nullptr;
  const int result = post_one(&wr, &bad);
  if (result != 0) {
    EXPECT_EQ(bad, &wr);
  }
  return result;
}

}  // namespace

int post_recv(ibv_qp* qp, std::vector<ibv_sge> sges, std::uint64_t wr_id) {
  return post_receive([qp](ibv_recv_wr* wr, ibv_recv_wr** bad) { return ibv_post_recv(qp, wr, bad); }, sges, wr_id);
}

int post_srq_recv(ibv_srq* srq, std::vector<ibv_sge> sges, std::uint64_t wr_id) {
  return post_receive([srq](ibv_recv_wr* wr, ibv_recv_wr** bad) { return ibv_post_srq_recv(srq, wr, bad); }, sges,
                      wr_id);
}

std::vector<ibv_wc> poll(ibv_cq* cq, std::size_t count, Milliseconds timeout) {
  std::vector<ibv_wc> found;
  Wait wait(timeout);
  while (found.size() < count) {
    ibv_wc wc;
    std::memset(&wc, 0xA5, sizeof(wc));  // makes a field visible that the device should write and does not
    const int polled = ibv_poll_cq(cq, 1, &wc);
    if (polled == 1) {
      found.push_back(wc);
      wait.begin_again();
      continue;
    }
    if (polled < 0) {
      ADD_FAILURE() << "ibv_poll_cq: " << polled;
      break;
    }
    if (wait.is_over()) {
      ADD_FAILURE() << "only " << found.size() << " of " << count << " completions have come, no other one "
                    << wait.report();
      break;
    }
    wait.rest();
  }
  return found;
}

ibv_wc poll_one(ibv_cq* cq, Milliseconds timeout) {
  const std::vector<ibv_wc> found = poll(cq, 1, timeout);
  if (!found.empty()) return found.front();
  ibv_wc none{};
  none.wr_id = kNoWr;
  none.status = IBV_WC_GENERAL_ERR;
  return none;
}

bool stays_empty(ibv_cq* cq, Milliseconds time) {
  const auto deadline = Clock::now() + time;
  do {
    ibv_wc wc{};
    if (ibv_poll_cq(cq, 1, &wc) != 0) return false;
    timespec pause{0, 100'000};
    nanosleep(&pause, nullptr);
  } while (Clock::now() < deadline);
  return true;
}

bool readable(int fd, Milliseconds timeout) {
  pollfd poller{fd, POLLIN, 0};
  return ::poll(&poller, 1, static_cast<int>(timeout.count())) == 1;
}

int write_in_child(const Device& device) {
  const Region region(device.pd.get(), 8192);
  region.fill(3);
  Endpoint a(device);
  Endpoint b(device);
  connect(a, b);
  const SendOptions target{.remote_addr = region.address(4096), .rkey = region.mr->rkey};
  if (post(a.qp(), IBV_WR_RDMA_WRITE, {region.sge(0, 4096)}, target) != 0) return 3;
  if (poll_one(a.send_cq()).status != IBV_WC_SUCCESS) return 4;
  return find_wrong_byte(region.bytes(4096, 4096), 3) ? 5 : 0;
}

std::optional<ibv_async_event> next_async_event(ibv_context* context, Milliseconds timeout) {
  while (readable(context->async_fd, timeout)) {
    ibv_async_event event{};
    check(verbs().get_async_event(context, &event) == 0 ? 0 : errno, "ibv_get_async_event");
    verbs().ack_async_event(&event);
    if (event.event_type != IBV_EVENT_COMM_EST) return event;
  }
  return std::nullopt;
}

decltype(ibv_async_event::element) expect_async_event(ibv_context* context, ibv_event_type type) {
  const std::optional<ibv_async_event> event = next_async_event(context);
  if (event && event->event_type == type) return event->element;
  ADD_FAILURE() << "expected the event \"" << verbs().event_type_str(type) << "\", found "
                << (event ? verbs().event_type_str(event->event_type) : "none");
  return {};
}

}  // namespace verbatim::test
