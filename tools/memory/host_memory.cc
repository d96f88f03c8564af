#include <sys/mman.h>
#include <sys/resource.h>

#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "memory/memory.h"
#include "ranks/failure.h"

namespace verbatim::memory {
namespace {

// A kernel without huge pages, or with a setting that it never gives them, takes the advice and gives small ones.
bool kernel_has_huge_pages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string text;
  return std::getline(file, text) && text.find("[never]") == std::string::npos;
}

class HostMemory final : public Memory {
 public:
  explicit HostMemory(std::optional<Pages> pages) : pages_(pages) {}
  ~HostMemory() override {
    for (const Mapping& mapping : mappings_) ::munmap(mapping.data, mapping.bytes);
  }

  bool is_host() const override { return true; }

  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void upload(std::byte* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void download(void* to, const std::byte* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void finish() override {}

  const char* registered_by(const ranks::LoadedPlugin& /*plugin*/, int /*device*/) const override { return "regMr"; }
  void* register_at(const ranks::LoadedPlugin& plugin, int /*device*/, void* comm, std::byte* data,
                    std::size_t bytes) const override {
    void* mhandle = nullptr;
    ranks::require(plugin->reg_mr(comm, data, bytes, nccl::kPtrHost, &mhandle),
                   "regMr of " + std::to_string(bytes) + " bytes");
    return mhandle;
  }

  std::string describe() const override { return describe_host_memory(pages_); }
  std::size_t in_use() const override {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return static_cast<std::size_t>(usage.ru_maxrss) << 10;
  }

 private:
  struct Mapping {
    void* data;
    std::size_t bytes;
  };

  std::byte* do_allocate(std::size_t bytes) override {
    const std::size_t mapped = bytes == 0 ? 1 : bytes;
    void* const data = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw ranks::Failure("not enough memory for " + std::to_string(bytes) + " bytes");
    mappings_.push_back({data, mapped});
    // Refused by a kernel without huge pages.
    if (pages_) ::madvise(data, mapped, *pages_ == Pages::kHuge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    return static_cast<std::byte*>(data);
  }

  const std::optional<Pages> pages_;
  std::vector<Mapping> mappings_;
};

}  // namespace

const char* pages_name(Pages pages) {
  return pages == Pages::kHuge ? "huge" : "small";
}

std::unique_ptr<Memory> make_host_memory(std::optional<Pages> pages) {
  return std::make_unique<HostMemory>(pages);
}

std::string describe_host_memory(std::optional<Pages> pages) {
  if (!pages) return "host memory";
  if (*pages == Pages::kHuge && !kernel_has_huge_pages())
    return "host memory, small pages (this kernel gives no huge ones)";
  return std::string("host memory, ") + pages_name(*pages) + " pages";
}

}  // namespace verbatim::memory
