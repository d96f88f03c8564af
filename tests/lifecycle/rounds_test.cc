// Hundreds of rounds of init, connections and finalize must leave no descriptors, threads, heap or verbs objects.
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "conformance.h"
#include "process_resources.h"

namespace conformance {
namespace {

// For tables that grow once. One lost object in each round would be more.
constexpr std::size_t kHeapSlack = 8 << 10;

class Rounds : public Conformance {
 protected:
  // A round is from init to finalize; up to v10, which have no finalize, from loading to unloading the library.
  void* begin() {
    if (!loaded_) SetUp();
    loaded_ = true;
    return new_context();
  }
  void end(void* context) {
    if (version() >= 11) return finalize(context);
    Conformance::TearDown();
    loaded_ = false;
  }
  // Runs `round` repeatedly. Compares the resources after the warm-up with those at the end, and checks after each
  // round that no verbs object exists.
  void repeat(int rounds, const std::function<void(void* context)>& round) {
    constexpr int kWarmUp = 20;
    rounds /= options().shorten;
    ProcessResources before;
    const auto start = Clock::now();
    for (int i = 0; i < kWarmUp + rounds && !HasFailure(); ++i) {
      if (i == kWarmUp) before = ProcessResources::take();
      const long made = verbs_made();
      void* const context = begin();
      round(context);
      end(context);
      EXPECT_GT(verbs_made(), made);
      EXPECT_EQ(verbs_alive(), "") << "in round " << i;
    }
    EXPECT_TRUE(is_restored(before, kHeapSlack));
    std::printf("heap: %zu before, %zu now\n", before.heap, ProcessResources::take().heap);
    const std::chrono::duration<double, std::milli> took = Clock::now() - start;
    std::printf("%d rounds, %.2f ms each\n", kWarmUp + rounds, took.count() / (kWarmUp + rounds));
  }

