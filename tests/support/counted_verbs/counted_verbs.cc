#include "counted_verbs.h"

#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#undef ibv_reg_mr
#undef ibv_query_port

extern "C" __attribute__((visibility("default"))) verbatim::test::VerbsCounters verbatim_verbs_counters;
verbatim::test::VerbsCounters verbatim_verbs_counters;

namespace verbatim::test {
namespace {

// The function of this name in softverbs, or in another libibverbs.so.1 that the loader finds instead. It is the next
// library in search order because this library is linked with it.
template <typename Function>
Function next(const char* symbol, const char* version) {
  return reinterpret_cast<Function>(dlvsym(RTLD_NEXT, symbol, version));
}

void report(const char* what) {
  const int fd = verbatim_verbs_counters.report_fd.load();
  if (fd < 0) return;
  const std::string line = std::string(what) + "\n";
  static_cast<void>(!::write(fd, line.data(), line.size()));
}

// Functions of rdma-core call each other by name, so these inner calls arrive here too. Only the outermost call counts.
// In the static TLS block: the ThreadSanitizer of clang 14 misreads the size of one dynamic block in 256 and then ends
// the process ("failed to allocate").
[[gnu::tls_model("initial-exec")]] thread_local int depth = 0;

template <typename Function>
auto call_next(const Function& function) {
  ++depth;
  const auto returned = function();
  --depth;
  return returned;
}

// The errno with which this call must fail; 0 when it must not fail.
int injected_error(const char* verb) {
  if (depth != 0) return 0;
  if (auto* const before = verbatim_verbs_counters.before.load(); before != nullptr) before(verb);
  return verbatim_verbs_counters.fail.next_error(verb);
}

template <typename Function>
int call_unless_failed(const char* verb, const Function& function) {
  const int error = injected_error(verb);
  return error != 0 ? error : call_next(function);
}

template <typename Function>
auto count_create(const char* verb, VerbsObject kind, const Function& create) {
  if (const int error = injected_error(verb); error != 0) {
    errno = error;
    return decltype(create()){nullptr};
  }
  auto* const object = call_next(create);
  if (object != nullptr && depth == 0) {
    ++verbatim_verbs_counters.alive[static_cast<std::size_t>(kind)];
    ++verbatim_verbs_counters.made[static_cast<std::size_t>(kind)];
  }
  return object;
}

ibv_mr* count_bytes(ibv_mr* region, std::size_t bytes) {
  if (region != nullptr && depth == 0) verbatim_verbs_counters.registered_bytes += static_cast<long>(bytes);
  return region;
}

template <typename Function>
int count_destroy(const char* verb, VerbsObject kind, const Function& destroy) {
  const int returned = call_unless_failed(verb, destroy);
  if (depth > 0) return returned;
  if (returned == 0) --verbatim_verbs_counters.alive[static_cast<std::size_t>(kind)];
  report(kVerbsObjectNames[static_cast<std::size_t>(kind)]);
  return returned;
}

}  // namespace
}  // namespace verbatim::test

using verbatim::test::call_unless_failed;
using verbatim::test::count_bytes;
using verbatim::test::count_create;
using verbatim::test::count_destroy;
using verbatim::test::injected_error;
using verbatim::test::next;
using verbatim::test::VerbsObject;

