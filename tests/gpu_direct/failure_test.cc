// What the plugin says about GPU memory, and errors of CUDA. These run in processes of their own: an error of a copy
// stays the error of the process's context.
#include <cstdlib>

#include "gpu_test.h"

namespace gpu_direct {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class GpuSupport : public GpuTest {
 protected:
  struct Described {
    int ptr_support = -1;
    std::string log;
  };
  Described describe(const std::string& setting) {
    const char* const files = std::getenv("SOFTVERBS_TEST_FILES_LIBRARY");
    conformance::Process process(
        "describe", version(),
        {{"SOFTVERBS_GPU_MEMORY", setting}, {"LD_PRELOAD", files == nullptr ? "" : files}, {"SOFTVERBS_DEVICES", "1"}});
    const conformance::Exit end = process.wait();
    EXPECT_EQ(end.status, 0) << end.output;
    Described found;
    found.log = end.output;
    std::sscanf(end.output.c_str(), "ptrSupport %d", &found.ptr_support);
    return found;
  }
};
TWO_VERSIONS(GpuSupport);

TEST_P(GpuSupport, PropertiesAndLog_SayHowGpuMemoryIsReached) {
  const Described dmabuf = describe("dmabuf");
  EXPECT_EQ(dmabuf.ptr_support, nccl::kPtrHost | nccl::kPtrDmaBuf);
  EXPECT_TRUE(contains(dmabuf.log, "GPU memory by dma-buf")) << dmabuf.log;

  const Described none = describe("none");
  EXPECT_EQ(none.ptr_support, nccl::kPtrHost);
  EXPECT_FALSE(contains(none.log, "GPU memory by")) << none.log;
  EXPECT_TRUE(contains(none.log, "GPU memory cannot be registered")) << none.log;
  EXPECT_TRUE(contains(none.log, "dma-buf: Operation not supported")) << none.log;
  EXPECT_TRUE(contains(none.log, "peer memory: the device has no kernel driver")) << none.log;

  if (std::getenv("SOFTVERBS_TEST_FILES_LIBRARY") == nullptr) return;
  const Described both = describe("both");
  EXPECT_EQ(both.ptr_support, nccl::kPtrHost | nccl::kPtrCuda | nccl::kPtrDmaBuf);
  EXPECT_TRUE(contains(both.log, "GPU memory by peer memory or dma-buf")) << both.log;
  const Described peer_memory = describe("peer-memory");
  EXPECT_EQ(peer_memory.ptr_support, nccl::kPtrHost | nccl::kPtrCuda);
  EXPECT_TRUE(contains(peer_memory.log, "GPU memory by peer memory,") ||
              contains(peer_memory.log, "GPU memory by peer memory\n"))
      << peer_memory.log;
}

class GpuFailure : public GpuTest {
 protected:
  static constexpr std::size_t kBytes = 200'000;
  static int lines(const std::string& text) { return static_cast<int>(std::count(text.begin(), text.end(), '\n')); }
};
ONE_VERSION(GpuFailure, 12);

// The copies of a WRITE are made where the data comes from.
TEST_P(GpuFailure, CopyFailsAtTheSender_BothEndsSaySo) {
  if (!cuda().is_standin()) GTEST_SKIP() << "needs the stand-in for CUDA";
  PeerProcess peer(version());
  TestConnection link = connect_to(peer);
  ASSERT_TRUE(link);
  Buffer target({}, kBytes);
  const Registered mr(*this, link.recv_comm, target);
  ASSERT_EQ(peer.call({Command::Verb::kAllocate, {0, Kind::kAllocated, ways().front()}, 0, kBytes}).result,
            nccl::Result::kSuccess);
  peer.call({Command::Verb::kFailCopy, {}, 2});
  peer.ask({Command::Verb::kSend, {}, 0, kBytes, 5});
  const nccl::Result received =
      post_and_wait(net(), link.recv_comm, false, {target.data(), kBytes, 0, mr.get()}, nullptr);
  EXPECT_NE(received, nccl::Result::kSuccess);
  EXPECT_NE(peer.answer().result, nccl::Result::kSuccess);
  const std::string here = joined(take_warnings());
  const std::string there = peer.call({Command::Verb::kReadWarnings}).text;
  EXPECT_EQ(lines(here), 1) << here;
  EXPECT_EQ(lines(there), 1) << there;
  EXPECT_TRUE(contains(there, "IBV_WC_LOC_PROT_ERR")) << there;
  EXPECT_TRUE(contains(there, "the application's buffer")) << there;
  EXPECT_TRUE(contains(there, "in a registration of")) << there;
  EXPECT_TRUE(contains(here, "the peer")) << here;
  EXPECT_TRUE(contains(here, "reported: sending 200000 bytes failed")) << here;
}

// Memory that this process cannot reach is copied by its owner.
TEST_P(GpuFailure, CopyFailsAtTheReceiver_BothEndsSaySo) {
  if (!cuda().is_standin()) GTEST_SKIP() << "needs the stand-in for CUDA";
  PeerProcess peer(version());
  TestConnection link = connect_to(peer);
  ASSERT_TRUE(link);
  Buffer source({}, kBytes);
  const Registered mr(*this, link.send_comm, source);
  ASSERT_EQ(peer.call({Command::Verb::kAllocate, {0, Kind::kPrivate, ways().front()}, 0, kBytes}).result,
            nccl::Result::kSuccess);
  peer.call({Command::Verb::kFailCopy, {}, 2});
  peer.ask({Command::Verb::kReceive, {}, 0, kBytes, 5});
  source.write(0, kBytes, 5);
  EXPECT_NE(post_and_wait(net(), link.send_comm, true, {source.data(), kBytes, 0, mr.get()}, nullptr),
            nccl::Result::kSuccess);
  EXPECT_NE(peer.answer().result, nccl::Result::kSuccess);
  const std::string here = joined(take_warnings());
  const std::string there = peer.call({Command::Verb::kReadWarnings}).text;
  EXPECT_EQ(lines(here), 1) << here;
  EXPECT_EQ(lines(there), 1) << there;
  // The end that knows of the failure first reports it to the other.
  EXPECT_TRUE(contains(here, "IBV_WC_REM_OP_ERR")) << here;
  EXPECT_TRUE(contains(here, "the NIC of") || contains(here, "the peer failed first: the peer")) << here;
  const bool own_event =
      contains(there, "IBV_EVENT_QP_FATAL") && contains(there, "or its driver failed, not the path to the peer");
  EXPECT_TRUE(own_event || contains(there, "reported: sending 200000 bytes failed with remote operation error"))
      << there;
}

}  // namespace
}  // namespace gpu_direct
