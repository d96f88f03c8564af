// Puts, signals, gets and flushes: every byte and every value, in every context, also to oneself.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "ranks.h"
#include "support/shows.h"

namespace rma_test {
namespace {

constexpr int kRanks = 3;
constexpr int kContexts = 2;
constexpr std::size_t kPart = 310'000;  // of a sender and a context, in the target

std::uint8_t content(std::uint32_t from, std::uint32_t to, int context, std::size_t position) {
  const std::size_t ends = std::size_t{from} * 7 + std::size_t{to} * 13;
  return static_cast<std::uint8_t>(position * 31 + ends + static_cast<std::size_t>(context) * 17 + 1);
}

class RmaData : public ::testing::TestWithParam<int> {
 protected:
  Ranks ranks_{kRanks, GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Rma, RmaData, ::testing::Values(13, 14),
                         [](const auto& param) { return "v" + std::to_string(param.param); });

// Each rank has a part of the target for each sender and context, with guards between the parts.
TEST_P(RmaData, PutsOfManySizesAndOffsets_ArriveWholeAndNowhereElse) {
  const std::vector<std::size_t> sizes = {1, 2, 7, 8, 63, 64, 4095, 4096, 4097, 65'537, 300'001};
  constexpr std::size_t kOffset = 13;
  ranks_.run_connected({.contexts = kContexts}, [&](Rank& rank) {
    const std::size_t bytes = std::size_t{kRanks} * kContexts * kPart;
    std::vector<std::uint8_t> source(bytes);
    std::vector<std::uint8_t> target(bytes);
    void* const from = rank.register_memory(source.data(), bytes);
    void* const to = rank.register_memory(target.data(), bytes);
    const auto own = static_cast<std::uint32_t>(rank.number());
    const auto part = [](std::uint32_t peer, int context) -> std::size_t {
      return (std::size_t{peer} * kContexts + static_cast<std::size_t>(context)) * kPart;
    };
    for (const std::size_t size : sizes) {
      std::fill(target.begin(), target.end(), std::uint8_t{0});
      rank.barrier();
      std::vector<void*> requests;
      for (std::uint32_t peer = 0; peer < kRanks; ++peer) {
        for (int context = 0; context < kContexts; ++context) {
          const std::size_t at = part(peer, context) + kOffset;
          for (std::size_t i = 0; i < size; ++i) source[at + i] = content(own, peer, context, i);
          const RmaPart place{to, part(own, context) + 2 * kOffset};
          requests.push_back(rank.put(context, {from, at}, size, place, peer));
        }
      }
      for (void* request : requests) EXPECT_TRUE(rank.wait_ok(request));
      rank.barrier();
      std::vector<std::uint8_t> expected(bytes);
      for (std::uint32_t peer = 0; peer < kRanks; ++peer) {
        for (int context = 0; context < kContexts; ++context) {
          for (std::size_t i = 0; i < size; ++i) {
            expected[part(peer, context) + 2 * kOffset + i] = content(peer, own, context, i);
          }
        }
      }
      // No signal comes behind these puts, so nothing but the bytes says that they are visible.
      EXPECT_TRUE(rank.eventually([&] { return verbatim::test::shows(target, expected); }))
          << "rank " << own << ", " << size << " bytes";
      rank.barrier();
    }
    EXPECT_OK(rank.net().dereg_mr(rank.coll, from));
    EXPECT_OK(rank.net().dereg_mr(rank.coll, to));
  });
}

TEST_P(RmaData, Signals_AddAndIncrement) {
  ranks_.run_connected({.contexts = kContexts}, [&](Rank& rank) {
    Words words(std::size_t{2} * kRanks);
    void* const memory = rank.register_memory(words.data(), words.bytes(), nccl::kMrForceStrictOrdering);
    const auto own = static_cast<std::uint64_t>(rank.number());
    constexpr std::uint64_t kLarge = 0x1'0000'0001;
    for (std::uint32_t peer = 0; peer < kRanks; ++peer) {
      for (int context = 0; context < kContexts; ++context) {
        RmaSignal signal{.word = {memory, 16 * own}, .value = kLarge, .operation = nccl::kSignalAdd};
        EXPECT_TRUE(rank.wait_ok(rank.put_signal(context, {}, 0, {}, peer, signal)));
        signal.word.offset += 8;
        signal.operation = nccl::kSignalIncrement;  // the value has no meaning
        EXPECT_TRUE(rank.wait_ok(rank.put_signal(context, {}, 0, {}, peer, signal)));
      }
    }
    rank.barrier();
    for (std::size_t peer = 0; peer < kRanks; ++peer) {
      EXPECT_EQ(words[2 * peer], kContexts * kLarge) << "from rank " << peer;
      EXPECT_EQ(words[2 * peer + 1], kContexts) << "from rank " << peer;
    }
  });
}

// The receiver waits for the signal only: all puts of the context must be there, not only that of the signal.
TEST_P(RmaData, StrongSignalAfterManyPuts_FindsAllOfThemArrived) {
  constexpr int kPuts = 40;
  constexpr std::size_t kBytes = 9000;
  constexpr int kRounds = 20;
  ranks_.run_connected({.contexts = 1}, [&](Rank& rank) {
    std::vector<std::uint8_t> source(kPuts * kBytes);
    std::vector<std::uint8_t> target(kPuts * kBytes);
    Words word(1);
    void* const from = rank.register_memory(source.data(), source.size());
    void* const to = rank.register_memory(target.data(), target.size());
    void* const signals = rank.register_memory(word.data(), word.bytes(), nccl::kMrForceStrictOrdering);
    for (int round = 1; round <= kRounds; ++round) {
      std::memset(source.data(), round, source.size());
      rank.barrier();
      std::vector<void*> requests;
      for (std::size_t i = 0; i + 1 < kPuts; ++i) {
        requests.push_back(rank.put(0, {from, i * kBytes}, kBytes, {to, i * kBytes}, rank.next()));
      }
      const std::size_t last = (kPuts - 1) * kBytes;
      const RmaSignal signal{.word = {signals, 0}, .operation = nccl::kSignalIncrement, .strong = true};
      requests.push_back(rank.put_signal(0, {from, last}, kBytes, {to, last}, rank.next(), signal));
      EXPECT_TRUE(rank.wait_for(word[0], static_cast<std::uint64_t>(round)));
      EXPECT_EQ(std::count(target.begin(), target.end(), static_cast<std::uint8_t>(round)),
                static_cast<std::ptrdiff_t>(target.size()));
      for (void* request : requests) EXPECT_TRUE(rank.wait_ok(request));
    }
    rank.barrier();
  });
}

TEST_P(RmaData, Gets_ReadThePeersBytes) {
  constexpr std::size_t kBytes = 100'000;
  ranks_.run_connected({.contexts = kContexts}, [&](Rank& rank) {
    std::vector<std::uint8_t> source(kBytes);
    const auto own = static_cast<std::uint32_t>(rank.number());
    for (std::size_t i = 0; i < kBytes; ++i) source[i] = content(own, 0, 0, i);
    std::vector<std::uint8_t> target(kBytes);
    void* const from = rank.register_memory(source.data(), kBytes);
    void* const to = rank.register_memory(target.data(), kBytes);
    for (std::uint32_t peer = 0; peer < kRanks; ++peer) {
      std::fill(target.begin(), target.end(), std::uint8_t{0});
      EXPECT_TRUE(rank.wait_ok(rank.get(kContexts - 1, {from, 5}, kBytes - 5, {to, 3}, peer)));
      for (std::size_t i = 0; i + 5 < kBytes; ++i) {
        ASSERT_EQ(target[i + 3], content(peer, 0, 0, i + 5)) << "byte " << i << " from rank " << peer;
      }
      EXPECT_EQ(target[0] + target[1] + target[2] + target[kBytes - 1] + target[kBytes - 2], 0);
    }
    rank.barrier();
  });
}

// As many puts as may be outstanding for each context and peer, each at its place, before the first test.
TEST_P(RmaData, RequestsAtTheLimit_AllComplete) {
  nccl::v12::NetProperties properties{};
  ranks_.run_connected({.contexts = kContexts}, [&](Rank& rank) {
    if (rank.number() == 0) {
      EXPECT_OK(rank.net().properties(0, &properties));
    }
    rank.barrier();
    const auto limit = std::size_t{nccl::kNetMaxRequests} * static_cast<std::size_t>(properties.maxRecvs);
    const auto own = static_cast<std::size_t>(rank.number());
    Words source(limit);
    Words target(std::size_t{kRanks} * kContexts * limit);
    Words word(1);
    for (std::size_t i = 0; i < limit; ++i) source[i] = 1000 * own + i + 1;
    void* const from = rank.register_memory(source.data(), source.bytes());
    void* const to = rank.register_memory(target.data(), target.bytes());
    void* const signals = rank.register_memory(word.data(), word.bytes(), nccl::kMrForceStrictOrdering);
    const RmaSignal signal{.word = {signals, 0}, .operation = nccl::kSignalIncrement};
    std::vector<void*> requests;
    for (std::size_t i = 0; i < limit; ++i) {
      for (std::uint32_t peer = 0; peer < kRanks; ++peer) {
        for (int context = 0; context < kContexts; ++context) {
          const std::size_t at = (own * kContexts + static_cast<std::size_t>(context)) * limit + i;
          requests.push_back(rank.put_signal(context, {from, 8 * i}, 8, {to, 8 * at}, peer, signal));
        }
      }
    }
    for (void* request : requests) ASSERT_TRUE(rank.wait_ok(request));
    rank.barrier();
    EXPECT_EQ(word[0], std::size_t{kRanks} * kContexts * limit);
    for (std::size_t peer = 0; peer < kRanks; ++peer) {
      for (std::size_t i = 0; i < kContexts * limit; ++i) {
        ASSERT_EQ(target[peer * kContexts * limit + i], 1000 * peer + i % limit + 1);
      }
    }
    rank.barrier();
  });
}

// Puts wait for one another to share a doorbell, but not longer than until the next test, whatever that tests: NCCL's
// flush tests nothing but its own request.
TEST_P(RmaData, TestOfAnyRequest_PostsAllEarlierCalls) {
  ranks_.run_connected({}, [&](Rank& rank) {
    Words words(8);
    void* const memory = rank.register_memory(words.data(), words.bytes(), nccl::kMrForceStrictOrdering);
    void* const earlier = rank.put(0, {memory, 0}, 8, {memory, 8}, rank.next());
    EXPECT_TRUE(rank.wait_ok(rank.put(0, {memory, 0}, 8, {memory, 16}, rank.next())));  // so `earlier` is done too
    const RmaSignal signal{.word = {memory, 32}, .operation = nccl::kSignalIncrement};
    void* const signalled = rank.put_signal(0, {memory, 0}, 8, {memory, 24}, rank.next(), signal);
    int done = 0;
    EXPECT_OK(rank.net().test(rank.coll, earlier, &done));
    EXPECT_EQ(done, 1);
    rank.barrier();
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (__atomic_load_n(&words[4], __ATOMIC_ACQUIRE) == 0 && std::chrono::steady_clock::now() < limit) {
      std::this_thread::yield();
    }
    EXPECT_EQ(words[4], 1U);
    rank.barrier();
    EXPECT_TRUE(rank.wait_ok(signalled));
  });
}

// NCCL destroys the contexts when its kernel has ended, which does not wait for its last signals to the peers: a peer
// may wait for them.
TEST_P(RmaData, DestroyedContexts_FinishWhatNobodyHasTested) {
  constexpr std::size_t kPuts = 50;
  ranks_.run_connected({.contexts = kContexts}, [&](Rank& rank) {
    Words source(kPuts);
    Words target(kPuts);
    Words word(1);
    for (std::size_t i = 0; i < kPuts; ++i) source[i] = i + 1;
    void* const from = rank.register_memory(source.data(), source.bytes());
    void* const to = rank.register_memory(target.data(), target.bytes());
    void* const signals = rank.register_memory(word.data(), word.bytes(), nccl::kMrForceStrictOrdering);
    const RmaSignal signal{.word = {signals, 0}, .operation = nccl::kSignalIncrement};
    rank.barrier();
    for (std::size_t i = 0; i < kPuts; ++i) {
      EXPECT_NE(rank.put_signal(0, {from, 8 * i}, 8, {to, 8 * i}, rank.next(), signal), nullptr);
    }
    EXPECT_OK(rank.net().destroy_context(std::exchange(rank.contexts, nullptr)));
    EXPECT_TRUE(rank.wait_for(word[0], kPuts));
    for (std::size_t i = 0; i < kPuts; ++i) EXPECT_EQ(target[i], i + 1);
    rank.barrier();
  });
}

TEST_P(RmaData, PutsAndGetsOfZeroBytes_Complete) {
  ranks_.run_connected({}, [&](Rank& rank) {
    EXPECT_TRUE(rank.wait_ok(rank.put(0, {}, 0, {}, rank.next())));
    EXPECT_TRUE(rank.wait_ok(rank.get(0, {}, 0, {}, rank.next())));
    rank.barrier();
  });
}

TEST_P(RmaData, FlushOfHostMemory_IsDoneAtOnce) {
  ranks_.run_connected({}, [&](Rank& rank) {
    Words words(8);
    void* const memory = rank.register_memory(words.data(), words.bytes());
    void* request = &request;
    EXPECT_OK(rank.net().iflush(rank.contexts, 0, memory, rank.next(), &request));
    EXPECT_EQ(request, nullptr);
    rank.barrier();
  });
}

TEST_P(RmaData, OneRank_PutsToItself) {
  Ranks alone(1, GetParam());
  alone.run_connected({.contexts = kContexts}, [&](Rank& rank) {
    Words words(16);
    words[0] = 42;
    void* const memory = rank.register_memory(words.data(), words.bytes());
    const RmaSignal signal{.word = {memory, 8}, .value = 3};
    for (int context = 0; context < kContexts; ++context) {
      EXPECT_TRUE(rank.wait_ok(rank.put_signal(context, {memory, 0}, 8, {memory, 64}, 0, signal)));
    }
    EXPECT_EQ(words[8], 42U);
    EXPECT_EQ(words[1], 6U);
  });
}

// Registrations are collective and may be made while another thread uses the contexts.
TEST_P(RmaData, RegistrationBesidePuts_Works) {
  ranks_.run_connected({}, [&](Rank& rank) {
    Words source(512, 7);
    Words target(512);
    void* const from = rank.register_memory(source.data(), source.bytes());
    void* const to = rank.register_memory(target.data(), target.bytes());
    std::atomic<bool> stop{false};
    std::thread puts([&] {
      do {
        EXPECT_TRUE(rank.wait_ok(rank.put(0, {from, 0}, 4096, {to, 0}, rank.next())));
      } while (!stop.load());
    });
    for (int i = 0; i < 20; ++i) {
      Words more(1024);
      void* const mhandle = rank.register_memory(more.data(), more.bytes());
      EXPECT_NE(mhandle, nullptr);
      EXPECT_OK(rank.net().dereg_mr(rank.coll, mhandle));
    }
    stop.store(true);
    puts.join();
    rank.barrier();
    // No signal comes behind these puts. What is not visible yet must be, before this memory is given back.
    EXPECT_OK(rank.net().dereg_mr(rank.coll, to));
    EXPECT_EQ(target[511], 7U);
  });
}

}  // namespace
}  // namespace rma_test
