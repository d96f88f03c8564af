// libibverbs, opened at run time: on a host without rdma-core the plugin loads and logs a warning, and
// VERBATIM_VERBS_LIBRARY can select another library. The verbs of the data path (ibv_post_send, ibv_post_recv,
// ibv_poll_cq, ibv_req_notify_cq) are not in the table: they are inline functions in rdma-core's header, which call
// through the context.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"

namespace verbatim {

// The verbs and their symbol versions in rdma-core's libibverbs. An optional one is nullptr if the library lacks it.
#define VERBATIM_VERBS(REQUIRED, OPTIONAL)  \
  REQUIRED(get_device_list, "IBVERBS_1.1")  \
  REQUIRED(free_device_list, "IBVERBS_1.1") \
  REQUIRED(get_device_name, "IBVERBS_1.1")  \
  REQUIRED(open_device, "IBVERBS_1.1")      \
  REQUIRED(close_device, "IBVERBS_1.1")     \
  REQUIRED(fork_init, "IBVERBS_1.1")        \
  REQUIRED(query_device, "IBVERBS_1.1")     \
  REQUIRED(query_port, "IBVERBS_1.1")       \
  REQUIRED(query_gid, "IBVERBS_1.1")        \
  REQUIRED(query_pkey, "IBVERBS_1.1")       \
  REQUIRED(alloc_pd, "IBVERBS_1.1")         \
  REQUIRED(dealloc_pd, "IBVERBS_1.1")       \
  REQUIRED(reg_mr, "IBVERBS_1.1")           \
  OPTIONAL(reg_mr_iova2, "IBVERBS_1.8")     \
  OPTIONAL(reg_dmabuf_mr, "IBVERBS_1.12")   \
  REQUIRED(dereg_mr, "IBVERBS_1.1")         \
  REQUIRED(create_cq, "IBVERBS_1.1")        \
  REQUIRED(destroy_cq, "IBVERBS_1.1")       \
  REQUIRED(create_qp, "IBVERBS_1.1")        \
  REQUIRED(modify_qp, "IBVERBS_1.1")        \
  REQUIRED(query_qp, "IBVERBS_1.1")         \
  REQUIRED(destroy_qp, "IBVERBS_1.1")       \
  OPTIONAL(query_ece, "IBVERBS_1.10")       \
  OPTIONAL(set_ece, "IBVERBS_1.10")         \
  REQUIRED(get_async_event, "IBVERBS_1.1")  \
  REQUIRED(ack_async_event, "IBVERBS_1.1")  \
  REQUIRED(wc_status_str, "IBVERBS_1.1")    \
  REQUIRED(event_type_str, "IBVERBS_1.1")

// Each function pointer is named like its verb without "ibv_". Immutable after load; any thread may call it.
struct Verbs {
#define VERBATIM_VERB(name, version) \
  decltype(&ibv_##name) name = nullptr;  // NOLINT(bugprone-macro-parentheses): a declaration
  VERBATIM_VERBS(VERBATIM_VERB, VERBATIM_VERB)
#undef VERBATIM_VERB
  decltype(&_ibv_query_gid_ex) query_gid_ex = nullptr;  // optional

  // The port's attributes in the current layout: by the driver's extended query if the context has one, else by
  // query_port, which fills an older layout.
  Result<ibv_port_attr> port_attributes(ibv_context* context, std::uint8_t port_num) const;

  // Opens `path` when it is not empty, else libibverbs.so.1, then libibverbs.so, and fills the table. The library is
  // never closed, because drivers start threads and register fork handlers. A failure is logged as one warning.
  static Result<std::unique_ptr<const Verbs>> load(const std::string& path);
};

}  // namespace verbatim
