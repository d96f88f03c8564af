// Symbols that rdma-core's other libraries (drivers, librdmacm) link with. They call them only for a kernel device, and
// softverbs has none. The symbols exist so that these libraries load; every call is refused.
#include <infiniband/verbs.h>

#include <cstring>

#include "softverbs/api/refusals.h"

extern "C" {

SOFTVERBS_REFUSES(__ioctl_final_num_attrs)
SOFTVERBS_REFUSES(execute_ioctl)
SOFTVERBS_REFUSES(ibv_cmd_advise_mr)
SOFTVERBS_REFUSES(ibv_cmd_alloc_dm)
SOFTVERBS_REFUSES(ibv_cmd_alloc_mw)
SOFTVERBS_REFUSES(ibv_cmd_alloc_pd)
SOFTVERBS_REFUSES(ibv_cmd_attach_mcast)
SOFTVERBS_REFUSES(ibv_cmd_close_xrcd)
SOFTVERBS_REFUSES(ibv_cmd_create_ah)
SOFTVERBS_REFUSES(ibv_cmd_create_counters)
SOFTVERBS_REFUSES(ibv_cmd_create_cq)
SOFTVERBS_REFUSES(ibv_cmd_create_cq_ex)
SOFTVERBS_REFUSES(ibv_cmd_create_flow)
SOFTVERBS_REFUSES(ibv_cmd_create_flow_action_esp)
SOFTVERBS_REFUSES(ibv_cmd_create_qp)
SOFTVERBS_REFUSES(ibv_cmd_create_qp_ex)
SOFTVERBS_REFUSES(ibv_cmd_create_qp_ex2)
SOFTVERBS_REFUSES(ibv_cmd_create_rwq_ind_table)
SOFTVERBS_REFUSES(ibv_cmd_create_srq)
SOFTVERBS_REFUSES(ibv_cmd_create_srq_ex)
SOFTVERBS_REFUSES(ibv_cmd_create_wq)
SOFTVERBS_REFUSES(ibv_cmd_dealloc_mw)
SOFTVERBS_REFUSES(ibv_cmd_dealloc_pd)
SOFTVERBS_REFUSES(ibv_cmd_dereg_mr)
SOFTVERBS_REFUSES(ibv_cmd_destroy_ah)
SOFTVERBS_REFUSES(ibv_cmd_destroy_counters)
SOFTVERBS_REFUSES(ibv_cmd_destroy_cq)
SOFTVERBS_REFUSES(ibv_cmd_destroy_flow)
SOFTVERBS_REFUSES(ibv_cmd_destroy_flow_action)
SOFTVERBS_REFUSES(ibv_cmd_destroy_qp)
SOFTVERBS_REFUSES(ibv_cmd_destroy_rwq_ind_table)
SOFTVERBS_REFUSES(ibv_cmd_destroy_srq)
SOFTVERBS_REFUSES(ibv_cmd_destroy_wq)
SOFTVERBS_REFUSES(ibv_cmd_detach_mcast)
SOFTVERBS_REFUSES(ibv_cmd_free_dm)
SOFTVERBS_REFUSES(ibv_cmd_get_context)
SOFTVERBS_REFUSES(ibv_cmd_modify_cq)
SOFTVERBS_REFUSES(ibv_cmd_modify_flow_action_esp)
SOFTVERBS_REFUSES(ibv_cmd_modify_qp)
SOFTVERBS_REFUSES(ibv_cmd_modify_qp_ex)
SOFTVERBS_REFUSES(ibv_cmd_modify_srq)
SOFTVERBS_REFUSES(ibv_cmd_modify_wq)
SOFTVERBS_REFUSES(ibv_cmd_open_qp)
SOFTVERBS_REFUSES(ibv_cmd_open_xrcd)
SOFTVERBS_REFUSES(ibv_cmd_poll_cq)
SOFTVERBS_REFUSES(ibv_cmd_post_recv)
SOFTVERBS_REFUSES(ibv_cmd_post_send)
SOFTVERBS_REFUSES(ibv_cmd_post_srq_recv)
SOFTVERBS_REFUSES(ibv_cmd_query_context)
SOFTVERBS_REFUSES(ibv_cmd_query_device_any)
SOFTVERBS_REFUSES(ibv_cmd_query_mr)
SOFTVERBS_REFUSES(ibv_cmd_query_port)
SOFTVERBS_REFUSES(ibv_cmd_query_qp)
SOFTVERBS_REFUSES(ibv_cmd_query_srq)
SOFTVERBS_REFUSES(ibv_cmd_read_counters)
SOFTVERBS_REFUSES(ibv_cmd_reg_dm_mr)
SOFTVERBS_REFUSES(ibv_cmd_reg_dmabuf_mr)
SOFTVERBS_REFUSES(ibv_cmd_reg_mr)
SOFTVERBS_REFUSES(ibv_cmd_req_notify_cq)
SOFTVERBS_REFUSES(ibv_cmd_rereg_mr)
SOFTVERBS_REFUSES(ibv_cmd_resize_cq)
SOFTVERBS_REFUSES(ibv_read_ibdev_sysfs_file)

// Verbs of rdma-core releases after 44, which our headers do not declare: DMA handles, buffers and completion counters.
SOFTVERBS_REFUSES(_ibv_query_comp_cntr_caps)
SOFTVERBS_REFUSES(ibv_dealloc_dmah)
SOFTVERBS_REFUSES(ibv_destroy_comp_cntr)
SOFTVERBS_REFUSES(ibv_inc_comp_cntr)
SOFTVERBS_REFUSES(ibv_inc_err_comp_cntr)
SOFTVERBS_REFUSES(ibv_qp_attach_comp_cntr)
SOFTVERBS_REFUSES(ibv_read_comp_cntr)
SOFTVERBS_REFUSES(ibv_read_err_comp_cntr)
SOFTVERBS_REFUSES(ibv_set_comp_cntr)
SOFTVERBS_REFUSES(ibv_set_err_comp_cntr)
SOFTVERBS_RETURNS_NULL(ibv_alloc_buf)
SOFTVERBS_RETURNS_NULL(ibv_alloc_dmah)
SOFTVERBS_RETURNS_NULL(ibv_create_comp_cntr)
SOFTVERBS_RETURNS_NULL(ibv_reg_buf_mr)
SOFTVERBS_RETURNS_NULL(ibv_reg_mr_ex)
SOFTVERBS_RETURNS_MINUS_ONE(ibv_dm_export_dmabuf_fd)
SOFTVERBS_RETURNS_MINUS_ONE(ibv_export_buf_dmabuf_fd)
SOFTVERBS_IGNORES(ibv_free_buf)

SOFTVERBS_RETURNS_NULL(_verbs_init_and_alloc_context)
SOFTVERBS_RETURNS_NULL(verbs_open_device)
SOFTVERBS_IGNORES(__verbs_log)
SOFTVERBS_IGNORES(verbs_init_cq)
SOFTVERBS_IGNORES(verbs_set_ops)
SOFTVERBS_IGNORES(verbs_uninit_context)

// Conversions of structures of the kernel's connection manager.
SOFTVERBS_EXPORT void ibv_copy_ah_attr_from_kern(ibv_ah_attr* to, const void*) {
  std::memset(to, 0, sizeof *to);
}
SOFTVERBS_EXPORT void ibv_copy_qp_attr_from_kern(ibv_qp_attr* to, const void*) {
  std::memset(to, 0, sizeof *to);
}
SOFTVERBS_EXPORT void ibv_copy_path_rec_from_kern(void*, const void*) {}
SOFTVERBS_EXPORT void ibv_copy_path_rec_to_kern(void*, const void*) {}

}  // extern "C"
