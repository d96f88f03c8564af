#include "verbs/mr_cache.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <barrier>
#include <cerrno>
#include <random>
#include <thread>

#include "base/unique_fd.h"
#include "support/log_lines.h"
#include "unit/support/fake_verbs.h"
#include "unit/support/log_capture.h"

namespace verbatim {
namespace {

constexpr std::uintptr_t kPage = 4096;
constexpr std::uintptr_t kBase = 0x7f0000000000;

class MrCacheTest : public testing::Test {
 protected:
  MrCacheTest() {
    device_.add_roce_port();
    device_.dmabuf_errno = 0;
    context_ = fake_.table.open_device(&device_.device);
    pd_ = fake_.table.alloc_pd(context_);
    cache_.emplace(fake_.table, pd_, "mlx5_0", true);
  }
  ~MrCacheTest() override {
    cache_.reset();
    EXPECT_EQ(fake_.live("mr"), 0);
    fake_.table.dealloc_pd(pd_);
    fake_.table.close_device(context_);
  }

  static MrRequest range(std::uintptr_t offset, std::size_t bytes, MemoryType type = MemoryType::kHost) {
    return {.address = reinterpret_cast<void*>(kBase + offset), .bytes = bytes, .type = type};
  }
  static MrRequest dmabuf(std::uintptr_t offset, std::size_t bytes, int fd, std::uint64_t in_buffer) {
    MrRequest request = range(offset, bytes, MemoryType::kDmaBuf);
    request.dmabuf = {fd, in_buffer};
    return request;
  }
  static UniqueFd buffer() { return UniqueFd(memfd_create("buffer", MFD_CLOEXEC)); }

  MrRef acquire(const MrRequest& request) {
    Result<MrRef> ref = cache_->acquire(request);
    EXPECT_TRUE(ref);
    return ref ? *std::move(ref) : MrRef();
  }

