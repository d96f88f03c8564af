// Single messages: all bytes and sizes must be right, and no request may be done early or twice.
#include <string>
#include <thread>

#include "conformance.h"

namespace conformance {
namespace {

constexpr std::size_t KiB = 1024;
constexpr std::size_t MiB = 1024 * KiB;

class Data : public Conformance {};
EVERY_VERSION(Data);

// Sizes that take too long to repeat for each table.
class HeavyData : public Conformance {};
ONE_VERSION(HeavyData, 12);

Group single(std::size_t size, std::size_t capacity, int tag = 0) {
  return {{{size, capacity, tag}}, {}};
}

TEST_P(Data, BoundarySizes_ArriveWhole) {
  TestConnection link = this->link();
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{63}, std::size_t{64}, std::size_t{65},
                                 std::size_t{4095}, std::size_t{4096}, std::size_t{4097}, 128 * KiB, MiB}) {
    SCOPED_TRACE(size);
    exchange_one(link, size);
  }
}

TEST_P(HeavyData, LargestSizes_ArriveWhole) {
  TestConnection link = this->link();
  const std::size_t largest = options().largest;
  exchange_one(link, largest / 16 - 1);
  exchange_one(link, largest);
  exchange_one(link, largest + 1, {.send_offset = 3, .recv_offset = 61});
}

TEST_P(HeavyData, ManyLargeMessages_ArriveWhole) {
  TestConnection link = this->link();
  std::vector<Group> groups;
  for (int i = 0; i < repetitions(24); ++i) {
    const auto nth = static_cast<std::size_t>(i);
    groups.push_back(single(MiB + nth, MiB + 2 * nth, i));
  }
  exchange(link, groups);
}

TEST_P(Data, SendShorterThanReceive_ReportsSentSize) {
  TestConnection link = this->link();
  std::vector<Group> groups;
  for (const std::size_t capacity : {std::size_t{1}, std::size_t{64}, std::size_t{4097}, 256 * KiB}) {
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, capacity / 2, capacity - 1}) {
      if (size <= capacity) groups.push_back(single(size, capacity));
    }
  }
  exchange(link, groups);
}

TEST_P(Data, ManyEmptyMessages_Arrive) {
  TestConnection link = this->link();
  exchange(link, std::vector<Group>(100, single(0, 0)));
  exchange(link, std::vector<Group>(100, single(0, 4 * KiB)));
}

TEST_P(Data, EmptyAndFullMessages_Arrive) {
  TestConnection link = this->link();
  std::vector<Group> groups;
  for (std::size_t i = 0; i < 60; ++i) groups.push_back(single(i % 3 == 0 ? 700 + i : 0, 1000));
  exchange(link, groups);
}

TEST_P(Data, UnalignedAddresses_ArriveWhole) {
  TestConnection link = this->link();
  for (const std::size_t send_offset : {std::size_t{1}, std::size_t{7}, std::size_t{4095}}) {
    for (const std::size_t recv_offset : {std::size_t{0}, std::size_t{3}, std::size_t{63}}) {
      SCOPED_TRACE(std::to_string(send_offset) + " " + std::to_string(recv_offset));
      const Layout layout{.send_offset = send_offset, .recv_offset = recv_offset, .gap = 13};
      exchange(link, {single(65, 65), single(4097, 4099), single(10'001, 10'001)}, layout);
    }
  }
}

TEST_P(Data, AdjacentBuffers_AreNotOverwritten) {
  TestConnection link = this->link();
  std::vector<Group> groups;
  for (std::size_t i = 0; i < 64; ++i) groups.push_back(single(1 + i, 1 + i));
  exchange(link, groups, {.gap = 0});
}

TEST_P(Data, EqualTags_ArriveInPostingOrder) {
  TestConnection link = this->link();
  exchange(link, std::vector<Group>(500, single(48, 48)));
}

TEST_P(Data, AnyTagValue_Matches) {
  TestConnection link = this->link();
  std::vector<Group> groups;
  for (const int tag : {0, 1, 255, 65'536, 0x7fff'ffff, -1, -0x7fff'ffff - 1}) groups.push_back(single(100, 100, tag));
  exchange(link, groups);
}

TEST_P(Data, ReceivePostedLate_ArrivesWhole) {
  TestConnection link = this->link();
  exchange(link, {single(100, 200), single(70'000, 70'000), single(0, 10)}, {.receiver_delay = kQuiet});
}

TEST_P(Data, SendPostedLate_ArrivesWhole) {
  TestConnection link = this->link();
  exchange(link, {single(100, 200), single(70'000, 70'000), single(0, 10)}, {.sender_delay = kQuiet});
}

TEST_P(Data, TestWithoutSizes_Completes) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  Memory source(300);
  Memory target(300);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
  source.write(0, 300, 1);
  target.expect(0, 300, 1);
  Traffic traffic(net());
  traffic.recv(link.recv_comm, {{target.data(), 300, 0, target_mr.get()}}).wants_sizes = false;
  traffic.send(link.send_comm, {source.data(), 300, 0, source_mr.get()}).wants_sizes = false;
  ASSERT_TRUE(traffic.run());
  EXPECT_TRUE(target.intact());
}

// NCCL marks a receive with optional completion by 1 in *request (v9 and later). The plugin must replace this value,
// otherwise NCCL crashes. Such a receive can be done before its data arrives, so the test waits for the data.
TEST_P(Data, OptionalReceiveCompletion_DataArrives) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  constexpr std::size_t kBytes = 1024;
  constexpr std::size_t kMessages = 64;
  Memory source(kBytes * kMessages);
  Memory target(kBytes * kMessages);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
  Traffic traffic(net());
  for (std::size_t i = 0; i < kMessages; ++i) {
    const std::size_t at = i * kBytes;
    source.write(at, kBytes, i);
    target.expect(at, kBytes, i);
    // Mixed with receives without the mark, because NCCL's protocols LL and SIMPLE share a comm.
    Operation& recv = traffic.recv(link.recv_comm, {{target.data() + at, kBytes, 0, target_mr.get()}});
    if (version() >= 9 && i % 3 != 2) recv.preset = nccl::kNetOptionalRecvCompletion;
    traffic.send(link.send_comm, {source.data() + at, kBytes, 0, source_mr.get()});
  }
  ASSERT_TRUE(traffic.run());
  EXPECT_TRUE(eventually([&] { return target.arrived(0, target.size()); }));
  EXPECT_TRUE(target.intact());
}

