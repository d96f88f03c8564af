//: program softverbs_device_names link=verbs_headers,libdl

// The program that launcher_test.py runs under the launcher. It opens libibverbs.so.1 by this name, prints the names of
// the devices and opens the first one. With an argument it keeps the device open until its input ends. An exit handler
// prints how many files of the namespace still exist.
#include <dlfcn.h>
#include <infiniband/verbs.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#undef ibv_get_device_list

namespace {

void report_segments() {
  const char* const name_space = std::getenv("SOFTVERBS_NAMESPACE");
  int found = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    if (name_space != nullptr && name.find(name_space) != std::string::npos) ++found;
  }
  std::printf("files at exit: %d\n", found);
}

template <typename Function>
Function* find(void* library, const char* name) {
  void* const found = dlvsym(library, name, "IBVERBS_1.1");
  if (found == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(3);
  }
  return reinterpret_cast<Function*>(found);
}

}  // namespace

int main(int argc, char**) {
  std::atexit(report_segments);
  void* const library = dlopen("libibverbs.so.1", RTLD_NOW);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 3;
  }
  int count = 0;
  ibv_device** const list = find<decltype(ibv_get_device_list)>(library, "ibv_get_device_list")(&count);
  if (list == nullptr) return 4;
  for (int i = 0; i < count; ++i) std::printf("%s\n", list[i]->name);
  ibv_context* const context =
      count > 0 ? find<decltype(ibv_open_device)>(library, "ibv_open_device")(list[0]) : nullptr;
  find<decltype(ibv_free_device_list)>(library, "ibv_free_device_list")(list);
  if (count > 0 && context == nullptr) return 5;
  std::puts("open");
  std::fflush(stdout);
  while (argc > 1 && std::getchar() != EOF) {
  }
  return 0;
}
