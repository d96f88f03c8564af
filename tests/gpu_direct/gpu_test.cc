#include "gpu_test.h"

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "base/unique_fd.h"

namespace gpu_direct {
namespace {

constexpr std::size_t kGap = 64;

std::string_view gpu_memory_setting() {
  const char* const value = std::getenv("SOFTVERBS_GPU_MEMORY");
  return value == nullptr ? "dmabuf" : value;
}

}  // namespace

nccl::Result register_memory(netapi::Plugin& net, void* comm, unsigned char* data, std::size_t bytes,
                             const Place& place, void** mhandle, std::optional<int> fd, CUdeviceptr start) {
  if (!place.is_gpu()) return net.reg_mr(comm, data, bytes, nccl::kPtrHost, mhandle);
  if (place.how == How::kPlain) return net.reg_mr(comm, data, bytes, nccl::kPtrCuda, mhandle);
  const auto address = reinterpret_cast<CUdeviceptr>(data);
  // The first whole page of the allocation.
  const CUdeviceptr first = place.how == How::kDmabufAtOffset ? page_of(start + kPageBytes - 1) : address;
  const std::uint64_t offset = place.how == How::kDmabufAtOffset ? address - first : 0;
  // NCCL closes the descriptor right after the call.
  const verbatim::UniqueFd own(fd ? -1 : dmabuf_of(first, address + bytes - first));
  return net.reg_mr_dmabuf(comm, data, bytes, nccl::kPtrCuda, offset, fd.value_or(own.get()), mhandle);
}

nccl::Result post_and_wait(netapi::Plugin& net, void* comm, bool is_send, Part part, int* size) {
  void* request = nullptr;
  nccl::Result result = nccl::Result::kSuccess;
  int done = 0;
  const bool ended = eventually([&] {
    if (request == nullptr) {
      result = is_send ? net.isend(comm, part.data, part.size, part.tag, part.mhandle, &request)
                       : net.irecv(comm, 1, &part.data, &part.size, &part.tag, &part.mhandle, &request);
    } else {
      result = net.test(request, &done, size);
    }
    return done != 0 || result != nccl::Result::kSuccess;
  });
  EXPECT_TRUE(ended) << (is_send ? "a send" : "a receive") << " does not end";
  return ended ? result : nccl::Result::kInternalError;
}

nccl::Result flush_and_wait(netapi::Plugin& net, void* comm, Part part) {
  int size = static_cast<int>(part.size);
  void* request = nullptr;
  int done = 0;
  nccl::Result result = net.iflush(comm, 1, &part.data, &size, &part.mhandle, &request);
  if (request == nullptr) return result;
  const bool ended = eventually([&] {
    result = net.test(request, &done, nullptr);
    return done != 0 || result != nccl::Result::kSuccess;
  });
  EXPECT_TRUE(ended) << "a flush does not end";
  return ended ? result : nccl::Result::kInternalError;
}

Registered::Registered(conformance::Conformance& test, void* comm, Buffer& buffer, std::size_t at, std::size_t bytes)
    : test_(test), comm_(comm) {
  test.service().run([&] {
    EXPECT_OK(
        register_memory(test.net(), comm, buffer.data() + at, bytes, buffer.place(), &mhandle_, {}, buffer.start()))
        << name_of(buffer.place());
  });
  EXPECT_NE(mhandle_, nullptr);
}

void Registered::release() {
  if (mhandle_ == nullptr) return;
  test_.service().run([&] { EXPECT_OK(test_.net().dereg_mr(comm_, std::exchange(mhandle_, nullptr))); });
}

bool GpuTest::takes_plain() {
  return gpu_memory_setting() == "both" || gpu_memory_setting() == "peer-memory";
}

bool GpuTest::takes_dmabuf() {
  return gpu_memory_setting() == "both" || gpu_memory_setting() == "dmabuf";
}

std::vector<How> GpuTest::ways() {
  std::vector<How> ways;
  if (takes_dmabuf()) ways = {How::kDmabuf, How::kDmabufAtOffset};
  if (takes_plain()) ways.push_back(How::kPlain);
  return ways;
}

int second_gpu() {
  static const int gpu = [] {
    int count = 0;
    EXPECT_EQ(cuda().cuDeviceGetCount(&count), CUDA_SUCCESS);
    return count > 1 ? 1 : 0;
  }();
  return gpu;
}

void GpuTest::run(Traffic& traffic, const std::vector<const Operation*>& receives) {
  std::vector<void*> flushes;
  std::size_t flushed = 0;
  const auto flush = [&](const Operation& receive) {
    std::vector<void*> data;
    std::vector<int> sizes = receive.sizes;
    std::vector<void*> mhandles;
    for (const Part& part : receive.parts) {
      data.push_back(part.data);
      mhandles.push_back(part.mhandle);
    }
    void* request = nullptr;
    EXPECT_OK(net().iflush(receive.comm, static_cast<int>(data.size()), data.data(), sizes.data(), mhandles.data(),
                           &request));
    if (request != nullptr) flushes.push_back(request);
  };
  const bool ended = eventually([&] {
    if (traffic.open() > 0 && !traffic.step()) return true;
    for (; flushed < receives.size() && receives[flushed]->done; ++flushed) flush(*receives[flushed]);
    std::erase_if(flushes, [&](void* request) {
      int done = 0;
      EXPECT_OK(net().test(request, &done, nullptr));
      return done != 0;
    });
    return HasFailure() || (traffic.open() == 0 && flushed == receives.size() && flushes.empty());
  });
  EXPECT_TRUE(ended) << traffic.open() << " operations and " << flushes.size() << " flushes do not end, " << flushed
                     << " of " << receives.size() << " receives were done";
}

void GpuTest::exchange(TestConnection& link, const std::vector<std::vector<std::size_t>>& groups, const Route& route) {
  ASSERT_TRUE(link);
  SCOPED_TRACE("from " + name_of(route.from) + " to " + name_of(route.to));
  std::size_t total = kGap;
  for (const auto& group : groups) {
    for (const std::size_t size : group) total += size + kGap + 1;
  }
  Buffer source(route.from, total, route.send_offset);
  Buffer target(route.to, total, route.recv_offset);
  std::optional<Buffer> odd;
  if (route.odd_to) odd.emplace(*route.odd_to, total, route.recv_offset);
  const Registered source_mr(*this, link.send_comm, source);
  const Registered target_mr(*this, link.recv_comm, target);
  std::optional<Registered> odd_mr;
  if (odd) odd_mr.emplace(*this, link.recv_comm, *odd);
  ASSERT_FALSE(HasFailure());

  Traffic traffic(net());
  std::vector<const Operation*> receives;
  std::size_t at = kGap;
  for (const auto& group : groups) {
    std::vector<Part> members;
    for (std::size_t i = 0; i < group.size(); ++i) {
      const std::size_t size = group[i];
      const bool is_odd = odd && i % 2 == 1;
      Buffer& to = is_odd ? *odd : target;
      source.write(at, size, ++seed_);
      to.expect(at, size, seed_);
      const int tag = static_cast<int>(i);
      members.push_back({to.data() + at, size, tag, is_odd ? odd_mr->get() : target_mr.get()});
      traffic.send(link.send_comm, {source.data() + at, size, tag, source_mr.get()});
      at += size + kGap + 1;
    }
    receives.push_back(&traffic.recv(link.recv_comm, std::move(members)));
  }
  run(traffic, receives);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const std::vector<int> sizes(groups[i].begin(), groups[i].end());
    EXPECT_EQ(receives[i]->sizes, sizes) << "receive " << i;
  }
  EXPECT_TRUE(source.intact()) << "at the sender";
  EXPECT_TRUE(target.intact()) << "at the receiver";
  if (odd) {
    EXPECT_TRUE(odd->intact()) << "at the receiver, odd members";
  }
}

