// regMr, deregMr and iflush: any ranges, repeatedly, also during transfers on the same comm.
#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "conformance.h"

namespace conformance {
namespace {

class Registrations : public Conformance {
 protected:
  // Sends one message from `from` in `source` to `to` in `target`, with these memory handles.
  void send_between(TestConnection& link, Memory& source, std::size_t from, void* source_mr, Memory& target,
                    std::size_t to, void* target_mr, std::size_t size) {
    source.write(from, size, ++seed_);
    target.expect(to, size, seed_);
    Traffic traffic(net());
    const Operation& recv = traffic.recv(link.recv_comm, {{target.data() + to, size, 0, target_mr}});
    traffic.send(link.send_comm, {source.data() + from, size, 0, source_mr});
    ASSERT_TRUE(traffic.run());
    EXPECT_EQ(recv.sizes.front(), static_cast<int>(size));
    EXPECT_TRUE(source.intact());
    EXPECT_TRUE(target.intact());
  }

  void flush(TestConnection& link, std::vector<Part> parts) {
    std::vector<void*> data;
    std::vector<int> sizes;
    std::vector<void*> mhandles;
    for (const Part& part : parts) {
      data.push_back(part.data);
      sizes.push_back(static_cast<int>(part.size));
      mhandles.push_back(part.mhandle);
    }
    void* request = nullptr;
    ASSERT_OK(net().iflush(link.recv_comm, static_cast<int>(parts.size()), data.data(), sizes.data(), mhandles.data(),
                           &request));
    if (request == nullptr) return;  // no flush is necessary
    int done = 0;
    ASSERT_TRUE(eventually([&] {
      EXPECT_OK(net().test(request, &done, nullptr));
      return done != 0 || HasFailure();
    }));
    EXPECT_EQ(done, 1);
  }

