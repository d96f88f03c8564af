// Shared libraries for the tests that open libraries. FAKE_VERBS: all required functions of libibverbs without symbol
// versions, and no optional ones. FAKE_MLX5_SUPPORTED: a libmlx5 whose mlx5dv_is_supported returns this value.
extern "C" {
#ifdef FAKE_VERBS
#define FAKE(name) \
  int name() {     \
    return 4711;   \
  }
FAKE(ibv_get_device_list)
FAKE(ibv_free_device_list)
FAKE(ibv_get_device_name)
FAKE(ibv_open_device)
FAKE(ibv_close_device)
FAKE(ibv_fork_init)
FAKE(ibv_query_device)
FAKE(ibv_query_port)
FAKE(ibv_query_gid)
FAKE(ibv_query_pkey)
FAKE(ibv_alloc_pd)
FAKE(ibv_dealloc_pd)
FAKE(ibv_reg_mr)
FAKE(ibv_dereg_mr)
FAKE(ibv_create_cq)
FAKE(ibv_destroy_cq)
FAKE(ibv_create_qp)
FAKE(ibv_modify_qp)
FAKE(ibv_query_qp)
FAKE(ibv_destroy_qp)
FAKE(ibv_get_async_event)
FAKE(ibv_ack_async_event)
FAKE(ibv_wc_status_str)
FAKE(ibv_event_type_str)
#endif

#ifdef FAKE_MLX5_SUPPORTED
bool mlx5dv_is_supported(void*) {
  return FAKE_MLX5_SUPPORTED;
}
int mlx5dv_query_device(void*, void*) {
  return 0;
}
#endif

int verbatim_fake_library() {
  return 1;
}
}
