// A flush waits for at least 10 ms after a port of the connection has failed. On devices as those of bnxt_re and irdma
// only with tools/check --full.
//: test gpu-direct-link-down-{} filter=*GpuLanes* SOFTVERBS_DEVICES=16 SOFTVERBS_PROFILE={variant} CONFORMANCE_MERGE=2
//:   + SOFTVERBS_LATE_GPU_MS=6
//:   + SOFTVERBS_FAULTS='link-down device=1 op=write_imm qp=any after=2;
//:   + link-down device=3 op=write_imm qp=any after=6; link-down device=5 op=write_imm qp=any after=10;
//:   + link-down device=7 op=write_imm qp=any after=14; link-down device=9 op=write_imm qp=any after=18;
//:   + link-down device=11 op=write_imm qp=any after=22; link-down device=13 op=write_imm qp=any after=26;
//:   + link-down device=15 op=write_imm qp=any after=30'
//:   mlx5
//:   bnxt_re full
//:   irdma full

// GPU memory and a lane whose port fails: what has come over it cannot be flushed any more.
#include <cstddef>
#include <string>

#include "gpu_test.h"

namespace gpu_direct {
namespace {

// Each device of the test has two members. The third of four messages goes over the first one, and with it the link of
// the second one goes down. What a message has brought is visible a little later (CONFORMANCE_MERGE, SOFTVERBS_FAULTS,
// SOFTVERBS_LATE_GPU_MS).
class GpuLanes : public GpuTest {};
ONE_VERSION(GpuLanes, 12);

TEST_P(GpuLanes, PortFailsBehindAMessage_FlushEndsWithItsBytes) {
  constexpr std::size_t kBytes = 5'000;
  constexpr const char* kLaneIsDown = "lane 2 of 2 is down";
  bool has_come = false;
  // On a busy machine softverbs may make the bytes visible later still.
  for (int device = 0; device < device_count() && !has_come && !HasFailure(); ++device) {
    TestConnection link = this->link({context(), device}, {context(), device});
    ASSERT_TRUE(link);
    Buffer source({}, 3 * kBytes);
    Buffer target({second_gpu(), Kind::kAllocated, ways().front()}, 3 * kBytes);
    const Registered source_mr(*this, link.send_comm, source);
    const Registered target_mr(*this, link.recv_comm, target);
    source.write(0, 3 * kBytes, ++seed_);
    target.expect(0, 3 * kBytes, seed_);
    for (std::size_t at = 0; at < 3 * kBytes; at += kBytes) {
      Traffic traffic(net());
      traffic.recv(link.recv_comm, {{target.data() + at, kBytes, 0, target_mr.get()}});
      traffic.send(link.send_comm, {source.data() + at, kBytes, 0, source_mr.get()});
      ASSERT_TRUE(traffic.run());
    }
    EXPECT_OK(flush_and_wait(net(), link.recv_comm, {target.data(), 3 * kBytes, 0, target_mr.get()}));
    has_come = static_cast<bool>(target.intact());
    EXPECT_TRUE(eventually([&] { return static_cast<bool>(target.intact()); })) << "wrong bytes";
    exchange_one(link, source, source_mr.get(), target, target_mr.get(), 0, 0, kBytes);
    std::string lines;
    EXPECT_TRUE(eventually([&] {
      lines += joined(take_warnings());
      const std::size_t of_one_end = lines.find(kLaneIsDown);
      return of_one_end != lines.rfind(kLaneIsDown);
    })) << lines;
  }
  EXPECT_TRUE(has_come) << "wrong bytes after the flush";
  finalize(context());
  take_warnings();  // of ports and their addresses
}

}  // namespace
}  // namespace gpu_direct