  std::uint64_t seed_ = 0;
};
EVERY_VERSION(Registrations);

TEST_P(Registrations, PartOfRegisteredRange_IsUsable) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  Memory source(200'000, 5);
  Memory target(200'000, 9);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
  for (const std::size_t at : {std::size_t{0}, std::size_t{1}, std::size_t{4091}, std::size_t{131'072}}) {
    send_between(link, source, at, source_mr.get(), target, 199'000 - at, target_mr.get(), 1000);
  }
  send_between(link, source, 0, source_mr.get(), target, 0, target_mr.get(), 200'000);
}

TEST_P(Registrations, SmallUnalignedRange_IsUsable) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  for (const std::size_t offset : {std::size_t{0}, std::size_t{1}, std::size_t{4095}}) {
    for (const std::size_t size : {std::size_t{1}, std::size_t{2}, std::size_t{4096}, std::size_t{4098}}) {
      Memory source(size, offset);
      Memory target(size, offset + 17);
      const Registration source_mr(*this, link.send_comm, source.data(), size);
      const Registration target_mr(*this, link.recv_comm, target.data(), size);
      send_between(link, source, 0, source_mr.get(), target, 0, target_mr.get(), size);
    }
  }
}

// The same range again, a part of it, an overlapping and a larger range: each registration is valid until it is
// deregistered, regardless of the others.
TEST_P(Registrations, OverlappingRanges_AreIndependent) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  struct Range {
    std::size_t at;
    std::size_t size;
  };
  constexpr Range kRanges[] = {{8192, 16384},  {8192, 16384}, {8192, 16384}, {9000, 100},
                               {20000, 12000}, {0, 40000},    {4096, 8192},  {100, 39000}};
  std::vector<std::size_t> order(std::size(kRanges));
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::mt19937 random(3);
  for (int round = 0; round < repetitions(4); ++round) {
    Memory source(40000);
    Memory target(40000);
    std::vector<std::unique_ptr<Registration>> sources;
    std::vector<std::unique_ptr<Registration>> targets;
    for (const Range& range : kRanges) {
      sources.push_back(std::make_unique<Registration>(*this, link.send_comm, source.data() + range.at, range.size));
      targets.push_back(std::make_unique<Registration>(*this, link.recv_comm, target.data() + range.at, range.size));
    }
    std::shuffle(order.begin(), order.end(), random);
    for (std::size_t next = 0; next < order.size(); ++next) {
      for (std::size_t i = next; i < order.size(); ++i) {
        const Range& range = kRanges[order[i]];
        const std::size_t size = std::min<std::size_t>(range.size, 60);
        send_between(link, source, range.at + range.size - size, sources[order[i]]->get(), target, range.at,
                     targets[order[i]]->get(), size);
      }
      sources[order[next]].reset();
      targets[order[next]].reset();
    }
  }
}

TEST_P(Registrations, SameMemoryOnManyComms_IsUsable) {
  Memory source(10'000);
  Memory target(10'000);
  std::vector<TestConnection> links;
  std::vector<std::unique_ptr<Registration>> mrs;
  for (int i = 0; i < 4; ++i) {
    links.push_back(link());
    ASSERT_TRUE(links.back());
    mrs.push_back(std::make_unique<Registration>(*this, links.back().send_comm, source.data(), source.size()));
    mrs.push_back(std::make_unique<Registration>(*this, links.back().recv_comm, target.data(), target.size()));
  }
  // The first two are deregistered first. The others must still be usable.
  for (std::size_t first = 0; first < links.size(); ++first) {
    for (std::size_t i = first; i < links.size(); ++i) {
      send_between(links[i], source, 10 * i, mrs[2 * i]->get(), target, 100 * i, mrs[2 * i + 1]->get(), 3000);
    }
    mrs[2 * first].reset();
    mrs[2 * first + 1].reset();
    links[first].close_send();
    links[first].close_recv();
  }
}

// A new buffer at the address of an old buffer: the old registration must not be used for it.
TEST_P(Registrations, AddressReused_IsRegisteredAnew) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  for (int i = 0; i < repetitions(50); ++i) {
    Memory source(30'000 + static_cast<std::size_t>(i) * 100);
    Memory target(30'000 + static_cast<std::size_t>(i) * 100);
    const Registration source_mr(*this, link.send_comm, source.data(), source.size());
    const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
    send_between(link, source, 0, source_mr.get(), target, 0, target_mr.get(), source.size());
  }
}

TEST_P(Registrations, UnknownPointerType_IsRejected) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  Memory memory(100);
  for (const int type : {0, 3, 8, -1}) {
    void* mhandle = nullptr;
    EXPECT_NE(net().reg_mr(link.send_comm, memory.data(), memory.size(), type, &mhandle), nccl::Result::kSuccess)
        << type;
    EXPECT_EQ(mhandle, nullptr);
  }
  take_warnings();
}

TEST_P(Registrations, DmaBufWithoutFd_IsRejected) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  if (!net().has_reg_mr_dmabuf()) GTEST_SKIP() << "no regMrDmaBuf";
  Memory memory(100);
  void* mhandle = nullptr;
  EXPECT_NE(net().reg_mr_dmabuf(link.recv_comm, memory.data(), memory.size(), nccl::kPtrCuda, 0, -1, &mhandle),
            nccl::Result::kSuccess);
  EXPECT_EQ(mhandle, nullptr);
  take_warnings();
  exchange_one(link, 100);
  take_warnings();
}

// NCCL registers user buffers from its service thread while its progress thread uses the same comm.
TEST_P(Registrations, RegistrationDuringTraffic_Works) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  constexpr std::size_t kArena = 256 * 1024;
  Memory source(kArena);
  Memory target(kArena);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
  std::atomic<bool> stop{false};
  std::atomic<int> registrations{0};
  std::thread other([&] {
    std::mt19937 random(11);
    struct Held {
      void* comm;
      void* mhandle;
    };
    std::vector<Held> held;
    while (!stop) {
      const bool sender = random() % 2 == 0;
      void* const comm = sender ? link.send_comm : link.recv_comm;
      Memory& memory = sender ? source : target;
      const std::size_t at = random() % (kArena - 1);
      const std::size_t size = 1 + random() % (kArena - at);
      void* mhandle = nullptr;
      EXPECT_OK(
          net().reg_mr(comm, memory.data() + at, size, random() % 4 == 0 ? nccl::kPtrCuda : nccl::kPtrHost, &mhandle));
      held.push_back({comm, mhandle});
      ++registrations;
      if (held.size() > 8) {
        std::swap(held[random() % held.size()], held.back());
        EXPECT_OK(net().dereg_mr(held.back().comm, held.back().mhandle));
        held.pop_back();
      }
      if (registrations % 16 == 0) std::this_thread::yield();
    }
    for (const Held& one : held) EXPECT_OK(net().dereg_mr(one.comm, one.mhandle));
  });
  const auto end = Clock::now() + 250ms;
  while ((Clock::now() < end || registrations < 50) && !HasFailure()) {
    Traffic traffic(net());
    for (std::size_t i = 0; i < 16; ++i) {
      const std::size_t at = i * 16'000;
      source.write(at, 15'000, ++seed_);
      target.expect(at, 15'000, seed_);
      traffic.recv(link.recv_comm, {{target.data() + at, 15'000, 0, target_mr.get()}});
      traffic.send(link.send_comm, {source.data() + at, 15'000, 0, source_mr.get()});
    }
    EXPECT_TRUE(traffic.run());
    EXPECT_TRUE(target.intact());
  }
  stop = true;
  other.join();
  EXPECT_TRUE(source.intact());
}

// A test without a GPU: host memory that is registered as GPU memory uses the same code in iflush.
TEST_P(Registrations, FlushAfterReceives_Completes) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  const std::size_t n = max_recvs();
  Memory source(8192);
  Memory target(8192 * n);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size(), nccl::kPtrCuda);
  for (int round = 0; round < 10; ++round) {
    std::vector<Part> parts;
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t size = (i + static_cast<std::size_t>(round)) % 3 == 0 ? 0 : 4000 + i;
      send_between(link, source, i, source_mr.get(), target, 8192 * i, target_mr.get(), size);
      parts.push_back({target.data() + 8192 * i, size, 0, target_mr.get()});
    }
    flush(link, parts);
    EXPECT_TRUE(target.intact());
  }
}

TEST_P(Registrations, FlushOfNothing_Succeeds) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  Memory target(100);
  const Registration mr(*this, link.recv_comm, target.data(), target.size(), nccl::kPtrCuda);
  flush(link, {{target.data(), 0, 0, mr.get()}});
  flush(link, std::vector<Part>(max_recvs(), {target.data(), 0, 0, mr.get()}));
  // Host memory needs no flush, but iflush for it is not an error.
  const Registration host_mr(*this, link.recv_comm, target.data(), target.size());
  flush(link, {{target.data(), 50, 0, host_mr.get()}});
  EXPECT_TRUE(target.intact());
}

// Outstanding flushes during receives, as many as NCCL has steps.
TEST_P(Registrations, FlushesDuringTraffic_Complete) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  constexpr std::size_t kBytes = 2000;
  constexpr std::size_t kMessages = 100;
  Memory source(kBytes * kMessages);
  Memory target(kBytes * kMessages);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size(), nccl::kPtrCuda);
  Traffic traffic(net());
  std::vector<const Operation*> recvs;
  for (std::size_t i = 0; i < kMessages; ++i) {
    source.write(i * kBytes, kBytes, i);
    target.expect(i * kBytes, kBytes, i);
    recvs.push_back(&traffic.recv(link.recv_comm, {{target.data() + i * kBytes, kBytes, 0, target_mr.get()}}));
    traffic.send(link.send_comm, {source.data() + i * kBytes, kBytes, 0, source_mr.get()});
  }
  std::vector<void*> flushes;
  std::size_t flushed = 0;
  ASSERT_TRUE(eventually([&] {
    if (traffic.open() > 0 && !traffic.step()) return true;
    if (flushed < kMessages && recvs[flushed]->done && flushes.size() < 8) {
      void* data = target.data() + flushed * kBytes;
      int size = kBytes;
      void* mhandle = target_mr.get();
      void* request = nullptr;
      EXPECT_OK(net().iflush(link.recv_comm, 1, &data, &size, &mhandle, &request));
      if (request != nullptr) flushes.push_back(request);
      ++flushed;
    }
    std::erase_if(flushes, [&](void* request) {
      int done = 0;
      EXPECT_OK(net().test(request, &done, nullptr));
      return done != 0;
    });
    return HasFailure() || (flushed == kMessages && flushes.empty() && traffic.open() == 0);
  }));
  EXPECT_EQ(flushed, kMessages);
  EXPECT_TRUE(target.intact());
}

}  // namespace
}  // namespace conformance