void GpuTest::exchange_one(TestConnection& link, Buffer& source, void* source_mr, Buffer& target, void* target_mr,
                           std::size_t from, std::size_t to, std::size_t size) {
  source.write(from, size, ++seed_);
  target.expect(to, size, seed_);
  Traffic traffic(net());
  const Operation& receive = traffic.recv(link.recv_comm, {{target.data() + to, size, 0, target_mr}});
  traffic.send(link.send_comm, {source.data() + from, size, 0, source_mr});
  run(traffic, {&receive});
  EXPECT_TRUE(source.intact()) << "at the sender";
  EXPECT_TRUE(target.intact()) << "at the receiver";
}

TestConnection GpuTest::connect_to(PeerProcess& peer) {
  TestConnection link(*this, nullptr, nullptr);
  conformance::Handle own;
  void* const listen_comm = listen({context(), 0}, own);
  conformance::Handle others;
  if (listen_comm == nullptr || !peer.exchange_handles(own, others)) return link;
  service().run([&] {
    EXPECT_TRUE(eventually([&] {
      if (link.send_comm == nullptr) {
        EXPECT_OK(net().connect(context(), 0, others.bytes, &link.send_comm));
      }
      if (link.recv_comm == nullptr) {
        EXPECT_OK(net().accept(listen_comm, &link.recv_comm));
      }
      return HasFailure() || link;
    }));
    EXPECT_OK(net().close_listen(listen_comm));
  });
  EXPECT_TRUE(peer.result() == nccl::Result::kSuccess);
  return link;
}

SpinningKernels::SpinningKernels()
    : waits_(cuda().standin_cuda_waits()), pageable_copies_(cuda().standin_cuda_pageable_copies()) {
  for (int gpu = 0; gpu <= second_gpu(); ++gpu) cuda().standin_cuda_begin_kernel(gpu);
  watchdog_ = std::thread([this] {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, std::chrono::seconds(15), [this] { return is_ended_; })) return;
    ADD_FAILURE() << "a call waits for a kernel that spins";
    end();
    is_ended_ = true;
  });
}

SpinningKernels::~SpinningKernels() {
  {
    const std::lock_guard lock(mutex_);
    if (!is_ended_) end();
    is_ended_ = true;
  }
  changed_.notify_all();
  watchdog_.join();
}

void SpinningKernels::end() {
  for (int gpu = 0; gpu <= second_gpu(); ++gpu) cuda().standin_cuda_end_kernel(gpu);
}

unsigned long long SpinningKernels::waits() const {
  return cuda().standin_cuda_waits() - waits_;
}

unsigned long long SpinningKernels::pageable_copies() const {
  return cuda().standin_cuda_pageable_copies() - pageable_copies_;
}

}  // namespace gpu_direct
