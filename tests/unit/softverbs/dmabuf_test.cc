// Memory regions of dma-buf descriptors. With SOFTVERBS_DMABUF=1 a memfd is used in place of an accelerator's dma-buf.
// This process does not map it, so all bytes pass through the descriptor.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/unique_fd.h"
#include "support/verbs_peer.h"

namespace verbatim::test {
namespace {

constexpr std::size_t kFileBytes = 5 * 4096 + 123;
constexpr std::size_t kOffset = 4096 + 77;  // within a page
constexpr std::size_t kLength = 2 * 4096 + 5;
constexpr std::uint64_t kIova = 0x7000'0000'0000 + 13;
constexpr std::uint64_t kDmabufSeed = 0xD3AB;
constexpr int kAccess = kAllAccess | IBV_ACCESS_REMOTE_ATOMIC;

class Dmabuf : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(file);
    ASSERT_EQ(ftruncate(file.get(), kFileBytes), 0);
    const char* const setting = std::getenv("SOFTVERBS_DMABUF");
    if (setting == nullptr || std::string(setting) != "1") {
      errno = 0;
      EXPECT_EQ(register_part(kOffset, kLength), nullptr);
      EXPECT_EQ(errno, EOPNOTSUPP) << "without SOFTVERBS_DMABUF=1";
      GTEST_SKIP() << "SOFTVERBS_DMABUF is not set";
    }
    contents.resize(kFileBytes);
    fill_pattern(contents, kDmabufSeed);
    write_file();
  }

  ibv_mr* try_register(std::uint64_t offset, std::size_t length, int fd, int access = kAccess) {
    errno = 0;
    return verbs().reg_dmabuf_mr(device.pd.get(), offset, length, kIova, fd, access);
  }
  Mr register_part(std::uint64_t offset, std::size_t length) { return Mr(try_register(offset, length, file.get())); }

  void write_file() {
    ASSERT_EQ(pwrite(file.get(), contents.data(), contents.size(), 0), static_cast<ssize_t>(contents.size()));
  }
  std::vector<std::byte> read_file() {
    std::vector<std::byte> bytes(kFileBytes);
    EXPECT_EQ(pread(file.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    return bytes;
  }
  // The file has its original contents, except `length` bytes from `offset` on, which have pattern `seed`.
  void expect_written(std::size_t offset, std::size_t length, std::uint64_t seed) {
    const std::vector<std::byte> bytes = read_file();
    const std::span<const std::byte> all(bytes);
    EXPECT_EQ(find_wrong_byte(all.subspan(offset, length), seed), std::nullopt);
    EXPECT_EQ(std::memcmp(bytes.data(), contents.data(), offset), 0);
    const std::size_t end = offset + length;
    EXPECT_EQ(std::memcmp(bytes.data() + end, contents.data() + end, kFileBytes - end), 0);
  }

  Device device = open_device();
  UniqueFd file{memfd_create("dmabuf", MFD_CLOEXEC)};
  std::vector<std::byte> contents;
};

TEST_F(Dmabuf, WriteAndRead_ReachTheFile) {
  const Mr mr = register_part(kOffset, kLength);
  ASSERT_NE(mr, nullptr);
  EXPECT_EQ(mr->length, kLength);
  const Region local(device.pd.get(), kLength);
  Endpoint endpoint(device);
  connect(endpoint, endpoint);
  ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_READ, {local.sge()}, {.remote_addr = kIova, .rkey = mr->rkey}), 0);
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(find_wrong_byte(local.buffer.bytes(), kDmabufSeed, kOffset), std::nullopt);
  local.fill(kDmabufSeed + 1);
  ASSERT_EQ(
      post(endpoint.qp(), IBV_WR_RDMA_WRITE, {local.sge(0, 5000)}, {.remote_addr = kIova + 100, .rkey = mr->rkey}), 0);
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
  expect_written(kOffset + 100, 5000, kDmabufSeed + 1);
}

TEST_F(Dmabuf, SendAndReceive_UseTheFile) {
  const Mr mr = register_part(kOffset, kLength);
  ASSERT_NE(mr, nullptr);
  const Region local(device.pd.get(), 1000);
  Endpoint a(device);
  Endpoint b(device);
  connect(a, b);
  ASSERT_EQ(post_recv(b.qp(), {local.sge()}), 0);
  ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {{kIova + 4000, 1000, mr->lkey}}), 0);
  EXPECT_EQ(poll_one(b.recv_cq()).byte_len, 1000U);
  EXPECT_EQ(find_wrong_byte(local.buffer.bytes(), kDmabufSeed, kOffset + 4000), std::nullopt);
  local.fill(kDmabufSeed + 2);
  ASSERT_EQ(post_recv(b.qp(), {{kIova, 1000, mr->lkey}}), 0);
  ASSERT_EQ(post(a.qp(), IBV_WR_SEND, {local.sge()}), 0);
  EXPECT_EQ(poll_one(b.recv_cq()).status, IBV_WC_SUCCESS);
  expect_written(kOffset, 1000, kDmabufSeed + 2);
}