extern "C" {

// Resolved when the library is loaded. A plugin that is being unloaded holds the loader's lock while it waits for calls
// of other threads, so a dlvsym in such a call would block.
#define NEXT(name, version) const auto real_##name = next<decltype(&name)>(#name, version)
NEXT(ibv_open_device, "IBVERBS_1.1");
NEXT(ibv_close_device, "IBVERBS_1.1");
NEXT(ibv_alloc_pd, "IBVERBS_1.1");
NEXT(ibv_dealloc_pd, "IBVERBS_1.1");
NEXT(ibv_reg_mr, "IBVERBS_1.1");
NEXT(ibv_reg_mr_iova2, "IBVERBS_1.8");
NEXT(ibv_reg_dmabuf_mr, "IBVERBS_1.12");
NEXT(ibv_dereg_mr, "IBVERBS_1.1");
NEXT(ibv_create_cq, "IBVERBS_1.1");
NEXT(ibv_destroy_cq, "IBVERBS_1.1");
NEXT(ibv_create_qp, "IBVERBS_1.1");
NEXT(ibv_modify_qp, "IBVERBS_1.1");
NEXT(ibv_destroy_qp, "IBVERBS_1.1");
NEXT(ibv_create_comp_channel, "IBVERBS_1.0");
NEXT(ibv_destroy_comp_channel, "IBVERBS_1.0");
NEXT(ibv_get_device_list, "IBVERBS_1.1");
NEXT(ibv_fork_init, "IBVERBS_1.1");
NEXT(ibv_query_device, "IBVERBS_1.1");
NEXT(ibv_query_gid, "IBVERBS_1.1");
NEXT(_ibv_query_gid_ex, "IBVERBS_1.11");
NEXT(ibv_query_pkey, "IBVERBS_1.1");
NEXT(ibv_query_qp, "IBVERBS_1.1");
NEXT(ibv_query_ece, "IBVERBS_1.10");
NEXT(ibv_set_ece, "IBVERBS_1.10");
NEXT(ibv_get_async_event, "IBVERBS_1.1");

#define COUNTED __attribute__((visibility("default")))

// The verbs of the data path and query_port are function pointers of the context. All contexts of softverbs have the
// same functions, so one copy of the originals is enough.
static ibv_context_ops real_ops;
static decltype(verbs_context::query_port) real_query_port;

static int post_send(ibv_qp* qp, ibv_send_wr* requests, ibv_send_wr** bad) {
  const int error = injected_error("ibv_post_send");
  if (error == 0) return real_ops.post_send(qp, requests, bad);
  *bad = requests;
  return error;
}
static int post_recv(ibv_qp* qp, ibv_recv_wr* requests, ibv_recv_wr** bad) {
  const int error = injected_error("ibv_post_recv");
  if (error == 0) return real_ops.post_recv(qp, requests, bad);
  *bad = requests;
  return error;
}
static int poll_cq(ibv_cq* cq, int max_entries, ibv_wc* completions) {
  const int error = injected_error("ibv_poll_cq");
  return error == 0 ? real_ops.poll_cq(cq, max_entries, completions) : -error;
}
static int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attributes, size_t bytes) {
  return call_unless_failed("ibv_query_port", [&] { return real_query_port(context, port, attributes, bytes); });
}

static void intercept(ibv_context* context) {
  if (context->ops.post_send != post_send) real_ops = context->ops;
  context->ops.post_send = post_send;
  context->ops.post_recv = post_recv;
  context->ops.poll_cq = poll_cq;
  auto* const extended = verbs_get_ctx_op(context, query_port);
  if (extended == nullptr) return;
  if (extended->query_port != query_port) real_query_port = extended->query_port;
  extended->query_port = query_port;
}

