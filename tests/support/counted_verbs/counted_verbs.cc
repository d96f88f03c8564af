#include "counted_verbs.h"

#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <unistd.h>

#include <string>

#undef ibv_reg_mr

extern "C" __attribute__((visibility("default"))) verbatim::test::VerbsCounters verbatim_verbs_counters;
verbatim::test::VerbsCounters verbatim_verbs_counters;

namespace verbatim::test {
namespace {

// The function of this name in softverbs, or whatever libibverbs.so.1 is found instead: it comes next because we are
// linked with it.
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

// rdma-core's own functions call each other by name, and so come back here: only the call from outside counts.
thread_local int depth = 0;

template <typename Function>
auto call_next(const Function& function) {
  ++depth;
  const auto returned = function();
  --depth;
  return returned;
}

template <typename Function>
auto made(VerbsObject kind, const Function& create) {
  auto* const object = call_next(create);
  if (object != nullptr && depth == 0) {
    ++verbatim_verbs_counters.alive[static_cast<std::size_t>(kind)];
    ++verbatim_verbs_counters.made[static_cast<std::size_t>(kind)];
  }
  return object;
}

template <typename Function>
int gone(VerbsObject kind, const Function& destroy) {
  const int returned = call_next(destroy);
  if (depth > 0) return returned;
  if (returned == 0) --verbatim_verbs_counters.alive[static_cast<std::size_t>(kind)];
  report(kVerbsObjectNames[static_cast<std::size_t>(kind)]);
  return returned;
}

}  // namespace
}  // namespace verbatim::test

using verbatim::test::gone;
using verbatim::test::made;
using verbatim::test::next;
using verbatim::test::VerbsObject;

extern "C" {

// Found while the library is loaded: a plugin that is being unloaded waits for calls of other threads, and holds the
// loader's lock meanwhile.
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

#define COUNTED __attribute__((visibility("default")))

COUNTED ibv_context* ibv_open_device(ibv_device* device) {
  return made(VerbsObject::kContext, [&] { return real_ibv_open_device(device); });
}
COUNTED int ibv_close_device(ibv_context* context) {
  return gone(VerbsObject::kContext, [&] { return real_ibv_close_device(context); });
}
COUNTED ibv_pd* ibv_alloc_pd(ibv_context* context) {
  return made(VerbsObject::kPd, [&] { return real_ibv_alloc_pd(context); });
}
COUNTED int ibv_dealloc_pd(ibv_pd* pd) {
  return gone(VerbsObject::kPd, [&] { return real_ibv_dealloc_pd(pd); });
}
COUNTED ibv_mr* ibv_reg_mr(ibv_pd* pd, void* address, size_t bytes, int access) {
  return made(VerbsObject::kMr, [&] { return real_ibv_reg_mr(pd, address, bytes, access); });
}
COUNTED ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* address, size_t bytes, uint64_t iova, unsigned access) {
  return made(VerbsObject::kMr, [&] { return real_ibv_reg_mr_iova2(pd, address, bytes, iova, access); });
}
COUNTED ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, uint64_t offset, size_t bytes, uint64_t iova, int fd, int access) {
  return made(VerbsObject::kMr, [&] { return real_ibv_reg_dmabuf_mr(pd, offset, bytes, iova, fd, access); });
}
COUNTED int ibv_dereg_mr(ibv_mr* mr) {
  return gone(VerbsObject::kMr, [&] { return real_ibv_dereg_mr(mr); });
}
COUNTED ibv_cq* ibv_create_cq(ibv_context* context, int entries, void* own, ibv_comp_channel* channel, int vector) {
  return made(VerbsObject::kCq, [&] { return real_ibv_create_cq(context, entries, own, channel, vector); });
}
COUNTED int ibv_destroy_cq(ibv_cq* cq) {
  return gone(VerbsObject::kCq, [&] { return real_ibv_destroy_cq(cq); });
}
COUNTED ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* attributes) {
  return made(VerbsObject::kQp, [&] { return real_ibv_create_qp(pd, attributes); });
}
COUNTED int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
  verbatim::test::report("modify");
  if ((mask & IBV_QP_AV) != 0) ++verbatim_verbs_counters.paths[attributes->ah_attr.grh.traffic_class];
  return real_ibv_modify_qp(qp, attributes, mask);
}
COUNTED int ibv_destroy_qp(ibv_qp* qp) {
  return gone(VerbsObject::kQp, [&] { return real_ibv_destroy_qp(qp); });
}
COUNTED ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  return made(VerbsObject::kChannel, [&] { return real_ibv_create_comp_channel(context); });
}
COUNTED int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  return gone(VerbsObject::kChannel, [&] { return real_ibv_destroy_comp_channel(channel); });
}

}  // extern "C"
