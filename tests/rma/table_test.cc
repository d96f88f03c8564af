// What the tables promise besides data: properties, inits, registrations that fail, the order of the closing calls.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>

#include "base/unique_fd.h"
#include "nccl/rma_v13.h"
#include "netapi/log.h"
#include "ranks.h"

namespace rma_test {
namespace {

class RmaTable : public ::testing::TestWithParam<int> {
 protected:
  netapi::RmaPlugin& net() { return plugin(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Rma, RmaTable, ::testing::Values(13, 14),
                         [](const auto& param) { return "v" + std::to_string(param.param); });

// Memory that can be registered as a dma-buf (SOFTVERBS_DMABUF=1).
class DmaBuf {
 public:
  explicit DmaBuf(std::size_t bytes) : fd_(::memfd_create("rma_test", MFD_CLOEXEC)), bytes_(bytes) {
    EXPECT_EQ(::ftruncate(fd_.get(), static_cast<off_t>(bytes)), 0);
    data_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    EXPECT_NE(data_, MAP_FAILED);
  }
  ~DmaBuf() { ::munmap(data_, bytes_); }
  DmaBuf(const DmaBuf&) = delete;
  DmaBuf& operator=(const DmaBuf&) = delete;

  nccl::Result register_at(const Rank& rank, void** mhandle) const { return register_at(rank, fd_.get(), mhandle); }
  // With a descriptor that is none: the device refuses it.
  nccl::Result fail_at(const Rank& rank, void** mhandle) const { return register_at(rank, -1, mhandle); }
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  nccl::Result register_at(const Rank& rank, int fd, void** mhandle) const {
    return rank.net().reg_mr_dmabuf(rank.coll, data_, bytes_, nccl::kPtrCuda, 0, fd, 0, mhandle);
  }

  const verbatim::UniqueFd fd_;
  const std::size_t bytes_;
  void* data_ = nullptr;
};

TEST_P(RmaTable, Properties_AreOfPhysicalDevicesWithTypeGinProxy) {
  void* instance = nullptr;
  ASSERT_OK(net().init(1, &instance));
  int devices = 0;
  ASSERT_OK(net().devices(&devices));
  EXPECT_EQ(devices, 2);
  for (int device = 0; device < devices; ++device) {
    nccl::v12::NetProperties properties{};
    ASSERT_OK(net().properties(device, &properties));
    EXPECT_EQ(properties.netDeviceType, nccl::NetDeviceType::kGinProxy);
    EXPECT_EQ(properties.vProps.ndevs, 1);
    EXPECT_EQ(properties.vProps.devs[0], device);
    EXPECT_GT(properties.maxRecvs, 0);
  }
  nccl::v12::NetProperties properties{};
  EXPECT_NE(net().properties(devices, &properties), nccl::Result::kSuccess);
  EXPECT_NE(net().properties(-1, &properties), nccl::Result::kSuccess);
  EXPECT_OK(net().finalize(instance));
}

// NCCL calls init for host RMA and again for its device API.
TEST_P(RmaTable, TwoInits_AreIndependent) {
  void* first = nullptr;
  void* second = nullptr;
  ASSERT_OK(net().init(1, &first));
  ASSERT_OK(net().init(1, &second));
  EXPECT_NE(first, second);
  EXPECT_OK(net().finalize(first));
  int devices = 0;
  EXPECT_OK(net().devices(&devices));
  EXPECT_OK(net().finalize(second));
  EXPECT_NE(net().devices(&devices), nccl::Result::kSuccess);
}

TEST_P(RmaTable, SettingRmaZero_InitRefuses) {
  ::setenv("VERBATIM_RMA", "0", 1);
  void* instance = nullptr;
  EXPECT_EQ(net().init(1, &instance), nccl::Result::kInvalidUsage);
  EXPECT_EQ(instance, nullptr);
  ::unsetenv("VERBATIM_RMA");
  EXPECT_OK(net().init(1, &instance));
  EXPECT_OK(net().finalize(instance));
}

TEST(RmaSymbols, GinTable_IsTheTableV13) {
  void* const library = ::dlopen(std::getenv("PLUGIN"), RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr);
  const void* const gin = ::dlsym(library, "ncclGinPlugin_v13");
  const void* const rma = ::dlsym(library, "ncclRmaPlugin_v13");
  ASSERT_TRUE(gin != nullptr && rma != nullptr);
  EXPECT_EQ(std::memcmp(gin, rma, sizeof(nccl::rma_v13::Rma)), 0);
  ::dlclose(library);
}

TEST_P(RmaTable, RankStride_SpeaksToMultiplesOnly) {
  Ranks ranks(4, GetParam());
  ranks.run_connected({.contexts = 2, .rank_stride = 2}, [&](Rank& rank) {
    Words words(8);
    words[0] = 40 + static_cast<std::uint64_t>(rank.number());
    void* const memory = rank.register_memory(words.data(), words.bytes());
    EXPECT_TRUE(rank.wait_ok(rank.put(1, {memory, 0}, 8, {memory, 8}, rank.next(2))));
    void* request = &request;
    const nccl::Result refused =
        rank.net().iput(rank.contexts, 0, {memory, 0}, 8, {memory, 16}, rank.next(1), &request);
    if (GetParam() == 13) {  // NCCL drops the stride
      EXPECT_EQ(refused, nccl::Result::kSuccess);
      EXPECT_TRUE(rank.wait_ok(request));
    } else {
      EXPECT_EQ(refused, nccl::Result::kInvalidArgument);
      EXPECT_EQ(request, nullptr);
    }
    rank.barrier();
    EXPECT_OK(rank.net().dereg_mr(rank.coll, memory));  // all bytes have come
    EXPECT_EQ(words[1], 40 + rank.next(2));
  });
}

// NCCL 2.30.7 passes INT_MIN where the user has set none.
TEST_P(RmaTable, NoTrafficClass_IsAccepted) {
  Ranks ranks(2, GetParam());
  ranks.run_connected({.traffic_class = INT_MIN}, [&](Rank& rank) { EXPECT_NE(rank.contexts, nullptr); });
}

// v13 has no stride.
TEST(RmaTableV14, RankStrideThatDoesNotDivide_FailsAtAllRanks) {
  Ranks ranks(3, 14);
  ranks.run([&](Rank& rank) {
    rank.connect();
    EXPECT_EQ(rank.net().create_context(rank.coll, {.rank_stride = 2}, &rank.contexts), nccl::Result::kInvalidArgument);
    EXPECT_EQ(rank.contexts, nullptr);
    rank.close();
  });
}

TEST_P(RmaTable, OtherNumberOfContextsAtOneRank_FailsAtAllRanks) {
  Ranks ranks(3, GetParam());
  ranks.run([&](Rank& rank) {
    rank.connect();
    const netapi::RmaConfig config{.contexts = rank.number() == 1 ? 2 : 1};
    EXPECT_NE(rank.net().create_context(rank.coll, config, &rank.contexts), nccl::Result::kSuccess);
    rank.contexts = nullptr;
    rank.close();
  });
}

TEST_P(RmaTable, CallsOutsideTheMemory_AreRefusedAndHarmNothing) {
  Ranks ranks(2, GetParam());
  ranks.run_connected({}, [&](Rank& rank) {
    Words words(8);
    void* const memory = rank.register_memory(words.data(), words.bytes());
    const RmaSignal signal{.word = {memory, 4}, .value = 1};
    void* request = nullptr;
    constexpr std::uint64_t kHuge = ~std::uint64_t{0};
    netapi::RmaPlugin& net = rank.net();
    const std::uint32_t peer = rank.next();
    EXPECT_EQ(net.iput(rank.contexts, 0, {memory, 60}, 8, {memory, 0}, peer, &request), nccl::Result::kInvalidArgument);
    EXPECT_EQ(net.iput(rank.contexts, 0, {memory, 0}, 8, {memory, kHuge}, peer, &request),
              nccl::Result::kInvalidArgument);
    EXPECT_EQ(net.iput(rank.contexts, 1, {memory, 0}, 8, {memory, 0}, peer, &request), nccl::Result::kInvalidArgument);
    EXPECT_EQ(net.iput(rank.contexts, 0, {memory, 0}, 8, {memory, 0}, 2, &request), nccl::Result::kInvalidArgument);
    EXPECT_EQ(net.iput(rank.contexts, 0, {nullptr, 0}, 8, {memory, 0}, peer, &request), nccl::Result::kInvalidArgument);
    EXPECT_EQ(net.iput_signal(rank.contexts, 0, {}, 0, {}, peer, signal, &request), nccl::Result::kInvalidArgument);
    EXPECT_EQ(net.iget(rank.contexts, 0, {memory, 0}, kHuge, {memory, 0}, peer, &request),
              nccl::Result::kInvalidArgument);
    EXPECT_EQ(request, nullptr);
    EXPECT_FALSE(rank.has_error());
    EXPECT_TRUE(rank.wait_ok(rank.put(0, {memory, 0}, 8, {memory, 8}, peer)));
    rank.barrier();
    EXPECT_OK(rank.net().dereg_mr(rank.coll, memory));
  });
}

TEST_P(RmaTable, RegistrationThatFailsAtOneRank_FailsAtAllRanks) {
  Ranks ranks(3, GetParam());
  ranks.run_connected({}, [&](Rank& rank) {
    Words words(512);
    void* const unmapped = reinterpret_cast<void*>(std::uintptr_t{1} << 45);
    void* mhandle = &mhandle;
    EXPECT_NE(rank.net().reg_mr(rank.coll, rank.number() == 1 ? unmapped : words.data(), words.bytes(), nccl::kPtrHost,
                                0, &mhandle),
              nccl::Result::kSuccess);
    EXPECT_EQ(mhandle, nullptr);
    void* const memory = rank.register_memory(words.data(), words.bytes());
    EXPECT_TRUE(rank.wait_ok(rank.put(0, {memory, 0}, 8, {memory, 8}, rank.next())));
    rank.barrier();
    EXPECT_OK(rank.net().dereg_mr(rank.coll, memory));
  });
}

// NCCL registers again at the rank where a dma-buf has failed, and at no other.
TEST_P(RmaTable, DmaBufThatFailsOnceAtOneRank_IsRegisteredByTheSecondCall) {
  Ranks ranks(3, GetParam());
  ranks.run_connected({}, [&](Rank& rank) {
    const DmaBuf buffer(8192);
    void* memory = nullptr;
    if (rank.number() == 1) {
      EXPECT_NE(buffer.fail_at(rank, &memory), nccl::Result::kSuccess);
      EXPECT_OK(rank.net().reg_mr(rank.coll, buffer.data(), buffer.bytes(), nccl::kPtrHost, 0, &memory));
    } else {
      EXPECT_OK(buffer.register_at(rank, &memory));
    }
    EXPECT_TRUE(rank.wait_ok(rank.put(0, {memory, 0}, 4096, {memory, 4096}, rank.next())));
    rank.barrier();
    EXPECT_OK(rank.net().dereg_mr(rank.coll, memory));
  });
}

// Then the others register again as well, because their dma-bufs have failed too, as far as they know.
TEST_P(RmaTable, DmaBufThatFailsTwiceAtOneRank_FailsTwiceAtAllRanks) {
  Ranks ranks(3, GetParam());
  ranks.run_connected({}, [&](Rank& rank) {
    const DmaBuf buffer(8192);
    void* memory = nullptr;
    for (int attempt = 0; attempt < 2; ++attempt) {
      const nccl::Result result =
          rank.number() == 1 ? buffer.fail_at(rank, &memory) : buffer.register_at(rank, &memory);
      EXPECT_NE(result, nccl::Result::kSuccess);
      EXPECT_EQ(memory, nullptr);
    }
    EXPECT_OK(buffer.register_at(rank, &memory));
    EXPECT_TRUE(rank.wait_ok(rank.put(0, {memory, 0}, 4096, {memory, 4096}, rank.next())));
    rank.barrier();
    EXPECT_OK(rank.net().dereg_mr(rank.coll, memory));
  });
}

TEST_P(RmaTable, DmaBufThatIsGivenUp_FailsAtAllRanks) {
  Ranks ranks(2, GetParam());
  ranks.run_connected({}, [&](Rank& rank) {
    const DmaBuf buffer(8192);
    Words words(8);
    void* memory = nullptr;
    if (rank.number() == 1) {
      EXPECT_NE(buffer.fail_at(rank, &memory), nccl::Result::kSuccess);
    } else {
      EXPECT_NE(rank.net().reg_mr(rank.coll, buffer.data(), buffer.bytes(), nccl::kPtrHost, 0, &memory),
                nccl::Result::kSuccess);
    }
    EXPECT_NE(rank.register_memory(words.data(), words.bytes()), nullptr);
    rank.barrier();
  });
}

TEST_P(RmaTable, FlushOfDeviceMemory_Completes) {
  Ranks ranks(2, GetParam());
  ranks.run_connected({}, [&](Rank& rank) {
    const DmaBuf buffer(8192);
    void* memory = nullptr;
    EXPECT_OK(buffer.register_at(rank, &memory));
    std::memset(buffer.data(), 3 + rank.number(), 8192);
    rank.barrier();
    EXPECT_TRUE(rank.wait_ok(rank.get(0, {memory, 0}, 4096, {memory, 4096}, rank.next())));
    void* request = nullptr;
    EXPECT_OK(rank.net().iflush(rank.contexts, 0, memory, rank.next(), &request));
    EXPECT_TRUE(rank.wait_ok(request));
    EXPECT_EQ(static_cast<char*>(buffer.data())[8191], 3 + static_cast<char>(rank.next()));
    rank.barrier();
  });
}

TEST_P(RmaTable, DeregistrationAfterDestroyContext_Works) {
  Ranks ranks(2, GetParam());
  ranks.run([&](Rank& rank) {
    rank.connect();
    rank.create({});
    Words words(512);
    void* const memory = rank.register_memory(words.data(), words.bytes());
    EXPECT_TRUE(rank.wait_ok(rank.put(0, {memory, 0}, 8, {memory, 8}, rank.next())));
    rank.barrier();
    EXPECT_OK(rank.net().destroy_context(rank.contexts));
    rank.contexts = nullptr;
    EXPECT_OK(rank.net().dereg_mr(rank.coll, memory));
    rank.close();
  });
}

TEST_P(RmaTable, SeveralContextSetsOfOneCommunicator_Work) {
  Ranks ranks(3, GetParam());
  ranks.run_connected({.contexts = 2}, [&](Rank& rank) {
    void* const first = rank.contexts;
    rank.create({.contexts = 3});
    Words words(8);
    void* const memory = rank.register_memory(words.data(), words.bytes());
    const RmaSignal signal{.word = {memory, 0}, .operation = nccl::kSignalIncrement};
    EXPECT_TRUE(rank.wait_ok(rank.put_signal(2, {}, 0, {}, rank.next(), signal)));
    EXPECT_OK(rank.net().destroy_context(rank.contexts));
    rank.contexts = first;
    EXPECT_TRUE(rank.wait_ok(rank.put_signal(1, {}, 0, {}, rank.next(), signal)));
    rank.barrier();
    EXPECT_EQ(words[0], 2U);
  });
}

std::size_t open_descriptors() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

// Of the plugin; softverbs keeps its own.
std::size_t plugin_threads() {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(entry.path() / "comm"), name);
    count += name == "verbatim" ? 1U : 0U;
  }
  return count;
}

// Nothing is closed but the instances: finalize closes listens, communicators, contexts and registrations.
TEST_P(RmaTable, FinalizeOfAllThatIsOpen_LeavesNothing) {
  std::mutex mutex;
  std::string warnings;
  netapi::set_log_callback([&](const netapi::LogLine& line) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (line.level == nccl::DebugLogLevel::kWarn) warnings += line.text + "\n";
  });
  std::size_t descriptors = 0;
  for (int round = 0; round < 3; ++round) {
    Ranks ranks(3, GetParam());
    ranks.run([&](Rank& rank) {
      rank.connect();
      rank.create({.contexts = 2});
      Words words(512);
      void* const memory = rank.register_memory(words.data(), words.bytes());
      EXPECT_TRUE(rank.wait_ok(rank.put(0, {memory, 0}, 8, {memory, 8}, rank.next())));
      rank.barrier();
      EXPECT_OK(rank.net().finalize(rank.instance));
    });
    // A thread that was joined is listed a moment longer.
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (plugin_threads() != 0 && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
    EXPECT_EQ(plugin_threads(), 0U);
    if (round > 0) {
      EXPECT_EQ(open_descriptors(), descriptors);
    }
    descriptors = open_descriptors();
  }
  netapi::set_log_callback({});
  EXPECT_EQ(warnings, "");
}

}  // namespace
}  // namespace rma_test
