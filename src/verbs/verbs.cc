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
// default version; that is not tried first because it could be an older version with another structure layout. Returns
// the first required symbol that is missing, else nullptr.
const char* bind_all(const DynamicLibrary& library, Verbs& verbs) {
  const char* missing = nullptr;
#define VERBATIM_REQUIRED(name, version) \
  if (!library.bind("ibv_" #name, version, verbs.name) && missing == nullptr) missing = "ibv_" #name;
#define VERBATIM_OPTIONAL(name, version) library.bind("ibv_" #name, version, verbs.name);
  VERBATIM_VERBS(VERBATIM_REQUIRED, VERBATIM_OPTIONAL)
#undef VERBATIM_REQUIRED
#undef VERBATIM_OPTIONAL
  library.bind("_ibv_query_gid_ex", "IBVERBS_1.11", verbs.query_gid_ex);
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
