//: program softverbs_fault_test sources=support/child.cc,main.cc,qp_pair_fixture.cc link=verbs_test
// Each but the first leaves out a case that registers 40,000 times in two threads. No engine takes part in a
// registration.
//: test softverbs-faults-{} timeout=180 use=device
//:   when has=softverbs_control SOFTVERBS_CONTROL={softverbs_control}
//:   thread SOFTVERBS_ENGINE=thread
//:   inline full-sanitized use=once SOFTVERBS_ENGINE=inline
//:   thread-adaptive-routing full-sanitized use=once SOFTVERBS_ENGINE=thread SOFTVERBS_ORDERING=adaptive-routing
//:   inline-adaptive-routing use=once SOFTVERBS_ENGINE=inline SOFTVERBS_ORDERING=adaptive-routing
//: set once filter=-LockLimit.DmabufsOfOtherThreads_DoNotCount

// Verbs that fail by a fault script or because of a fatal device error, and fault scripts sent to a running process.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

#include "qp_pair_fixture.h"
#include "support/verbs_peer.h"
#include "support/wait.h"

namespace verbatim::test {
namespace {

// 16.8 ms per attempt, two attempts.
constexpr Timers kFewAttempts{.timeout = 12, .retry_count = 1};

struct Call {
  const char* verb;
  // Calls the verb once and destroys what it created; returns 0 or the errno.
  std::function<int(Pair&)> run;
};

template <typename Object>
int result_of_create(Object* object, int (*destroy)(Object*)) {
  if (object == nullptr) return errno;
  EXPECT_EQ(destroy(object), 0);
  return 0;
}

const std::vector<Call>& calls() {
  static const std::vector<Call> all{
      {"alloc_pd",
       [](Pair& p) { return result_of_create(verbs().alloc_pd(p.device.context.get()), verbs().dealloc_pd); }},
      {"reg_mr",
       [](Pair& p) {
         return result_of_create(verbs().reg_mr(p.device.pd.get(), p.source.buffer.data(), 8, IBV_ACCESS_LOCAL_WRITE),
                                 verbs().dereg_mr);
       }},
      {"create_comp_channel",
       [](Pair& p) {
         return result_of_create(verbs().create_comp_channel(p.device.context.get()), verbs().destroy_comp_channel);
       }},
      {"create_cq",
       [](Pair& p) {
         return result_of_create(verbs().create_cq(p.device.context.get(), 1, nullptr, nullptr, 0), verbs().destroy_cq);
       }},
      {"create_srq",
       [](Pair& p) {
         ibv_srq_init_attr attributes{};
         attributes.attr.max_wr = 1;
         return result_of_create(verbs().create_srq(p.device.pd.get(), &attributes), verbs().destroy_srq);
       }},
      {"create_qp",
       [](Pair& p) {
         ibv_qp_init_attr attributes{};
         attributes.send_cq = attributes.recv_cq = p.a.send_cq();
         attributes.qp_type = IBV_QPT_RC;
         return result_of_create(verbs().create_qp(p.device.pd.get(), &attributes), verbs().destroy_qp);
       }},
      {"modify_qp",
       [](Pair& p) {
         ibv_qp_attr attributes{};
         attributes.min_rnr_timer = 5;
         return verbs().modify_qp(p.a.qp(), &attributes, IBV_QP_MIN_RNR_TIMER);
       }},
      {"query_qp",
       [](Pair& p) {
         ibv_qp_attr attributes{};
         ibv_qp_init_attr init{};
         return verbs().query_qp(p.a.qp(), &attributes, IBV_QP_STATE, &init);
       }},
      {"query_device",
       [](Pair& p) {
         ibv_device_attr attributes{};
         return verbs().query_device(p.device.context.get(), &attributes);
       }},
      {"query_port",
       [](Pair& p) {
         ibv_port_attr attributes{};
         return query_port(p.device.context.get(), 1, &attributes);
       }},
      {"query_gid",
       [](Pair& p) {
         ibv_gid gid{};
         return verbs().query_gid(p.device.context.get(), 1, 0, &gid) == 0 ? 0 : errno;
       }},
      {"query_pkey",
       [](Pair& p) {
         __be16 pkey = 0;
         return verbs().query_pkey(p.device.context.get(), 1, 0, &pkey) == 0 ? 0 : errno;
       }},
      {"post_recv", [](Pair& p) { return post_recv(p.b.qp(), {}); }},
      {"post_send", [](Pair& p) { return post(p.a.qp(), IBV_WR_RDMA_WRITE, {}, p.to_target()); }},
      {"poll_cq",
       [](Pair& p) {
         ibv_wc wc{};
         const int polled = ibv_poll_cq(p.b.recv_cq(), 1, &wc);
         return polled < 0 ? -polled : 0;
       }},
      {"req_notify_cq", [](Pair& p) { return ibv_req_notify_cq(p.a.send_cq(), 0); }},
  };
  return all;
}

// Makes the call `times` times. One letter for each call: '.' success, 'x' failure with `error`, '?' failure with
// another errno.
std::string outcomes(const Call& call, Pair& pair, int times, int error) {
  std::string seen;
  for (int i = 0; i < times; ++i) {
    const int result = call.run(pair);
    seen += result == 0 ? '.' : result == error ? 'x' : '?';
  }
  return seen;
}

// Creating the pair uses up to eight calls of a verb, hence nth=10.
TEST(CallFault, NthCallOfAVerb_Fails) {
  for (const Call& call : calls()) {
    with_faults(std::string("fail verb=") + call.verb + " nth=10 count=2 errno=EBUSY", [&call] {
      SCOPED_TRACE(call.verb);
      Pair pair;
      const std::string seen = outcomes(call, pair, 14, EBUSY);
      const std::size_t first = seen.find('x');
      ASSERT_NE(first, std::string::npos) << seen;
      EXPECT_GT(first, 0U) << seen;
      EXPECT_EQ(seen, std::string(first, '.') + "xx" + std::string(12 - first, '.'));
    });
  }
}

TEST(CallFault, SlowVerb_TakesLongerAndSucceeds) {
  with_faults("slow by=5ms verb=create_cq; slow by=100us", [] {
    Pair pair;
    for (const Call& call : calls()) {
      const auto start = std::chrono::steady_clock::now();
      EXPECT_EQ(outcomes(call, pair, 1, EIO), ".") << call.verb;
      const auto least = std::chrono::microseconds(call.verb == std::string("create_cq")      ? 5100
                                                   : std::string(call.verb).starts_with("po") ? 0
                                                                                              : 100);
      EXPECT_GE(std::chrono::steady_clock::now() - start, least) << call.verb;
    }
  });
}

// Another device's calls that have begun and returned while one of this device hangs; the first may have returned
// before.
unsigned calls_beside_a_hang(const Device& hanging, const Device& other) {
  std::atomic<bool> has_begun{false};
  std::atomic<bool> has_returned{false};
  std::thread caller([&] {
    const Stopwatch stopwatch;
    has_begun = true;
    EXPECT_NE(create_cq(hanging), nullptr);
    EXPECT_GE(stopwatch.elapsed(), 300ms);
    has_returned = true;
  });
  while (!has_begun) std::this_thread::yield();
  unsigned calls = 0;
  while (!has_returned) {
    EXPECT_NE(create_cq(other), nullptr);
    if (!has_returned) ++calls;
  }
  caller.join();
  return calls;
}

TEST(CallFault, HangOfOneDevice_LeavesOthersAlone) {
  with_faults("slow by=300ms verb=create_cq device=1", [] {
    const Device other = open_device(0);
    const Device hanging = open_device(1);
    Wait patience(kPatience);  // a process that is stopped makes no call meanwhile
    while (calls_beside_a_hang(hanging, other) < 2) ASSERT_FALSE(patience.is_over());
  });
}

TEST(CallFault, OpenDevice_Fails) {
  with_faults("fail verb=ibv_open_device errno=ENODEV nth=2", [] {
    const Device first = open_device();
    EXPECT_EQ(verbs().open_device(first.context->device), nullptr);
    EXPECT_EQ(errno, ENODEV);
    const Context again(verbs().open_device(first.context->device));
    EXPECT_NE(again, nullptr);
  });
}

TEST(CallFault, OfOneDevice_DoesNotAffectOthers) {
  with_faults("fail verb=alloc_pd device=1 count=all errno=EPERM", [] {
    EXPECT_NO_THROW(open_device(0));
    EXPECT_THROW(open_device(1), std::runtime_error);
  });
}

TEST(CallFault, SameSeed_FailsTheSameCalls) {
  const auto pattern = [](const std::string& faults) {
    return with_faults(faults, [] {
      Pair pair;
      std::fprintf(stderr, "%s", outcomes(calls().front(), pair, 64, ENOMEM).c_str());
    });
  };
  const std::string first = pattern("fail verb=alloc_pd rate=0.3 errno=ENOMEM nth=2; seed=5");
  EXPECT_NE(first.find('x'), std::string::npos);
  EXPECT_NE(first.find('.'), std::string::npos);
  EXPECT_EQ(pattern("fail verb=alloc_pd rate=0.3 errno=ENOMEM nth=2; seed=5"), first);
  EXPECT_NE(pattern("fail verb=alloc_pd rate=0.3 errno=ENOMEM nth=2; seed=6"), first);
}

bool works_after_device_fatal(const std::string& verb) {
  return verb == "post_recv" || verb == "post_send" || verb == "poll_cq" || verb == "req_notify_cq";
}

TEST(DeviceFatal, Calls_FailWithEio) {
  with_faults("device-fatal after=1", [] {
    Pair pair;
    for (int i = 0; i < 2; ++i) {
      ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {}, pair.to_target()), 0);
      poll_one(pair.a.send_cq());
    }
    EXPECT_EQ(next_async_event(pair.device.context.get())->event_type, IBV_EVENT_DEVICE_FATAL);
    for (const Call& call : calls()) {
      EXPECT_EQ(call.run(pair), works_after_device_fatal(call.verb) ? 0 : EIO) << call.verb;
    }
    EXPECT_EQ(verbs().open_device(pair.device.context->device), nullptr);
    EXPECT_EQ(errno, EIO);
  });  // the destroy verbs succeed; the fixture checks them
}

