//: program rma_gpu sources=ranks.cc link=netapi,wire,threads,verbs_headers,test_gpus,gtest
//: test rma-gpu-{} needs=softverbs_mlx5 CUDA_TEST_LIBRARY={standin_cuda}
//:   standard
//:   mlx5 SOFTVERBS_PROFILE=mlx5
//:   irdma full SOFTVERBS_PROFILE=irdma
// As it is, it would execute no signals there.
//:   bnxt_re full SOFTVERBS_PROFILE=bnxt_re SOFTVERBS_GPU_ATOMICS=allowed
// GPU memory that is registered for Data Direct, and in no other way.
//:   data-direct filter=RmaGpu.* VERBATIM_MLX5_LIBRARY={softverbs_mlx5} SOFTVERBS_LATE_GPU_MS=3600000
//:   + SOFTVERBS_DATA_DIRECT=5356:41:00.0,5356:42:00.0
//:   + SOFTVERBS_FAULTS='fail verb=reg_dmabuf_mr count=all errno=EINVAL'

// Signals and puts into the memory of a GPU. Each rank is a process; the stand-in for libcuda takes the place of GPUs.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "netapi/plugin.h"
#include "ranks.h"
#include "support/cuda/gpus.h"

namespace rma_test {
namespace {

using namespace verbatim::test;

constexpr std::size_t kBytes = kCudaPageBytes;

class RmaGpu : public ::testing::Test {
 protected:
  // By its dma-buf. Signals need nccl::kMrForceStrictOrdering.
  static nccl::Result register_memory(Rank& rank, const MappedMemory& gpu, std::uint64_t flags, void** memory) {
    int fd = -1;
    require(export_dmabuf(gpu.start, kBytes, fd), "cuMemGetHandleForAddressRange");
    const verbatim::UniqueFd dmabuf(fd);
    return rank.net().reg_mr_dmabuf(rank.coll, reinterpret_cast<void*>(gpu.start), kBytes, nccl::kPtrCuda, 0, fd, flags,
                                    memory);
  }

