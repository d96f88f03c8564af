// The library must find this program's allocator before the C library's; a sanitizer replaces the allocator.
//: program softverbs_no_memory_test export_dynamic link=verbs_test
//:   + sources=fault/system_calls.cc,support/child.cc,main.cc
//: test softverbs-no-memory sanitizer=none use=device CUDA_TEST_LIBRARY={standin_cuda} SOFTVERBS_DMABUF=1

// Memory runs out. A program uses every family of verbs, in as many processes as the library allocates in one of them,
// and in each process another allocation fails. A verb that may allocate then returns its error and has done nothing:
// the same call succeeds afterwards. All other verbs succeed, and so do the requests that are under way.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.h"
#include "fault/system_calls.h"
#include "support/child.h"
#include "support/gpu_memory.h"
#include "support/verbs_fixture.h"
#include "support/verbs_peer.h"

namespace verbatim::test {
namespace {

constexpr Timers kTimers{.min_rnr_timer = 1};
constexpr int kAccess = kAllAccess | IBV_ACCESS_REMOTE_ATOMIC;
constexpr std::size_t kBytes = 16384;  // of a region; each half belongs to one end

template <typename Object>
Object* made(Object* object, const char* verb) {
  if (object == nullptr) throw std::runtime_error(std::string(verb) + ": " + std::strerror(errno));
  return object;
}

void expect_success(ibv_cq* cq, std::size_t count) {
  for (const ibv_wc& completion : poll(cq, count)) EXPECT_EQ(completion.status, IBV_WC_SUCCESS);
}

// The objects of the program, each declared behind those that it needs.
struct Program {
  Device device;
  std::optional<Region> region;
  Mr dmabuf;
  Channel channel;
  Cq cq;
  Cq extended_cq;
  Srq srq;
  Srq extended_srq;
  Ah ah;
  std::optional<Endpoint> a, b;      // RC; b has the shared receive queue
  std::optional<Endpoint> extended;  // RC, connected to itself; with the extended queues and ibv_wr_*
  std::optional<Endpoint> uc;        // connected to itself
  std::optional<Endpoint> datagram;  // sends to itself
  std::optional<Peer> peer;          // with SOFTVERBS_CROSS_MEMORY
  std::optional<Endpoint> to_peer;

