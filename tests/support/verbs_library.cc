#include "support/verbs_library.h"

#include <dlfcn.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

namespace verbatim::test {
namespace {

void* symbol(void* library, const char* name, const char* version) {
  void* const address = dlvsym(library, name, version);
  if (address == nullptr) {
    std::fprintf(stderr, "the verbs library under test has no %s@%s: %s\n", name, version, dlerror());
    std::exit(EXIT_FAILURE);
  }
  return address;
}

VerbsLibrary load() {
  const char* const path = std::getenv("VERBS_TEST_LIBRARY");
  if (path == nullptr) {
    std::fprintf(stderr, "VERBS_TEST_LIBRARY does not name the verbs library to test\n");
    std::exit(EXIT_FAILURE);
  }
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "cannot open the verbs library under test: %s\n", dlerror());
    std::exit(EXIT_FAILURE);
  }
  VerbsLibrary verbs;
#define VERBATIM_TEST_RESOLVE(name, version) \
  verbs.name = reinterpret_cast<decltype(verbs.name)>(symbol(library, "ibv_" #name, version));
  VERBATIM_TEST_VERBS(VERBATIM_TEST_RESOLVE)
#undef VERBATIM_TEST_RESOLVE
  verbs.query_gid_ex =
      reinterpret_cast<decltype(verbs.query_gid_ex)>(symbol(library, "_ibv_query_gid_ex", "IBVERBS_1.11"));
  verbs.query_gid_table =
      reinterpret_cast<decltype(verbs.query_gid_table)>(symbol(library, "_ibv_query_gid_table", "IBVERBS_1.11"));
  verbs.query_port_speed =
      reinterpret_cast<decltype(verbs.query_port_speed)>(dlvsym(library, "ibv_query_port_speed", "IBVERBS_1.16"));
  return verbs;
}

}  // namespace

const VerbsLibrary& verbs() {
  static const VerbsLibrary library = load();
  return library;
}

int query_port(ibv_context* context, unsigned port_num, ibv_port_attr* attr) {
  verbs_context* const extended = verbs_get_ctx_op(context, query_port);
  if (extended == nullptr) return EOPNOTSUPP;
  return extended->query_port(context, static_cast<uint8_t>(port_num), attr, sizeof(*attr));
}

}  // namespace verbatim::test