  LogCapture log_;
  FakeVerbs fake_;
  FakeDevice& device_ = fake_.add_device("mlx5_0");
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  std::optional<MrCache> cache_;
};

TEST_F(MrCacheTest, Range_IsRoundedToPages) {
  const MrRef ref = acquire(range(100, 5000));
  ASSERT_EQ(fake_.registrations().size(), 1U);
  const FakeVerbs::Registration made = fake_.registrations()[0];
  EXPECT_EQ(made.address, kBase);
  EXPECT_EQ(made.bytes, 2 * kPage);
  EXPECT_EQ(ref->lkey, ref->mr->lkey);
  EXPECT_EQ(ref->rkey, ref->mr->rkey);
  EXPECT_NE(ref->lkey, ref->rkey);
}

TEST_F(MrCacheTest, CoveringRegistration_IsReusedUntilLastReference) {
  MrRef whole = acquire(range(0, 8 * kPage));
  MrRef again = acquire(range(0, 8 * kPage));
  MrRef part = acquire(range(3 * kPage + 5, 100));
  EXPECT_EQ(whole->mr, again->mr);
  EXPECT_EQ(whole->mr, part->mr);
  EXPECT_EQ(cache_->size(), 1U);
  whole.reset();
  EXPECT_TRUE(cache_->release(std::move(again)));
  EXPECT_EQ(fake_.live("mr"), 1);
  part.reset();
  EXPECT_EQ(fake_.live("mr"), 0);
  EXPECT_EQ(cache_->size(), 0U);
  EXPECT_EQ(fake_.calls("reg_mr_iova2"), 1);
}

// Part of the memory may be other memory by then: a part of it is still registered, the rest was freed.
TEST_F(MrCacheTest, CoverWithoutReferenceToItsWholeRange_IsNotUsed) {
  for (const bool same_part : {false, true}) {
    const int before = fake_.calls("reg_mr_iova2");
    MrRef whole = acquire(range(0, 8 * kPage));
    const MrRef part = acquire(range(4 * kPage, 4 * kPage));
    const MrRef second_part = acquire(range(5 * kPage, kPage));
    EXPECT_EQ(whole->mr, part->mr);
    whole.reset();
    EXPECT_EQ(fake_.calls("reg_mr_iova2") - before, 1);
    const MrRef next = same_part ? acquire(range(4 * kPage, 4 * kPage)) : acquire(range(0, 4 * kPage));
    EXPECT_NE(next->mr, part->mr);
    EXPECT_EQ(fake_.calls("reg_mr_iova2") - before, 2);
    EXPECT_EQ(acquire(range(same_part ? 5 * kPage : 0, kPage))->mr, next->mr);
    EXPECT_EQ(cache_->size(), 2U);
  }
  EXPECT_EQ(cache_->size(), 0U);
}

TEST_F(MrCacheTest, OverlappingRanges_AreNotMerged) {
  const MrRef left = acquire(range(0, 4 * kPage));
  const MrRef right = acquire(range(2 * kPage, 4 * kPage));
  EXPECT_NE(left->mr, right->mr);
  const MrRef across = acquire(range(kPage, 4 * kPage));  // covered by both together, but not by one alone
  EXPECT_NE(across->mr, left->mr);
  EXPECT_NE(across->mr, right->mr);
  EXPECT_EQ(across->mr->length, 4 * kPage);
  EXPECT_EQ(cache_->size(), 3U);
}

TEST_F(MrCacheTest, CoverStartingBeforeShorterRanges_IsFound) {
  const MrRef large = acquire(range(0, 100 * kPage));
  // A shorter range with a later start, which is released at once.
  EXPECT_TRUE(cache_->release(acquire(range(200 * kPage, kPage))));
  const MrRef wide = acquire(range(50 * kPage, 100 * kPage));
  EXPECT_NE(wide->mr, large->mr);
  EXPECT_EQ(acquire(range(60 * kPage, 10 * kPage))->mr, wide->mr);
  EXPECT_EQ(acquire(range(40 * kPage, 20 * kPage))->mr, large->mr);
}

TEST_F(MrCacheTest, OtherTypeOrOrdering_IsNotShared) {
  const MrRef host = acquire(range(0, kPage));
  const MrRef cuda = acquire(range(0, kPage, MemoryType::kCuda));
  MrRequest strict = range(0, kPage);
  strict.ordering = MrOrdering::kStrict;
  const MrRef ordered = acquire(strict);
  EXPECT_NE(host->mr, cuda->mr);
  EXPECT_NE(host->mr, ordered->mr);
  EXPECT_EQ(cache_->size(), 3U);
}

// The same range of a dma-buf on both paths: a flush on one does not show what came on the other.
TEST_F(MrCacheTest, DataDirect_HasRegistrationsOfItsOwn) {
  static Verbs verbs;
  static int data_direct_access;
  static int registered;
  verbs = fake_.table;
  registered = 0;
  MrCache cache(
      fake_.table, pd_, "mlx5_0", true,
      [](ibv_pd* pd, std::uint64_t offset, std::size_t bytes, std::uint64_t iova, int fd, int access, int mlx5) {
        data_direct_access = mlx5;
        ++registered;
        return verbs.reg_dmabuf_mr(pd, offset, bytes, iova, fd, access);
      });
  const UniqueFd fd = buffer();
  MrRequest request = dmabuf(0, kPage, fd.get(), 8 * kPage);
  const Result<MrRef> plain = cache.acquire(request);
  EXPECT_EQ(registered, 0);
  request.data_direct = true;
  const Result<MrRef> direct = cache.acquire(request);
  const Result<MrRef> again = cache.acquire(request);
  ASSERT_TRUE(plain && direct && again);
  EXPECT_EQ(registered, 1);
  EXPECT_EQ(data_direct_access, kMlx5DataDirectAccess);
  EXPECT_NE((*plain)->mr, (*direct)->mr);
  EXPECT_EQ((*again)->mr, (*direct)->mr);
  const FakeVerbs::Registration made = fake_.registrations().back();
  EXPECT_EQ(made.address, kBase);
  EXPECT_EQ(made.offset, 8 * kPage);
  EXPECT_EQ(made.fd, fd.get());
  EXPECT_NE(made.access & IBV_ACCESS_RELAXED_ORDERING, 0U);
  // Other memory is never registered for it.
  MrRequest host = range(0, kPage);
  host.data_direct = true;
  EXPECT_TRUE(cache.acquire(host));
  EXPECT_EQ(registered, 1);
}

TEST_F(MrCacheTest, RelaxedOrdering_IsRequestedWhereAllowed) {
  constexpr unsigned kPlain = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  const MrRef relaxed = acquire(range(0, kPage));
  EXPECT_EQ(fake_.registrations().back().verb, "reg_mr_iova2");
  EXPECT_EQ(fake_.registrations().back().access, kPlain | IBV_ACCESS_RELAXED_ORDERING);
  MrRequest request = range(0, kPage);
  request.ordering = MrOrdering::kStrict;
  const MrRef strict = acquire(request);
  EXPECT_EQ(fake_.registrations().back().verb, "reg_mr");
  EXPECT_EQ(fake_.registrations().back().access, kPlain);

  MrCache without(fake_.table, pd_, "mlx5_0", false);
  const Result<MrRef> plain = without.acquire(range(0, kPage));
  ASSERT_TRUE(plain);
  EXPECT_EQ(fake_.registrations().back().verb, "reg_mr");
}

TEST_F(MrCacheTest, ZeroBytes_RegistersOwnPage) {
  const MrRef null = acquire({});
  const MrRef odd = acquire(range(123, 0));
  EXPECT_EQ(null->mr, odd->mr);
  ASSERT_EQ(fake_.registrations().size(), 1U);
  EXPECT_NE(fake_.registrations()[0].address, 0U);
  EXPECT_NE(fake_.registrations()[0].address, kBase);
  EXPECT_EQ(fake_.registrations()[0].bytes, kPage);
}

TEST_F(MrCacheTest, RangeBeyondAddressSpace_IsRejected) {
  for (const MrRequest& request :
       {range(0, SIZE_MAX), MrRequest{.address = reinterpret_cast<void*>(UINTPTR_MAX - 10), .bytes = 5}}) {
    const Result<MrRef> ref = cache_->acquire(request);
    ASSERT_FALSE(ref);
    EXPECT_EQ(ref.error().kind, ErrorKind::kArgument);
  }
  EXPECT_TRUE(fake_.registrations().empty());
}

TEST_F(MrCacheTest, DmaBufAtAnyOffset_IsRoundedToPages) {
  const UniqueFd fd = buffer();
  const MrRef ref = acquire(dmabuf(5 * kPage + 100, 3000, fd.get(), 2 * kPage + 100));
  const FakeVerbs::Registration made = fake_.registrations().back();
  EXPECT_EQ(made.verb, "reg_dmabuf_mr");
  EXPECT_EQ(made.address, kBase + 5 * kPage);
  EXPECT_EQ(made.offset, 2 * kPage);
  EXPECT_EQ(made.bytes, kPage);
  EXPECT_EQ(made.fd, fd.get());
}

TEST_F(MrCacheTest, DmaBufWithPageOffset_IsAccepted) {
  const UniqueFd fd = buffer();
  const MrRef ref = acquire(dmabuf(100, 3000, fd.get(), 0));
  EXPECT_EQ(fake_.registrations().back().address, kBase);
  EXPECT_EQ(fake_.registrations().back().offset, 0U);
}

TEST_F(MrCacheTest, DmaBufWithImpossibleOffset_IsRejected) {
  const UniqueFd fd = buffer();
  EXPECT_EQ(cache_->acquire(dmabuf(100, 3000, fd.get(), 101)).error().kind, ErrorKind::kArgument);
  EXPECT_EQ(cache_->acquire(dmabuf(0, 3000, -1, 0)).error().sys_errno, EBADF);
}

// NCCL exports a dma-buf for each registration, so the same memory comes with another descriptor of another inode.
TEST_F(MrCacheTest, DmaBufThroughOtherFd_IsReusedByAddress) {
  UniqueFd fd = buffer();
  const UniqueFd other = buffer();
  const MrRef first = acquire(dmabuf(0, 8 * kPage, fd.get(), 4 * kPage));
  fd.reset();  // the cache needs the descriptor during acquire() only
  EXPECT_EQ(acquire(dmabuf(0, 8 * kPage, other.get(), 0))->mr, first->mr);
  EXPECT_EQ(acquire(dmabuf(2 * kPage, kPage, other.get(), 2 * kPage))->mr, first->mr);
  EXPECT_EQ(fake_.registrations().size(), 1U);
  EXPECT_NE(acquire(dmabuf(0, 9 * kPage, other.get(), 0))->mr, first->mr);  // not covered
  EXPECT_NE(acquire(range(0, 8 * kPage, MemoryType::kCuda))->mr, first->mr);
}

TEST_F(MrCacheTest, DmaBufAfterLastRelease_IsRegisteredAgain) {
  const UniqueFd fd = buffer();
  const UniqueFd other = buffer();
  acquire(dmabuf(0, kPage, fd.get(), 0));
  const MrRef next = acquire(dmabuf(0, kPage, other.get(), 0));
  ASSERT_EQ(fake_.registrations().size(), 2U);
  EXPECT_EQ(fake_.registrations().back().fd, other.get());
}

TEST_F(MrCacheTest, DmaBufRefusedByDevice_IsReported) {
  const UniqueFd fd = buffer();
  device_.dmabuf_errno = EOPNOTSUPP;
  EXPECT_EQ(cache_->acquire(dmabuf(0, kPage, fd.get(), 0)).error().sys_errno, EOPNOTSUPP);
  test::expect_log_lines(log_.warnings());
  fake_.table.reg_dmabuf_mr = nullptr;
  EXPECT_EQ(cache_->acquire(dmabuf(0, kPage, fd.get(), 0)).error().sys_errno, EOPNOTSUPP);
}

TEST_F(MrCacheTest, FailedRegistration_LeavesNothing) {
  fake_.failures["reg_mr_iova2"] = ENOMEM;
  EXPECT_FALSE(cache_->acquire(range(0, kPage)));
  EXPECT_EQ(cache_->size(), 0U);
  fake_.failures.clear();
  acquire(range(0, kPage));
}

TEST_F(MrCacheTest, DeregMrFails_ReleaseReturnsError) {
  MrRef ref = acquire(range(0, kPage));
  ibv_mr* mr = ref->mr.get();
  fake_.failures["dereg_mr"] = EBUSY;
  const Status status = cache_->release(std::move(ref));
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().sys_errno, EBUSY);
  EXPECT_EQ(cache_->size(), 0U);
  EXPECT_TRUE(cache_->release({}));
  fake_.failures.clear();
  EXPECT_EQ(fake_.table.dereg_mr(mr), 0);  // the MR that the cache could not deregister
}

TEST_F(MrCacheTest, UnreleasedRegistration_IsReportedAndFreed) {
  MrRef forgotten = acquire(range(0, kPage));
  cache_.reset();
  (void)forgotten.release();  // must not outlive the cache
  test::expect_log_lines(log_.warnings());
  EXPECT_EQ(fake_.live("mr"), 0);
}

TEST_F(MrCacheTest, ConcurrentRegistration_HoldsNoLock) {
  // The barrier opens only if both threads are in the driver at the same time.
  std::barrier inside(2);
  fake_.on_register = [&] { inside.arrive_and_wait(); };
  MrRef refs[2];
  {
    std::jthread one([&] { refs[0] = acquire(range(0, 4 * kPage)); });
    std::jthread two([&] { refs[1] = acquire(range(0, 4 * kPage)); });
  }
  fake_.on_register = nullptr;
  EXPECT_EQ(refs[0]->mr, refs[1]->mr);  // both use the MR that was added to the cache first
  EXPECT_EQ(fake_.live("mr"), 1);
  EXPECT_EQ(cache_->size(), 1U);
  EXPECT_EQ(fake_.calls("dereg_mr"), 1);
}

TEST_F(MrCacheTest, ManyThreads_AcquireAndRelease) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 2000;
  std::atomic<int> uncovered{0};
  {
    std::vector<std::jthread> threads;
    for (unsigned seed = 0; seed < kThreads; ++seed) {
      threads.emplace_back([&, seed] {
        std::mt19937 random(seed);
        std::vector<MrRef> held;
        for (int round = 0; round < kRounds; ++round) {
          const std::uintptr_t start = random() % 8 * kPage + random() % 100;
          const std::size_t bytes = 1 + random() % (3 * kPage);
          MrRef ref = acquire(range(start, bytes));
          const auto from = reinterpret_cast<std::uintptr_t>(ref->mr->addr);
          if (from > kBase + start || from + ref->mr->length < kBase + start + bytes) ++uncovered;
          held.push_back(std::move(ref));
          if (held.size() > 5) held.erase(held.begin() + static_cast<std::ptrdiff_t>(random() % held.size()));
        }
      });
    }
  }
  EXPECT_EQ(uncovered, 0);
  EXPECT_EQ(cache_->size(), 0U);
  EXPECT_EQ(fake_.live("mr"), 0);
}

