// libmlx5.so.1 of softverbs: reports that none of the devices is an mlx5 device.
#include <infiniband/mlx5dv.h>

#include <cerrno>

#define SOFTVERBS_EXPORT __attribute__((visibility("default")))

namespace {

template <typename T>
T* not_supported() {
  errno = EOPNOTSUPP;
  return nullptr;
}

}  // namespace

extern "C" {

SOFTVERBS_EXPORT bool mlx5dv_is_supported(ibv_device*) {
  return false;
}
SOFTVERBS_EXPORT ibv_context* mlx5dv_open_device(ibv_device*, mlx5dv_context_attr*) {
  return not_supported<ibv_context>();
}
SOFTVERBS_EXPORT int mlx5dv_query_device(ibv_context*, mlx5dv_context*) {
  return EOPNOTSUPP;
}
SOFTVERBS_EXPORT int _mlx5dv_query_port(ibv_context*, uint32_t, mlx5dv_port*, size_t) {
  return EOPNOTSUPP;
}
SOFTVERBS_EXPORT int mlx5dv_init_obj(mlx5dv_obj*, uint64_t) {
  return EOPNOTSUPP;
}
SOFTVERBS_EXPORT int mlx5dv_set_context_attr(ibv_context*, mlx5dv_set_ctx_attr_type, void*) {
  return EOPNOTSUPP;
}
SOFTVERBS_EXPORT int mlx5dv_get_clock_info(ibv_context*, mlx5dv_clock_info*) {
  return EOPNOTSUPP;
}
SOFTVERBS_EXPORT ibv_cq_ex* mlx5dv_create_cq(ibv_context*, ibv_cq_init_attr_ex*, mlx5dv_cq_init_attr*) {
  return not_supported<ibv_cq_ex>();
}
SOFTVERBS_EXPORT ibv_qp* mlx5dv_create_qp(ibv_context*, ibv_qp_init_attr_ex*, mlx5dv_qp_init_attr*) {
  return not_supported<ibv_qp>();
}
SOFTVERBS_EXPORT mlx5dv_qp_ex* mlx5dv_qp_ex_from_ibv_qp_ex(ibv_qp_ex*) {
  return not_supported<mlx5dv_qp_ex>();
}
SOFTVERBS_EXPORT int mlx5dv_modify_qp_lag_port(ibv_qp*, uint8_t) {
  return EOPNOTSUPP;
}
SOFTVERBS_EXPORT int mlx5dv_query_qp_lag_port(ibv_qp*, uint8_t*, uint8_t*) {
  return EOPNOTSUPP;
}
SOFTVERBS_EXPORT int mlx5dv_modify_qp_udp_sport(ibv_qp*, uint16_t) {
  return EOPNOTSUPP;
}
SOFTVERBS_EXPORT int mlx5dv_modify_qp_sched_elem(ibv_qp*, const mlx5dv_sched_leaf*, const mlx5dv_sched_leaf*) {
  return EOPNOTSUPP;
}
SOFTVERBS_EXPORT mlx5dv_mkey* mlx5dv_create_mkey(mlx5dv_mkey_init_attr*) {
  return not_supported<mlx5dv_mkey>();
}
SOFTVERBS_EXPORT int mlx5dv_destroy_mkey(mlx5dv_mkey*) {
  return EOPNOTSUPP;
}
SOFTVERBS_EXPORT int mlx5dv_crypto_login(ibv_context*, mlx5dv_crypto_login_attr*) {
  return EOPNOTSUPP;
}
SOFTVERBS_EXPORT int mlx5dv_crypto_logout(ibv_context*) {
  return EOPNOTSUPP;
}
SOFTVERBS_EXPORT mlx5dv_dek* mlx5dv_dek_create(ibv_context*, mlx5dv_dek_init_attr*) {
  return not_supported<mlx5dv_dek>();
}
SOFTVERBS_EXPORT int mlx5dv_dek_destroy(mlx5dv_dek*) {
  return EOPNOTSUPP;
}
SOFTVERBS_EXPORT int mlx5dv_devx_general_cmd(ibv_context*, const void*, size_t, void*, size_t) {
  return EOPNOTSUPP;
}

// Functions of rdma-core releases after 44, which our headers do not declare.
SOFTVERBS_EXPORT int mlx5dv_get_data_direct_sysfs_path(ibv_context*, char*, size_t) {
  return EOPNOTSUPP;
}
SOFTVERBS_EXPORT ibv_mr* mlx5dv_reg_dmabuf_mr(ibv_pd*, uint64_t, size_t, uint64_t, int, int, int) {
  return not_supported<ibv_mr>();
}

}  // extern "C"
