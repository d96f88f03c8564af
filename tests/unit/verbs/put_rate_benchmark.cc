//: program perf_put_rate optimized link=cost,perf,netapi,verbs,base,gtest
//: benchmark perf-put-rate suite=perf protocol=gtest sanitizer=none needs=plugin,softverbs SOFTVERBS_ENGINE=thread
//:   + PERF_PLUGIN={plugin} VERBATIM_VERBS_LIBRARY={softverbs} VERBATIM_SOCKET_IFNAME=lo

// Puts of 4 KiB with 32 under way, over the RMA table of the plugin and over a bare loop of verbs: the same work
// requests, all signalled, from and to memory that begins at a page: copies of other memory take up to a third more
// time. Both run in turn in this process, round by round. As any program that puts, the loop fills in a work request
// for each put, finds the put by its completion, and ends puts in order.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/config.h"
#include "memory/memory.h"
#include "netapi/rma.h"
#include "support/benchmark.h"
#include "verbatim-perf/cost/measured_puts.h"
#include "verbs/device_inventory.h"
#include "verbs/errors.h"
#include "verbs/handles.h"
#include "verbs/qp.h"
#include "verbs/verbs.h"

namespace verbatim::perf {
namespace {

constexpr std::size_t kBytes = 4096;
constexpr int kUnderWay = cost::MeasuredPuts::kUnderWay;
constexpr int kPutsOfARound = 16384;

template <typename T>
T value_of(Result<T> result) {
  if (!result) throw std::runtime_error(std::string(result.error().operation) + " failed");
  return *std::move(result);
}

// Two QPs of this process, and WRITEs from one to the other.
class BareLoop {
 public:
  BareLoop() {
    const Config config = value_of(Config::from_environment());
    verbs_ = value_of(Verbs::load(config.verbs_library));
    inventory_ = value_of(DeviceSurvey::open(*verbs_, config));
    const Port& port = inventory_->ports.front();
    const Device& device = *port.device;
    for (End& end : ends_) {
      end.bytes = memory_->allocate(kBytes);
      end.mr = value_of(
          adopt("ibv_reg_mr",
                verbs_->reg_mr(device.pd(), end.bytes, kBytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE),
                verbs_->dereg_mr));
      end.cq = value_of(adopt("ibv_create_cq", verbs_->create_cq(device.context(), 2 * kUnderWay, nullptr, nullptr, 0),
                              verbs_->destroy_cq));
      end.qp = value_of(make_qp(port, end.cq.get(), {.send_wr = 2 * kUnderWay, .recv_wr = 1}, config));
    }
    for (const int i : {0, 1}) {
      ibv_qp* const own = ends_[i].qp.qp.get();
      value_of(connect_qp(own, port,
                          {.remote = qp_address(port, ends_[1 - i].qp.qp.get()),
                           .path = {.mtu = port.active_mtu},
                           .peer_reads = responder_reads(device)},
                          config));
    }
    std::memset(ends_[0].bytes, 0x5a, kBytes);
    for (std::size_t i = 0; i < kUnderWay; ++i) {
      work_[i].sg_list = &segments_[i];
      work_[i].num_sge = 1;
    }
  }

  void put(int times) {
    int started = 0;
    for (int ended = 0; ended < times;) {
      const int count = std::min(kUnderWay - (started - ended), times - started);
      for (int i = 0; i < count; ++i) fill(static_cast<std::size_t>(i), (started + i) % kUnderWay);
      if (count > 0) post(static_cast<std::size_t>(count));
      started += count;
      std::array<ibv_wc, kPollBatch> completions;
      const int polled = ibv_poll_cq(ends_[0].cq.get(), kPollBatch, completions.data());
      if (polled < 0) throw std::runtime_error("ibv_poll_cq failed");
      for (int i = 0; i < polled; ++i) {
        const ibv_wc& completion = completions[static_cast<std::size_t>(i)];
        if (completion.status != IBV_WC_SUCCESS) throw std::runtime_error("a WRITE failed");
        done_[completion.wr_id] = true;
      }
      for (; ended < started && done_[static_cast<std::size_t>(ended % kUnderWay)]; ++ended) {
        done_[static_cast<std::size_t>(ended % kUnderWay)] = false;
      }
    }
  }
  bool is_right() const { return std::memcmp(ends_[0].bytes, ends_[1].bytes, kBytes) == 0; }

