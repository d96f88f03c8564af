// The verbs library under test. It is opened at run time by the path in VERBS_TEST_LIBRARY, so that the same tests can
// check any libibverbs without linking one.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

namespace verbatim::test {

// name, symbol version that programs built against rdma-core request
#define VERBATIM_TEST_VERBS(X)           \
  X(get_device_list, "IBVERBS_1.1")      \
  X(free_device_list, "IBVERBS_1.1")     \
  X(get_device_name, "IBVERBS_1.1")      \
  X(get_device_guid, "IBVERBS_1.1")      \
  X(get_device_index, "IBVERBS_1.9")     \
  X(open_device, "IBVERBS_1.1")          \
  X(close_device, "IBVERBS_1.1")         \
  X(query_device, "IBVERBS_1.1")         \
  X(query_port, "IBVERBS_1.1")           \
  X(query_gid, "IBVERBS_1.1")            \
  X(query_pkey, "IBVERBS_1.1")           \
  X(get_pkey_index, "IBVERBS_1.5")       \
  X(alloc_pd, "IBVERBS_1.1")             \
  X(dealloc_pd, "IBVERBS_1.1")           \
  X(reg_mr, "IBVERBS_1.1")               \
  X(reg_mr_iova, "IBVERBS_1.7")          \
  X(reg_mr_iova2, "IBVERBS_1.8")         \
  X(reg_dmabuf_mr, "IBVERBS_1.12")       \
  X(dereg_mr, "IBVERBS_1.1")             \
  X(create_comp_channel, "IBVERBS_1.0")  \
  X(destroy_comp_channel, "IBVERBS_1.0") \
  X(create_cq, "IBVERBS_1.1")            \
  X(resize_cq, "IBVERBS_1.1")            \
  X(destroy_cq, "IBVERBS_1.1")           \
  X(get_cq_event, "IBVERBS_1.1")         \
  X(ack_cq_events, "IBVERBS_1.1")        \
  X(create_srq, "IBVERBS_1.1")           \
  X(modify_srq, "IBVERBS_1.1")           \
  X(query_srq, "IBVERBS_1.1")            \
  X(destroy_srq, "IBVERBS_1.1")          \
  X(create_qp, "IBVERBS_1.1")            \
  X(modify_qp, "IBVERBS_1.1")            \
  X(query_qp, "IBVERBS_1.1")             \
  X(destroy_qp, "IBVERBS_1.1")           \
  X(qp_to_qp_ex, "IBVERBS_1.6")          \
  X(create_ah, "IBVERBS_1.1")            \
  X(destroy_ah, "IBVERBS_1.1")           \
  X(init_ah_from_wc, "IBVERBS_1.1")      \
  X(create_ah_from_wc, "IBVERBS_1.1")    \
  X(query_ece, "IBVERBS_1.10")           \
  X(set_ece, "IBVERBS_1.10")             \
  X(get_async_event, "IBVERBS_1.1")      \
  X(ack_async_event, "IBVERBS_1.1")      \
  X(fork_init, "IBVERBS_1.1")            \
  X(wc_status_str, "IBVERBS_1.1")        \
  X(event_type_str, "IBVERBS_1.1")       \
  X(port_state_str, "IBVERBS_1.1")       \
  X(node_type_str, "IBVERBS_1.1")

struct VerbsLibrary {
#define VERBATIM_TEST_MEMBER(name, version) decltype(&ibv_##name) name = nullptr;
  VERBATIM_TEST_VERBS(VERBATIM_TEST_MEMBER)
#undef VERBATIM_TEST_MEMBER
  decltype(&_ibv_query_gid_ex) query_gid_ex = nullptr;
  decltype(&_ibv_query_gid_table) query_gid_table = nullptr;
  // The header of rdma-core 44 does not declare it. nullptr in older libraries.
  int (*query_port_speed)(ibv_context*, std::uint32_t port_num, std::uint64_t* speed) = nullptr;
};

// Opened on first use and never closed. A missing library or symbol ends the program with one line that names it.
const VerbsLibrary& verbs();

// The same as the header's ibv_query_port() without its link-time fallback: calls the extended entry of the context;
// EOPNOTSUPP without one.
int query_port(ibv_context* context, unsigned port_num, ibv_port_attr* attr);

}  // namespace verbatim::test
