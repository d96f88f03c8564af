//: in unit_net_failure

// Failures that no completion reports: calls of the two applications that do not match, a corrupt peer, flushes that
// cannot be posted, events of a device. Each in a child process, because a process reads its faults once.
#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <regex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "child_lines.h"
#include "connected_comms.h"
#include "support/child.h"
#include "support/log_lines.h"

namespace verbatim {
namespace {

// A connection, to device `to`, with a buffer at each end.
struct Ends {
  explicit Ends(MemoryType type = MemoryType::kHost, std::size_t to = 0) {
    link.connect(0, to);
    send_memory = link.reg(link.send(), source, type);
    recv_memory = link.reg(link.recv(), target);
  }

  Request* announce(std::size_t bytes, std::size_t members = 1) {
    const std::vector<RecvBuffer> buffers(members, {target.data(), bytes, 0, recv_memory.get()});
    return link.irecv(buffers);
  }
  // Until the receive has arrived and the send has failed.
  void send_until_failed(std::size_t bytes) { send_until_failed(bytes, *send_memory); }
  void send_until_failed(std::size_t bytes, const MemoryKeys& keys) {
    EXPECT_TRUE(ConnectedComms::fails(link.send(), [&] {
      void* request = nullptr;
      link.send().isend(source.data(), bytes, 0, &keys, nullptr, &request);
      link.send().progress();
    }));
  }
  void test_until_failed(Request* request) {
    EXPECT_TRUE(ConnectedComms::fails(link.recv(), [&] {
      int done = 0;
      if (request != nullptr) RecvComm::test(*request, &done, nullptr);
      if (request == nullptr) link.recv().progress();
    }));
  }

  // What no correct peer does: writes with an arbitrary immediate into the receiver's buffer, past the plugin.
  void write_as_sender(std::size_t bytes, const wire::Immediate& immediate) {
    ibv_send_wr work = {};
    work.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    work.imm_data = htonl(wire::encode_immediate(immediate));
    work.wr.rdma = {reinterpret_cast<std::uint64_t>(target.data()), recv_memory->rkey[0]};
    post(link.send(), work, source.data(), bytes, send_memory->lkey[0]);
  }
  // An atomic at this offset of the receiver's buffer.
  void add_as_sender(std::size_t offset) {
    ibv_send_wr work = {};
    work.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
    work.wr.atomic = {reinterpret_cast<std::uint64_t>(target.data()) + offset, 1, 0, recv_memory->rkey[0]};
    post(link.send(), work, source.data(), 8, send_memory->lkey[0]);
  }
  void write_as_receiver(const wire::CtsEntry& entry) {
    ibv_send_wr work = {};
    work.opcode = IBV_WR_RDMA_WRITE;
    const wire::Hello& sender = link.recv().endpoint().remote();
    work.wr.rdma = {sender.control_address, sender.devices[0].control_rkey};
    std::memcpy(target.data(), &entry, sizeof entry);
    post(link.recv(), work, target.data(), sizeof entry, recv_memory->lkey[0]);
  }

  // Until the monitor has reported the event of the device to the receiving end.
  void wait_for_device_event() {
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      std::this_thread::yield();
      return link.recv().slow_path_flags() != 0;
    }));
  }

  ConnectedComms link;
  std::vector<std::uint8_t> source = pattern(std::size_t{1} << 20, 1);
  std::vector<std::uint8_t> target = std::vector<std::uint8_t>(4096);
  std::unique_ptr<MemoryHandle> send_memory;
  std::unique_ptr<MemoryHandle> recv_memory;

 private:
  static void post(Comm& comm, ibv_send_wr& work, void* data, std::size_t bytes, std::uint32_t lkey) {
    ibv_sge segment = {reinterpret_cast<std::uint64_t>(data), static_cast<std::uint32_t>(bytes), lkey};
    work.sg_list = &segment;
    work.num_sge = 1;
    ibv_send_wr* refused = nullptr;
    ASSERT_EQ(ibv_post_send(comm.endpoint().qps()[0].qp.get(), &work, &refused), 0);
  }
};

Lines lines_of(const std::string& faults, const std::function<void()>& body) {
  return warnings_of(test::check_in_child(with_faults(faults), body));
}

// The number of lines; `act` checks the fields.
std::size_t line_count(const std::function<void(Ends&)>& act, const std::string& faults = "seed=1") {
  return lines_of(faults,
                  [&] {
                    Ends ends;
                    act(ends);
                  })
      .size();
}

