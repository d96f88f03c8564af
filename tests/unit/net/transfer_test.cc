// Send and receive comms against each other, below the ABI.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <string>
#include <string_view>

#include "connected_comms.h"
#include "support/available_memory.h"

namespace verbatim {
namespace {

class TransferTest : public ::testing::Test {
 protected:
  void TearDown() override {
    for (const char* name : {"VERBATIM_QPS_PER_CONNECTION", "VERBATIM_SPLIT_DATA_ON_QPS", "VERBATIM_ADAPTIVE_ROUTING",
                             "VERBATIM_MAX_RECVS", "VERBATIM_COMPLETION", "VERBATIM_GDR_FLUSH_DISABLE"}) {
      ::unsetenv(name);
    }
  }

  // One message of `bytes` into a buffer of `capacity`, checked with the guards around it.
  static void exchange(ConnectedComms& link, std::size_t bytes, std::size_t capacity, std::uint64_t seed) {
    constexpr std::size_t kGuardBytes = 64;
    std::vector<std::uint8_t> source = pattern(bytes + 1, seed);
    std::vector<std::uint8_t> target(capacity + 2 * kGuardBytes, 0xee);
    const auto send_memory = link.reg(link.send(), source);
    const auto recv_memory = link.reg(link.recv(), target);
    const RecvBuffer buffer{target.data() + kGuardBytes, capacity, 7, recv_memory.get()};
    Request* receive = link.posted([&] { return link.irecv({&buffer, 1}); });
    Request* send = link.posted([&] { return link.isend(source.data(), bytes, 7, *send_memory); });
    ASSERT_TRUE(link.wait(send));
    ASSERT_TRUE(link.wait(receive));
    EXPECT_EQ(link.is_completed(receive)[0], static_cast<int>(bytes));
    EXPECT_EQ(link.is_completed(send)[0], static_cast<int>(bytes));
    EXPECT_EQ(std::memcmp(target.data() + kGuardBytes, source.data(), bytes), 0);
    for (std::size_t i = 0; i < kGuardBytes; ++i) ASSERT_EQ(target[i], 0xee) << i;
    for (std::size_t i = kGuardBytes + bytes; i < target.size(); ++i) ASSERT_EQ(target[i], 0xee) << i;
  }
};

TEST_F(TransferTest, EverySizeAndQpCount_ArrivesWhole) {
  for (const char* qps : {"1", "2", "3", "8"}) {
    for (const char* split : {"0", "1"}) {
      for (const char* adaptive : {"0", "1", "atomic"}) {
        const bool atomic = std::string_view(adaptive) == "atomic";
        ::setenv("VERBATIM_COMPLETION", atomic ? "atomic" : "imm", 1);
        if (atomic) adaptive = "auto";
        ::setenv("VERBATIM_QPS_PER_CONNECTION", qps, 1);
        ::setenv("VERBATIM_SPLIT_DATA_ON_QPS", split, 1);
        ::setenv("VERBATIM_ADAPTIVE_ROUTING", adaptive, 1);
        ConnectedComms link;
        ASSERT_NO_FATAL_FAILURE(link.connect());
        std::uint64_t seed = 0;
        for (const std::size_t bytes : {0UL, 1UL, 127UL, 128UL, 129UL, 8192UL, 8193UL, 300001UL}) {
          // In 8192 bytes a message of 128 is less than a unit: its signal carries all of the first stripe.
          for (const std::size_t capacity : {bytes, bytes + 1, bytes + 77, 2 * bytes, std::max(bytes, 8192UL)}) {
            ASSERT_NO_FATAL_FAILURE(exchange(link, bytes, capacity, ++seed))
                << qps << split << adaptive << " " << bytes << " " << capacity;
          }
        }
      }
    }
  }
}

// Whether the size of a message comes with its signal, or is written into the completion record before it.
TEST_F(TransferTest, SingleMessage_WritesNoSizeUnlessItsSignalCannotCarryIt) {
  struct Case {
    const char* qps;
    const char* split;
    const char* adaptive;
    std::size_t bytes;
    std::size_t capacity;
    bool is_written;
  };
  constexpr std::size_t kFourMiB = std::size_t{4} << 20;
  for (const Case& tested : {Case{"1", "0", "1", 8193, 8194, false}, Case{"1", "0", "1", 300'001, 300'078, false},
                             Case{"1", "0", "1", 65'536, 131'072, false}, Case{"1", "0", "0", 20'000, kFourMiB, false},
                             Case{"2", "1", "0", 300'001, 300'078, false}, Case{"2", "1", "1", 300'001, 300'078, false},
                             // The signal would carry more than the threshold of adaptive routing,
                             Case{"1", "0", "1", 20'000, kFourMiB, true}, Case{"2", "1", "1", 300'001, kFourMiB, true},
                             // or more than the first stripe has.
                             Case{"8", "1", "0", 8193, kFourMiB, true}}) {
    SCOPED_TRACE(std::to_string(tested.bytes) + " of " + std::to_string(tested.capacity) + ", QPs " + tested.qps +
                 ", adaptive routing " + tested.adaptive);
    ::setenv("VERBATIM_QPS_PER_CONNECTION", tested.qps, 1);
    ::setenv("VERBATIM_SPLIT_DATA_ON_QPS", tested.split, 1);
    ::setenv("VERBATIM_ADAPTIVE_ROUTING", tested.adaptive, 1);
    ConnectedComms link;
    ASSERT_NO_FATAL_FAILURE(link.connect());
    auto& record = *reinterpret_cast<wire::CompletionRecord*>(link.send().endpoint().remote().control_address);
    constexpr std::uint64_t kUntouched = 0xfeed;
    record.size[0] = kUntouched;
    ASSERT_NO_FATAL_FAILURE(exchange(link, tested.bytes, tested.capacity, 1));
    EXPECT_EQ(record.size[0], tested.is_written ? tested.bytes : kUntouched);
  }
}

// Beyond what 32 bits count. The source is one window of memory seen many times over, whose size divides no piece, so
// that a piece at a wrong place is seen.
TEST_F(TransferTest, MessageAboveFourGibibytes_ArrivesWhole) {
  const char* engine = ::getenv("SOFTVERBS_ENGINE");
  if (engine == nullptr || std::string_view(engine) != "inline")
    GTEST_SKIP() << "once is enough: with the inline engine";
  constexpr std::size_t kWindowBytes = (std::size_t{64} << 20) + 4096;
  constexpr std::size_t kWindows = 65;
  constexpr std::size_t kBytes = (std::size_t{1} << 32) + 12345;
  static_assert(kBytes < kWindows * kWindowBytes);
  if (test::available_memory() < kBytes + (std::size_t{1} << 30)) GTEST_SKIP() << "less than 5 GiB are available";
  const UniqueFd window(::memfd_create("window", 0));
  ASSERT_EQ(::ftruncate(window.get(), kWindowBytes), 0);
  const auto map = [](void* at, std::size_t bytes, int flags, int fd) {
    return static_cast<std::uint8_t*>(::mmap(at, bytes, PROT_READ | PROT_WRITE, flags, fd, 0));
  };
  std::uint8_t* source = map(nullptr, kWindows * kWindowBytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
  std::uint8_t* target = map(nullptr, kBytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
  ASSERT_NE(source, MAP_FAILED);
  ASSERT_NE(target, MAP_FAILED);
  ::madvise(target, kBytes, MADV_HUGEPAGE);
  for (std::size_t i = 0; i < kWindows; ++i) {
    ASSERT_NE(map(source + i * kWindowBytes, kWindowBytes, MAP_SHARED | MAP_FIXED, window.get()), MAP_FAILED);
  }
  const std::vector<std::uint8_t> content = pattern(kWindowBytes, 5);
  std::memcpy(source, content.data(), kWindowBytes);
  {
    ConnectedComms link;
    ASSERT_NO_FATAL_FAILURE(link.connect());
    const auto send_memory = link.send().register_memory({.address = source, .bytes = kWindows * kWindowBytes});
    const auto recv_memory = link.recv().register_memory({.address = target, .bytes = kBytes});
    ASSERT_TRUE(send_memory);
    ASSERT_TRUE(recv_memory);
    const RecvBuffer buffer{target, kBytes, 0, recv_memory->get()};
    Request* receive = link.posted([&] { return link.irecv({&buffer, 1}); });
    Request* send = link.posted([&] { return link.isend(source, kBytes - 1, 0, **send_memory); });
    ASSERT_TRUE(link.wait(send));
    ASSERT_TRUE(link.wait(receive));
    EXPECT_EQ(link.is_completed(receive)[0], INT_MAX);  // all that the interface can say
    EXPECT_EQ(link.is_completed(send)[0], INT_MAX);
  }
  for (std::size_t at = 0; at < kBytes - 1; at += kWindowBytes) {
    ASSERT_EQ(std::memcmp(target + at, content.data(), std::min(kWindowBytes, kBytes - 1 - at)), 0) << at;
  }
  EXPECT_EQ(target[kBytes - 1], 0);
  ::munmap(source, kWindows * kWindowBytes);
  ::munmap(target, kBytes);
}

TEST_F(TransferTest, ManyRingPasses_ArriveWhole) {
  ConnectedComms link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  for (std::uint64_t i = 0; i < 3 * wire::kMaxInFlight; ++i) ASSERT_NO_FATAL_FAILURE(exchange(link, i % 97, 100, i));
}

TEST_F(TransferTest, ReceivesBeyondMaxInFlight_AreNotAccepted) {
  ConnectedComms link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  Buffers<std::uint64_t> ends(link, wire::kMaxInFlight + 1);
  std::vector<Request*> receives;
  for (std::uint32_t i = 0; i < wire::kMaxInFlight; ++i) {
    ends.source[i] = 1000 + i;
    const RecvBuffer buffer{&ends.target[i], 8, 0, ends.recv_memory.get()};
    receives.push_back(link.posted([&] { return link.irecv({&buffer, 1}); }));
  }
  const RecvBuffer one_more{&ends.target.back(), 8, 0, ends.recv_memory.get()};
  EXPECT_EQ(link.irecv({&one_more, 1}), nullptr);
  EXPECT_EQ(link.recv().error(), nullptr);

  std::vector<Request*> sends;
  for (std::uint32_t i = 0; i < wire::kMaxInFlight; ++i) {
    sends.push_back(link.posted([&] { return link.isend(&ends.source[i], 8, 0, *ends.send_memory); }));
  }
  for (std::uint32_t i = 0; i < wire::kMaxInFlight; ++i) {
    ASSERT_TRUE(link.wait(receives[i]));
    ASSERT_TRUE(link.wait(sends[i]));
    EXPECT_EQ(ends.target[i], 1000 + i);
    link.is_completed(receives[i]);
    link.is_completed(sends[i]);
  }
  EXPECT_NE(link.irecv({&one_more, 1}), nullptr);
}

TEST_F(TransferTest, GroupMembers_MatchByTag) {
  ConnectedComms link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  Buffers<std::uint32_t> ends(link, 1 << 16);
  std::uint32_t round = 0;
  for (std::uint32_t size = 1; size <= wire::kMaxGroup; ++size) {
    for (std::uint32_t shift = 0; shift < size; ++shift, ++round) {
      std::vector<RecvBuffer> buffers;
      for (std::uint32_t i = 0; i < size; ++i) {
        ends.target[i * 8] = 0;
        buffers.push_back({&ends.target[i * 8], 32, static_cast<int>(100 + i), ends.recv_memory.get()});
      }
      Request* receive = link.posted([&] { return link.irecv(buffers); });
      std::vector<Request*> sends;
      for (std::uint32_t i = 0; i < size; ++i) {
        const std::uint32_t member = (i + shift) % size;
        ends.source[member * 8] = round * 16 + member + 1;
        const std::size_t bytes = member % 3 == 2 ? 0 : 4 * (1 + member % 8);  // short, empty and full ones
        const int tag = static_cast<int>(100 + member);
        sends.push_back(
            link.posted([&] { return link.isend(&ends.source[member * 8], bytes, tag, *ends.send_memory); }));
        ASSERT_NE(sends.back(), nullptr);
      }
      ASSERT_TRUE(link.wait(receive));
      for (Request* send : sends) {
        ASSERT_TRUE(link.wait(send));
        link.is_completed(send);
      }
      const auto sizes = link.is_completed(receive);
      for (std::uint32_t member = 0; member < size; ++member) {
        const bool empty = member % 3 == 2;
        EXPECT_EQ(sizes[member], empty ? 0 : static_cast<int>(4 * (1 + member % 8)));
        EXPECT_EQ(ends.target[member * 8], empty ? 0 : round * 16 + member + 1);
      }
    }
  }
}

// A receive whose completion NCCL does not want is done at once, and its data comes all the same.
TEST_F(TransferTest, OptionalReceives_CompleteAtOnce) {
  for (const char* completion : {"imm", "atomic"}) {
    for (const char* qps : {"1", "4"}) {
      ::setenv("VERBATIM_COMPLETION", completion, 1);
      ::setenv("VERBATIM_QPS_PER_CONNECTION", qps, 1);
      ::setenv("VERBATIM_SPLIT_DATA_ON_QPS", "1", 1);
      ConnectedComms link;
      ASSERT_NO_FATAL_FAILURE(link.connect());
      Buffers<std::uint64_t> buffers(link, 1);
      for (std::uint64_t i = 1; i <= 5 * wire::kMaxInFlight; ++i) {
        // Most are optional, in runs of every length; the others wait for their data.
        const bool optional = i % 11 != 0;
        Request* receive = link.posted([&] { return buffers.irecv(8, 7, optional); });
        ASSERT_NE(receive, nullptr) << i;
        if (optional) {
          ASSERT_EQ(receive->state, RequestState::kDone);
          EXPECT_EQ(link.is_completed(receive)[0], 8);
        }
        buffers.source[0] = i;
        Request* send = link.posted([&] { return buffers.isend(8, 7); });
        ASSERT_NE(send, nullptr) << i;
        ASSERT_TRUE(link.wait(send));
        link.is_completed(send);
        if (!optional) {
          ASSERT_TRUE(link.wait(receive)) << i;
          EXPECT_EQ(link.is_completed(receive)[0], 8);
        }
        link.eventually([&] { return __atomic_load_n(buffers.target.data(), __ATOMIC_ACQUIRE) == i; });
        ASSERT_EQ(buffers.target[0], i);
      }
      EXPECT_EQ(link.recv().error(), nullptr);
    }
  }
}

// A caller that posts optional receives as long as it may: no more than a ring of them without a word of the sender.
TEST_F(TransferTest, OptionalReceivesWithoutSender_StopAtFullRing) {
  ConnectedComms link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  Buffers buffers(link, 8);
  std::uint32_t posted = 0;
  const auto end = std::chrono::steady_clock::now() + ConnectedComms::kPatience;
  // A full ring needs the completions of CTS WRITEs; one more would come soon.
  for (int idle = 0; idle < 1000 && std::chrono::steady_clock::now() < end;) {
    Request* receive = buffers.irecv(8, 0, true);
    if (receive == nullptr) {
      link.recv().progress();
      idle += posted < wire::kMaxInFlight ? 0 : 1;
      continue;
    }
    link.is_completed(receive);
    ASSERT_LE(++posted, wire::kMaxInFlight);
  }
  EXPECT_EQ(posted, wire::kMaxInFlight);
  EXPECT_EQ(link.recv().error(), nullptr);
}

TEST_F(TransferTest, SendLargerThanReceive_FailsPermanently) {
  ConnectedComms link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  Buffers buffers(link, 100);
  ASSERT_NE(link.posted([&] { return buffers.irecv(50); }), nullptr);
  ASSERT_TRUE(link.fails(link.send(), [&] { ASSERT_EQ(buffers.isend(51), nullptr); }));
  EXPECT_EQ(link.send().error()->kind, ErrorKind::kUsage);
  EXPECT_EQ(buffers.isend(50), nullptr);
}

// A CTS entry has 48 bits for the size.
TEST_F(TransferTest, ReceiveLargerThanEntryCanSay_IsRejected) {
  ConnectedComms link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  std::vector<std::byte> target(8);
  const auto memory = link.reg(link.recv(), target);
  for (const int members : {1, 2}) {
    void* data[] = {target.data(), target.data()};
    const std::size_t sizes[] = {wire::CtsSize::kMaxBytes + 1, 8};
    const int tags[] = {0, 1};
    void* handles[] = {memory.get(), memory.get()};
    void* request = &target;
    EXPECT_EQ(link.recv().irecv(members, data, sizes, tags, handles, &request), ErrorKind::kArgument);
    EXPECT_EQ(request, nullptr);
  }
  EXPECT_EQ(link.recv().error(), nullptr);
}

TEST_F(TransferTest, WrongRemoteKey_FailsBothEnds) {
  ConnectedComms link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  Buffers buffers(link, 100);
  buffers.recv_memory->rkey[0] ^= 0x00ffff00;
  Request* receive = link.posted([&] { return buffers.irecv(100); });
  Request* send = link.posted([&] { return buffers.isend(100); });
  EXPECT_FALSE(link.wait(send));
  ASSERT_TRUE(link.fails(link.send()));
  EXPECT_EQ(link.send().error()->kind, ErrorKind::kRemote);
  EXPECT_NE(receive->state, RequestState::kDone);
}

TEST_F(TransferTest, DeviceMemoryFlushes_Complete) {
  ConnectedComms link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  std::vector<std::uint8_t> target(100);
  const auto host = link.reg(link.recv(), target);
  EXPECT_EQ(link.recv().iflush(target.data(), *host), nullptr);  // nothing to do
  EXPECT_EQ(link.recv().error(), nullptr);

  const auto device = link.reg(link.recv(), target, MemoryType::kCuda);
  std::vector<Request*> flushes;
  for (std::uint32_t i = 0; i < wire::kMaxInFlight; ++i) {
    flushes.push_back(link.recv().iflush(target.data() + i % 100, *device));
    ASSERT_NE(flushes.back(), nullptr) << i;
  }
  for (Request* flush : flushes) {
    ASSERT_TRUE(link.wait(flush));
    int done = 0;
    EXPECT_EQ(RecvComm::test_flush(*flush, &done), ErrorKind::kNone);
    EXPECT_EQ(done, 1);
  }
  Request* again = link.recv().iflush(target.data(), *device);
  ASSERT_NE(again, nullptr);
  EXPECT_TRUE(link.wait(again));
}

TEST_F(TransferTest, FlushDisabled_NothingIsFlushed) {
  ::setenv("VERBATIM_GDR_FLUSH_DISABLE", "1", 1);
  ConnectedComms link;
  ASSERT_NO_FATAL_FAILURE(link.connect());
  std::vector<std::uint8_t> target(100);
  const auto device = link.reg(link.recv(), target, MemoryType::kCuda);
  const RecvBuffer buffer{target.data(), target.size(), 0, device.get()};
  ASSERT_NE(link.irecv({&buffer, 1}), nullptr);
  EXPECT_EQ(link.recv().iflush(target.data(), *device), nullptr);
  EXPECT_EQ(link.recv().error(), nullptr);
}

}  // namespace
}  // namespace verbatim