// Compares with a model that checks all registrations to whose whole range a reference is held.
TEST_F(MrCacheTest, RandomRanges_AreReusedExactlyWhenCovered) {
  std::mt19937 random(7);
  struct Held {
    MrRef ref;
    std::uintptr_t start;
    std::size_t bytes;
  };
  std::vector<Held> held;
  for (int round = 0; round < 20000; ++round) {
    if (held.size() > 12 || (!held.empty() && random() % 3 == 0)) {
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(random() % held.size()));
      continue;
    }
    const std::uintptr_t start = random() % 32 * kPage;
    const std::size_t bytes = (1 + random() % 16) * kPage;
    bool covered = false;
    for (const Held& one : held) {
      const auto from = reinterpret_cast<std::uintptr_t>(one.ref->mr->addr) - kBase;
      const bool is_whole = from == one.start && one.ref->mr->length == one.bytes;
      covered = covered || (is_whole && from <= start && from + one.bytes >= start + bytes);
    }
    const int before = fake_.calls("reg_mr_iova2");
    MrRef ref = acquire(range(start, bytes));
    ASSERT_EQ(fake_.calls("reg_mr_iova2") - before, covered ? 0 : 1) << round;
    held.push_back({std::move(ref), start, bytes});
  }
}

}  // namespace
}  // namespace verbatim