const std::string kSizesDiffer = "isend of 1024 bytes with tag 0 is more than the peer's receive holds, 64 bytes";

TEST(CallMismatch, SendLargerThanReceive_NamesBothRanks) {
  const std::size_t lines = line_count([](Ends& ends) {
    ASSERT_NE(ends.announce(64), nullptr);
    ends.send_until_failed(1024);
    expect_failure(ends.link.send(), {.kind = ErrorKind::kUsage,
                                      .what = kSizesDiffer,
                                      .why = "the ranks use different message sizes",
                                      .next = "compare count, type and environment (NCCL_ALGO, NCCL_PROTO, "
                                              "NCCL_BUFFSIZE...) of the ranks on HOST and HOST"});
  });
  EXPECT_EQ(lines, 1U);
}

TEST(CallMismatch, SendLargerThanReceive_IsReportedAtPeer) {
  const std::size_t lines = line_count([](Ends& ends) {
    Request* const receive = ends.announce(64);
    ASSERT_NE(receive, nullptr);
    ends.send_until_failed(1024);
    ends.test_until_failed(receive);
    expect_failure(ends.link.recv(), {.kind = ErrorKind::kRemote,
                                      .what = "the peer HOST (pid #) reported: " + kSizesDiffer +
                                              ": the ranks use different message sizes",
                                      .why = "",
                                      .next = "look at HOST (pid #) first: its log says more"});
  });
  EXPECT_EQ(lines, 2U);
}

TEST(LinkFailure, LinkDown_IsReportedAtPeerWithHostName) {
  const std::size_t lines = line_count(
      [](Ends& ends) {
        ASSERT_NE(ends.announce(64), nullptr);
        Request* const receive = ends.announce(64);
        ASSERT_NE(receive, nullptr);
        ends.send_until_failed(64);
        ends.test_until_failed(receive);
        ASSERT_NE(ends.link.send().failure(), nullptr);
        ASSERT_NE(ends.link.recv().failure(), nullptr);
        const std::string why = ends.link.send().failure()->diagnosis.why;
        EXPECT_EQ(normalized(why), "worked for T: the link of softverbs0:1 on HOST is down, longer than all retries");
        EXPECT_TRUE(ends.link.send().failure()->what.starts_with("sending 64 bytes failed"));
        const std::string& reported = ends.link.recv().failure()->what;
        EXPECT_NE(reported.find("reported: sending 64 bytes failed"), std::string::npos) << reported;
        EXPECT_TRUE(reported.ends_with(": " + why)) << reported;
      },
      "link-down device=0 after=1 op=write_imm");
  EXPECT_EQ(lines, 2U);
}

// They are done for the application as soon as they are posted.
TEST(OptionalReceive, UnreachablePeer_IsReportedAsNeverWorked) {
  const std::size_t lines = line_count(
      [](Ends& ends) {
        const RecvBuffer buffer{ends.target.data(), 64, 0, ends.recv_memory.get()};
        for (int i = 0; i < 4; ++i) ASSERT_NE(ends.link.irecv({&buffer, 1}, true), nullptr);
        ends.test_until_failed(nullptr);
        ASSERT_NE(ends.link.recv().failure(), nullptr);
        EXPECT_EQ(ends.link.recv().failure()->diagnosis.why,
                  "never worked: the two NICs cannot reach each other: GID, subnet, VLAN, firewall or rail");
      },
      "unreachable device=0 peer=0");
  EXPECT_EQ(lines, 1U);
}

void expect_corrupt_peer(const Comm& comm, const std::string& what, std::uint64_t messages = 0) {
  expect_failure(comm, {.kind = ErrorKind::kRemote,
                        .what = what,
                        .why = "no peer of this version does that: the versions of the plugin on HOST and HOST differ, "
                               "or memory of the plugin was overwritten",
                        .next = "compare the versions of the plugin on HOST and HOST, then check the application's "
                                "last changes",
                        .messages = messages});
}

TEST(CorruptPeer, GroupSizeOutOfRange_IsReported) {
  const std::size_t lines = line_count([](Ends& ends) {
    wire::CtsEntry entry = {};
    entry.size = {0, wire::CtsSize::of_group(200, wire::CtsFlags::kNone)};
    entry.ready = 1;
    ends.write_as_receiver(entry);
    ends.send_until_failed(64);
    expect_corrupt_peer(ends.link.send(), "the peer announced a group of 200 receives (CTS), 1 to 8 are possible");
  });
  EXPECT_EQ(lines, 1U);
}

