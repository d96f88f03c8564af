#include <algorithm>
#include <atomic>
#include <chrono>

#include "process.h"

using verbatim::test::CudaProcess;
using verbatim::test::in_process;
using verbatim::test::numbered;
using verbatim::test::Variables;

namespace {

const Variables kSlow{{"STANDIN_CUDA_DELAY_US", "30000"}};

// The race with the copy is what the test is about.
__attribute__((no_sanitize("thread"))) unsigned char read_early(const unsigned char* at) {
  return *static_cast<const volatile unsigned char*>(at);
}

void wait_for(const std::function<bool()>& condition) {
  while (!condition()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

TEST(DriverStreams, EventIsReady_WhenTheCopyBeforeItHasEnded) {
  in_process({}, [](CudaProcess& cuda) {
    const CUdeviceptr memory = cuda.allocate(1 << 20);
    const auto host = cuda.allocate_host(1 << 20);
    const CUstream stream = cuda.make_stream();
    const CUevent event = cuda.make_event();
    EXPECT_EQ(cuda.cuEventQuery(event), CUDA_SUCCESS) << "never recorded";
    for (unsigned char round = 1; round < 20; ++round) {
      const auto data = numbered(host.size(), round);
      std::copy(data.begin(), data.end(), host.begin());
      EXPECT_CUDA(cuda.cuMemcpyHtoDAsync_v2(memory, host.data(), host.size(), stream));
      EXPECT_CUDA(cuda.cuEventRecord(event, stream));
      CUresult result = CUDA_ERROR_NOT_READY;
      wait_for([&] { return (result = cuda.cuEventQuery(event)) != CUDA_ERROR_NOT_READY; });
      EXPECT_EQ(result, CUDA_SUCCESS);
      std::fill(host.begin(), host.end(), 0);
      EXPECT_CUDA(cuda.cuMemcpyDtoHAsync_v2(host.data(), memory, host.size(), stream));
      wait_for([&] { return (result = cuda.cuStreamQuery(stream)) != CUDA_ERROR_NOT_READY; });
      EXPECT_EQ(result, CUDA_SUCCESS);
      ASSERT_TRUE(std::equal(data.begin(), data.end(), host.begin())) << "round " << int{round};
    }
  });
}

TEST(DriverStreams, Operations_AreExecutedInTheirOrder) {
  in_process({}, [](CudaProcess& cuda) {
    const CUdeviceptr memory = cuda.allocate(4);
    const auto host = cuda.allocate_host(1000);
    const CUstream stream = cuda.make_stream();
    for (std::size_t i = 0; i < 200; ++i) {
      host[i] = static_cast<unsigned char>(i);
      EXPECT_CUDA(cuda.cuMemcpyHtoDAsync_v2(memory, &host[i], 1, stream));
      EXPECT_CUDA(cuda.cuMemcpyDtoHAsync_v2(&host[500 + i], memory, 1, stream));
    }
    EXPECT_CUDA(cuda.cuStreamSynchronize(stream));
    EXPECT_TRUE(std::equal(host.begin(), host.begin() + 200, host.begin() + 500));
  });
}

TEST(StandinStreams, CopyThatIsNotWaitedFor_LeavesOldBytes) {
  in_process(kSlow, [](CudaProcess& cuda) {
    const CUdeviceptr memory = cuda.allocate(64 << 10);
    const auto host = cuda.allocate_host(64 << 10);
    const CUstream stream = cuda.make_stream();
    const CUevent event = cuda.make_event();
    cuda.upload(memory, std::vector<unsigned char>(host.size(), 1));
    unsigned old = 0;
    unsigned partial = 0;
    unsigned without_first = 0;
    for (int round = 0; round < 10; ++round) {
      std::fill(host.begin(), host.end(), 0);
      EXPECT_CUDA(cuda.cuMemcpyDtoHAsync_v2(host.data(), memory, host.size(), stream));
      EXPECT_CUDA(cuda.cuEventRecord(event, stream));
      while (cuda.cuEventQuery(event) == CUDA_ERROR_NOT_READY) {
        const bool first = read_early(&host[0]) == 1;
        unsigned pieces = 0;
        for (std::size_t at = 0; at < host.size(); at += 8192) pieces += read_early(&host[at]);
        if (pieces == 0) ++old;
        if (pieces > 0 && pieces < 8) ++partial;
        if (pieces > 0 && !first) ++without_first;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      EXPECT_EQ(std::count(host.begin(), host.end(), 1), 64 << 10);
    }
    EXPECT_GT(old, 0U);
    EXPECT_GT(partial, 0U);
    EXPECT_GT(without_first, 0U);
  });
}

TEST(StandinStreams, CopiesThatAreNotPinned_AreCountedAndEndBeforeTheCallReturns) {
  in_process({}, [](CudaProcess& cuda) {
    const CUdeviceptr memory = cuda.allocate(1 << 20);
    const auto pinned = cuda.allocate_host(1 << 20);
    std::vector<unsigned char> pageable(1 << 20);
    const CUstream stream = cuda.make_stream();
    EXPECT_CUDA(cuda.cuMemcpyHtoDAsync_v2(memory, pinned.data(), pinned.size(), stream));
    EXPECT_EQ(cuda.standin_cuda_pageable_copies(), 0U);
    EXPECT_CUDA(cuda.cuMemcpyDtoHAsync_v2(pageable.data(), memory, pageable.size(), stream));
    EXPECT_EQ(cuda.standin_cuda_pageable_copies(), 1U);
    EXPECT_EQ(cuda.cuStreamQuery(stream), CUDA_SUCCESS);
    EXPECT_CUDA(cuda.cuMemHostRegister_v2(&pageable[4096], 100'000, 0));
    EXPECT_CUDA(cuda.cuMemcpyDtoHAsync_v2(&pageable[4096], memory, 100'000, stream));
    EXPECT_EQ(cuda.standin_cuda_pageable_copies(), 1U);
    EXPECT_CUDA(cuda.cuMemcpyDtoHAsync_v2(&pageable[4096], memory, 100'001, stream));
    EXPECT_EQ(cuda.standin_cuda_pageable_copies(), 2U) << "one byte is not pinned";
    EXPECT_EQ(cuda.standin_cuda_copies(), 4U);
  });
}

TEST(StandinStreams, Free_WaitsForCopies) {
  in_process(kSlow, [](CudaProcess& cuda) {
    const CUdeviceptr memory = cuda.allocate(1 << 20);
    const auto host = cuda.allocate_host(1 << 20);
    const CUstream stream = cuda.make_stream();
    for (int i = 0; i < 5; ++i) EXPECT_CUDA(cuda.cuMemcpyDtoHAsync_v2(host.data(), memory, 8, stream));
    EXPECT_CUDA(cuda.cuMemFree_v2(memory));
    EXPECT_EQ(cuda.cuStreamQuery(stream), CUDA_SUCCESS);
  });
}

TEST(DriverStreams, Free_DoesNotWaitForLaterCopies) {
  in_process({{"STANDIN_CUDA_DELAY_US", "2000"}}, [](CudaProcess& cuda) {
    constexpr unsigned kManyRounds = 1000;
    const CUdeviceptr memory = cuda.allocate(1 << 20);
    const auto host = cuda.allocate_host(1 << 20);
    const CUstream stream = cuda.make_stream();
    const CUevent events[] = {cuda.make_event(), cuda.make_event()};
    std::atomic<unsigned> rounds = 0;
    std::atomic<bool> freed = false;
    std::thread copies([&] {
      EXPECT_CUDA(cuda.cuCtxSetCurrent(cuda.context));
      for (; !freed && rounds < kManyRounds; ++rounds) {
        for (int i = 0; i < 10; ++i) EXPECT_CUDA(cuda.cuMemcpyHtoDAsync_v2(memory, host.data(), 8, stream));
        EXPECT_CUDA(cuda.cuEventRecord(events[rounds % 2], stream));
        // The copies of this round are queued when those of the last one have ended: the stream is never idle.
        wait_for([&] { return cuda.cuEventQuery(events[(rounds + 1) % 2]) != CUDA_ERROR_NOT_READY; });
      }
    });
    wait_for([&] { return rounds > 2; });
    for (int i = 0; i < 5; ++i) EXPECT_CUDA(cuda.cuMemFree_v2(cuda.allocate(100)));
    EXPECT_LT(rounds, kManyRounds);
    freed = true;
    copies.join();
  });
}

TEST(StandinStreams, CopyFromMemoryThatIsUnpinnedMeanwhile_Faults) {
  in_process({{"STANDIN_CUDA_DELAY_US", "300000"}}, [](CudaProcess& cuda) {
    const CUdeviceptr memory = cuda.allocate(1 << 20);
    std::vector<unsigned char> host(1 << 20);
    const CUstream stream = cuda.make_stream();
    EXPECT_CUDA(cuda.cuMemHostRegister_v2(host.data(), host.size(), 0));
    for (int i = 0; i < 10; ++i) EXPECT_CUDA(cuda.cuMemcpyHtoDAsync_v2(memory, host.data(), 8, stream));
    EXPECT_CUDA(cuda.cuMemHostUnregister(host.data()));
    EXPECT_EQ(cuda.cuStreamSynchronize(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
  });
}

}  // namespace
