// Messages from and to GPU memory: every byte and the bytes around them, after the flush of each receive.
#include <cstdlib>

#include "gpu_test.h"
#include "nccl/net_v12.h"

namespace gpu_direct {
namespace {

constexpr std::size_t KiB = 1024;
constexpr std::size_t MiB = 1024 * KiB;

class GpuData : public GpuTest {};
TWO_VERSIONS(GpuData);
class GpuProcesses : public GpuTest {};
ONE_VERSION(GpuProcesses, 12);

TEST_P(GpuData, EverySizeInEveryDirection_ArrivesWhole) {
  TestConnection link = this->link();
  const std::vector<std::size_t> sizes = {0,    1,      7,         64,      4095,        4096, 4097,
                                          9001, 65'537, 512 * KiB, MiB + 3, 3 * MiB + 1, 0,    12'345};
  std::vector<std::vector<std::size_t>> groups;
  for (const std::size_t size : sizes) groups.push_back({size});
  const int other = second_gpu();
  for (const How how : ways()) {
    exchange(link, groups, {.from = {0, Kind::kAllocated, how}, .to = {other, Kind::kMapped, how}});
    if (how == How::kDmabufAtOffset) continue;
    std::erase(groups, std::vector<std::size_t>{3 * MiB + 1});  // once is enough
    exchange(link, groups, {.from = {}, .to = {other, Kind::kAllocated, how}, .send_offset = 3, .recv_offset = 61});
    exchange(link, groups, {.from = {0, Kind::kPrivate, how}, .to = {}, .send_offset = 4095, .recv_offset = 1});
    exchange(link, groups,
             {.from = {other, Kind::kMapped, how}, .to = {other, Kind::kPrivate, how}, .recv_offset = 4097});
    if (HasFailure()) return;
  }
}

TEST_P(GpuData, GroupsInSeveralMemories_ArriveWhole) {
  TestConnection link = this->link();
  const std::size_t largest = max_recvs();
  std::vector<std::vector<std::size_t>> groups;
  for (const std::size_t n : {std::size_t{1}, std::size_t{2}, std::size_t{3}, largest}) {
    if (n > largest) continue;
    std::vector<std::size_t> group;
    for (std::size_t i = 0; i < n; ++i) group.push_back(i == 1 ? 0 : 1 + i * i * 5'003 + n * 77);
    groups.push_back(group);
    groups.push_back(std::vector<std::size_t>(n, 40'001));
  }
  const int other = second_gpu();
  for (const How how : {ways().front(), ways().back()}) {
    const Place first{0, Kind::kAllocated, how};
    const Place second{other, Kind::kMapped, how};
    exchange(link, groups, {.from = first, .to = second});
    exchange(link, groups, {.from = second, .to = first, .odd_to = second, .send_offset = 5, .recv_offset = 9});
    exchange(link, groups, {.from = first, .to = second, .odd_to = Place{}});
    exchange(link, groups, {.from = Place{}, .to = Place{}, .odd_to = first});
    if (HasFailure()) return;
  }
}

// As many messages as can be outstanding, each flushed while others arrive.
TEST_P(GpuData, ManyMessagesAtOnce_ArriveWhole) {
  TestConnection link = this->link();
  std::vector<std::vector<std::size_t>> groups;
  for (std::size_t i = 0; i < 120; ++i) groups.push_back({i % 11 == 0 ? 0 : (i * 7'919) % 30'000});
  const How how = ways().back();
  exchange(link, groups, {.from = {0, Kind::kMapped, how}, .to = {second_gpu(), Kind::kAllocated, how}});
  exchange(link, groups, {.from = {0, Kind::kAllocated, how}, .to = {0, Kind::kAllocated, how}});
}

// Such a receive can be done before its data has arrived.
TEST_P(GpuData, OptionalReceiveCompletion_DataArrives) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  constexpr std::size_t kBytes = 3'001;
  constexpr std::size_t kMessages = 48;
  Buffer target({second_gpu(), Kind::kMapped, ways().front()}, kBytes * kMessages, 2);
  Buffer source({0, Kind::kAllocated, ways().front()}, kBytes * kMessages, 1);
  const Registered source_mr(*this, link.send_comm, source);
  const Registered target_mr(*this, link.recv_comm, target);
  Traffic traffic(net());
  for (std::size_t i = 0; i < kMessages; ++i) {
    source.write(i * kBytes, kBytes, i);
    target.expect(i * kBytes, kBytes, i);
    Operation& recv = traffic.recv(link.recv_comm, {{target.data() + i * kBytes, kBytes, 0, target_mr.get()}});
    if (version() >= 9 && i % 3 != 2) recv.preset = nccl::kNetOptionalRecvCompletion;
    traffic.send(link.send_comm, {source.data() + i * kBytes, kBytes, 0, source_mr.get()});
  }
  ASSERT_TRUE(traffic.run());
  EXPECT_TRUE(eventually([&] { return static_cast<bool>(target.intact()); }, std::chrono::seconds(5)));
  EXPECT_TRUE(target.intact());
  EXPECT_TRUE(source.intact());
}

// The flush of GPU memory reads from it; host memory and a receive of nothing need none.
TEST_P(GpuData, Flush_ReadsGpuMemory) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  const How how = ways().front();
  Buffer source({}, 5'000);
  Buffer target({second_gpu(), Kind::kAllocated, how}, 5'000);
  Buffer host({}, 5'000);
  const Registered source_mr(*this, link.send_comm, source);
  const Registered target_mr(*this, link.recv_comm, target);
  const Registered host_mr(*this, link.recv_comm, host);
  exchange_one(link, source, source_mr.get(), target, target_mr.get(), 0, 0, 5'000);
  const auto copies = [] { return cuda().is_standin() ? cuda().standin_cuda_copies() : 0; };
  const auto request_of = [&](Buffer& buffer, int size, void* mhandle) {
    void* data = buffer.data();
    void* request = nullptr;
    EXPECT_OK(net().iflush(link.recv_comm, 1, &data, &size, &mhandle, &request));
    return request;
  };
  const auto before = copies();
  void* const request = request_of(target, 5'000, target_mr.get());
  ASSERT_NE(request, nullptr);
  int done = 0;
  EXPECT_TRUE(eventually([&] {
    EXPECT_OK(net().test(request, &done, nullptr));
    return done != 0 || HasFailure();
  }));
  if (cuda().is_standin()) {
    EXPECT_GT(copies(), before);
  }
  EXPECT_EQ(request_of(target, 0, target_mr.get()), nullptr);
  EXPECT_EQ(request_of(host, 5'000, host_mr.get()), nullptr);
}

TEST_P(GpuData, BesideSpinningKernel_DataArrives) {
  if (!cuda().is_standin()) GTEST_SKIP() << "needs the stand-in for CUDA";
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  constexpr std::size_t kBytes = 300'001;
  for (const How how : ways()) {
    Buffer first({0, Kind::kAllocated, how}, kBytes);
    Buffer second({second_gpu(), Kind::kMapped, how}, kBytes);
    Buffer host({}, kBytes);
    const Registered first_send(*this, link.send_comm, first);
    const Registered host_send(*this, link.send_comm, host);
    const Registered first_recv(*this, link.recv_comm, first);
    const Registered second_recv(*this, link.recv_comm, second);
    const Registered host_recv(*this, link.recv_comm, host);
    const SpinningKernels kernels;
    for (const std::size_t size : {std::size_t{1}, std::size_t{5'000}, kBytes}) {
      exchange_one(link, first, first_send.get(), second, second_recv.get(), 0, 0, size);
      exchange_one(link, first, first_send.get(), host, host_recv.get(), 0, 0, size);
      exchange_one(link, host, host_send.get(), first, first_recv.get(), 0, 0, size);
    }
    EXPECT_LE(kernels.waits(), 1U) << name_of(second.place());
    EXPECT_EQ(kernels.pageable_copies(), 0U) << name_of(second.place());
  }
}

TEST_P(GpuProcesses, MessagesInBothDirections_ArriveWhole) {
  PeerProcess peer(version() == 12 ? 8 : 12);
  TestConnection link = connect_to(peer);
  ASSERT_TRUE(link);
  constexpr std::size_t kBytes = 2 * MiB + 77;
  for (const Kind kind : {Kind::kAllocated, Kind::kMapped, Kind::kPrivate}) {
    for (const How how : ways()) {
      if (how == How::kDmabufAtOffset && kind != Kind::kMapped) continue;
      const Place own{0, kind, how};
      const Place peers{second_gpu(), kind, how};
      SCOPED_TRACE(name_of(own));
      Buffer buffer(own, kBytes, 7);
      const Registered send_mr(*this, link.send_comm, buffer);
      const Registered recv_mr(*this, link.recv_comm, buffer);
      ASSERT_EQ(peer.call({Command::Verb::kAllocate, peers, 13, kBytes}).result, nccl::Result::kSuccess);
      std::size_t at = 0;
      for (const std::size_t size :
           {std::size_t{1}, std::size_t{0}, std::size_t{70'001}, std::size_t{70'001}, kBytes}) {
        at = size == kBytes ? 0 : at;
        buffer.write(at, size, ++seed_);
        peer.ask({Command::Verb::kReceive, {}, at, size, seed_});
        EXPECT_OK(post_and_wait(net(), link.send_comm, true, {buffer.data() + at, size, 0, send_mr.get()}, nullptr));
        const Answer received = peer.answer();
        EXPECT_EQ(received.result, nccl::Result::kSuccess);
        EXPECT_TRUE(received.intact) << size << " bytes at the peer: " << received.text;

        peer.ask({Command::Verb::kSend, {}, at, size, ++seed_});
        const Part part{buffer.data() + at, size, 0, recv_mr.get()};
        buffer.expect(at, size, seed_);
        EXPECT_OK(post_and_wait(net(), link.recv_comm, false, part, nullptr));
        EXPECT_OK(flush_and_wait(net(), link.recv_comm, part));
        const Answer sent = peer.answer();
        EXPECT_EQ(sent.result, nccl::Result::kSuccess);
        EXPECT_TRUE(sent.intact);
        EXPECT_TRUE(buffer.intact()) << size << " bytes";
        at += size + 1'000;
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(GpuProcesses, BesideSpinningKernels_DataArrives) {
  if (!cuda().is_standin()) GTEST_SKIP() << "needs the stand-in for CUDA";
  PeerProcess peer(version());
  TestConnection link = connect_to(peer);
  ASSERT_TRUE(link);
  constexpr std::size_t kBytes = 300'001;
  const Place own{0, Kind::kAllocated, ways().front()};
  Buffer buffer(own, kBytes);
  const Registered send_mr(*this, link.send_comm, buffer);
  const Registered recv_mr(*this, link.recv_comm, buffer);
  ASSERT_EQ(peer.call({Command::Verb::kAllocate, own, 0, kBytes}).result, nccl::Result::kSuccess);
  peer.call({Command::Verb::kBeginKernel});
  {
    const SpinningKernels kernels;
    for (int round = 0; round < 4; ++round) {
      buffer.write(0, kBytes, ++seed_);
      peer.ask({Command::Verb::kReceive, {}, 0, kBytes, seed_});
      EXPECT_OK(post_and_wait(net(), link.send_comm, true, {buffer.data(), kBytes, 0, send_mr.get()}, nullptr));
      const Answer received = peer.answer();
      EXPECT_EQ(received.result, nccl::Result::kSuccess);
      EXPECT_TRUE(received.intact) << received.text;
    }
  }
  EXPECT_LE(peer.call({Command::Verb::kEndKernel}).waits, 1U);
}

}  // namespace
}  // namespace gpu_direct
