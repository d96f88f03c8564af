#include "buffer.h"

#include <stdexcept>

namespace gpu_direct {
namespace {

std::size_t guard_of(const Place& place) {
  return place.is_gpu() && place.kind != Kind::kSmall ? kPageBytes : 0;
}

}  // namespace

std::string name_of(const Place& place) {
  if (!place.is_gpu()) return "host memory";
  constexpr const char* kKinds[] = {"allocated", "small", "mapped", "private"};
  constexpr const char* kHows[] = {"by dma-buf", "by dma-buf at an offset", "plainly"};
  return std::string(kKinds[static_cast<std::size_t>(place.kind)]) + " memory of GPU " + std::to_string(place.gpu) +
         " registered " + kHows[static_cast<std::size_t>(place.how)];
}

Buffer::Buffer(const Place& place, std::size_t size, std::size_t offset)
    : place_(place),
      size_(size),
      before_(guard_of(place) + (place.is_gpu() ? offset : 0)),
      shadow_(place.is_gpu() ? before_ + size + guard_of(place) : size, place.is_gpu() ? 0 : offset) {
  if (!place.is_gpu()) return;
  use_gpu(gpu());
  if (place.kind == Kind::kAllocated || place.kind == Kind::kSmall) {
    require(cuda().cuMemAlloc_v2(&start_, shadow_.size()), "cuMemAlloc");
  } else {
    mapped_ = verbatim::test::map_memory(gpu(), shadow_.size(), place.kind != Kind::kPrivate);
    start_ = mapped_.start;
  }
  upload(0, shadow_.size());
}

Buffer::~Buffer() {
  free();
}

void Buffer::free() {
  if (start_ == 0) return;
  use_gpu(gpu());
  if (mapped_.bytes == 0) {
    cuda().cuMemFree_v2(start_);
  } else {
    unmap(mapped_);
  }
  start_ = 0;
}

unsigned char* Buffer::data() {
  return place_.is_gpu() ? reinterpret_cast<unsigned char*>(start_ + before_) : shadow_.data();
}

void Buffer::write(std::size_t at, std::size_t size, std::uint64_t seed) {
  shadow_.write((place_.is_gpu() ? before_ : 0) + at, size, seed);
  if (place_.is_gpu()) upload(before_ + at, size);
}

void Buffer::expect(std::size_t at, std::size_t size, std::uint64_t seed) {
  shadow_.expect((place_.is_gpu() ? before_ : 0) + at, size, seed);
}

::testing::AssertionResult Buffer::intact() {
  if (place_.is_gpu() && !download()) return ::testing::AssertionFailure() << "the memory cannot be read";
  ::testing::AssertionResult result = shadow_.intact();
  if (!result) result << " in " << name_of(place_) << " with " << before_ << " bytes before it";
  return result;
}

void Buffer::upload(std::size_t from, std::size_t bytes) {
  if (!verbatim::test::upload(gpu(), start_ + from, shadow_.data() + from, bytes)) {
    throw std::runtime_error("upload failed");
  }
}

bool Buffer::download() {
  return verbatim::test::download(shadow_.data(), gpu(), start_, shadow_.size());
}

int dmabuf_of(CUdeviceptr address, std::size_t bytes) {
  int fd = -1;
  EXPECT_EQ(verbatim::test::export_dmabuf(address, bytes, fd), CUDA_SUCCESS) << "cuMemGetHandleForAddressRange";
  return fd;
}

}  // namespace gpu_direct