  Ranks ranks_{2, 14};
};

TEST_F(RmaGpu, SignalsInMemoryOfAGpu_AreCounted) {
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    rank.connect();
    rank.create({});
    use_gpu(0);
    const MappedMemory gpu = map_memory(0, kBytes, true);
    const std::uint64_t before = 5;
    EXPECT_TRUE(upload(0, gpu.start, &before, sizeof before));
    void* memory = nullptr;
    EXPECT_OK(register_memory(rank, gpu, nccl::kMrForceStrictOrdering, &memory));
    const RmaSignal signal{.word = {memory, 0}, .operation = nccl::kSignalIncrement};
    EXPECT_TRUE(rank.wait_ok(rank.put_signal(0, {}, 0, {}, rank.next(), signal)));
    rank.barrier();
    std::uint64_t after = 0;
    EXPECT_TRUE(download(&after, 0, gpu.start, sizeof after));
    EXPECT_EQ(after, before + 1);
    EXPECT_OK(rank.net().dereg_mr(rank.coll, memory));
    rank.close();
    unmap(gpu);
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
}

// What rank 0 has set, and whether its registration fails.
struct Refusal {
  const char* name;
  const char* variable;
  const char* value;
  bool fails;
};

class RmaGpuAtomics : public RmaGpu, public ::testing::WithParamInterface<Refusal> {};
INSTANTIATE_TEST_SUITE_P(Rma, RmaGpuAtomics,
                         ::testing::Values(Refusal{"Refused", "SOFTVERBS_GPU_ATOMICS", "refused", true},
                                           // Before each there is one on memory of the host.
                                           Refusal{"NotAnswered", "SOFTVERBS_FAULTS",
                                                   "drop-request op=cmp_swap nth=2 times=all", true},
                                           Refusal{"PortDoesNotWork", "SOFTVERBS_FAULTS",
                                                   "drop-request op=cmp_swap count=all times=all", false},
                                           Refusal{"PortIsLostMeanwhile", "SOFTVERBS_FAULTS",
                                                   "drop-request op=cmp_swap nth=2 count=all times=all", false}),
                         [](const auto& param) { return std::string(param.param.name); });

// Before the first signal, which would end the communicator.
TEST_P(RmaGpuAtomics, MemoryForSignals_FailsAtAllRanksWhereAtomicsDo) {
  const bool fails = GetParam().fails;
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    if (rank.number() == 0) ::setenv(GetParam().variable, GetParam().value, 1);
    rank.keep_warnings();
    rank.connect();
    use_gpu(0);
    const MappedMemory gpu = map_memory(0, kBytes, true);
    constexpr std::uint64_t kContent = 0x1234'5678'9abc'def0;
    EXPECT_TRUE(upload(0, gpu.start, &kContent, sizeof kContent));
    void* memory = nullptr;
    const nccl::Result expected = !fails               ? nccl::Result::kSuccess
                                  : rank.number() == 0 ? nccl::Result::kSystemError
                                                       : nccl::Result::kRemoteError;
    EXPECT_EQ(register_memory(rank, gpu, nccl::kMrForceStrictOrdering, &memory), expected);
    if (fails) {  // NCCL tries it again without dma-buf
      EXPECT_EQ(rank.net().reg_mr(rank.coll, reinterpret_cast<void*>(gpu.start), kBytes, nccl::kPtrCuda,
                                  nccl::kMrForceStrictOrdering, &memory),
                expected);
    } else {
      EXPECT_OK(rank.net().dereg_mr(rank.coll, memory));
    }
    std::uint64_t content = 0;
    EXPECT_TRUE(download(&content, 0, gpu.start, sizeof content));
    EXPECT_EQ(content, kContent);
    // Memory without signals can be used.
    const MappedMemory other = map_memory(0, kBytes, true);
    EXPECT_OK(register_memory(rank, other, 0, &memory));
    EXPECT_OK(rank.net().dereg_mr(rank.coll, memory));
    unmap(other);
    rank.close();
    unmap(gpu);
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
  const std::string why = ranks_.text(0);
  const std::string other = ranks_.text(1);
  if (!fails) {
    EXPECT_EQ(why + other, "");
    return;
  }
  EXPECT_NE(why.find("executes no atomics on memory of a GPU, which signals need"), std::string::npos) << why;
  EXPECT_NE(other.find("because it failed at rank 0 on "), std::string::npos) << other;
  for (const std::string& text : {why, other}) EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
}

// NCCL also flushes by a put to oneself.
class RmaGpuFlush : public RmaGpu, public ::testing::WithParamInterface<bool> {
 protected:
  // Rank 0 has the devices 0 and 2, rank 1 has 1 and 3. What a rank writes to memory of a GPU is visible after an hour.
  static std::unique_ptr<netapi::Plugin> begin(const Rank& rank, void** context) {
    for (const auto& [name, value] :
         {std::pair("SOFTVERBS_DEVICES", "4"), std::pair("SOFTVERBS_LATE_GPU_MS", "3600000"),
          std::pair("SOFTVERBS_ATOMICS", "glob"), std::pair("SOFTVERBS_RQ_PSN", "exact"),
          std::pair("SOFTVERBS_QP_REUSE", "allowed"), std::pair("VERBATIM_TIMEOUT", "10")}) {
      ::setenv(name, value, 1);
    }
    if (rank.number() == 0) ::setenv("SOFTVERBS_FAULTS", "link-down device=0 op=fetch_add qp=any after=1", 1);
    netapi::Opened opened = netapi::open_plugin(std::getenv("PLUGIN"));
    EXPECT_NE(opened.plugin, nullptr) << opened.error;
    int device = 0;
    EXPECT_OK(opened.plugin->init(1, {}, context));
    EXPECT_OK(opened.plugin->devices(&device));
    EXPECT_OK(opened.plugin->make_vdevice({rank.number(), rank.number() + 2}, &device));
    return std::move(opened.plugin);
  }
};
INSTANTIATE_TEST_SUITE_P(Rma, RmaGpuFlush, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "PutToOneself" : "Flush"; });

// Rank 0 loses its first port behind the first put, so the others come over the second port of rank 1.
TEST_P(RmaGpuFlush, PutsHaveComeOverTwoPorts_AllTheirBytesAreVisible) {
  constexpr std::size_t kPuts = 4;
  const std::vector<int> statuses = ranks_.run_processes([&](Rank& rank) {
    void* context = nullptr;
    const std::unique_ptr<netapi::Plugin> net = begin(rank, &context);
    rank.connect();
    rank.create({});
    use_gpu(0);
    const MappedMemory gpu = map_memory(0, kBytes, true);
    Words words(kPuts);
    EXPECT_TRUE(upload(0, gpu.start, words.data(), words.bytes()));
    void* memory = nullptr;
    EXPECT_OK(register_memory(rank, gpu, 0, &memory));
    const std::vector<std::uint64_t> sent{11, 12, 13, 14};
    Words source(kPuts);
    std::copy(sent.begin(), sent.end(), source.data());
    void* const source_memory = rank.register_memory(source.data(), source.bytes());
    Words signals(1);
    const RmaSignal signal{.word = {rank.register_memory(signals.data(), signals.bytes()), 0}, .value = 1};
    rank.barrier();
    for (std::size_t i = 0; i < kPuts && rank.number() == 0; ++i) {
      EXPECT_TRUE(rank.wait_ok(rank.put_signal(0, {source_memory, 8 * i}, 8, {memory, 8 * i}, 1, signal)));
    }
    if (rank.number() == 1) {
      const auto received = [&] {
        std::vector<std::uint64_t> all(kPuts);
        EXPECT_TRUE(download(all.data(), 0, gpu.start, 8 * kPuts));
        return all;
      };
      EXPECT_TRUE(rank.wait_for(signals[0], kPuts));
      EXPECT_EQ(received(), std::vector<std::uint64_t>(kPuts)) << "nothing is left to flush";
      void* request = nullptr;
      if (GetParam()) {
        request = rank.put(0, {memory, 8 * kPuts}, 8, {memory, 16 * kPuts}, 1);
      } else {
        EXPECT_OK(rank.net().iflush(rank.contexts, 0, memory, 0, &request));
      }
      EXPECT_TRUE(rank.wait_ok(request));
      EXPECT_EQ(received(), sent) << "wrong bytes";
    }
    rank.close();
    EXPECT_OK(net->finalize(context));
    unmap(gpu);
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace rma_test
