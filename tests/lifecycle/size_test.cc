// Messages with sizes around 2 GiB and 4 GiB, whose bytes are all compared.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <random>

#include "base/unique_fd.h"
#include "conformance.h"
#include "support/available_memory.h"

namespace conformance {
namespace {

constexpr std::size_t kGiB = std::size_t{1} << 30;
constexpr std::size_t kPage = 4096;
// The source buffer maps one window of random bytes repeatedly. The window has a prime number of pages, so that data at
// an address that is wrong by a power of two has the wrong content.
constexpr std::size_t kWindowBytes = 4099 * kPage;
constexpr std::size_t kLargest = 5 * kGiB;
constexpr std::size_t kTailBytes = 1 << 20;  // after each message; must not change
constexpr unsigned char kPoison = 0xa7;

class Mapping {
 public:
  explicit Mapping(std::size_t size)
      : size_(size),
        data_(static_cast<unsigned char*>(
            mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {
    EXPECT_NE(static_cast<void*>(data_), MAP_FAILED);
  }
  ~Mapping() { munmap(data_, size_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  unsigned char* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  unsigned char* data_;
};

// Created once for all versions, because allocating the pages takes longer than sending the data.
class Buffers {
 public:
  static Buffers& get() {
    static Buffers only;
    return only;
  }

  const Mapping source{(kLargest / kWindowBytes + 2) * kWindowBytes};
  const Mapping target{kLargest + kTailBytes};
  std::size_t shift = 1;  // position of the next message in the window

 private:
  Buffers() {
    const verbatim::UniqueFd window(memfd_create("window", MFD_CLOEXEC));
    EXPECT_EQ(ftruncate(window.get(), kWindowBytes), 0);
    for (std::size_t at = 0; at < source.size(); at += kWindowBytes) {
      EXPECT_NE(mmap(source.data() + at, kWindowBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, window.get(), 0),
                MAP_FAILED);
    }
    std::mt19937_64 random(1);
    for (std::size_t at = 0; at < kWindowBytes; at += sizeof(std::uint64_t)) {
      const std::uint64_t word = random();
      std::memcpy(source.data() + at, &word, sizeof word);
    }
    madvise(target.data(), target.size(), MADV_HUGEPAGE);
    // Pages are allocated here: on a busy machine that takes longer than a transfer without progress may take.
    for (std::size_t at = 0; at < target.size(); at += kPage) target.data()[at] = kPoison;
  }
};

class Sizes : public Conformance {
 protected:
  // Sends each size once, each time from another position in the window, so that data of an earlier message is wrong.
  void send_all(const std::vector<std::size_t>& sizes) {
    static const bool enough = verbatim::test::available_memory() > kLargest + kGiB;
    if (!enough) GTEST_SKIP() << "less than 6 GiB of memory are available";
    Buffers& buffers = Buffers::get();
    const Mapping& source = buffers.source;
    const Mapping& target = buffers.target;
    std::size_t& shift = buffers.shift;
    TestConnection link = this->link();
    ASSERT_TRUE(link);
    const Registration source_mr(*this, link.send_comm, source.data(), source.size());
    const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
    for (const std::size_t size : sizes) {
      SCOPED_TRACE(size);
      shift += 3 * kPage + 1;
      std::memset(target.data() + size, kPoison, kTailBytes);
      Traffic traffic(net());
      const Operation& recv = traffic.recv(link.recv_comm, {{target.data(), size, 7, target_mr.get()}});
      const Operation& send = traffic.send(link.send_comm, {source.data() + shift, size, 7, source_mr.get()});
      ASSERT_TRUE(traffic.run(100s));
      const std::vector<int> expected = {static_cast<int>(std::min<std::size_t>(size, INT_MAX))};
      EXPECT_EQ(recv.sizes, expected);
      EXPECT_EQ(send.sizes, expected);
      ASSERT_EQ(first_difference(target.data(), source.data() + shift, size), size) << "wrong byte there";
      for (std::size_t i = 0; i < kTailBytes; ++i)
        ASSERT_EQ(target.data()[size + i], kPoison) << i << " bytes after the end";
    }
  }

 private:
  static std::size_t first_difference(const unsigned char* a, const unsigned char* b, std::size_t size) {
    constexpr std::size_t kStep = 1 << 20;
    for (std::size_t at = 0; at < size; at += kStep) {
      const std::size_t bytes = std::min(kStep, size - at);
      if (std::memcmp(a + at, b + at, bytes) == 0) continue;
      return at + static_cast<std::size_t>(std::mismatch(a + at, a + at + bytes, b + at).first - (a + at));
    }
    return size;
  }
};
INSTANTIATE_TEST_SUITE_P(Net, Sizes, ::testing::Values(9, 10, 11, 12), version_name);

TEST_P(Sizes, AboveTwoAndFourGibibytes_ArriveWhole) {
  send_all({2 * kGiB, 4 * kGiB + 1});
}

TEST_P(Sizes, OthersAroundTwoAndFourGibibytes_ArriveWhole) {
  send_all({2 * kGiB - 1, 4 * kGiB - 1, 4 * kGiB, 5 * kGiB});
}

}  // namespace
}  // namespace conformance