TEST_F(Dmabuf, Atomic_ChangesTheFile) {
  EndpointOptions options;
  options.access = kAccess;
  const Mr mr = register_part(0, 4096);
  ASSERT_NE(mr, nullptr);
  const Region found(device.pd.get(), 8);
  Endpoint endpoint(device, options);
  connect(endpoint, endpoint);
  std::uint64_t before = 0;
  std::memcpy(&before, &contents[3], sizeof before);  // kIova + 3 is a multiple of 8
  ibv_sge sge = found.sge();
  ibv_send_wr request{};
  request.sg_list = &sge;
  request.num_sge = 1;
  request.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
  request.send_flags = IBV_SEND_SIGNALED;
  request.wr.atomic = {.remote_addr = kIova + 3, .compare_add = 5, .swap = 0, .rkey = mr->rkey};
  ibv_send_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_send(endpoint.qp(), &request, &bad), 0);
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(std::memcmp(found.buffer.data(), &before, sizeof before), 0);
  std::uint64_t after = 0;
  std::memcpy(&after, &read_file()[3], sizeof after);
  EXPECT_EQ(after, before + 5);
}

TEST_F(Dmabuf, AccessBeyondTheRegion_IsRefused) {
  const Mr mr = register_part(kOffset, kLength);
  ASSERT_NE(mr, nullptr);
  const Region local(device.pd.get(), 16);
  for (const std::uint64_t address : {kIova - 1, kIova + kLength - 15}) {
    Endpoint endpoint(device);
    connect(endpoint, endpoint);
    ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {local.sge()}, {.remote_addr = address, .rkey = mr->rkey}), 0);
    EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_REM_ACCESS_ERR);
  }
  expect_written(kOffset, 0, 0);
}

TEST_F(Dmabuf, ClosedDescriptor_RegionStaysUsable) {
  const Mr mr = [&] {
    const UniqueFd copy(dup(file.get()));
    return Mr(try_register(kOffset, kLength, copy.get()));
  }();
  ASSERT_NE(mr, nullptr);
  const Region local(device.pd.get(), 64);
  local.fill(kDmabufSeed + 3);
  Endpoint endpoint(device);
  connect(endpoint, endpoint);
  ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {local.sge()}, {.remote_addr = kIova, .rkey = mr->rkey}), 0);
  EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
  expect_written(kOffset, 64, kDmabufSeed + 3);
}

// NCCL flushes an accelerator's memory like this: a small READ after the last write, by a QP connected to itself.
TEST_F(Dmabuf, WriteFromAnotherProcess_IsFlushed) {
  const Mr mr = register_part(kOffset, kLength);
  ASSERT_NE(mr, nullptr);
  Endpoint endpoint(device);
  Peer peer;
  endpoint.connect(peer.address());
  peer.connect(endpoint.address());
  peer.fill(0, 3000, kDmabufSeed + 4);
  ASSERT_EQ(peer.post(IBV_WR_RDMA_WRITE, 0, 3000, {.wr_id = 1, .remote_addr = kIova + 9, .rkey = mr->rkey}), 0);
  EXPECT_EQ(peer.poll_sent().status, IBV_WC_SUCCESS);
  const Region word(device.pd.get(), 4);
  Endpoint flush(device);
  connect(flush, flush);
  ASSERT_EQ(post(flush.qp(), IBV_WR_RDMA_READ, {word.sge()}, {.remote_addr = kIova, .rkey = mr->rkey}), 0);
  EXPECT_EQ(poll_one(flush.send_cq()).status, IBV_WC_SUCCESS);
  expect_written(kOffset + 9, 3000, kDmabufSeed + 4);
  ASSERT_EQ(peer.post(IBV_WR_RDMA_READ, 4096, 3000, {.wr_id = 2, .remote_addr = kIova + 9, .rkey = mr->rkey}), 0);
  EXPECT_EQ(peer.poll_sent().status, IBV_WC_SUCCESS);
  EXPECT_EQ(peer.find_wrong_byte(4096, 3000, kDmabufSeed + 4), std::nullopt);
}

TEST_F(Dmabuf, UnmappableDescriptor_IsRefused) {
  EXPECT_EQ(try_register(0, 4096, -1), nullptr);
  EXPECT_EQ(errno, EBADF);
  EXPECT_EQ(try_register(0, kFileBytes + 1, file.get()), nullptr);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(try_register(kFileBytes, 1, file.get()), nullptr);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(try_register(~std::uint64_t{0}, 2, file.get()), nullptr);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(try_register(0, 0, file.get()), nullptr);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(try_register(0, 4096, file.get(), IBV_ACCESS_REMOTE_WRITE), nullptr) << "without LOCAL_WRITE";
  EXPECT_EQ(errno, EINVAL);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const UniqueFd reader(ends[0]);
  const UniqueFd writer(ends[1]);
  EXPECT_EQ(try_register(0, 4096, reader.get()), nullptr);
  EXPECT_EQ(errno, EINVAL);
  const UniqueFd read_only(open(("/proc/self/fd/" + std::to_string(file.get())).c_str(), O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(try_register(0, 4096, read_only.get()), nullptr);
  EXPECT_EQ(errno, EACCES);
  EXPECT_NE(Mr(try_register(0, 4096, read_only.get(), IBV_ACCESS_REMOTE_READ)), nullptr);
}

}  // namespace
}  // namespace verbatim::test
