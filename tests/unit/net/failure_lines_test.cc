// The lines of failures that no completion tells of: what the application's ends or a corrupt peer do to each other, a
// flush that cannot be, a device's events. Word for word, each in a child of its own.
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
  // Once the receive has been heard of.
  void send_until_failed(std::size_t bytes) { send_until_failed(bytes, *send_memory); }
  void send_until_failed(std::size_t bytes, const MemoryKeys& keys) {
    EXPECT_TRUE(ConnectedComms::fails(link.send(), [&] {
      void* request = nullptr;
      link.send().isend(source.data(), bytes, 0, keys, &request);
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

  // What no sound peer does: bytes of its own choice to where the other end's `memory` is, behind the transport's back.
  void write_as_sender(std::size_t bytes, const wire::Immediate& immediate) {
    ibv_send_wr work = {};
    work.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    work.imm_data = htonl(wire::encode_immediate(immediate));
    work.wr.rdma = {reinterpret_cast<std::uint64_t>(target.data()), recv_memory->rkey[0]};
    post(link.send(), work, source.data(), bytes, send_memory->lkey[0]);
  }
  // An atomic on the word at this place of the other end's memory.
  void add_as_sender(std::size_t place) {
    ibv_send_wr work = {};
    work.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
    work.wr.atomic = {reinterpret_cast<std::uint64_t>(target.data()) + place, 1, 0, recv_memory->rkey[0]};
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

  // Until the receiving end has been told of its device's event.
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

Lines lines_of(const std::function<void(Ends&)>& act) {
  return lines_of("seed=1", [&] {
    Ends ends;
    act(ends);
  });
}

TEST(CallMismatchLine, SendLargerThanReceive_NamesBothRanks) {
  const Lines told = lines_of([](Ends& ends) {
    ASSERT_NE(ends.announce(64), nullptr);
    ends.send_until_failed(1024);
  });
  EXPECT_EQ(told, Lines{"isend of 1024 bytes with tag 0 is more than the peer's receive holds, 64 bytes: the ranks use "
                        "different message sizes. Next: compare count, type and environment (NCCL_ALGO, NCCL_PROTO, "
                        "NCCL_BUFFSIZE...) of the ranks on HOST and HOST. " +
                        kPath + "0 messages, 0 bytes"});
}

// The other end is told what this one's operator is.
TEST(CallMismatchLine, SendLargerThanReceive_IsReportedAtPeer) {
  const Lines told = lines_of([](Ends& ends) {
    Request* const receive = ends.announce(64);
    ASSERT_NE(receive, nullptr);
    ends.send_until_failed(1024);
    ends.test_until_failed(receive);
  });
  ASSERT_EQ(told.size(), 2U) << testing::PrintToString(told);
  EXPECT_EQ(told[1],
            "the peer HOST (pid #) reported: isend of 1024 bytes with tag 0 is more than the peer's receive holds, 64 "
            "bytes: the ranks use different message sizes. Next: look at HOST (pid #) first: its log says more. " +
                kPath + "0 messages, 0 bytes");
}

const std::string kCorrupt =
    ": no peer of this version does that: the versions of the plugin on HOST and HOST differ, or memory of the plugin "
    "was overwritten. Next: compare the versions of the plugin on HOST and HOST, then check the application's last "
    "changes. ";

TEST(CallMismatchLine, LinkDown_IsReportedAtPeerWithHostName) {
  const Lines told = lines_of("link-down device=0 after=1 op=write_imm", [] {
    Ends ends;
    ASSERT_NE(ends.announce(64), nullptr);
    Request* const receive = ends.announce(64);
    ASSERT_NE(receive, nullptr);
    ends.send_until_failed(64);
    ends.test_until_failed(receive);
  });
  ASSERT_EQ(told.size(), 2U) << testing::PrintToString(told);
  EXPECT_NE(told[0].find("the link of softverbs0:1 on HOST is down"), std::string::npos) << told[0];
  EXPECT_NE(told[1].find("reported: sending 64 bytes failed"), std::string::npos) << told[1];
  EXPECT_NE(told[1].find("the link of softverbs0:1 on HOST is down"), std::string::npos) << told[1];
}

// They are over for the application as soon as they are posted.
TEST(OptionalReceiveLine, UnreachablePeer_IsReportedAsNeverWorked) {
  const Lines told = lines_of("unreachable device=0 peer=0", [] {
    Ends ends;
    const RecvBuffer buffer{ends.target.data(), 64, 0, ends.recv_memory.get()};
    for (int i = 0; i < 4; ++i) ASSERT_NE(ends.link.irecv({&buffer, 1}, true), nullptr);
    ends.test_until_failed(nullptr);
  });
  ASSERT_EQ(told.size(), 1U) << testing::PrintToString(told);
  EXPECT_NE(told[0].find("): never worked: the two NICs cannot reach each other"), std::string::npos) << told[0];
}

TEST(CorruptPeerLine, GroupSizeOutOfRange_IsReported) {
  const Lines told = lines_of([](Ends& ends) {
    wire::CtsEntry entry = {};
    entry.head.group_size = 200;
    entry.ready = 1;
    ends.write_as_receiver(entry);
    ends.send_until_failed(64);
  });
  EXPECT_EQ(told, Lines{"the peer announced a group of 200 receives (CTS), 1 to 8 are possible" + kCorrupt + kPath +
                        "0 messages, 0 bytes"});
}

TEST(CorruptPeerLine, CompletionWithoutReceive_IsReported) {
  const Lines told = lines_of([](Ends& ends) {
    ends.write_as_sender(8, {});
    ends.test_until_failed(nullptr);
  });
  EXPECT_EQ(told, Lines{"the peer completed a receive that is not posted" + kCorrupt + kPath + "0 messages, 0 bytes"});
}

TEST(CorruptPeerLine, CompletionLargerThanReceive_IsReported) {
  const Lines told = lines_of([](Ends& ends) {
    Request* const receive = ends.announce(64);
    ends.write_as_sender(65, {});
    ends.test_until_failed(receive);
  });
  EXPECT_EQ(told,
            Lines{"the peer reports 65 bytes in a receive that holds 64" + kCorrupt + kPath + "1 messages, 0 bytes"});
}

TEST(CorruptPeerLine, GroupCompletedAsSingleMessage_IsReported) {
  const Lines told = lines_of([](Ends& ends) {
    Request* const receive = ends.announce(64, 3);
    ends.write_as_sender(64, {});
    ends.test_until_failed(receive);
  });
  EXPECT_EQ(told, Lines{"the peer completed a group of 3 receives as a single message" + kCorrupt + kPath +
                        "3 messages, 0 bytes"});
}

const std::string kContradiction =
    ": the calls of the application on HOST contradict each other, the path is not the cause. Next: report this line "
    "and the versions of NCCL (NCCL_DEBUG=VERSION) and of the plugin. ";

TEST(FlushLine, MemoryNeverReceivedInto_IsReported) {
  const Lines told = lines_of([](Ends& ends) {
    MemoryKeys memory = *ends.recv_memory;
    memory.device_memory = true;
    EXPECT_EQ(ends.link.recv().iflush(ends.target.data(), memory), nullptr);
    EXPECT_NE(ends.link.recv().error(), nullptr);
  });
  EXPECT_EQ(told, Lines{"iflush of GPU memory, but this connection has received into none" + kContradiction + kPath +
                        "0 messages, 0 bytes"});
}

TEST(FlushLine, TooManyOutstanding_IsReported) {
  const Lines told = lines_of([](Ends& ends) {
    std::vector<std::uint8_t> target(8);
    const auto memory = ends.link.reg(ends.link.recv(), target, MemoryType::kCuda);
    ASSERT_NE(memory, nullptr);
    for (std::uint32_t i = 0; i < FlushQueue::kSlots; ++i) {
      ASSERT_NE(ends.link.recv().iflush(target.data(), *memory), nullptr) << i;
    }
    EXPECT_EQ(ends.link.recv().iflush(target.data(), *memory), nullptr);
  });
  EXPECT_EQ(told, Lines{"iflush while 256 flushes are outstanding, as many as receives can be" + kContradiction +
                        kPath + "0 messages, 0 bytes"});
}

// The queue pair to flush with is made when GPU memory is first registered: the third of this connection.
TEST(FlushLine, CreateQpFails_IsReportedAndConnectionWorks) {
  const Lines told = lines_of("fail verb=create_qp nth=3 errno=ENOMEM", [] {
    Ends ends;
    const MrRequest gpu{.address = ends.target.data(), .bytes = ends.target.size(), .type = MemoryType::kCuda};
    const auto refused = ends.link.recv().register_memory(gpu);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().sys_errno, ENOMEM);
    EXPECT_EQ(ends.link.recv().error(), nullptr) << "the connection is as good as before";
    EXPECT_TRUE(ends.link.recv().register_memory(gpu)) << "there is room now";
  });
  EXPECT_EQ(told, Lines{"ibv_create_qp for flushes of GPU memory failed with Cannot allocate memory: the QP limit of "
                        "the device is reached (8192 queue pairs for all processes, this process holds 2), or the "
                        "limit of locked memory. Next: fewer NCCL channels, VERBATIM_QPS_PER_CONNECTION=1, 'ulimit -l "
                        "unlimited'; 'rdma resource show' counts what all processes hold. Path: " +
                        kEnds});
}

// Six calls have connected both ends. It goes from the receiving device to itself.
TEST(FlushLine, ModifyQpFails_IsReported) {
  const Lines told = lines_of("fail verb=modify_qp nth=8 errno=EINVAL", [] {
    Ends ends(MemoryType::kHost, 1);
    EXPECT_FALSE(ends.link.recv().register_memory(
        {.address = ends.target.data(), .bytes = ends.target.size(), .type = MemoryType::kCuda}));
  });
  EXPECT_EQ(told,
            Lines{"ibv_modify_qp to RTR for flushes of GPU memory failed with Invalid argument: the device refuses an "
                  "attribute: GID 3, an MTU above the port's, or VERBATIM_SL, VERBATIM_TC or VERBATIM_PKEY out of its "
                  "range. Next: 'show_gids softverbs1' and 'ibv_devinfo -v -d softverbs1' on both hosts. Path: HOST "
                  "softverbs1:1 GID 3 ::ffff:10.77.1.1 QP # to HOST softverbs1:1 GID 3 ::ffff:10.77.1.1 QP #, MTU "
                  "4096, TC 0, SL 0"});
}

// Registered through another connection: this one hears of GPU memory when it is to receive into it. The fifth
// registration, after both ends' own and both buffers, is for what a flush reads.
TEST(FlushLine, RegMrFails_FailsConnection) {
  const Lines told = lines_of("fail verb=reg_mr nth=5 errno=EFAULT", [] {
    Ends ends;
    ends.recv_memory->device_memory = true;
    void* data = ends.target.data();
    void* memory = ends.recv_memory.get();
    std::size_t bytes = ends.target.size();
    int tag = 0;
    void* request = nullptr;
    EXPECT_EQ(ends.link.recv().irecv<std::size_t>(1, &data, &bytes, &tag, &memory, &request), ErrorKind::kSystem);
    EXPECT_EQ(request, nullptr);
  });
  EXPECT_EQ(told, (Lines{"softverbs0: ibv_reg_mr of 4096 bytes of host memory at 0x# failed: Bad address. Next: check "
                         "that the application has not freed the memory and may write to it",
                         "no flushes of GPU memory: the line before says why. Path: " + kEnds}));
}

// ---- what a device reports of a queue that it has ended ----

// No address for an atomic: the device refuses what the peer asks for.
TEST(AsyncEventLine, QpRequestError_IsReported) {
  const Lines told = lines_of([](Ends& ends) {
    ends.add_as_sender(4);
    ends.wait_for_device_event();
    ends.test_until_failed(nullptr);
  });
  EXPECT_EQ(told, Lines{"softverbs0 on HOST reported invalid request local work queue error (IBV_EVENT_QP_REQ_ERR): a "
                        "request from HOST is invalid: access flags, MTU or length. Next: look at the log of HOST; "
                        "compare versions and MTU on HOST and HOST. " +
                        kPath + "0 messages, 0 bytes"});
}

const std::string kDeviceFailed =
    "softverbs0 on HOST or its driver failed, not the path to the peer. Next: 'dmesg | grep softverbs0' on HOST; "
    "exclude it with VERBATIM_HCA=^softverbs0 until it works. ";

// softverbs has no such fault; which event reaches which connection is control_test's.
TEST(AsyncEventLine, QpCqOrDeviceError_IsReported) {
  const std::pair<ibv_event_type, std::string> events[] = {
      {IBV_EVENT_QP_FATAL, "local work queue catastrophic error (IBV_EVENT_QP_FATAL): "},
      {IBV_EVENT_CQ_ERR, "CQ error (IBV_EVENT_CQ_ERR): "},
      {IBV_EVENT_DEVICE_FATAL, "local catastrophic error (IBV_EVENT_DEVICE_FATAL): "},
  };
  for (const auto& [event, name] : events) {
    const Lines told = lines_of([type = event](Ends& ends) {
      ends.link.recv().set_signal(type);
      ends.test_until_failed(nullptr);
    });
    EXPECT_EQ(told, Lines{"softverbs0 on HOST reported " + name + kDeviceFailed + kPath + "0 messages, 0 bytes"});
  }
}

const std::string kProtection =
    "sending 64 bytes failed with local protection error (IBV_WC_LOC_PROT_ERR 4, vendor error ";

TEST(LocalProtectionErrorLine, GpuBuffer_MentionsIommu) {
  const Lines told = lines_of("complete op=write_imm nth=1 status=LOC_PROT_ERR vendor=81", [] {
    Ends ends(MemoryType::kCuda);
    ASSERT_NE(ends.announce(64), nullptr);
    ends.send_until_failed(64);
  });
  EXPECT_EQ(told, Lines{kProtection +
                        "81): the application's buffer is behind an IOMMU or PCIe ACS, or was freed while in use: 64 "
                        "bytes of GPU memory at 0x# in a registration of # bytes at 0x#. Next: 'lspci -vvv | grep "
                        "ACSCtl' must show no SrcValid+, the kernel needs "
                        "iommu=pt; check that buffers outlive their operations. " +
                        kPath + "0 messages, 0 bytes"});
}

TEST(LocalProtectionErrorLine, DeregisteredBuffer_IsReported) {
  const Lines told = lines_of([](Ends& ends) {
    const MemoryKeys keys = *ends.send_memory;
    ASSERT_NE(ends.announce(64), nullptr);
    ends.send_memory.reset();
    ends.send_until_failed(64, keys);
  });
  EXPECT_EQ(told, Lines{kProtection +
                        "0): the application's buffer was deregistered while in use: 64 bytes at 0x# are in no "
                        "registration. Next: check that buffers outlive their operations. " +
                        kPath + "0 messages, 0 bytes"});
}

}  // namespace
}  // namespace verbatim