  ibv_sge bytes(std::size_t offset, std::size_t length) const { return region->sge(offset, length); }
  SendOptions target(std::size_t offset = kBytes / 2) const {
    return {.remote_addr = region->address(offset), .rkey = region->mr->rkey};
  }
  EndpointOptions options(ibv_qp_type type = IBV_QPT_RC) const {
    return {.access = kAccess, .timers = kTimers, .send_cq = cq.get(), .recv_cq = cq.get(), .type = type};
  }
};

// For verbs whose inline functions would need the library to be linked.
verbs_context* extended(Program& p) {
  return verbs_get_ctx(p.device.context.get());
}

void register_memory(Program& p) {
  p.region.emplace(p.device.pd.get(), kBytes, 0, kAccess);
  p.region->fill(1);
}

void register_dmabuf(Program& p) {
  const UniqueFd file(memfd_create("no_memory_test", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(file.get(), 4096), 0);
  p.dmabuf.reset(
      made(verbs().reg_dmabuf_mr(p.device.pd.get(), 0, 4096, 0, file.get(), kAllAccess), "ibv_reg_dmabuf_mr"));
}

void make_extended_cq(Program& p) {
  ibv_cq_init_attr_ex attributes{};
  attributes.cqe = 64;
  attributes.wc_flags = IBV_WC_STANDARD_FLAGS;
  p.extended_cq.reset(ibv_cq_ex_to_cq(made(ibv_create_cq_ex(p.device.context.get(), &attributes), "ibv_create_cq_ex")));
}

void make_extended_srq(Program& p) {
  ibv_srq_init_attr_ex attributes{};
  attributes.attr = {.max_wr = 16, .max_sge = 1, .srq_limit = 0};
  attributes.comp_mask = IBV_SRQ_INIT_ATTR_PD;
  attributes.pd = p.device.pd.get();
  p.extended_srq.reset(made(extended(p)->create_srq_ex(p.device.context.get(), &attributes), "ibv_create_srq_ex"));
}

void make_address_handle(Program& p) {
  ibv_ah_attr path{};
  path.port_num = p.device.port_num;
  path.is_global = 1;
  path.grh.dgid = p.device.gid;
  path.grh.sgid_index = p.device.gid_index;
  path.grh.hop_limit = 1;
  p.ah.reset(made(verbs().create_ah(p.device.pd.get(), &path), "ibv_create_ah"));
}

void make_extended_qp(Program& p) {
  EndpointOptions options = p.options();
  options.send_cq = options.recv_cq = p.extended_cq.get();
  options.srq = p.extended_srq.get();
  options.send_ops = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE;
  p.extended.emplace(p.device, options);
}

void make_reliable_qps(Program& p) {
  p.a.emplace(p.device, p.options());
  EndpointOptions shared = p.options();
  shared.srq = p.srq.get();
  p.b.emplace(p.device, shared);
}

void connect_all(Program& p) {
  connect(*p.a, *p.b);
  connect(*p.extended, *p.extended);
  connect(*p.uc, *p.uc);
  p.datagram->to_ready();
}

// Every operation of a reliable connection.
void transfer(Program& p) {
  ASSERT_EQ(post_srq_recv(p.srq.get(), {p.bytes(kBytes / 2, 4096)}), 0);
  ASSERT_EQ(post_srq_recv(p.srq.get(), {}), 0);
  ASSERT_EQ(post(p.a->qp(), IBV_WR_SEND, {p.bytes(0, 4096)}), 0);
  ASSERT_EQ(post(p.a->qp(), IBV_WR_RDMA_WRITE, {p.bytes(0, 4096)}, p.target()), 0);
  ASSERT_EQ(post(p.a->qp(), IBV_WR_RDMA_WRITE_WITH_IMM, {p.bytes(0, 8)}, p.target()), 0);
  ASSERT_EQ(post(p.a->qp(), IBV_WR_RDMA_READ, {p.bytes(4096, 4096)}, p.target()), 0);
  ASSERT_EQ(post_atomic(p.a->qp(), IBV_WR_ATOMIC_FETCH_AND_ADD, p.bytes(kBytes - 64, 8), p.target(kBytes - 8), 1), 0);
  expect_success(p.cq.get(), 7);
  EXPECT_EQ(find_wrong_byte(p.region->bytes(kBytes / 2, 4096), 1), std::nullopt) << "wrong bytes";
  EXPECT_EQ(find_wrong_byte(p.region->bytes(4096, 4096), 1), std::nullopt) << "wrong bytes";
}

void transfer_by_extended_calls(Program& p) {
  ASSERT_EQ(post_srq_recv(p.extended_srq.get(), {p.bytes(kBytes / 2, 64)}), 0);
  ibv_qp_ex* const qp = verbs().qp_to_qp_ex(p.extended->qp());
  ASSERT_NE(qp, nullptr);
  ibv_wr_start(qp);
  qp->wr_flags = IBV_SEND_SIGNALED;
  ibv_wr_send(qp);
  ibv_wr_set_sge(qp, p.region->mr->lkey, p.region->address(), 64);
  ibv_wr_rdma_write(qp, p.region->mr->rkey, p.region->address(kBytes / 2));
  ibv_wr_set_sge(qp, p.region->mr->lkey, p.region->address(), 64);
  ASSERT_EQ(ibv_wr_complete(qp), 0);
  ibv_cq_ex* const cq = reinterpret_cast<ibv_cq_ex*>(p.extended_cq.get());
  ibv_poll_cq_attr none{};
  Wait wait(kPatience);
  for (int found = 0; found < 3; ++found) {
    int result = 0;
    while ((result = ibv_start_poll(cq, &none)) == ENOENT && !wait.is_over()) wait.rest();
    ASSERT_EQ(result, 0);
    EXPECT_EQ(cq->status, IBV_WC_SUCCESS);
    ibv_end_poll(cq);
  }
}

// A message for which memory runs out is lost, as the standard allows, and its request completes all the same.
void expect_received(Program& p, const std::function<int()>& post_message) {
  for (bool may_be_lost = !fault::failing_system_call().has_failed(), is_received = false; !is_received;) {
    ASSERT_EQ(post_message(), 0);
    for (bool is_sent = false; !is_sent;) {
      const ibv_wc completion = poll_one(p.cq.get());
      ASSERT_EQ(completion.status, IBV_WC_SUCCESS);
      ((completion.opcode & IBV_WC_RECV) != 0 ? is_received : is_sent) = true;
    }
    ASSERT_TRUE(is_received || (may_be_lost && fault::failing_system_call().has_failed()));
    may_be_lost = false;
  }
}

void transfer_unreliably(Program& p) {
  ASSERT_EQ(post_recv(p.uc->qp(), {p.bytes(kBytes / 2, 64)}), 0);
  expect_received(p, [&] { return post(p.uc->qp(), IBV_WR_SEND, {p.bytes(0, 64)}); });
  ASSERT_EQ(post_recv(p.datagram->qp(), {p.bytes(kBytes / 2, 256)}), 0);
  ibv_sge sge = p.bytes(0, 64);
  ibv_send_wr request{};
  request.sg_list = &sge;
  request.num_sge = 1;
  request.opcode = IBV_WR_SEND;
  request.send_flags = IBV_SEND_SIGNALED;
  request.wr.ud = {.ah = p.ah.get(), .remote_qpn = p.datagram->qp()->qp_num, .remote_qkey = 0x1234};
  ibv_send_wr* bad = nullptr;
  expect_received(p, [&] { return ibv_post_send(p.datagram->qp(), &request, &bad); });
}

// To the sender of the one that has arrived.
void answer_datagram(Program& p) {
  ibv_wc received{};
  received.wc_flags = IBV_WC_GRH;
  p.ah.reset(made(
      verbs().create_ah_from_wc(p.device.pd.get(), &received,
                                reinterpret_cast<ibv_grh*>(p.region->bytes(kBytes / 2, 40).data()), p.device.port_num),
      "ibv_create_ah_from_wc"));
}

void wait_for_events(Program& p) {
  ASSERT_EQ(ibv_req_notify_cq(p.cq.get(), 0), 0);
  ASSERT_EQ(post(p.a->qp(), IBV_WR_RDMA_WRITE, {p.bytes(0, 64)}, p.target()), 0);
  ibv_cq* cq = nullptr;
  void* cq_context = nullptr;
  ASSERT_EQ(verbs().get_cq_event(p.channel.get(), &cq, &cq_context), 0);
  verbs().ack_cq_events(cq, 1);
  expect_success(cq, 1);
  ibv_srq_attr limit{.max_wr = 0, .max_sge = 0, .srq_limit = 1};
  ASSERT_EQ(verbs().modify_srq(p.srq.get(), &limit, IBV_SRQ_LIMIT), 0);
  expect_async_event(p.device.context.get(), IBV_EVENT_SRQ_LIMIT_REACHED);
}

// What a program asks, and what it changes of a connection.
void query(Program& p) {
  ibv_device_attr_ex device{};
  EXPECT_EQ(extended(p)->query_device_ex(p.device.context.get(), nullptr, &device, sizeof device), 0);
  ibv_port_attr port{};
  EXPECT_EQ(query_port(p.device.context.get(), p.device.port_num, &port), 0);
  std::vector<ibv_gid_entry> gids(static_cast<std::size_t>(port.gid_tbl_len));
  EXPECT_GT(verbs().query_gid_table(p.device.context.get(), gids.data(), gids.size(), 0, sizeof gids[0]), 0);
  ibv_srq_attr srq{};
  EXPECT_EQ(verbs().query_srq(p.srq.get(), &srq), 0);
  EXPECT_EQ(p.a->state(), IBV_QPS_RTS);
  ibv_values_ex clock{.comp_mask = IBV_VALUES_MASK_RAW_CLOCK, .raw_clock = {}};
  EXPECT_EQ(ibv_query_rt_values_ex(p.device.context.get(), &clock), 0);
}

// Requests that are flushed, and QPs that are connected again.
void fail_and_reset(Program& p) {
  ASSERT_EQ(post_recv(p.a->qp(), {p.bytes(0, 64)}), 0);
  p.a->to_error();
  ASSERT_EQ(post(p.a->qp(), IBV_WR_RDMA_WRITE, {p.bytes(0, 64)}, p.target()), 0);
  for (const ibv_wc& completion : poll(p.cq.get(), 2)) EXPECT_EQ(completion.status, IBV_WC_WR_FLUSH_ERR);
  p.a->to_reset();
  p.b->to_reset();
  connect(*p.a, *p.b);
}

// Between processes that may not access each other's memory, so that a thread of each copies for the other one.
void transfer_to_peer(Program& p) {
  if (std::getenv("SOFTVERBS_CROSS_MEMORY") == nullptr) return;
  if (!p.peer) p.peer.emplace(Peer::Options{.region_bytes = 4096});
  p.to_peer.emplace(p.device, p.options());
  p.to_peer->connect(p.peer->address());
  p.peer->connect(p.to_peer->address());
  ASSERT_EQ(post(p.to_peer->qp(), IBV_WR_RDMA_WRITE, {p.bytes(0, 4096)}, p.peer->target(0)), 0);
  expect_success(p.cq.get(), 1);
  ASSERT_EQ(p.peer->post(IBV_WR_RDMA_WRITE, 0, 4096, p.target()), 0);
  EXPECT_EQ(p.peer->poll_sent().status, IBV_WC_SUCCESS);
  EXPECT_EQ(find_wrong_byte(p.region->bytes(kBytes / 2, 4096), 1), std::nullopt) << "wrong bytes";
}

// Between the memories of two GPUs and of the host.
void transfer_gpu_memory(Program& p) {
  if (std::getenv("SOFTVERBS_GPU_COPY") == nullptr) return;
  const PlacedRegion near(p.device.pd.get(), {.kind = MemoryKind::kLegacy, .gpu = 0}, 4096);
  const PlacedRegion far(p.device.pd.get(), {.kind = MemoryKind::kExportable, .gpu = 1}, 4096);
  ASSERT_EQ(post(p.a->qp(), IBV_WR_RDMA_WRITE, {p.bytes(0, 4096)}, near.target()), 0);
  expect_success(p.cq.get(), 1);
  ASSERT_EQ(post(p.a->qp(), IBV_WR_RDMA_WRITE, {near.sge()}, far.target()), 0);
  ASSERT_EQ(post(p.a->qp(), IBV_WR_RDMA_READ, {p.bytes(4096, 4096)}, far.target()), 0);
  expect_success(p.cq.get(), 2);
  EXPECT_EQ(find_wrong_byte(p.region->bytes(4096, 4096), 1), std::nullopt) << "wrong bytes";
}

// A forked child opens the device anew. Only a process without threads may fork here.
void use_in_child(Program&) {
  if (std::string_view(std::getenv("SOFTVERBS_ENGINE")) != "inline") return;
  const ChildResult result = run_in_child({}, [] {
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        return write_in_child(open_device());
      } catch (const std::runtime_error& refused) {
        std::fprintf(stderr, "%s\n", refused.what());
      }
    }
    return 1;
  });
  EXPECT_EQ(result.status, 0) << result.stderr_text;
}

// A device that is closed resets the QPs that the program has left, whose memory is lost.
void close_with_qp(Program&) {
  Device device = open_device();
  Cq cq = create_cq(device);
  ibv_qp_init_attr attributes{};
  attributes.send_cq = attributes.recv_cq = cq.get();
  attributes.cap = {1, 1, 1, 1, 0};
  attributes.qp_type = IBV_QPT_RC;
  static_cast<void>(made(verbs().create_qp(device.pd.get(), &attributes), "ibv_create_qp"));
  static_cast<void>(cq.release());
  static_cast<void>(device.pd.release());
  EXPECT_EQ(verbs().close_device(device.context.release()), 0);
}

// QPs are destroyed with receives that are posted.
void destroy(Program& p) {
  ASSERT_EQ(post_srq_recv(p.srq.get(), {p.bytes(0, 64)}), 0);
  p.to_peer.reset();
  p.peer.reset();
  for (std::optional<Endpoint>* endpoint : {&p.datagram, &p.uc, &p.extended, &p.b, &p.a}) endpoint->reset();
  p.ah.reset();
  p.extended_srq.reset();
  p.srq.reset();
  p.extended_cq.reset();
  p.cq.reset();
  p.channel.reset();
  p.dmabuf.reset();
  p.region.reset();
}

struct Step {
  void (*take)(Program&);
  std::vector<std::string> verbs;  // that may find no memory
};

const std::vector<Step>& steps() {
  static const std::vector<Step> all{
      {[](Program& p) { p.device = open_device(); }, {"ibv_get_device_list", "ibv_open_device", "ibv_alloc_pd"}},
      {register_memory, {"ibv_reg_mr"}},
      {register_dmabuf, {"ibv_reg_dmabuf_mr"}},
      {[](Program& p) {
         p.channel.reset(made(verbs().create_comp_channel(p.device.context.get()), "ibv_create_comp_channel"));
       },
       {"ibv_create_comp_channel"}},
      {[](Program& p) { p.cq = create_cq(p.device, 64, p.channel.get()); }, {"ibv_create_cq"}},
      {make_extended_cq, {"ibv_create_cq_ex"}},
      {[](Program& p) {
         if (const int error = verbs().resize_cq(p.cq.get(), 2000); error != 0) {
           errno = error;
           made<void>(nullptr, "ibv_resize_cq");
         }
       },
       {"ibv_resize_cq"}},
      {[](Program& p) { p.srq = create_srq(p.device.pd.get()); }, {"ibv_create_srq"}},
      {make_extended_srq, {"ibv_create_srq_ex"}},
      {make_address_handle, {"ibv_create_ah"}},
      {make_reliable_qps, {"ibv_create_qp"}},
      {make_extended_qp, {"ibv_create_qp_ex"}},
      {[](Program& p) { p.uc.emplace(p.device, p.options(IBV_QPT_UC)); }, {"ibv_create_qp"}},
      {[](Program& p) { p.datagram.emplace(p.device, p.options(IBV_QPT_UD)); }, {"ibv_create_qp"}},
      {connect_all, {}},
      {query, {}},
      {transfer, {}},
      {transfer_by_extended_calls, {}},
      {transfer_unreliably, {}},
      {answer_datagram, {"ibv_create_ah_from_wc"}},
      {transfer_unreliably, {}},
      {wait_for_events, {}},
      {fail_and_reset, {}},
      {transfer, {}},
      {transfer_to_peer, {"ibv_create_qp"}},
      {transfer_gpu_memory, {"ibv_reg_dmabuf_mr"}},
      {transfer_gpu_memory, {"ibv_reg_dmabuf_mr"}},
      {use_in_child, {}},
      {close_with_qp, {"ibv_get_device_list", "ibv_open_device", "ibv_alloc_pd", "ibv_create_cq", "ibv_create_qp"}},
      {destroy, {}},
  };
  return all;
}

// Whether `what` says that one of these verbs has found no memory.
bool is_documented(const Step& step, const std::string& what) {
  for (const std::string& verb : step.verbs) {
    if (what == verb + ": " + std::strerror(ENOMEM)) return true;
  }
  return false;
}

// `begin` is called before the step `first`; nullptr: before all of them.
void run(void (*first)(Program&), const std::function<void()>& begin) {
  Program program;
  bool has_begun = false;
  for (const Step& step : steps()) {
    SCOPED_TRACE("step " + std::to_string(&step - steps().data()));
    if (!has_begun && (first == nullptr || step.take == first)) {
      has_begun = true;
      begin();
    }
    try {
      step.take(program);
      continue;
    } catch (const std::runtime_error& refused) {
      ASSERT_PRED2(is_documented, step, refused.what()) << refused.what();
      ASSERT_TRUE(fault::failing_system_call().has_failed()) << refused.what();
    }
    step.take(program);  // memory is there again
  }
}

struct Variant {
  const char* name;
  Variables variables;
  void (*first)(Program&) = nullptr;  // the step from which on allocations fail
  long stride = 1;                    // one of so many allocations
};

void PrintTo(const Variant& variant, std::ostream* out) {
  *out << testing::PrintToString(variant.variables);
}

class NoMemory : public testing::TestWithParam<Variant> {};

// The end of the process is part of it: whether a call has failed is known behind it.
TEST_P(NoMemory, EachAllocationFails_VerbsReturnTheirErrors) {
  FailNth& fail = fault::failing_system_call();
  verbs();  // loads the library
  fault::watch_library(std::getenv("VERBS_TEST_LIBRARY"));
  long failures = 0;
  for (const char* const call : {"malloc", "calloc", "aligned_alloc"}) {
    for (long nth = 1;; nth += GetParam().stride, ++failures) {
      SCOPED_TRACE(std::string(call) + " number " + std::to_string(nth));
      fail.arm(nullptr, 1, 0);
      check_in_child(GetParam().variables, [&] {
        run(GetParam().first, [&] { fail.arm(call, nth, ENOMEM); });
        if (fail.has_failed()) run(nullptr, [] {});
      });
      if (!fail.has_failed()) break;
    }
  }
  std::printf("%ld allocations failed, each in a process of its own\n", failures);
  EXPECT_GT(failures, 0);
  fail.disarm();
  fault::watch_nothing();
}

// Each with paths of the library that the others do not take.
const Variant kVariants[] = {
    {"Faults",
     {{"SOFTVERBS_ENGINE", "inline"},
      {"SOFTVERBS_PCI", "0000:3b:00.0,0000:3b:00.1"},
      {"SOFTVERBS_GID_TABLE", "renumbered"},
      {"SOFTVERBS_FAULTS",
       "rnr op=send; link-down device=1 after=1 op=read for=1ms; link-down device=1 at=1ms "
       "for=1ms; unreachable device=1 peer=1 after=1 op=write for=2ms; fail verb=query_gid nth=100000"}}},
    {"Thread", {{"SOFTVERBS_ENGINE", "thread"}, {"SOFTVERBS_LINK_GBPS", "100"}}, connect_all},
    {"OutOfOrder", {{"SOFTVERBS_ENGINE", "inline"}, {"SOFTVERBS_ORDERING", "adaptive-routing"}}, make_reliable_qps},
    {"LateWrites", {{"SOFTVERBS_ENGINE", "thread"}, {"SOFTVERBS_LATE_HOST_MS", "1"}}, connect_all},
    {"Gpu", {{"SOFTVERBS_ENGINE", "thread"}, {"SOFTVERBS_GPU_COPY", "direct"}}, transfer_gpu_memory},
    {"Processes", {{"SOFTVERBS_ENGINE", "thread"}, {"SOFTVERBS_CROSS_MEMORY", "forbidden"}}, transfer_to_peer},
    // The text has hundreds of allocations in one function.
    {"Statistics", {{"SOFTVERBS_ENGINE", "inline"}, {"SOFTVERBS_STATS", "/dev/null"}}, destroy, 16},
};
INSTANTIATE_TEST_SUITE_P(Settings, NoMemory, testing::ValuesIn(kVariants),
                         [](const auto& variant) { return std::string(variant.param.name); });

}  // namespace
}  // namespace verbatim::test
