#include "verbatim-perf/cost/allocations.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>

#include "ranks/failure.h"

namespace verbatim::perf::cost {
namespace {

struct Range {
  const std::string& object;
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};

int find_range(dl_phdr_info* info, std::size_t, void* opaque) {
  Range& range = *static_cast<Range*>(opaque);
  if (info->dlpi_name == nullptr || range.object != info->dlpi_name) return 0;
  range.begin = ~std::uintptr_t{0};
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& part = info->dlpi_phdr[i];
    if (part.p_type != PT_LOAD) continue;
    range.begin = std::min<std::uintptr_t>(range.begin, info->dlpi_addr + part.p_vaddr);
    range.end = std::max<std::uintptr_t>(range.end, info->dlpi_addr + part.p_vaddr + part.p_memsz);
  }
  return 1;
}

}  // namespace

Allocations::Allocations(const std::string& object) {
  const auto watch =
      reinterpret_cast<void (*)(std::uintptr_t, std::uintptr_t)>(::dlsym(RTLD_DEFAULT, "allocations_watch"));
  read_ = reinterpret_cast<std::int64_t (*)()>(::dlsym(RTLD_DEFAULT, "allocations_bytes"));
  if (watch == nullptr || read_ == nullptr)
    throw ranks::Failure("the library that counts allocations is not preloaded");
  Range range{object};
  if (::dl_iterate_phdr(find_range, &range) == 0) throw ranks::Failure(object + " is not loaded");
  watch(range.begin, range.end);
}

std::int64_t Allocations::bytes() const {
  return read_();
}

}  // namespace verbatim::perf::cost
