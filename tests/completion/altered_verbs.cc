// A verbs library that passes calls on to softverbs and alters them. The variable ALTERED_VERBS selects how:
//   plain-signal  replaces each fetch-and-add by a WRITE of its addend: the signal of a transport that relies on the
//                 order of WRITEs
//   no-atomics    devices report that they have no atomics
#include <dlfcn.h>
#include <infiniband/verbs.h>

#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

namespace {

// The function of softverbs with this name: the next library in the search order, because this one is linked with it.
template <typename Function>
Function next(const char* symbol) {
  return reinterpret_cast<Function>(dlvsym(RTLD_NEXT, symbol, "IBVERBS_1.1"));
}

bool alters(std::string_view what) {
  const char* const setting = std::getenv("ALTERED_VERBS");
  return setting != nullptr && setting == what;
}

int (*g_post_send)(ibv_qp*, ibv_send_wr*, ibv_send_wr**) = nullptr;  // the same for all devices of softverbs

int post_plain_signals(ibv_qp* qp, ibv_send_wr* chain, ibv_send_wr** refused) {
  std::size_t count = 0;
  for (const ibv_send_wr* work = chain; work != nullptr; work = work->next) ++count;
  std::vector<ibv_send_wr> copies(count);
  std::vector<ibv_sge> segments(count);
  std::vector<ibv_send_wr*> originals(count);
  for (std::size_t i = 0; i < count; ++i, chain = chain->next) {
    originals[i] = chain;
    ibv_send_wr& copy = copies[i];
    copy = *chain;
    copy.next = i + 1 < count ? &copies[i + 1] : nullptr;
    if (copy.opcode != IBV_WR_ATOMIC_FETCH_AND_ADD) continue;
    segments[i] = {reinterpret_cast<std::uint64_t>(&chain->wr.atomic.compare_add), sizeof(std::uint64_t), 0};
    copy.opcode = IBV_WR_RDMA_WRITE;
    copy.sg_list = &segments[i];
    copy.num_sge = 1;
    copy.send_flags |= IBV_SEND_INLINE;
    copy.wr.rdma.remote_addr = chain->wr.atomic.remote_addr;
    copy.wr.rdma.rkey = chain->wr.atomic.rkey;
  }
  ibv_send_wr* refused_copy = nullptr;
  const int returned = g_post_send(qp, copies.data(), &refused_copy);
  if (returned != 0 && refused_copy != nullptr)
    *refused = originals[static_cast<std::size_t>(refused_copy - &copies[0])];
  return returned;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) ibv_context* ibv_open_device(ibv_device* device) {
  ibv_context* const context = next<decltype(&ibv_open_device)>("ibv_open_device")(device);
  if (context != nullptr && alters("plain-signal")) {
    g_post_send = context->ops.post_send;
    context->ops.post_send = post_plain_signals;
  }
  return context;
}

__attribute__((visibility("default"))) int ibv_query_device(ibv_context* context, ibv_device_attr* attributes) {
  const int returned = next<decltype(&ibv_query_device)>("ibv_query_device")(context, attributes);
  if (returned == 0 && alters("no-atomics")) attributes->atomic_cap = IBV_ATOMIC_NONE;
  return returned;
}

}  // extern "C"