 private:
  bool loaded_ = true;  // the fixture's SetUp has loaded the library
};
INSTANTIATE_TEST_SUITE_P(Net, Rounds, ::testing::Values(6, 8, 9, 10, 11, 12), version_name);

TEST_P(Rounds, ConnectExchangeClose_LeavesNothing) {
  repeat(1000, [&](void* context) {
    TestConnection link = this->link({context, 0}, {context, 0});
    exchange_one(link, 10'000);
  });
}

TEST_P(Rounds, InitAndFinalizeOnly_LeavesNothing) {
  repeat(300, [](void*) {});
}

// NCCL leaves connections incomplete and comms open when its set-up fails.
TEST_P(Rounds, EverythingAbandoned_LeavesNothing) {
  std::vector<unsigned char> memory(100'000);
  repeat(200, [&](void* context) {
    const End end{context, 0};
    Handle unused;
    ASSERT_NE(listen(end, unused), nullptr);

    // A connect whose peer never calls accept, and one whose peer has called it.
    Handle not_accepted;
    Handle half;
    ASSERT_NE(listen(end, not_accepted), nullptr);
    void* const half_listen = listen(end, half);
    ASSERT_NE(half_listen, nullptr);
    void* comm = nullptr;
    ASSERT_OK(net().connect(context, 0, not_accepted.bytes, &comm));
    const long qps = verbs_alive("qp");
    ASSERT_TRUE(eventually([&] {
      EXPECT_OK(net().connect(context, 0, half.bytes, &comm));
      EXPECT_EQ(comm, nullptr);
      void* accepted = nullptr;
      EXPECT_OK(net().accept(half_listen, &accepted));
      EXPECT_EQ(accepted, nullptr);
      return HasFailure() || verbs_alive("qp") == qps + 2;  // one QP of each end
    }));

    // Comms with outstanding requests, and registrations.
    TestConnection link = this->link(end, end);
    ASSERT_TRUE(link);
    void* mrs[3] = {};
    EXPECT_OK(net().reg_mr(link.send_comm, memory.data(), memory.size(), nccl::kPtrHost, &mrs[0]));
    EXPECT_OK(net().reg_mr(link.recv_comm, memory.data(), 1000, nccl::kPtrHost, &mrs[1]));
    EXPECT_OK(net().reg_mr(link.recv_comm, memory.data() + 50'000, 50'000, nccl::kPtrHost, &mrs[2]));
    Traffic traffic(net());
    traffic.recv(link.recv_comm, {{memory.data(), 1000, 0, mrs[1]}});
    traffic.send(link.send_comm, {memory.data() + 50'000, 1000, 0, mrs[0]});
    traffic.recv(link.recv_comm, {{memory.data() + 50'000, 1000, 0, mrs[2]}});
    ASSERT_TRUE(traffic.step());
    ASSERT_TRUE(traffic.step());
    link.send_comm = nullptr;
    link.recv_comm = nullptr;
    take_warnings();
  });
}

// NCCL may deregister memory after it has closed the comm of the registration.
TEST_P(Rounds, DeregMrAfterClose_LeavesNothing) {
  std::vector<unsigned char> memory(100'000);
  repeat(100, [&](void* context) {
    TestConnection link = this->link({context, 0}, {context, 0});
    ASSERT_TRUE(link);
    void* const send_comm = link.send_comm;
    void* mhandle = nullptr;
    EXPECT_OK(net().reg_mr(link.send_comm, memory.data(), memory.size(), nccl::kPtrHost, &mhandle));
    link.close_send();
    link.close_recv();
    EXPECT_OK(net().dereg_mr(send_comm, mhandle));
    EXPECT_OK(net().dereg_mr(send_comm, nullptr));
  });
}

class RoundsOfContexts : public Rounds {};
INSTANTIATE_TEST_SUITE_P(Net, RoundsOfContexts, ::testing::Values(11, 12), version_name);

// Several contexts in one process: the objects of the process must be destroyed with the last context only.
TEST_P(RoundsOfContexts, TwoContexts_LeaveNothing) {
  repeat(100, [&](void* first) {
    void* const second = new_context();
    TestConnection across = this->link({first, 0}, {second, 0});
    exchange_one(across, 1000);
    across.close_send();
    across.close_recv();
    Handle handle;
    ASSERT_NE(listen({second, 0}, handle), nullptr);
    finalize(second);
    EXPECT_NE(verbs_alive(), "") << "the first context is still open";
    TestConnection link = this->link({first, 0}, {first, 0});
    exchange_one(link, 1000);
  });
}

class FailedInit : public Conformance {
 protected:
  // True when init has failed with a warning.
  bool fails() {
    void* context = nullptr;
    const nccl::Result result = net().init(1, {}, &context);
    if (result == nccl::Result::kSuccess) {
      EXPECT_OK(net().finalize(context));
      return false;
    }
    EXPECT_EQ(context, nullptr);
    EXPECT_FALSE(take_warnings().empty());
    return true;
  }
};
INSTANTIATE_TEST_SUITE_P(Net, FailedInit, ::testing::Values(8, 12), version_name);

TEST_P(FailedInit, InvalidSetting_LeavesNothing) {
  const std::pair<const char*, const char*> settings[] = {{"VERBATIM_MAX_RECVS", "many"},
                                                          {"VERBATIM_HCA", "=nothing"},
                                                          {"VERBATIM_HCA", "[["},
                                                          {"VERBATIM_GID_INDEX", "250"},
                                                          {"VERBATIM_SOCKET_IFNAME", "=nothing"}};
  ProcessResources before;
  for (int round = 0; round < 20 + 100 / options().shorten && !HasFailure(); ++round) {
    if (round == 20) before = ProcessResources::take();
    for (const auto& [name, value] : settings) {
      const char* const was = getenv(name);
      const std::string kept = was != nullptr ? was : "";
      setenv(name, value, 1);
      EXPECT_TRUE(fails()) << name << "=" << value;
      kept.empty() ? unsetenv(name) : setenv(name, kept.c_str(), 1);
      EXPECT_EQ(verbs_alive(), "") << name;
    }
  }
  EXPECT_TRUE(is_restored(before, kHeapSlack));
  TestConnection link = this->link();
  exchange_one(link, 1000);
}

// init fails at each descriptor that it opens, one after the other, and must close all that it has opened before.
TEST_P(FailedInit, OutOfDescriptors_LeavesNothing) {
  setenv("VERBATIM_STATE_DIR", "none", 1);  // init succeeds without a descriptor for the state socket, and warns
  Conformance::finalize(context());
  if (version() < 11) {
    TearDown();
    SetUp();
  }
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const ProcessResources resources = ProcessResources::take();
  const int next = dup(STDIN_FILENO);
  ASSERT_GE(next, 0);
  close(next);
  rlimit limit = before;
  limit.rlim_cur = static_cast<rlim_t>(next);
  int failures = 0;
  while (true) {
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    const bool failed = fails();
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    if (!failed) break;
    ++failures;
    EXPECT_EQ(verbs_alive(), "") << "leak where " << limit.rlim_cur - static_cast<rlim_t>(next)
                                 << " descriptors were left";
    EXPECT_TRUE(is_restored(resources, kHeapSlack));
    ++limit.rlim_cur;
  }
  unsetenv("VERBATIM_STATE_DIR");
  EXPECT_GE(failures, 3);
}

}  // namespace
}  // namespace conformance
