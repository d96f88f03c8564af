// regMr, regMrDmaBuf and deregMr of GPU memory: addresses that are used again, ranges that overlap or share pages,
// another thread that registers, and what is refused.
#include <fcntl.h>

#include <atomic>
#include <random>
#include <thread>

#include "base/unique_fd.h"
#include "gpu_test.h"

namespace gpu_direct {
namespace {

constexpr std::size_t kBytes = 100'000;

class GpuRegistrations : public GpuTest {
 protected:
  // Registers and expects a failure, a warning with `text` and no mhandle.
  void expect_refused(void* comm, unsigned char* data, std::size_t bytes, const Place& place, std::optional<int> fd,
                      const std::string& text) {
    void* mhandle = nullptr;
    nccl::Result result{};
    service().run([&] { result = register_memory(net(), comm, data, bytes, place, &mhandle, fd); });
    EXPECT_NE(result, nccl::Result::kSuccess);
    EXPECT_EQ(mhandle, nullptr);
    const std::vector<std::string> warnings = take_warnings();
    ASSERT_EQ(warnings.size(), 1U) << joined(warnings);
    EXPECT_NE(warnings.front().find(text), std::string::npos) << warnings.front();
  }
};
TWO_VERSIONS(GpuRegistrations);
class GpuReuse : public GpuTest {
 protected:
  // Receives from the peer into `buffer` and checks all of it.
  void receive_from(PeerProcess& peer, TestConnection& link, Buffer& buffer, void* mhandle, std::size_t size) {
    if (HasFailure()) return;
    peer.ask({Command::Verb::kSend, {}, 0, size, ++seed_});
    const Part part{buffer.data(), size, 0, mhandle};
    buffer.expect(0, size, seed_);
    EXPECT_OK(post_and_wait(net(), link.recv_comm, false, part, nullptr));
    EXPECT_OK(flush_and_wait(net(), link.recv_comm, part));
    EXPECT_EQ(peer.answer().result, nccl::Result::kSuccess);
    EXPECT_TRUE(buffer.intact());
  }
};
ONE_VERSION(GpuReuse, 12);

// Each new allocation has the address of the one before. Its size differs, so that the registration of the old one, if
// it were still used, would cover it or not. `other` keeps the device's registrations of this way from being empty.
TEST_P(GpuRegistrations, AddressReused_IsRegisteredAnew) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  for (const How how : ways()) {
    for (const bool with_other : {false, true}) {
      for (const Kind kind : {Kind::kAllocated, Kind::kMapped}) {
        const Place from{0, kind, how};
        const Place to{second_gpu(), kind, how};
        SCOPED_TRACE(name_of(to) + (with_other ? " beside another registration" : ""));
        Buffer other(to, kBytes);
        Buffer host({}, kBytes);
        std::optional<Registered> other_mr;
        if (with_other) other_mr.emplace(*this, link.recv_comm, other);
        CUdeviceptr last = 0;
        int reused = 0;
        for (const std::size_t bytes : {kBytes, kBytes, kBytes / 2, 2 * kBytes}) {
          Buffer target(to, bytes, 5);
          Buffer source(from, bytes, 3);
          if (target.start() == last) ++reused;
          last = target.start();
          const Registered source_mr(*this, link.send_comm, source);
          const Registered target_mr(*this, link.recv_comm, target);
          exchange_one(link, source, source_mr.get(), target, target_mr.get(), 0, 0, bytes);
          EXPECT_TRUE(other.intact());
        }
        if (cuda().is_standin()) {
          EXPECT_EQ(reused, 3);
        }
        if (HasFailure()) return;
      }
    }
  }
}

// The peer's GPU has mapped the first allocation, in order to write to it directly.
TEST_P(GpuReuse, AddressThatThePeerHasMapped_IsRegisteredAnew) {
  PeerProcess peer(version());
  TestConnection link = connect_to(peer);
  ASSERT_TRUE(link);
  for (const Kind kind : {Kind::kAllocated, Kind::kMapped}) {
    for (const How how : ways()) {
      const Place place{0, kind, how};
      SCOPED_TRACE(name_of(place));
      ASSERT_EQ(peer.call({Command::Verb::kAllocate, place, 0, 2 * kBytes}).result, nccl::Result::kSuccess);
      Buffer other(place, kBytes);
      const Registered other_mr(*this, link.recv_comm, other);
      std::vector<CUdeviceptr> starts;
      for (const std::size_t bytes : {kBytes, kBytes, 2 * kBytes, kBytes / 2}) {
        Buffer target(place, bytes);
        starts.push_back(target.start());
        const Registered target_mr(*this, link.recv_comm, target);
        // More than one: the first are staged, until the peer has mapped the memory.
        for (int i = 0; i < 3; ++i) receive_from(peer, link, target, target_mr.get(), bytes);
        receive_from(peer, link, other, other_mr.get(), kBytes / 3);
        EXPECT_TRUE(target.intact());
        if (HasFailure()) return;
      }
      if (cuda().is_standin()) {
        EXPECT_EQ(starts, std::vector<CUdeviceptr>(starts.size(), starts.front()));
      }
    }
  }
}

// Two small allocations in one page are one registration, which the cache gives to both. The first is freed, and
// another one takes its place while the second keeps the registration. The peer sends from host memory: the stand-in,
// unlike NVIDIA's driver, gives each small allocation its own memory, so that a mapping of the first would not be one
// of the third.
TEST_P(GpuReuse, SmallAllocationsInOnePage_HaveTheirOwnBytes) {
  PeerProcess peer(version());
  TestConnection link = connect_to(peer);
  ASSERT_TRUE(link);
  for (const How how : ways()) {
    if (how == How::kDmabufAtOffset) continue;  // no page is the allocation's own
    const Place place{0, Kind::kSmall, how};
    SCOPED_TRACE(name_of(place));
    ASSERT_EQ(peer.call({Command::Verb::kAllocate, {}, 0, kBytes}).result, nccl::Result::kSuccess);
    std::optional<Buffer> first(std::in_place, place, std::size_t{100});
    Buffer second(place, 100);
    EXPECT_EQ(page_of(first->start()), page_of(second.start())) << "the test needs allocations that share a page";
    std::optional<Registered> first_mr(std::in_place, *this, link.recv_comm, *first);
    const Registered second_mr(*this, link.recv_comm, second);
    for (int i = 0; i < 3; ++i) {
      receive_from(peer, link, *first, first_mr->get(), 100);
      receive_from(peer, link, second, second_mr.get(), 99);
      EXPECT_TRUE(first->intact());
    }
    const CUdeviceptr start = first->start();
    first_mr.reset();
    first.reset();
    receive_from(peer, link, second, second_mr.get(), 98);
    Buffer third(place, 100);
    if (cuda().is_standin()) {
      EXPECT_EQ(third.start(), start);
    }
    const Registered third_mr(*this, link.recv_comm, third);
    for (int i = 0; i < 3; ++i) {
      receive_from(peer, link, third, third_mr.get(), 100);
      receive_from(peer, link, second, second_mr.get(), 97);
      EXPECT_TRUE(third.intact());
    }
    if (HasFailure()) return;
  }
}

// All pairs of ranges of one allocation, registered in both orders and deregistered in both, also one in each way: as
// long as a registration exists, all its bytes can be sent from and received into.
TEST_P(GpuRegistrations, OverlappingAndAdjacentRanges_AreIndependent) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  struct Range {
    std::size_t at;
    std::size_t bytes;
  };
  constexpr Range kRanges[][2] = {
      {{0, 40'000}, {40'000, 40'000}},     // adjacent within a page
      {{0, 40'960}, {40'960, 40'960}},     // adjacent at a page
      {{0, 50'000}, {30'000, 50'000}},     // overlapping
      {{0, 80'000}, {20'000, 10'000}},     // one inside the other
      {{5'000, 70'000}, {5'000, 70'000}},  // the same
      {{0, 4'096}, {100, 50}},             // inside one page
  };
  for (const How first_how : {ways().front(), ways().back()}) {
    for (const How second_how : {ways().front(), ways().back()}) {
      if (first_how == second_how && first_how != ways().front()) continue;
      Buffer source({0, Kind::kAllocated, first_how}, kBytes);
      Buffer target({second_gpu(), Kind::kMapped, first_how}, kBytes);
      Buffer host({}, kBytes);
      const Registered host_mr(*this, link.send_comm, host);
      const Registered host_recv_mr(*this, link.recv_comm, host);
      for (const auto& ranges : kRanges) {
        for (const bool second_first : {false, true}) {
          for (const bool first_released_first : {false, true}) {
            void* sends[2] = {};
            void* recvs[2] = {};
            const auto add = [&](int i) {
              const How how = i == 0 ? first_how : second_how;
              service().run([&] {
                EXPECT_OK(register_memory(net(), link.send_comm, source.data() + ranges[i].at, ranges[i].bytes,
                                          {0, Kind::kAllocated, how}, &sends[i], {}, source.start()));
                EXPECT_OK(register_memory(net(), link.recv_comm, target.data() + ranges[i].at, ranges[i].bytes,
                                          {second_gpu(), Kind::kMapped, how}, &recvs[i], {}, target.start()));
              });
            };
            const auto remove = [&](int i) {
              service().run([&] {
                EXPECT_OK(net().dereg_mr(link.send_comm, sends[i]));
                EXPECT_OK(net().dereg_mr(link.recv_comm, recvs[i]));
              });
            };
            const auto use = [&](int i) {
              exchange_one(link, source, sends[i], target, recvs[i], ranges[i].at, ranges[i].at, ranges[i].bytes);
            };
            add(second_first ? 1 : 0);
            add(second_first ? 0 : 1);
            ASSERT_FALSE(HasFailure());
            use(0);
            use(1);
            remove(first_released_first ? 0 : 1);
            use(first_released_first ? 1 : 0);
            remove(first_released_first ? 1 : 0);
            ASSERT_FALSE(HasFailure()) << "ranges at " << ranges[0].at << " and " << ranges[1].at;
          }
        }
      }
    }
  }
}

// NCCL registers user buffers from its service thread while its progress thread uses connections of the same device.
TEST_P(GpuRegistrations, RegistrationDuringTraffic_Works) {
  TestConnection link = this->link();
  TestConnection idle = this->link();
  ASSERT_TRUE(link && idle);
  const How how = ways().front();
  Buffer source({0, Kind::kAllocated, how}, kBytes);
  Buffer target({second_gpu(), Kind::kMapped, how}, kBytes);
  Buffer arena({0, Kind::kMapped, how}, 3 * kBytes);
  const Registered source_mr(*this, link.send_comm, source);
  const Registered target_mr(*this, link.recv_comm, target);
  std::atomic<bool> stop{false};
  std::atomic<int> registrations{0};
  std::thread other([&] {
    std::mt19937 random(11);
    const std::vector<How> all = ways();
    Buffer* const buffers[] = {&source, &target, &arena};
    std::vector<void*> held;
    while (!stop) {
      Buffer& buffer = *buffers[random() % 3];
      void* const comm = random() % 2 == 0 ? link.recv_comm : idle.send_comm;
      const std::size_t at = random() % (buffer.size() - 1);
      const std::size_t bytes = 1 + random() % (buffer.size() - at);
      Place place = buffer.place();
      place.how = all[random() % all.size()];
      void* mhandle = nullptr;
      EXPECT_OK(register_memory(net(), comm, buffer.data() + at, bytes, place, &mhandle, {}, buffer.start()));
      held.push_back(mhandle);
      ++registrations;
      if (held.size() > 6) {
        std::swap(held[random() % held.size()], held.back());
        EXPECT_OK(net().dereg_mr(comm, held.back()));
        held.pop_back();
      }
      if (registrations % 16 == 0) std::this_thread::yield();
    }
    for (void* const mhandle : held) EXPECT_OK(net().dereg_mr(idle.send_comm, mhandle));
  });
  const auto end = Clock::now() + std::chrono::milliseconds(150);
  while ((Clock::now() < end || registrations < 50) && !HasFailure()) {
    for (std::size_t i = 0; i < 4; ++i) {
      exchange_one(link, source, source_mr.get(), target, target_mr.get(), 1'000 * i, 2'000 * i, 10'000 + 20'000 * i);
    }
  }
  stop = true;
  other.join();
  EXPECT_TRUE(arena.intact());
}

TEST_P(GpuRegistrations, WrongDescriptor_IsReported) {
  if (!takes_dmabuf()) GTEST_SKIP() << "no dma-bufs";
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  const Place place{0, Kind::kAllocated, How::kDmabuf};
  Buffer buffer(place, kBytes);
  expect_refused(link.recv_comm, buffer.data(), kBytes, place, -1, "descriptor -1 of a dma-buf");
  const int closed = dmabuf_of(buffer.start(), kBytes);
  close(closed);
  expect_refused(link.recv_comm, buffer.data(), kBytes, place, closed, "descriptor " + std::to_string(closed));
  // The dma-buf of GPU memory with an address of host memory, which could be registered at that address.
  const verbatim::UniqueFd fd(dmabuf_of(buffer.start(), kBytes));
  Buffer host({}, kBytes);
  expect_refused(link.recv_comm, host.data(), kBytes, place, fd.get(), "ibv_reg_dmabuf_mr of ");
  // The connection is not affected.
  Buffer source({}, kBytes);
  const Registered source_mr(*this, link.send_comm, source);
  const Registered mr(*this, link.recv_comm, buffer);
  exchange_one(link, source, source_mr.get(), buffer, mr.get(), 0, 0, kBytes);
}

TEST_P(GpuRegistrations, FreedMemory_IsReported) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  for (const How how : ways()) {
    if (how == How::kDmabufAtOffset) continue;
    for (const Kind kind : {Kind::kAllocated, Kind::kMapped}) {
      const Place place{0, kind, how};
      SCOPED_TRACE(name_of(place));
      Buffer buffer(place, 3 << 20);
      unsigned char* const data = buffer.data();
      const verbatim::UniqueFd fd(dmabuf_of(buffer.start(), 3 << 20));
      buffer.free();
      expect_refused(link.recv_comm, data, 3 << 20, place, fd.get(), "failed");
      // It is not the end of the memory that exists.
      Buffer living(place, kBytes);
      const Registered mr(*this, link.recv_comm, living);
      EXPECT_NE(mr.get(), nullptr);
    }
  }
}

TEST_P(GpuRegistrations, WayThatTheDeviceDoesNotHave_IsReported) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  if (takes_plain() && takes_dmabuf()) GTEST_SKIP() << "the device has both ways";
  Place place{0, Kind::kAllocated, How::kPlain};
  Buffer buffer(place, kBytes);
  if (!takes_plain()) expect_refused(link.recv_comm, buffer.data(), kBytes, place, {}, "nvidia_peermem");
  place.how = How::kDmabuf;
  if (!takes_dmabuf() && !takes_plain()) {
    expect_refused(link.recv_comm, buffer.data(), kBytes, place, {}, "dma-buf");
  }
}

// Memory must stay registered until its operations are done. If not, nothing is written after deregMr has returned,
// and the operation fails with a line: the receive is never done with other bytes.
TEST_P(GpuRegistrations, DeregisteredWhileReceiveIsOutstanding_FailsAndWritesNothing) {
  for (const How how : ways()) {
    TestConnection link = this->link();
    ASSERT_TRUE(link);
    const Place place{second_gpu(), Kind::kAllocated, how};
    SCOPED_TRACE(name_of(place));
    Buffer source({}, kBytes);
    Buffer target(place, kBytes);
    const Registered source_mr(*this, link.send_comm, source);
    Registered target_mr(*this, link.recv_comm, target);
    Traffic traffic(net());
    const Operation& receive = traffic.recv(link.recv_comm, {{target.data(), kBytes, 0, target_mr.get()}});
    ASSERT_TRUE(eventually([&] { return !traffic.step() || receive.posted; }));
    const CUdeviceptr start = target.start();
    target_mr.release();
    target.free();
    Buffer next(place, kBytes);  // at the same address
    if (cuda().is_standin()) {
      EXPECT_EQ(next.start(), start);
    }
    source.write(0, kBytes, ++seed_);
    EXPECT_NE(post_and_wait(net(), link.send_comm, true, {source.data(), kBytes, 0, source_mr.get()}, nullptr),
              nccl::Result::kSuccess);
    int done = 0;
    EXPECT_TRUE(eventually([&] { return net().test(receive.request, &done, nullptr) != nccl::Result::kSuccess; }));
    EXPECT_EQ(done, 0);
    EXPECT_TRUE(next.intact());
    EXPECT_TRUE(source.intact());
    EXPECT_FALSE(take_warnings().empty());
  }
}

}  // namespace
}  // namespace gpu_direct
