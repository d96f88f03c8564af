//: program unit_net_failure sources=support/child.cc link=net,verbs_headers,gtest
//:   + define=LOG_LINES={source}/tests/log_lines.txt
//: test unit-net-failure timeout=300

// What is reported of a connection that fails because of faults of softverbs: the fields of the failure, and
// whole log lines. Each case runs in a child process, because a process reads its faults once.
#include "net/diagnose/failure.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <regex>
#include <thread>

#include "base/clock.h"
#include "child_lines.h"
#include "connected_comms.h"
#include "support/child.h"
#include "support/log_lines.h"
#include "support/scratch_directory.h"
#include "unit/support/log_capture.h"
#include "verbs/verbs.h"

namespace verbatim {
namespace {

using test::Variables;

// Messages of 64 bytes on one connection.
class Stream {
 public:
  explicit Stream(std::size_t device = 0) {
    link_.connect(device, device);
    send_memory_ = link_.reg(link_.send(), source_);
    recv_memory_ = link_.reg(link_.recv(), target_);
  }

  ConnectedComms& link() { return link_; }
  void deregister_target() { recv_memory_.reset(); }

  Request* announce() {
    const RecvBuffer buffer{target_.data(), source_.size(), 0, recv_memory_.get()};
    return link_.irecv({&buffer, 1});
  }
  // Without the checks of ConnectedComms::isend: a comm that fails here still returns a request.
  Request* post() {
    void* request = nullptr;
    link_.send().isend(source_.data(), source_.size(), 0, &*send_memory_, nullptr, &request);
    return static_cast<Request*>(request);
  }

  // Sends this many messages, or until one end fails.
  void exchange(unsigned messages) {
    for (unsigned i = 0; i < messages && !link_.failed(); ++i) {
      Request* receive = until([&] { return announce(); });
      Request* send = until([&] { return post(); });
      if (receive == nullptr || send == nullptr) return;
      if (!link_.wait(send) || !link_.wait(receive)) return;
      link_.is_completed(send);
      link_.is_completed(receive);
    }
  }

  void await_warnings(const LogCapture& log, std::size_t count) {
    EXPECT_TRUE(link_.eventually([&] {
      link_.send().progress();
      return log.warnings().size() >= count;
    }));
  }

  // Until the monitor has reported the event of the device to the receiving end.
  void wait_for_device_event() {
    EXPECT_TRUE(link_.eventually([&] {
      std::this_thread::yield();
      return (link_.recv().slow_path_flags() & static_cast<std::uint32_t>(CommEvent::kDeviceFailed)) != 0;
    }));
  }

 private:
  template <typename Post>
  Request* until(Post post) {
    Request* request = nullptr;
    link_.eventually([&] {
      if (link_.failed()) return true;
      request = post();
      if (request == nullptr) link_.progress();
      return request != nullptr;
    });
    return request;
  }

  ConnectedComms link_;
  std::vector<std::uint8_t> source_ = pattern(64, 1);
  // Large enough for pages that no other registration covers.
  std::vector<std::uint8_t> target_ = std::vector<std::uint8_t>(std::size_t{1} << 20);
  std::unique_ptr<MemoryHandle> send_memory_;
  std::unique_ptr<MemoryHandle> recv_memory_;
};

// The warnings of a stream under these faults.
Lines warnings_under(const std::string& faults, const std::function<void(Stream&)>& act) {
  return warnings_of(test::check_in_child(with_faults(faults), [&] {
    Stream stream;
    act(stream);
  }));
}

// The same for up to this many messages; the stream must fail.
Lines warnings_under(const std::string& faults, unsigned messages) {
  return warnings_under(faults, [messages](Stream& stream) {
    stream.exchange(messages);
    EXPECT_TRUE(stream.link().failed());
  });
}

enum class End { kConnecting, kAccepting };

// The warnings of a connection that cannot be established because of `end`, which is asked first: when the process is
// stopped, the deadlines of both ends pass.
Lines connect_warnings_under(const std::string& faults, End end) {
  test::Variables variables = with_faults(faults);
  variables.emplace_back("VERBATIM_CONNECT_TIMEOUT_S", "1");
  return warnings_of(test::check_in_child(variables, [end] {
    Result<Context*> context = open_context(-1);
    ASSERT_TRUE(context);
    std::array<std::uint8_t, wire::kHandleBytes> handle{};
    Result<ListenComm*> listen = (*context)->listen(0, handle);
    ASSERT_TRUE(listen);
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      if (end == End::kAccepting && !(*context)->accept(**listen)) return true;
      if (!(*context)->connect(0, handle, -1)) return true;
      return end == End::kConnecting && !(*context)->accept(**listen);
    }));
    close_context(*context);
  }));
}