COUNTED ibv_context* ibv_open_device(ibv_device* device) {
  ibv_context* const context =
      count_create("ibv_open_device", VerbsObject::kContext, [&] { return real_ibv_open_device(device); });
  if (context != nullptr) intercept(context);
  return context;
}
COUNTED ibv_device** ibv_get_device_list(int* count) {
  if (const int error = injected_error("ibv_get_device_list"); error != 0) {
    errno = error;
    return nullptr;
  }
  return real_ibv_get_device_list(count);
}
COUNTED int ibv_fork_init() {
  return call_unless_failed("ibv_fork_init", [] { return real_ibv_fork_init(); });
}
COUNTED int ibv_query_device(ibv_context* context, ibv_device_attr* attributes) {
  return call_unless_failed("ibv_query_device", [&] { return real_ibv_query_device(context, attributes); });
}
COUNTED int ibv_query_gid(ibv_context* context, uint8_t port, int index, ibv_gid* gid) {
  return call_unless_failed("ibv_query_gid", [&] { return real_ibv_query_gid(context, port, index, gid); });
}
COUNTED int _ibv_query_gid_ex(ibv_context* context, uint32_t port, uint32_t index, ibv_gid_entry* entry, uint32_t flags,
                              size_t bytes) {
  return call_unless_failed("ibv_query_gid_ex",
                            [&] { return real__ibv_query_gid_ex(context, port, index, entry, flags, bytes); });
}
COUNTED int ibv_query_pkey(ibv_context* context, uint8_t port, int index, __be16* key) {
  return call_unless_failed("ibv_query_pkey", [&] { return real_ibv_query_pkey(context, port, index, key); });
}
COUNTED int ibv_query_qp(ibv_qp* qp, ibv_qp_attr* attributes, int mask, ibv_qp_init_attr* init_attributes) {
  return call_unless_failed("ibv_query_qp", [&] { return real_ibv_query_qp(qp, attributes, mask, init_attributes); });
}
COUNTED int ibv_query_ece(ibv_qp* qp, ibv_ece* ece) {
  return call_unless_failed("ibv_query_ece", [&] { return real_ibv_query_ece(qp, ece); });
}
COUNTED int ibv_set_ece(ibv_qp* qp, ibv_ece* ece) {
  return call_unless_failed("ibv_set_ece", [&] { return real_ibv_set_ece(qp, ece); });
}
COUNTED int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  if (const int error = injected_error("ibv_get_async_event"); error != 0) {
    errno = error;
    return -1;
  }
  return real_ibv_get_async_event(context, event);
}
COUNTED int ibv_close_device(ibv_context* context) {
  return count_destroy("ibv_close_device", VerbsObject::kContext, [&] { return real_ibv_close_device(context); });
}
COUNTED ibv_pd* ibv_alloc_pd(ibv_context* context) {
  return count_create("ibv_alloc_pd", VerbsObject::kPd, [&] { return real_ibv_alloc_pd(context); });
}
COUNTED int ibv_dealloc_pd(ibv_pd* pd) {
  return count_destroy("ibv_dealloc_pd", VerbsObject::kPd, [&] { return real_ibv_dealloc_pd(pd); });
}
COUNTED ibv_mr* ibv_reg_mr(ibv_pd* pd, void* address, size_t bytes, int access) {
  return count_bytes(
      count_create("ibv_reg_mr", VerbsObject::kMr, [&] { return real_ibv_reg_mr(pd, address, bytes, access); }), bytes);
}
COUNTED ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* address, size_t bytes, uint64_t iova, unsigned access) {
  return count_bytes(count_create("ibv_reg_mr_iova2", VerbsObject::kMr,
                                  [&] { return real_ibv_reg_mr_iova2(pd, address, bytes, iova, access); }),
                     bytes);
}
COUNTED ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, uint64_t offset, size_t bytes, uint64_t iova, int fd, int access) {
  return count_bytes(count_create("ibv_reg_dmabuf_mr", VerbsObject::kMr,
                                  [&] { return real_ibv_reg_dmabuf_mr(pd, offset, bytes, iova, fd, access); }),
                     bytes);
}
COUNTED int ibv_dereg_mr(ibv_mr* mr) {
  return count_destroy("ibv_dereg_mr", VerbsObject::kMr, [&] { return real_ibv_dereg_mr(mr); });
}
COUNTED ibv_cq* ibv_create_cq(ibv_context* context, int entries, void* own, ibv_comp_channel* channel, int vector) {
  ibv_cq* const cq = count_create("ibv_create_cq", VerbsObject::kCq,
                                  [&] { return real_ibv_create_cq(context, entries, own, channel, vector); });
  if (cq != nullptr) verbatim_verbs_counters.queue_entries += cq->cqe;
  return cq;
}
COUNTED int ibv_destroy_cq(ibv_cq* cq) {
  return count_destroy("ibv_destroy_cq", VerbsObject::kCq, [&] { return real_ibv_destroy_cq(cq); });
}
COUNTED ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* attributes) {
  ibv_qp* const qp =
      count_create("ibv_create_qp", VerbsObject::kQp, [&] { return real_ibv_create_qp(pd, attributes); });
  if (qp != nullptr) {
    verbatim_verbs_counters.queue_entries += attributes->cap.max_send_wr;
    verbatim_verbs_counters.queue_entries += attributes->cap.max_recv_wr;
  }
  return qp;
}
COUNTED int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
  verbatim::test::report("modify");
  if (auto* const modify = verbatim_verbs_counters.modify.load(); modify != nullptr) modify(*attributes, mask);
  return call_unless_failed("ibv_modify_qp", [&] { return real_ibv_modify_qp(qp, attributes, mask); });
}
COUNTED int ibv_destroy_qp(ibv_qp* qp) {
  return count_destroy("ibv_destroy_qp", VerbsObject::kQp, [&] { return real_ibv_destroy_qp(qp); });
}
COUNTED ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  return count_create("ibv_create_comp_channel", VerbsObject::kChannel,
                      [&] { return real_ibv_create_comp_channel(context); });
}
COUNTED int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  return count_destroy("ibv_destroy_comp_channel", VerbsObject::kChannel,
                       [&] { return real_ibv_destroy_comp_channel(channel); });
}

}  // extern "C"