TEST(DeviceFatal, CallThatHangs_FailsWithEio) {
  with_faults("slow verb=alloc_pd nth=2 by=1s; device-fatal after=1", [] {
    Pair pair;
    const Stopwatch stopwatch;
    std::atomic<bool> begins{false};
    int error = 0;
    std::thread caller([&] {
      begins = true;
      error = verbs().alloc_pd(pair.device.context.get()) == nullptr ? errno : 0;
    });
    while (!begins) std::this_thread::yield();
    for (int i = 0; i < 2; ++i) {
      ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {}, pair.to_target()), 0);
      poll_one(pair.a.send_cq());
    }
    const bool fails_in_time = stopwatch.elapsed() < 1s;  // unless the system did not schedule this thread
    caller.join();
    if (fails_in_time) {
      EXPECT_EQ(error, EIO);
    }
  });
}

// ---- fault scripts for a running process ----

// Runs `softverbs-control fault` as a user would. Polls meanwhile, because with the inline engine a process applies the
// script only during its verbs.
int send_faults(const std::string& arguments, Pair& pair) {
  const char* control = std::getenv("SOFTVERBS_CONTROL");
  const std::string command = std::string(control) + " fault " + arguments + " >&2";
  std::atomic<bool> done{false};
  int status = -1;
  std::thread sender([&] {
    status = std::system(command.c_str());
    done = true;
  });
  while (!done) EXPECT_TRUE(stays_empty(pair.a.send_cq(), 1ms));
  sender.join();
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

class FaultCommand : public testing::Test {
 protected:
  void SetUp() override {
    if (std::getenv("SOFTVERBS_CONTROL") == nullptr) GTEST_SKIP() << "tools are not built";
  }
};

TEST_F(FaultCommand, LinkDownAndUp_TakeEffect) {
  const std::string stderr_text = with_faults("", [] {
    Pair pair({.timeout = 16, .retry_count = 7});
    ASSERT_EQ(send_faults("'link-down device=0'", pair), 0);
    expect_async_event(pair.device.context.get(), IBV_EVENT_PORT_ERR);
    ibv_port_attr attributes{};
    ASSERT_EQ(query_port(pair.device.context.get(), 1, &attributes), 0);
    EXPECT_EQ(attributes.state, IBV_PORT_DOWN);
    ASSERT_EQ(send_faults("link-up", pair), 0);
    expect_async_event(pair.device.context.get(), IBV_EVENT_PORT_ACTIVE);
    ASSERT_EQ(query_port(pair.device.context.get(), 1, &attributes), 0);
    EXPECT_EQ(attributes.state, IBV_PORT_ACTIVE);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {}, pair.to_target()), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
  });
  EXPECT_NE(stderr_text.find("applied by 1 of 1 processes"), std::string::npos) << stderr_text;
}