TEST_P(Data, NoData_ReceiveIsNotDone) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  Memory source(64);
  Memory target(128);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
  Traffic traffic(net());
  const Operation& first = traffic.recv(link.recv_comm, {{target.data(), 64, 0, target_mr.get()}});
  const Operation& second = traffic.recv(link.recv_comm, {{target.data() + 64, 64, 0, target_mr.get()}});
  source.write(0, 64, 9);
  target.expect(0, 64, 9);
  const Operation& send = traffic.send(link.send_comm, {source.data(), 64, 0, source_mr.get()});
  ASSERT_TRUE(traffic.run_for(kQuiet));
  EXPECT_TRUE(eventually([&] { return !traffic.step() || (first.done && send.done); }));
  EXPECT_TRUE(first.done);
  EXPECT_TRUE(send.done);
  EXPECT_FALSE(second.done);
  EXPECT_TRUE(target.intact());
  target.expect(64, 64, 9);
  traffic.send(link.send_comm, {source.data(), 64, 0, source_mr.get()});
  ASSERT_TRUE(traffic.run());
  EXPECT_TRUE(target.intact());
}

// After a send is done, its buffer belongs to the caller again: bytes written there later must not be sent.
TEST_P(Data, SendDone_BufferIsNotReadAgain) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  constexpr std::size_t kBytes = 32 * KiB;
  Memory source(kBytes);
  Memory target(kBytes * 20);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
  Traffic receives(net());
  for (std::size_t i = 0; i < 20; ++i) {
    target.expect(i * kBytes, kBytes, i);
    receives.recv(link.recv_comm, {{target.data() + i * kBytes, kBytes, 0, target_mr.get()}});
  }
  for (std::size_t i = 0; i < 20; ++i) {
    source.write(0, kBytes, i);
    Traffic one(net());
    const Operation& send = one.send(link.send_comm, {source.data(), kBytes, 0, source_mr.get()});
    ASSERT_TRUE(eventually([&] { return !receives.step() || !one.step() || send.done; }));
    ASSERT_TRUE(send.done);
  }
  ASSERT_TRUE(receives.run());
  EXPECT_TRUE(target.intact());
}

TEST_P(Data, BothDirections_ArriveWhole) {
  TestConnection forward = link();
  TestConnection back = link();
  ASSERT_TRUE(forward && back);
  constexpr std::size_t kBytes = 20'000;
  Memory a(2 * kBytes * 8);  // first half sent, second half received
  Memory b(2 * kBytes * 8);
  const Registration a_send(*this, forward.send_comm, a.data(), a.size());
  const Registration a_recv(*this, back.recv_comm, a.data(), a.size());
  const Registration b_send(*this, back.send_comm, b.data(), b.size());
  const Registration b_recv(*this, forward.recv_comm, b.data(), b.size());
  Traffic traffic(net());
  for (std::size_t i = 0; i < 8; ++i) {
    const std::size_t out = i * kBytes;
    const std::size_t in = (8 + i) * kBytes;
    a.write(out, kBytes, i);
    b.expect(in, kBytes, i);
    b.write(out, kBytes, 100 + i);
    a.expect(in, kBytes, 100 + i);
    traffic.send(forward.send_comm, {a.data() + out, kBytes, 0, a_send.get()});
    traffic.send(back.send_comm, {b.data() + out, kBytes, 0, b_send.get()});
    traffic.recv(forward.recv_comm, {{b.data() + in, kBytes, 0, b_recv.get()}});
    traffic.recv(back.recv_comm, {{a.data() + in, kBytes, 0, a_recv.get()}});
  }
  ASSERT_TRUE(traffic.run());
  EXPECT_TRUE(a.intact());
  EXPECT_TRUE(b.intact());
}

// Two ranks in one process: each end of the connection has its own progress thread.
TEST_P(Data, EndsOnTwoThreads_ArriveWhole) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  constexpr std::size_t kBytes = 3000;
  constexpr std::size_t kMessages = 400;
  Memory source(kBytes * kMessages);
  Memory target(kBytes * kMessages);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
  Traffic sends(net());
  Traffic recvs(net());
  for (std::size_t i = 0; i < kMessages; ++i) {
    source.write(i * kBytes, kBytes, i);
    target.expect(i * kBytes, kBytes, i);
    sends.send(link.send_comm, {source.data() + i * kBytes, kBytes, 0, source_mr.get()});
    recvs.recv(link.recv_comm, {{target.data() + i * kBytes, kBytes, 0, target_mr.get()}});
  }
  std::thread receiver([&] { EXPECT_TRUE(recvs.run()); });
  EXPECT_TRUE(sends.run());
  receiver.join();
  EXPECT_TRUE(source.intact());
  EXPECT_TRUE(target.intact());
}

}  // namespace
}  // namespace conformance
