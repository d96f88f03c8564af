#include "verbs_names.h"

#include <dlfcn.h>
#include <infiniband/verbs.h>

#include <cstdlib>

namespace conformance {
namespace {

template <typename Function>
Function* find(void* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

}  // namespace

std::vector<std::string> verbs_device_names() {
  std::vector<std::string> names;
  const char* const chosen = std::getenv("VERBATIM_VERBS_LIBRARY");
  // Never closed, because verbs libraries do not support unloading.
  void* const library = dlopen(chosen != nullptr ? chosen : "libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return names;
  auto* const get_list = find<decltype(ibv_get_device_list)>(library, "ibv_get_device_list");
  auto* const free_list = find<decltype(ibv_free_device_list)>(library, "ibv_free_device_list");
  auto* const get_name = find<decltype(ibv_get_device_name)>(library, "ibv_get_device_name");
  if (get_list == nullptr || free_list == nullptr || get_name == nullptr) return names;
  int count = 0;
  ibv_device** const list = get_list(&count);
  for (int i = 0; list != nullptr && i < count; ++i) names.emplace_back(get_name(list[i]));
  if (list != nullptr) free_list(list);
  return names;
}

}  // namespace conformance