struct FaultCase {
  const char* name;
  std::string faults;
  unsigned messages = 1;  // to send
};

void PrintTo(const FaultCase& tested, std::ostream* out) {
  *out << tested.name;
}

class CompletionStatusLine : public ::testing::TestWithParam<FaultCase> {};

TEST_P(CompletionStatusLine, Fault_GivesExpectedLine) {
  test::expect_log_lines(warnings_under(GetParam().faults, GetParam().messages), GetParam().name);
}

std::string completes(const char* status, unsigned nth = 1) {
  return "complete op=write_imm nth=" + std::to_string(nth) + " status=" + status + " vendor=129";
}

INSTANTIATE_TEST_SUITE_P(Statuses, CompletionStatusLine,
                         ::testing::Values(FaultCase{"RetryExceededAtOnce", completes("RETRY_EXC_ERR")},
                                           FaultCase{"RetryExceededLater", completes("RETRY_EXC_ERR", 101), 200},
                                           FaultCase{"CtsUnanswered", "unreachable device=0 peer=0"},
                                           FaultCase{"LinkDown", "link-down device=0 after=8 op=write_imm", 20},
                                           FaultCase{"LocalProtection", completes("LOC_PROT_ERR")},
                                           FaultCase{"RemoteAccess", completes("REM_ACCESS_ERR")},
                                           FaultCase{"ReceiverNotReady", completes("RNR_RETRY_EXC_ERR")},
                                           FaultCase{"FlushAlone", completes("WR_FLUSH_ERR")},
                                           FaultCase{"Fatal", completes("FATAL_ERR")},
                                           FaultCase{"PostRefused", "fail verb=post_send nth=2 errno=ENOMEM"},
                                           FaultCase{"PollRefused", "fail verb=poll_cq nth=1 errno=EIO"}),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(CompletionStatus, OtherStatus_GivesExpectedFields) {
  struct Expected {
    const char* status;
    ErrorKind kind;
    const char* text;
    const char* why;
    const char* next;
  };
  const Expected table[] = {
      {"LOC_LEN_ERR", ErrorKind::kSystem, "local length error (IBV_WC_LOC_LEN_ERR 1",
       "a message is longer than its receive, or than softverbs0 on HOST accepts: MTU or versions differ",
       "compare versions and MTU on HOST and HOST"},
      {"REM_INV_REQ_ERR", ErrorKind::kRemote, "remote invalid request error (IBV_WC_REM_INV_REQ_ERR 9",
       "the NIC of HOST finds the request invalid: the MTU differs, its queue pair forbids the access, or the length "
       "is "
       "wrong",
       "compare versions and 'ibv_devinfo -v' (active_mtu, max_msg_sz) on both hosts; on HOST look for an async event"},
      {"REM_OP_ERR", ErrorKind::kRemote, "remote operation error (IBV_WC_REM_OP_ERR 11",
       "the NIC of HOST could not complete the request",
       "look at HOST first: its log and 'dmesg | grep softverbs0' on HOST"},
      {"BAD_RESP_ERR", ErrorKind::kRemote, "bad response error (IBV_WC_BAD_RESP_ERR 7",
       "a response of the NIC of HOST fits no request: it belongs to another connection, or the firmware is at fault",
       "compare firmware and versions on both hosts; 'dmesg | grep softverbs0' on HOST"},
      {"GENERAL_ERR", ErrorKind::kSystem, "general error (IBV_WC_GENERAL_ERR 21",
       "softverbs0 on HOST or its driver refuses work that it accepted before", "'dmesg | grep softverbs0' on HOST"},
  };
  for (const Expected& expected : table) {
    const Lines lines = warnings_under(completes(expected.status), [&](Stream& stream) {
      stream.exchange(1);
      expect_failure(stream.link().send(),
                     {.kind = expected.kind,
                      .what = "sending 64 bytes failed with " + std::string(expected.text) + ", vendor error 129)",
                      .why = expected.why,
                      .next = expected.next});
    });
    EXPECT_EQ(lines.size(), 1U) << expected.status;
  }
}

PathFacts example() {
  PathFacts facts;
  facts.local = {"node1", "mlx5_0", 1, 3, {}, 4711, IBV_MTU_4096};
  facts.remote = PathEnd{"node2", "mlx5_1", 2, 5, {}, 815, IBV_MTU_1024};
  facts.mtu = IBV_MTU_1024;
  facts.traffic_class = 106;
  facts.timeout = 20;
  facts.retries = 7;
  facts.age_ns = 3 * 3600 * kNanosecondsPerSecond + 125 * kNanosecondsPerSecond;
  facts.completed_counts = {1000, 64000, true};
  return facts;
}

std::string cause(ibv_wc_status status, const PathFacts& facts) {
  return diagnose(status, facts).why;
}

TEST(Diagnosis, RetryExceededAfterLinkDown_NamesTheLink) {
  PathFacts facts = example();
  facts.link = {.downs = 2, .down = false, .changed_ns = 1, .outage_ns = 4 * kNanosecondsPerSecond};
  EXPECT_EQ(cause(IBV_WC_RETRY_EXC_ERR, facts),
            "worked for 3 h 2 min: the link of mlx5_0:1 on node1 has been down 2 times (link flap), the last time for "
            "4 s, longer than all retries");
  facts.link = {.downs = 1, .down = true, .changed_ns = 1, .outage_ns = 90 * kNanosecondsPerSecond};
  EXPECT_EQ(cause(IBV_WC_RETRY_EXC_ERR, facts),
            "worked for 3 h 2 min: the link of mlx5_0:1 on node1 is down, for 1 min 30 s now, longer than all retries");
}

TEST(Diagnosis, LocalQpOperationError_NamesLinkAndGid) {
  PathFacts facts = example();
  const std::string refuses = "mlx5_0 on node1 or its driver refuses work that it accepted before";
  EXPECT_EQ(cause(IBV_WC_LOC_QP_OP_ERR, facts), refuses);
  facts.link = {.downs = 1, .down = false, .changed_ns = 1, .outage_ns = 4 * kNanosecondsPerSecond};
  EXPECT_EQ(cause(IBV_WC_LOC_QP_OP_ERR, facts),
            refuses + "; the link of mlx5_0:1 on node1 has been down once (link flap), the last time for 4 s");
  facts.gid_removed = true;
  const std::string gone = "worked for 3 h 2 min: GID 3 of mlx5_0:1 on node1 is no longer ::, ";
  EXPECT_EQ(cause(IBV_WC_LOC_QP_OP_ERR, facts), gone + "and its driver does not retry");
  EXPECT_EQ(cause(IBV_WC_RETRY_EXC_ERR, facts), gone + "longer than all retries");
  facts.link.down = true;
  EXPECT_EQ(cause(IBV_WC_LOC_QP_OP_ERR, facts),
            "worked for 3 h 2 min: the link of mlx5_0:1 on node1 is down, for 4 s now, and its driver does not retry");
}

TEST(Diagnosis, LinkDownAndPeerReport_LinkIsTheCause) {
  PathFacts facts = example();
  facts.peer_report = "the peer node2 reported: sending failed";
  EXPECT_EQ(cause(IBV_WC_RETRY_EXC_ERR, facts), "the peer failed first: the peer node2 reported: sending failed");
  facts.link = {.downs = 1, .down = true, .changed_ns = 1, .outage_ns = 4 * kNanosecondsPerSecond};
  EXPECT_EQ(cause(IBV_WC_RETRY_EXC_ERR, facts),
            "worked for 3 h 2 min: the link of mlx5_0:1 on node1 is down, for 4 s now, longer than all retries");
}

TEST(Diagnosis, PeerClosedFirst_IsTheCause) {
  PathFacts facts = example();
  facts.peer_disconnected = true;
  for (const ibv_wc_status status : {IBV_WC_RETRY_EXC_ERR, IBV_WC_WR_FLUSH_ERR, IBV_WC_REM_ACCESS_ERR}) {
    EXPECT_EQ(cause(status, facts), "the process on node2 ended or closed the connection first");
  }
  EXPECT_EQ(cause(IBV_WC_LOC_PROT_ERR, facts).find("the peer"), std::string::npos) << "that is our own";
}

TEST(Diagnosis, EveryStatus_HasNameReasonAndNextStep) {
  for (int status = IBV_WC_LOC_LEN_ERR; status <= IBV_WC_GENERAL_ERR; ++status) {
    const auto one = static_cast<ibv_wc_status>(status);
    EXPECT_TRUE(std::string_view(wc_status_name(one)).starts_with("IBV_WC_")) << status;
    EXPECT_FALSE(diagnose(one, example()).why.empty()) << status;
    EXPECT_FALSE(diagnose(one, example()).next.empty()) << status;
  }
  EXPECT_STREQ(wc_status_name(IBV_WC_GENERAL_ERR), "IBV_WC_GENERAL_ERR");
  EXPECT_STREQ(wc_status_name(IBV_WC_RETRY_EXC_ERR), "IBV_WC_RETRY_EXC_ERR");
}

TEST(Diagnosis, SetupError_HasReasonAndNextStep) {
  PathFacts facts = example();
  inet_pton(AF_INET6, "::ffff:10.1.3.5", facts.local.gid.raw);
  inet_pton(AF_INET6, "::ffff:10.1.4.7", facts.remote->gid.raw);
  const auto diagnosed = [&](int code) {
    return diagnose_setup(system_error("ibv_modify_qp to RTR", code, SetupStep::kModifyQp), &facts);
  };
  const Diagnosis unresolved = diagnosed(ETIMEDOUT);
  EXPECT_EQ(unresolved.why, "the peer's address does not resolve (route, ARP or ND): another rail, subnet or VLAN");
  EXPECT_EQ(unresolved.next,
            "'ip route get 10.1.4.7 from 10.1.3.5' and 'ip neigh show 10.1.4.7' on node1, then 'ib_write_bw -d mlx5_1 "
            "-i 2 -x 5 -m 1024' on node2, then 'ib_write_bw -d mlx5_0 -i 1 -x 3 -m 1024 node2' on node1");
  EXPECT_EQ(diagnosed(ENETUNREACH).why,
            "there is no route from this NIC's address to the peer's: another rail or subnet");
  EXPECT_EQ(diagnosed(ENETUNREACH).next, unresolved.next);
  EXPECT_EQ(diagnosed(ENODEV).why, "GID 3 of mlx5_0:1 on node1 is empty or its address was removed after it was read");
  EXPECT_EQ(diagnosed(ENODEV).next,
            "'show_gids mlx5_0' lists the GIDs; VERBATIM_GID_INDEX=auto chooses anew for each connection");
  EXPECT_TRUE(diagnosed(EINVAL).why.starts_with("the device refuses an attribute: GID 3, an MTU"));
  EXPECT_TRUE(diagnose_setup(system_error("connect", ETIMEDOUT), &facts).why.empty()) << "TCP says all itself";
  for (const SetupStep step : {SetupStep::kCreateQueue, SetupStep::kModifyQp}) {
    const Error hangs = system_error("ibv_modify_qp to INIT", ETIMEDOUT, step);
    EXPECT_EQ(diagnose_setup(hangs, nullptr).why, "the device is slow, or hangs in a call for another connection");
  }
  const Error no_memory = system_error("ibv_create_qp", ENOMEM, SetupStep::kCreateQueue);
  const Diagnosis limit = diagnose_setup(no_memory, nullptr, {.limit = 8192, .in_use = 17});
  EXPECT_EQ(
      limit.why,
      "a limit is reached: QPs of the device (8192 queue pairs for all processes, this process holds 17), its CQs, or "
      "locked memory");
  EXPECT_EQ(limit.next,
            "fewer NCCL channels, VERBATIM_QPS_PER_CONNECTION=1, 'ulimit -l unlimited'; 'rdma resource show' counts "
            "what all processes hold");
}

// A tree like /sys/class/infiniband, in which softverbs' devices have counters from now on, as a kernel's driver keeps
// them. They have no files of their own, and the library's list is this process's to change.
class KernelCounters {
 public:
  explicit KernelCounters(std::filesystem::path root) : root_(std::move(root)) {}

  void take_place() const {
    const Result<std::unique_ptr<const Verbs>> verbs = Verbs::load(std::getenv("VERBATIM_VERBS_LIBRARY"));
    ASSERT_TRUE(verbs);
    int count = 0;
    ibv_device** const list = (*verbs)->get_device_list(&count);
    ASSERT_EQ(count, 2);
    for (int i = 0; i < count; ++i) {
      const std::string path = (root_ / list[i]->name).string();
      ASSERT_LT(path.size(), sizeof list[i]->ibdev_path);
      std::snprintf(list[i]->ibdev_path, sizeof list[i]->ibdev_path, "%s", path.c_str());
    }
    (*verbs)->free_device_list(list);
  }
  // `place` is of the form "softverbs0/ports/1/hw_counters".
  void set(const std::string& place, const std::string& name, unsigned value) const {
    std::filesystem::create_directories(root_ / place);
    std::ofstream(root_ / place / name) << value << "\n";
  }

 private:
  std::filesystem::path root_;
};

// Of the device and port of the connection, at the end that failed, from the moment it was made.
TEST(FailureReport, ChangedKernelCounters_AreNamed) {
  const ScratchDirectory scratch;
  const KernelCounters counters(scratch.path());
  const Lines warnings = warnings_of(test::check_in_child(with_faults(completes("RETRY_EXC_ERR", 3)), [&] {
    ASSERT_NO_FATAL_FAILURE(counters.take_place());
    for (const char* port : {"softverbs0/ports/1/", "softverbs0/ports/2/", "softverbs1/ports/1/"}) {
      for (const char* name : {"local_ack_timeout_err", "out_of_sequence", "packet_seq_err", "rx_write_requests"}) {
        counters.set(std::string(port) + "hw_counters", name, 1000);
      }
      counters.set(std::string(port) + "counters", "link_downed", 3);
      counters.set(std::string(port) + "counters", "port_xmit_data", 4);
    }
    Stream stream(1);
    stream.exchange(2);
    for (const char* port : {"softverbs0/ports/1/", "softverbs1/ports/2/"}) {
      counters.set(std::string(port) + "hw_counters", "packet_seq_err", 1077);
    }
    counters.set("softverbs1/ports/1/hw_counters", "local_ack_timeout_err", 1008);
    counters.set("softverbs1/ports/1/hw_counters", "rx_write_requests", 5000);
    counters.set("softverbs1/ports/1/counters", "link_downed", 5);
    counters.set("softverbs1/ports/1/counters", "port_xmit_data", 5000);
    stream.exchange(1);
    EXPECT_TRUE(stream.link().failed());
  }));
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_TRUE(warnings[0].starts_with("sending 64 bytes failed with transport retry counter exceeded")) << warnings[0];
  EXPECT_TRUE(
      warnings[0].ends_with(", carried 2 messages, 128 bytes; since then local_ack_timeout_err +8, link_downed +2"))
      << warnings[0];
}

// Both ends' QPs have gone to INIT before: the third call is the one to RTR of the accepting end, the fifth that of the
// connecting end.
class AddressNeverResolves : public testing::TestWithParam<End> {};

INSTANTIATE_TEST_SUITE_P(, AddressNeverResolves, testing::Values(End::kAccepting, End::kConnecting),
                         [](const auto& end) { return end.param == End::kAccepting ? "accepting" : "connecting"; });

TEST_P(AddressNeverResolves, NamesPathAndRemedy) {
  const Lines warnings = connect_warnings_under(
      std::string("fail verb=modify_qp errno=ETIMEDOUT count=all nth=") + (GetParam() == End::kAccepting ? "3" : "5"),
      GetParam());
  ASSERT_FALSE(warnings.empty());
  EXPECT_NE(
      warnings[0].find("failed: ibv_modify_qp to RTR: Connection timed out, repeated until the deadline "
                       "(VERBATIM_CONNECT_TIMEOUT_S): the peer's address does not resolve (route, "
                       "ARP or ND): another rail, subnet or VLAN. Next: 'ip route get 10.77.0.1 from 10.77.0.1' and "
                       "'ip neigh show 10.77.0.1' on HOST, then 'ib_write_bw -d softverbs0 -i 1 -x 3 -m 4096' on HOST"),
      std::string::npos)
      << warnings[0];
  EXPECT_NE(warnings[0].find("Path: HOST softverbs0:1 GID 3 ::ffff:10.77.0.1 QP # to HOST softverbs0:1 GID 3 "),
            std::string::npos)
      << warnings[0];
}

TEST(Diagnosis, LongHostNames_LineFitsNcclsLimit) {
  PathFacts facts = example();
  test::expect_log_lines({log_line({"sending 8 bytes failed", {"why", "do"}, facts})});
  facts.counters = "local_ack_timeout_err +8";
  facts.local.host = facts.remote->host = std::string(40, 'h');
  facts.completed_counts.messages = 0;
  const std::string line = log_line({std::string(150, 'x'), diagnose(IBV_WC_RETRY_EXC_ERR, facts), facts});
  EXPECT_TRUE(line.ends_with("; since then local_ack_timeout_err +8"));
  EXPECT_LT(line.size(), 1000U) << "more does not fit into NCCL's line";
}

TEST(FailureReport, ReceiveFails_IsReportedAtBothEnds) {
  const Lines lines = warnings_under("complete op=recv nth=2 status=LOC_LEN_ERR vendor=129", [](Stream& stream) {
    stream.exchange(20);
    expect_failure(
        stream.link().send(),
        {.kind = ErrorKind::kRemote,
         .what = "sending 64 bytes failed with remote invalid request error (IBV_WC_REM_INV_REQ_ERR 9, vendor error 0)",
         .why = "the NIC of HOST finds the request invalid: the MTU differs, its queue pair forbids the access, or the "
                "length is wrong",
         .next = "compare versions and 'ibv_devinfo -v' (active_mtu, max_msg_sz) on both hosts; on HOST look for an "
                 "async event",
         .messages = 1,
         .bytes = 64});
    expect_failure(stream.link().recv(), {.kind = ErrorKind::kSystem,
                                          .what = "receiving 64 bytes failed with local length error "
                                                  "(IBV_WC_LOC_LEN_ERR 1, vendor error 0; 30 more flushed)",
                                          .why = "a message is longer than its receive, or than softverbs0 on HOST "
                                                 "accepts: MTU or versions differ",
                                          .next = "compare versions and MTU on HOST and HOST",
                                          .messages = 1,
                                          .bytes = 64});
  });
  EXPECT_EQ(lines.size(), 2U);
}

// The device event or a flushed work request may be seen first.
TEST(FailureReport, DeviceFatal_IsNotReportedAsPathFailure) {
  const Lines lines = warnings_under("device-fatal device=0 after=1 op=write_imm", [](Stream& stream) {
    stream.exchange(20);
    ASSERT_TRUE(stream.link().failed());
    const Comm& send = stream.link().send();
    const Comm& recv = stream.link().recv();
    const Failure* const failure = send.failure() != nullptr ? send.failure() : recv.failure();
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(normalized(failure->diagnosis.why), "softverbs0 on HOST or its driver failed, not the path to the peer");
    EXPECT_EQ(normalized(failure->diagnosis.next),
              "'dmesg | grep softverbs0' on HOST; exclude it with VERBATIM_HCA=^softverbs0 until it works");
    EXPECT_TRUE(failure->path);
  });
  EXPECT_FALSE(lines.empty());
}

// The application of the receiver deregisters its buffer before the data arrives.
TEST(FailureReport, ReceiveBufferDeregistered_IsReportedAtBothEnds) {
  const Lines lines = warnings_under("seed=1", [](Stream& stream) {
    stream.exchange(3);
    ASSERT_NE(stream.announce(), nullptr);
    stream.deregister_target();
    ASSERT_NE(stream.post(), nullptr);
    EXPECT_TRUE(ConnectedComms::fails(stream.link().send()));
    stream.wait_for_device_event();
    EXPECT_TRUE(ConnectedComms::fails(stream.link().recv()));
    expect_failure(
        stream.link().send(),
        {.kind = ErrorKind::kRemote,
         .what = "sending 64 bytes failed with remote access error (IBV_WC_REM_ACCESS_ERR 10, vendor error 0)",
         .why = "the NIC of HOST refuses the address or its key: the memory was freed or deregistered "
                "there, or the process has ended",
         .next = "look at HOST first: its log says what failed before",
         .messages = 3,
         .bytes = 192});
    expect_failure(stream.link().recv(),
                   {.kind = ErrorKind::kRemote,
                    .what = "softverbs0 on HOST reported local access violation work queue error "
                            "(IBV_EVENT_QP_ACCESS_ERR)",
                    .why = "softverbs0 on HOST refused a message from HOST with a wrong key, range or MTU",
                    .next = "look at the log of HOST; compare versions and MTU on HOST and HOST",
                    .messages = 3,
                    .bytes = 192});
  });
  EXPECT_EQ(lines.size(), 2U);
}

// bnxt_re and irdma raise an event, too, when retries are used up. The event alone would blame the key or the device.
TEST(FailureReport, EventComesBeforeItsCompletion_CompletionIsReported) {
  test::Variables variables = with_faults("drop-request op=write_imm times=all");
  variables.emplace_back("VERBATIM_TIMEOUT", "14");  // 67 ms
  variables.emplace_back("VERBATIM_RETRY_CNT", "0");
  const Lines lines = warnings_of(test::check_in_child(variables, [] {
    Stream stream;
    ASSERT_NE(stream.announce(), nullptr);
    EXPECT_TRUE(ConnectedComms::eventually([&] { return stream.post() != nullptr; }));
    SendComm& sender = stream.link().send();
    sender.set_device_event(IBV_EVENT_QP_ACCESS_ERR, *sender.endpoint().ports()[0]->device);
    EXPECT_TRUE(ConnectedComms::fails(sender));
  }));
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_TRUE(lines[0].starts_with("sending 64 bytes failed with transport retry counter exceeded")) << lines[0];
}

TEST(FailureReport, PeerClosed_IsNamed) {
  const Lines lines = warnings_under("seed=1", [](Stream& stream) {
    stream.exchange(3);
    ASSERT_NE(stream.announce(), nullptr);
    stream.link().context().close(stream.link().send());
    EXPECT_TRUE(ConnectedComms::fails(stream.link().recv()));
    expect_failure(stream.link().recv(),
                   {.kind = ErrorKind::kRemote,
                    .what = "the peer HOST (pid #) closed a connection that has outstanding operations",
                    .why = "its application needs no more data, the one on HOST does: their calls do not match",
                    .next = "look at HOST (pid #) first: its log says why",
                    .messages = 3,
                    .bytes = 192});
  });
  EXPECT_EQ(lines.size(), 1U);
}

// Shorter than all retries together, which wait eight times 0.27 s.
TEST(LinkEvents, LinkFlap_IsSurvivedAndReportedWithDuration) {
  Variables variables = with_faults("link-down device=1 after=5 op=write_imm for=200ms");
  variables.emplace_back("VERBATIM_TIMEOUT", "16");
  variables.emplace_back("VERBATIM_RETRY_CNT", "7");
  test::check_in_child(variables, [] {
    const LogCapture log;
    Stream stream(1);
    stream.exchange(20);
    EXPECT_FALSE(stream.link().failed());
    EXPECT_EQ(stream.link().send().completed_counts().messages, 20U);
    stream.await_warnings(log, 2);
    auto warnings = log.warnings();
    for (std::string& line : warnings) line = std::regex_replace(line, std::regex("after [0-9.]+ (s|ms)"), "after T");
    test::expect_log_lines(warnings);
  });
}

TEST(LinkEvents, GidChange_IsReportedWithConnections) {
  test::check_in_child(with_faults("gid device=0 index=3 address=10.0.0.9 type=rocev2 after=5 op=write_imm"), [] {
    const LogCapture log;
    Stream stream;
    stream.exchange(20);
    EXPECT_FALSE(stream.link().failed());
    stream.await_warnings(log, 1);
    test::expect_log_lines(log.warnings());
  });
}

// Makes the first flush after the GID table has changed.
void flush_after(const std::string& gids, const char* index) {
  test::Variables variables = with_faults(gids);
  variables.emplace_back("VERBATIM_GID_INDEX", index);
  test::check_in_child(variables, [] {
    const LogCapture log;
    Stream stream;
    stream.exchange(20);
    stream.await_warnings(log, 1);
    RecvComm& receiver = stream.link().recv();
    std::vector<std::uint8_t> target(8);
    const auto memory = stream.link().reg(receiver, target, MemoryType::kCuda);
    ASSERT_NE(memory, nullptr);
    Request* const flush = receiver.iflush(target.data(), *memory);
    ASSERT_NE(flush, nullptr) << testing::PrintToString(log.warnings());
    for (int done = 0; done == 0;) ASSERT_EQ(RecvComm::test_flush(*flush, &done), ErrorKind::kNone);
  });
}

TEST(LinkEvents, GidHasMoved_FirstFlushUsesItsIndex) {
  flush_after(
      "gid device=0 index=5 address=10.77.0.1 type=rocev2 after=5 op=write_imm;"
      "gid device=0 index=3 address=none after=6 op=write_imm",
      "auto");
}

TEST(LinkEvents, GidIsAway_FirstFlushUsesAnother) {
  flush_after("gid device=0 index=3 address=none after=6 op=write_imm", "3");
}

TEST(FailureReport, ErrorAndFlushedRequests_GiveOneLine) {
  const Lines lines = warnings_under("drop-ack op=write_imm nth=1 times=all", [](Stream& stream) {
    for (unsigned i = 0; i < wire::kMaxInFlight; ++i) ASSERT_NE(stream.announce(), nullptr) << i;
    for (unsigned i = 0; i < wire::kMaxInFlight; ++i) ASSERT_NE(stream.post(), nullptr) << i;
    EXPECT_TRUE(ConnectedComms::fails(stream.link().send()));
    for (int i = 0; i < 1000; ++i) stream.link().send().progress();
    expect_failure(stream.link().send(),
                   {.kind = ErrorKind::kRemote,
                    .what = "sending 64 bytes failed with transport retry counter exceeded (IBV_WC_RETRY_EXC_ERR 12, "
                            "vendor error 0; 255 more flushed)",
                    .why = "never worked: packets from HOST arrive, packets to it are lost: the path is open in one "
                           "direction only, or a switch has a smaller MTU",
                    .next = "'ib_write_bw -d softverbs0 -i 1 -x 3 -m 4096' on HOST, then 'ib_write_bw -d softverbs0 -i "
                            "1 -x 3 -m 4096 HOST' on HOST"});
  });
  EXPECT_EQ(lines.size(), 1U);
}

}  // namespace
}  // namespace verbatim