TEST(CorruptPeer, CompletionWithoutReceive_IsReported) {
  const std::size_t lines = line_count([](Ends& ends) {
    ends.write_as_sender(8, {});
    ends.test_until_failed(nullptr);
    expect_corrupt_peer(ends.link.recv(), "the peer completed a receive that is not posted");
  });
  EXPECT_EQ(lines, 1U);
}

TEST(CorruptPeer, CompletionLargerThanReceive_IsReported) {
  const std::size_t lines = line_count([](Ends& ends) {
    Request* const receive = ends.announce(64);
    ends.write_as_sender(65, {});
    ends.test_until_failed(receive);
    expect_corrupt_peer(ends.link.recv(), "the peer reports 65 bytes in a receive that holds 64", 1);
  });
  EXPECT_EQ(lines, 1U);
}

TEST(CorruptPeer, UnitsLargerThanReceive_AreReported) {
  const std::size_t lines = line_count([](Ends& ends) {
    Request* const receive = ends.announce(64);
    ends.write_as_sender(8, {.units = wire::kUnitMask});  // of 1 byte
    ends.test_until_failed(receive);
    expect_corrupt_peer(ends.link.recv(), "the peer reports 71 bytes in a receive that holds 64", 1);
  });
  EXPECT_EQ(lines, 1U);
}

TEST(CorruptPeer, TwoPartsWithTheSize_AreReported) {
  const std::size_t lines = line_count([](Ends& ends) {
    ends.announce(64);
    ends.write_as_sender(8, {.parts = 3});
    ends.write_as_sender(8, {.parts = 3});
    ends.test_until_failed(nullptr);
    expect_corrupt_peer(ends.link.recv(), "the peer completed a receive that is not posted");
  });
  EXPECT_EQ(lines, 1U);
}

TEST(CorruptPeer, GroupCompletedAsSingleMessage_IsReported) {
  const std::size_t lines = line_count([](Ends& ends) {
    Request* const receive = ends.announce(64, 3);
    ends.write_as_sender(64, {});
    ends.test_until_failed(receive);
    expect_corrupt_peer(ends.link.recv(), "the peer completed a group of 3 receives as a single message", 3);
  });
  EXPECT_EQ(lines, 1U);
}

void expect_contradiction(const Comm& comm, ErrorKind kind, const std::string& what) {
  expect_failure(comm, {.kind = kind,
                        .what = what,
                        .why = "the calls of the application on HOST contradict each other, the path is not the cause",
                        .next = "report this line and the versions of NCCL (NCCL_DEBUG=VERSION) and of the plugin"});
}

TEST(Flush, TooManyOutstanding_IsReported) {
  const std::size_t lines = line_count([](Ends& ends) {
    std::vector<std::uint8_t> target(8);
    const auto memory = ends.link.reg(ends.link.recv(), target, MemoryType::kCuda);
    ASSERT_NE(memory, nullptr);
    for (std::uint32_t i = 0; i < FlushQueue::kSlots; ++i) {
      ASSERT_NE(ends.link.recv().iflush(target.data(), *memory), nullptr) << i;
    }
    EXPECT_EQ(ends.link.recv().iflush(target.data(), *memory), nullptr);
    expect_contradiction(ends.link.recv(), ErrorKind::kInternal,
                         "iflush while 256 flushes are outstanding, as many as receives can be");
  });
  EXPECT_EQ(lines, 1U);
}

// Flushes memory of a GPU for the first time, which must fail.
void expect_first_flush_fails(Ends& ends) {
  const auto memory = ends.link.reg(ends.link.recv(), ends.target, MemoryType::kCuda);
  ASSERT_NE(memory, nullptr);
  EXPECT_EQ(ends.link.recv().error(), nullptr);
  EXPECT_EQ(ends.link.recv().iflush(ends.target.data(), *memory), nullptr);
  ASSERT_NE(ends.link.recv().error(), nullptr);
  EXPECT_EQ(ends.link.recv().error()->kind, ErrorKind::kSystem);
}

// The first iflush creates the flush QP: the third QP of this connection.
TEST(Flush, CreateQpFails_IsReported) {
  const Lines warnings = lines_of("fail verb=create_qp nth=3 errno=ENOMEM", [] {
    Ends ends;
    expect_first_flush_fails(ends);
  });
  test::expect_log_lines(warnings);
}