 private:
  static constexpr int kPollBatch = 16;
  struct End {
    std::byte* bytes = nullptr;
    UniqueMr mr;
    UniqueCq cq;
    RcQp qp;
  };

  void fill(std::size_t index, int put) {
    segments_[index] = {reinterpret_cast<std::uint64_t>(ends_[0].bytes), kBytes, ends_[0].mr->lkey};
    ibv_send_wr& work = work_[index];
    work.wr_id = static_cast<std::uint64_t>(put);
    work.opcode = IBV_WR_RDMA_WRITE;
    work.send_flags = IBV_SEND_SIGNALED;
    work.wr.rdma.remote_addr = reinterpret_cast<std::uint64_t>(ends_[1].bytes);
    work.wr.rdma.rkey = ends_[1].mr->rkey;
  }

  void post(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) work_[i].next = i + 1 < count ? &work_[i + 1] : nullptr;
    ibv_send_wr* refused = nullptr;
    if (ibv_post_send(ends_[0].qp.qp.get(), work_.data(), &refused) != 0) {
      throw std::runtime_error("ibv_post_send failed");
    }
  }

  const std::unique_ptr<memory::Memory> memory_ = memory::make_host_memory();
  std::unique_ptr<const Verbs> verbs_;
  std::shared_ptr<const DeviceSurvey> inventory_;
  End ends_[2];
  std::array<ibv_sge, kUnderWay> segments_ = {};
  std::array<ibv_send_wr, kUnderWay> work_ = {};
  std::array<bool, kUnderWay> done_ = {};
};

template <typename Call>
double nanoseconds_of(Call call) {
  const std::uint64_t begin = monotonic_ns();
  call();
  return static_cast<double>(monotonic_ns() - begin) / kPutsOfARound;
}

// On a machine with many cores the rate depends on where queues and memory lie, so both are set up anew for every few
// rounds.
TEST(PutRateBenchmark, AgainstABareLoop) {
  constexpr int kSetups = 11;
  constexpr int kRounds = 4;
  const netapi::OpenedRma kept = netapi::open_rma_plugin(std::getenv("PERF_PLUGIN"));  // stays loaded between set-ups
  ASSERT_NE(kept.plugin, nullptr) << kept.error;
  std::vector<double> bare_ns;
  std::vector<double> put_ns;
  std::vector<double> ratios;
  for (int setup = 0; setup < kSetups; ++setup) {
    cost::MeasuredPuts puts(netapi::open_rma_plugin(std::getenv("PERF_PLUGIN")).plugin, kBytes);
    BareLoop bare;
    const auto measure_bare = [&] { bare_ns.push_back(nanoseconds_of([&] { bare.put(kPutsOfARound); })); };
    bare.put(kPutsOfARound);
    puts.put_stream(kBytes, kPutsOfARound);
    for (int round = 0; round < kRounds; ++round) {
      if (round % 2 == 0) measure_bare();
      put_ns.push_back(nanoseconds_of([&] { puts.put_stream(kBytes, kPutsOfARound); }));
      if (round % 2 != 0) measure_bare();
      ratios.push_back(bare_ns.back() / put_ns.back());
    }
    puts.check(kBytes);
    EXPECT_TRUE(bare.is_right()) << "wrong bytes";
  }
  test::print_benchmark("put of 4 KiB", "ns", put_ns);
  test::print_benchmark("WRITE of 4 KiB, bare loop", "ns", bare_ns);
  test::print_benchmark("rate of puts over that of the bare loop", "times", ratios);
}

}  // namespace
}  // namespace verbatim::perf
