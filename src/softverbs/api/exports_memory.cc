// The C API: protection domains and memory regions. Address handles are refused: reliable connections do not need them.
#include <infiniband/verbs.h>

#include <atomic>
#include <cerrno>
#include <new>

#include "softverbs/api/exports.h"
#include "softverbs/engine/call.h"
#include "softverbs/engine/datagrams.h"
#include "softverbs/engine/memory_region.h"
#include "softverbs/engine/process.h"

#undef ibv_reg_mr
#undef ibv_reg_mr_iova

namespace verbatim::softverbs {
namespace {

std::atomic<std::uint32_t> g_pds{0};
std::atomic<std::uint32_t> g_last_pd{0};

template <typename T>
T* not_supported() {
  errno = EOPNOTSUPP;
  return nullptr;
}

ibv_mr* reg_mr(ibv_pd* pd, void* address, std::size_t length, std::uint64_t iova, unsigned access) {
  return call_and_return_pointer(
      [&] { return register_memory(context_of(pd->context), pd, address, length, iova, access); });
}

}  // namespace

ibv_mr* reg_dmabuf_mr(ibv_pd* pd, std::uint64_t offset, std::size_t length, std::uint64_t iova, int fd, int access,
                      bool data_direct) {
  if (begin_call(Verb::kMlx5dvRegDmabufMr, pd->context) != 0) return nullptr;
  return call_and_return_pointer([&] {
    return register_dmabuf(context_of(pd->context), pd, offset, length, iova, fd, static_cast<unsigned>(access),
                           data_direct);
  });
}

}  // namespace verbatim::softverbs

using namespace verbatim::softverbs;

extern "C" {

SOFTVERBS_EXPORT ibv_pd* ibv_alloc_pd(ibv_context* context) {
  if (begin_call(Verb::kAllocPd, context) != 0) return nullptr;
  if (g_pds.fetch_add(1) >= context_of(context).process->settings().max_pd) {
    g_pds.fetch_sub(1);
    errno = ENOMEM;
    return nullptr;
  }
  Pd* pd = new (std::nothrow) Pd;
  if (pd == nullptr) {
    g_pds.fetch_sub(1);
    errno = ENOMEM;
    return nullptr;
  }
  pd->context = context;
  pd->handle = g_last_pd.fetch_add(1) + 1;
  context_of(context).process->objects(ObjectKind::kPd).count_created();
  return pd;
}

SOFTVERBS_EXPORT int ibv_dealloc_pd(ibv_pd* pd) {
  if (const int error = begin_call(Verb::kDeallocPd, pd->context); error != 0) return error;
  if (static_cast<Pd*>(pd)->users.load(std::memory_order_acquire) != 0) return EBUSY;
  g_pds.fetch_sub(1);
  context_of(pd->context).process->objects(ObjectKind::kPd).count_destroyed();
  delete static_cast<Pd*>(pd);
  return 0;
}

SOFTVERBS_EXPORT ibv_mr* ibv_reg_mr(ibv_pd* pd, void* address, std::size_t length, int access) {
  if (begin_call(Verb::kRegMr, pd->context) != 0) return nullptr;
  return reg_mr(pd, address, length, reinterpret_cast<std::uintptr_t>(address), static_cast<unsigned>(access));
}

SOFTVERBS_EXPORT ibv_mr* ibv_reg_mr_iova(ibv_pd* pd, void* address, std::size_t length, std::uint64_t iova,
                                         int access) {
  if (begin_call(Verb::kRegMrIova, pd->context) != 0) return nullptr;
  return reg_mr(pd, address, length, iova, static_cast<unsigned>(access));
}

SOFTVERBS_EXPORT ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* address, std::size_t length, std::uint64_t iova,
                                          unsigned access) {
  if (begin_call(Verb::kRegMrIova2, pd->context) != 0) return nullptr;
  return reg_mr(pd, address, length, iova, access);
}

SOFTVERBS_EXPORT ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, std::uint64_t offset, std::size_t length, std::uint64_t iova,
                                           int fd, int access) {
  if (begin_call(Verb::kRegDmabufMr, pd->context) != 0) return nullptr;
  return call_and_return_pointer([&] {
    return register_dmabuf(context_of(pd->context), pd, offset, length, iova, fd, static_cast<unsigned>(access), false);
  });
}

SOFTVERBS_EXPORT int ibv_rereg_mr(ibv_mr*, int, ibv_pd*, void*, std::size_t, int) {
  count(Verb::kReregMr);
  errno = EOPNOTSUPP;
  return IBV_REREG_MR_ERR_INPUT;
}

SOFTVERBS_EXPORT int ibv_dereg_mr(ibv_mr* mr) {
  if (const int error = begin_call(Verb::kDeregMr, mr->context); error != 0) return error;
  deregister_memory(*static_cast<Mr*>(mr));
  return 0;
}

SOFTVERBS_EXPORT ibv_pd* ibv_import_pd(ibv_context*, std::uint32_t) {
  return not_supported<ibv_pd>();
}
SOFTVERBS_EXPORT void ibv_unimport_pd(ibv_pd*) {}
SOFTVERBS_EXPORT ibv_mr* ibv_import_mr(ibv_pd*, std::uint32_t) {
  return not_supported<ibv_mr>();
}
SOFTVERBS_EXPORT void ibv_unimport_mr(ibv_mr*) {}
SOFTVERBS_EXPORT ibv_dm* ibv_import_dm(ibv_context*, std::uint32_t) {
  return not_supported<ibv_dm>();
}
SOFTVERBS_EXPORT void ibv_unimport_dm(ibv_dm*) {}

SOFTVERBS_EXPORT ibv_ah* ibv_create_ah(ibv_pd* pd, ibv_ah_attr* path) {
  if (begin_call(Verb::kCreateAh, pd->context) != 0) return nullptr;
  return call_and_return_pointer([&] { return create_ah(context_of(pd->context), pd, *path); });
}

SOFTVERBS_EXPORT int ibv_destroy_ah(ibv_ah* ah) {
  if (const int error = begin_call(Verb::kDestroyAh, ah->context); error != 0) return error;
  destroy_ah(*static_cast<Ah*>(ah));
  return 0;
}

SOFTVERBS_EXPORT int ibv_init_ah_from_wc(ibv_context* context, std::uint8_t port, ibv_wc* completion, ibv_grh* grh,
                                         ibv_ah_attr* path) {
  const int error = init_ah_from_wc(context_of(context), port, *completion, grh, *path);
  if (error == 0) return 0;
  errno = error;
  return -1;
}

SOFTVERBS_EXPORT ibv_ah* ibv_create_ah_from_wc(ibv_pd* pd, ibv_wc* completion, ibv_grh* grh, std::uint8_t port) {
  ibv_ah_attr path;
  if (ibv_init_ah_from_wc(pd->context, port, completion, grh, &path) != 0) return nullptr;
  return ibv_create_ah(pd, &path);
}
SOFTVERBS_EXPORT int ibv_resolve_eth_l2_from_gid(ibv_context*, ibv_ah_attr*, std::uint8_t*, std::uint16_t*) {
  return EOPNOTSUPP;
}

// A forked child does not share its parent's registrations in any case.
SOFTVERBS_EXPORT int ibv_dontfork_range(void*, std::size_t) {
  return 0;
}
SOFTVERBS_EXPORT int ibv_dofork_range(void*, std::size_t) {
  return 0;
}

}  // extern "C"