// Six calls have connected both ends. The flush QP is connected to itself.
TEST(Flush, ModifyQpFails_IsReported) {
  const Lines warnings = lines_of("fail verb=modify_qp nth=8 errno=EINVAL", [] {
    Ends ends(MemoryType::kHost, 1);
    expect_first_flush_fails(ends);
  });
  test::expect_log_lines(warnings);
}

// ---- events of a device that ended a queue

// An atomic at an unaligned address: the receiving device refuses the request.
TEST(AsyncEvent, QpRequestError_IsReported) {
  const std::size_t lines = line_count([](Ends& ends) {
    ends.add_as_sender(4);
    ends.wait_for_device_event();
    ends.test_until_failed(nullptr);
    expect_failure(ends.link.recv(),
                   {.kind = ErrorKind::kRemote,
                    .what = "softverbs0 on HOST reported invalid request local work queue error (IBV_EVENT_QP_REQ_ERR)",
                    .why = "a request from HOST is invalid: access flags, MTU or length",
                    .next = "look at the log of HOST; compare versions and MTU on HOST and HOST"});
  });
  EXPECT_EQ(lines, 1U);
}

// softverbs has no such fault; which event reaches which connection is tested in monitor_test.
TEST(AsyncEvent, QpCqOrDeviceError_IsReported) {
  const std::pair<ibv_event_type, std::string> events[] = {
      {IBV_EVENT_QP_FATAL, "local work queue catastrophic error (IBV_EVENT_QP_FATAL)"},
      {IBV_EVENT_CQ_ERR, "CQ error (IBV_EVENT_CQ_ERR)"},
      {IBV_EVENT_DEVICE_FATAL, "local catastrophic error (IBV_EVENT_DEVICE_FATAL)"},
  };
  for (const auto& [type, name] : events) {
    const std::size_t lines = line_count([type = type, name = name](Ends& ends) {
      ends.link.recv().set_device_event(type, *ends.link.recv().endpoint().ports()[0]->device);
      ends.test_until_failed(nullptr);
      expect_failure(ends.link.recv(),
                     {.kind = ErrorKind::kSystem,
                      .what = "softverbs0 on HOST reported " + name,
                      .why = "softverbs0 on HOST or its driver failed, not the path to the peer",
                      .next = "'dmesg | grep softverbs0' on HOST; exclude it with VERBATIM_HCA=^softverbs0 until it "
                              "works"});
    });
    EXPECT_EQ(lines, 1U);
  }
}

const std::string kProtection = "sending 64 bytes failed with local protection error (IBV_WC_LOC_PROT_ERR 4, vendor ";

TEST(LocalProtectionError, GpuBuffer_MentionsIommu) {
  const Lines lines = lines_of("complete op=write_imm nth=1 status=LOC_PROT_ERR vendor=81", [] {
    Ends ends(MemoryType::kCuda);
    ASSERT_NE(ends.announce(64), nullptr);
    ends.send_until_failed(64);
    expect_failure(ends.link.send(),
                   {.kind = ErrorKind::kSystem,
                    .what = kProtection + "error 81)",
                    .why = "the application's buffer is behind an IOMMU or PCIe ACS, or was freed while in use: 64 "
                           "bytes of GPU memory at 0x# in a registration of # bytes at 0x#",
                    .next = "'lspci -vvv | grep ACSCtl' must show no SrcValid+, the kernel needs iommu=pt; check that "
                            "buffers outlive their operations"});
  });
  EXPECT_EQ(lines.size(), 1U);
}

TEST(LocalProtectionError, DeregisteredBuffer_IsReported) {
  const std::size_t lines = line_count([](Ends& ends) {
    const MemoryKeys keys = *ends.send_memory;
    ASSERT_NE(ends.announce(64), nullptr);
    ends.send_memory.reset();
    ends.send_until_failed(64, keys);
    expect_failure(ends.link.send(), {.kind = ErrorKind::kSystem,
                                      .what = kProtection + "error 0)",
                                      .why = "the application's buffer was deregistered while in use: 64 bytes at 0x# "
                                             "are in no registration",
                                      .next = "check that buffers outlive their operations"});
  });
  EXPECT_EQ(lines, 1U);
}

}  // namespace
}  // namespace verbatim
