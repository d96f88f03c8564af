// libibverbs, opened at run time: on a host without rdma-core the plugin loads and logs a warning, and
// VERBATIM_VERBS_LIBRARY can select another library. This table has only the verbs that the library exports. The verbs
// of the data path (ibv_post_send, ibv_post_recv, ibv_poll_cq, ibv_req_notify_cq) are inline functions in rdma-core's
// header, which call through the context.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"

namespace verbatim {

// Each function pointer is named like its verb without "ibv_". Immutable after load; any thread may call it.
struct Verbs {
  // Devices and ports.
  decltype(&ibv_get_device_list) get_device_list = nullptr;
  decltype(&ibv_free_device_list) free_device_list = nullptr;
  decltype(&ibv_get_device_name) get_device_name = nullptr;
  decltype(&ibv_open_device) open_device = nullptr;
  decltype(&ibv_close_device) close_device = nullptr;
  decltype(&ibv_fork_init) fork_init = nullptr;
  decltype(&ibv_query_device) query_device = nullptr;
  decltype(&ibv_query_port) query_port = nullptr;  // fills an older layout: use port_attributes()
  decltype(&ibv_query_gid) query_gid = nullptr;
  decltype(&_ibv_query_gid_ex) query_gid_ex = nullptr;  // optional
  decltype(&ibv_query_pkey) query_pkey = nullptr;

  // Protection domains and memory regions.
  decltype(&ibv_alloc_pd) alloc_pd = nullptr;
  decltype(&ibv_dealloc_pd) dealloc_pd = nullptr;
  decltype(&ibv_reg_mr) reg_mr = nullptr;
  decltype(&ibv_reg_mr_iova2) reg_mr_iova2 = nullptr;    // optional
  decltype(&ibv_reg_dmabuf_mr) reg_dmabuf_mr = nullptr;  // optional
  decltype(&ibv_dereg_mr) dereg_mr = nullptr;

  // Completion queues and queue pairs.
  decltype(&ibv_create_cq) create_cq = nullptr;
  decltype(&ibv_destroy_cq) destroy_cq = nullptr;
  decltype(&ibv_create_qp) create_qp = nullptr;
  decltype(&ibv_modify_qp) modify_qp = nullptr;
  decltype(&ibv_query_qp) query_qp = nullptr;
  decltype(&ibv_destroy_qp) destroy_qp = nullptr;
  decltype(&ibv_query_ece) query_ece = nullptr;  // optional
  decltype(&ibv_set_ece) set_ece = nullptr;      // optional

  // Asynchronous events and names.
  decltype(&ibv_get_async_event) get_async_event = nullptr;
  decltype(&ibv_ack_async_event) ack_async_event = nullptr;
  decltype(&ibv_wc_status_str) wc_status_str = nullptr;
  decltype(&ibv_event_type_str) event_type_str = nullptr;

  // The port's attributes in the current layout: by the driver's extended query if the context has one, else by
  // query_port.
  Result<ibv_port_attr> port_attributes(ibv_context* context, std::uint8_t port_num) const;

  // Opens `path` when it is not empty, else libibverbs.so.1, then libibverbs.so, and fills the table. The library is
  // never closed, because drivers start threads and register fork handlers. A failure is logged as one warning.
  static Result<std::unique_ptr<const Verbs>> load(const std::string& path);
};

}  // namespace verbatim