TEST_F(FaultCommand, Clear_RemovesEveryFault) {
  with_faults("loss rate=1; fail verb=alloc_pd nth=2 count=all; unreachable; freeze", [] {
    Pair pair(kFewAttempts);
    ASSERT_EQ(send_faults("clear", pair), 0);
    EXPECT_EQ(calls().front().run(pair), 0);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {}, pair.to_target()), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
  });
}

TEST_F(FaultCommand, Clear_RestartsMessageCounts) {
  with_faults("complete qp=each nth=2 status=REM_ACCESS_ERR", [] {
    Pair pair;
    const auto write = [&] {
      EXPECT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {}, pair.to_target()), 0);
      return poll_one(pair.a.send_cq()).status;
    };
    EXPECT_EQ(write(), IBV_WC_SUCCESS);
    ASSERT_EQ(send_faults("'clear; complete qp=each nth=2 status=REM_ACCESS_ERR'", pair), 0);
    EXPECT_EQ(write(), IBV_WC_SUCCESS);
    EXPECT_EQ(write(), IBV_WC_REM_ACCESS_ERR);
  });
}

TEST_F(FaultCommand, MalformedClause_IsNotSent) {
  const std::string stderr_text = with_faults("", [] {
    Pair pair;
    EXPECT_EQ(send_faults("'link-down; explode'", pair), 2);
    ibv_port_attr attributes{};
    ASSERT_EQ(query_port(pair.device.context.get(), 1, &attributes), 0);
    EXPECT_EQ(attributes.state, IBV_PORT_ACTIVE);
  });
  EXPECT_NE(stderr_text.find("\"explode\": no such fault"), std::string::npos) << stderr_text;
}

