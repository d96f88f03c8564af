#include "verbs/verbs.h"

#include <dlfcn.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "base/log.h"
#include "verbs/dynamic_library.h"
#include "verbs/errors.h"

namespace verbatim {
namespace {

// Binds each symbol in the version of rdma-core's libibverbs. If the library has no such version, bind() uses the
// default version; that is not tried first because it could be an older version with another structure layout.
const char* bind_all(const DynamicLibrary& library, Verbs& verbs) {
  const char* missing = nullptr;
  const auto required = [&](const char* symbol, auto& function) {
    if (!library.bind(symbol, "IBVERBS_1.1", function) && missing == nullptr) missing = symbol;
  };
  required("ibv_get_device_list", verbs.get_device_list);
  required("ibv_free_device_list", verbs.free_device_list);
  required("ibv_get_device_name", verbs.get_device_name);
  required("ibv_open_device", verbs.open_device);
  required("ibv_close_device", verbs.close_device);
  required("ibv_fork_init", verbs.fork_init);
  required("ibv_query_device", verbs.query_device);
  required("ibv_query_port", verbs.query_port);
  required("ibv_query_gid", verbs.query_gid);
  required("ibv_query_pkey", verbs.query_pkey);
  required("ibv_alloc_pd", verbs.alloc_pd);
  required("ibv_dealloc_pd", verbs.dealloc_pd);
  required("ibv_reg_mr", verbs.reg_mr);
  required("ibv_dereg_mr", verbs.dereg_mr);
  required("ibv_create_cq", verbs.create_cq);
  required("ibv_destroy_cq", verbs.destroy_cq);
  required("ibv_create_qp", verbs.create_qp);
  required("ibv_modify_qp", verbs.modify_qp);
  required("ibv_query_qp", verbs.query_qp);
  required("ibv_destroy_qp", verbs.destroy_qp);
  required("ibv_get_async_event", verbs.get_async_event);
  required("ibv_ack_async_event", verbs.ack_async_event);
  required("ibv_wc_status_str", verbs.wc_status_str);
  required("ibv_event_type_str", verbs.event_type_str);

  library.bind("_ibv_query_gid_ex", "IBVERBS_1.11", verbs.query_gid_ex);
  library.bind("ibv_reg_mr_iova2", "IBVERBS_1.8", verbs.reg_mr_iova2);
  library.bind("ibv_reg_dmabuf_mr", "IBVERBS_1.12", verbs.reg_dmabuf_mr);
  library.bind("ibv_query_ece", "IBVERBS_1.10", verbs.query_ece);
  library.bind("ibv_set_ece", "IBVERBS_1.10", verbs.set_ece);
  return missing;
}

}  // namespace

Result<ibv_port_attr> Verbs::port_attributes(ibv_context* context, std::uint8_t port_num) const {
  ibv_port_attr attributes = {};
  const auto* extended = verbs_get_ctx_op(context, query_port);
  const int returned = extended != nullptr
                           ? extended->query_port(context, port_num, &attributes, sizeof attributes)
                           : query_port(context, port_num, reinterpret_cast<_compat_ibv_port_attr*>(&attributes));
  if (Status status = check_errno("ibv_query_port", returned); !status) return status.error();
  return attributes;
}

Result<std::unique_ptr<const Verbs>> Verbs::load(const std::string& path) {
  const DynamicLibrary library =
      path.empty() ? DynamicLibrary::open({"libibverbs.so.1", "libibverbs.so"}) : DynamicLibrary::open({path.c_str()});
  if (!library) {
    VERBATIM_WARN("no RDMA: cannot open libibverbs (%s). Next: install rdma-core, or set VERBATIM_VERBS_LIBRARY",
                  library.load_error().c_str());
    return Error{ErrorKind::kUsage, ENOENT, "dlopen"};
  }
  auto table = std::make_unique<Verbs>();
  if (const char* missing = bind_all(library, *table); missing != nullptr) {
    VERBATIM_WARN("no RDMA: %s has no symbol %s. Next: install rdma-core's libibverbs, or set VERBATIM_VERBS_LIBRARY",
                  library.name().c_str(), missing);
    return Error{ErrorKind::kUsage, ENOENT, "dlsym"};
  }
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(table->get_device_list), &info) != 0) {
    VERBATIM_INFO("libibverbs is %s", info.dli_fname);
  }
  return std::unique_ptr<const Verbs>(std::move(table));
}

}  // namespace verbatim