// The device thread of another process applies clauses soon; with the inline engine its next verb, for which nobody
// waits.
bool applies_by_itself() {
  return std::string(std::getenv("SOFTVERBS_ENGINE")) != "inline";
}
std::string wait_option() {
  return applies_by_itself() ? "--wait 60 " : "--wait 0.3 ";
}

TEST_F(FaultCommand, WithPid_AffectsThatProcessOnly) {
  with_faults("", [] {
    Pair pair(kFewAttempts);
    Peer peer;
    Endpoint endpoint(pair.device, {.timers = kFewAttempts});
    endpoint.connect(peer.address());
    peer.connect(endpoint.address());
    const std::string options = wait_option() + "--pid " + std::to_string(peer.pid());
    EXPECT_EQ(send_faults(options + " freeze", pair), applies_by_itself() ? 0 : 1);
    ASSERT_EQ(peer.post_recv(0, 0, 1), 0);
    ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {}, peer.target(1)), 0);
    EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_RETRY_EXC_ERR);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {}, pair.to_target()), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
  });
}

// Messages between these two processes are lost, in both directions; other messages are not.
TEST_F(FaultCommand, UnreachablePids_AffectThatPairOnly) {
  with_faults("", [] {
    Pair pair(kFewAttempts);
    Peer peer;
    Endpoint endpoint(pair.device, {.timers = kFewAttempts});
    endpoint.connect(peer.address());
    peer.connect(endpoint.address());
    ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {}, peer.target(1)), 0);
    EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_SUCCESS);
    const std::string pids = std::to_string(getpid()) + "," + std::to_string(peer.pid());
    send_faults(wait_option() + "'unreachable pids=" + pids + "'", pair);
    ASSERT_EQ(post(endpoint.qp(), IBV_WR_RDMA_WRITE, {}, peer.target(1)), 0);
    EXPECT_EQ(poll_one(endpoint.send_cq()).status, IBV_WC_RETRY_EXC_ERR);
    ASSERT_EQ(peer.post(IBV_WR_RDMA_WRITE, 0, 0, {}), 0);
    EXPECT_EQ(peer.poll_sent().status, IBV_WC_RETRY_EXC_ERR);
    ASSERT_EQ(post(pair.a.qp(), IBV_WR_RDMA_WRITE, {}, pair.to_target()), 0);
    EXPECT_EQ(poll_one(pair.a.send_cq()).status, IBV_WC_SUCCESS);
  });
}

}  // namespace
}  // namespace verbatim::test
