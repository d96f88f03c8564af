// QPs that are created in advance: none may remain after close and finalize, also when connections are abandoned, and
// they need no more verbs objects than others; as a benchmark, what they cost in processor time.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "conformance.h"
#include "process_resources.h"
#include "support/benchmark.h"

namespace conformance {
namespace {

constexpr std::uint32_t kSendOperation = 0x40;
constexpr std::uint32_t kAllReduceOperation = 0x10;

class Pool : public Conformance {
 protected:
  ~Pool() override { unsetenv("VERBATIM_QP_ORDER"); }

  // A context for which the numbers of peers and flows are announced (setNetAttr).
  void* communicator(int peers, int flows, std::uint32_t operation = kSendOperation) {
    void* const made = new_context();
    announce(made, peers, flows, operation);
    return made;
  }

  void announce(void* context, int peers, int flows, std::uint32_t operation) {
    netapi::NetAttr attributes{};
    attributes.sendCommAttr = {peers, 1, flows, 1};
    attributes.recvCommAttr = attributes.sendCommAttr;
    attributes.op = operation;
    service().run([&] { EXPECT_OK(net().set_net_attr(context, attributes)); });
  }
};
INSTANTIATE_TEST_SUITE_P(Net, Pool, ::testing::Values(11, 12), version_name);

TEST_P(Pool, LastConnectionClosed_UnusedQpsAreDestroyed) {
  finalize(context());  // the verbs library keeps descriptors of its first use
  const ProcessResources before = ProcessResources::take();
  void* const sender = communicator(4, 3);
  void* const receiver = communicator(4, 2);
  {
    TestConnection first = link({sender, 0}, {receiver, 0});
    EXPECT_EQ(verbs_alive("qp"), 4 * 3 + 4 * 2);
    {
      TestConnection second = link({sender, 0}, {receiver, 0});
      EXPECT_EQ(verbs_alive("qp"), 4 * 3 + 4 * 2);
      exchange_one(second, 100'000);
    }
    exchange_one(first, 100'000);
  }
  EXPECT_TRUE(eventually([] { return verbs_alive("qp") == 0; })) << verbs_alive();
  TestConnection again = link({sender, 0}, {receiver, 0});
  exchange_one(again, 100'000);
  again.close_send();
  again.close_recv();
  finalize(sender);
  finalize(receiver);
  EXPECT_EQ(verbs_alive(), "");
  EXPECT_TRUE(is_restored(before, 1 << 20));
}

TEST_P(Pool, ConnectsNotContinued_FinalizeDestroysQps) {
  for (const bool announced : {true, false}) {
    SCOPED_TRACE(announced);
    void* const sender = announced ? communicator(4, 2) : new_context();
    void* const receiver = announced ? communicator(4, 2) : new_context();
    // A peer that never calls accept, one that has called it once, and an established connection.
    Handle not_accepted;
    ASSERT_NE(listen({receiver, 0}, not_accepted), nullptr);
    Handle half;
    void* const half_listen = listen({receiver, 0}, half);
    service().run([&] {
      void* comm = nullptr;
      EXPECT_OK(net().connect(sender, 0, not_accepted.bytes, &comm));
      EXPECT_OK(net().connect(sender, 0, half.bytes, &comm));
      EXPECT_OK(net().accept(half_listen, &comm));
      EXPECT_EQ(comm, nullptr);
    });
    TestConnection made = link({sender, 0}, {receiver, 0});
    EXPECT_TRUE(made) << "the incomplete connects must not delay it";
    made.send_comm = nullptr;
    made.recv_comm = nullptr;
    finalize(sender);
    finalize(receiver);
    EXPECT_EQ(verbs_alive(), "");
    take_warnings();
  }
}

TEST_P(Pool, SeveralCommunicators_HaveSeparateBlocks) {
  std::vector<void*> contexts;
  for (int i = 0; i < 4; ++i) contexts.push_back(communicator(3, 2));
  {
    std::vector<TestConnection> links;
    for (int k = 0; k < 2; ++k) {
      for (int i = 0; i < 4; ++i)
        links.push_back(
            link({contexts[static_cast<std::size_t>(i)], 0}, {contexts[static_cast<std::size_t>((i + 1) % 4)], 0}));
    }
    EXPECT_EQ(verbs_alive("qp"), 4 * (3 * 2 + 3 * 2));
    for (TestConnection& one : links) exchange_one(one, 10'000);
  }
  while (!contexts.empty()) {
    finalize(contexts.back());
    contexts.pop_back();
  }
  EXPECT_EQ(verbs_alive(), "");
}

TEST_P(Pool, CollectiveAnnouncement_CreatesOnePeerPerBlock) {
  void* const sender = communicator(4, 3, kAllReduceOperation);
  void* const receiver = communicator(4, 3, kAllReduceOperation);
  TestConnection ring = link({sender, 0}, {receiver, 0});
  EXPECT_EQ(verbs_alive("qp"), 3 + 3) << "for one peer, not for the announced maximum";
  announce(sender, 4, 2, kSendOperation);
  announce(receiver, 4, 2, kSendOperation);
  TestConnection direct = link({sender, 0}, {receiver, 0});
  EXPECT_EQ(verbs_alive("qp"), 3 + 3 + 4 * 2 + 4 * 2);
  exchange_one(ring, 10'000);
  exchange_one(direct, 10'000);
}

TEST_P(Pool, QpRange_FollowsAnnouncedTraffic) {
  setenv("VERBATIM_QPS_PER_CONNECTION", "1-8", 1);
  void* const few = communicator(1, 1);
  void* const many = communicator(64, 1);
  unsetenv("VERBATIM_QPS_PER_CONNECTION");
  void* const receiver = new_context();
  TestConnection wide = link({few, 0}, {receiver, 0});
  EXPECT_EQ(verbs_alive("qp"), 8 + 8);
  TestConnection narrow = link({many, 0}, {receiver, 0});
  EXPECT_EQ(verbs_alive("qp"), 8 + 8 + 64 + 1);
  exchange_one(wide, 1'000'000);
  exchange_one(narrow, 1'000'000);
}

// The cost of many connections from one context to many contexts.
class PoolSetUp : public Pool {
 protected:
  struct Cost {
    long qps = 0;
    long objects = 0;
    double ms = 0;
    long registered_bytes = 0;
    long queue_entries = 0;
  };

  static constexpr int kPeers = 20;
  static constexpr int kFlows = 50;

  // The processor time of this thread.
  static double thread_ms() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
  }

  Cost set_up(const char* order) {
    setenv("VERBATIM_QP_ORDER", order, 1);
    void* const sender = communicator(kPeers, kFlows);
    std::vector<void*> receivers;
    for (int i = 0; i < kPeers; ++i) receivers.push_back(communicator(1, kFlows));
    std::vector<Handle> handles(static_cast<std::size_t>(kPeers * kFlows));
    std::vector<void*> listens(handles.size());
    std::vector<void*> sends(handles.size());
    std::vector<void*> recvs(handles.size());
    const auto receiver = [&](std::size_t i) { return receivers[i / kFlows]; };
    for (std::size_t i = 0; i < handles.size(); ++i) {
      EXPECT_OK(net().listen(receiver(i), 0, handles[i].bytes, &listens[i]));
    }
    Cost cost{verbs_made("qp"), verbs_made(), 0, verbs_registered_bytes(), verbs_queue_entries()};
    service().run([&] {
      const double start = thread_ms();
      EXPECT_TRUE(eventually([&] {
        bool all = true;
        for (std::size_t i = 0; i < handles.size() && !HasFailure(); ++i) {
          if (sends[i] == nullptr) {
            EXPECT_OK(net().connect(sender, 0, handles[i].bytes, &sends[i]));
          }
          if (recvs[i] == nullptr) {
            EXPECT_OK(net().accept(listens[i], &recvs[i]));
          }
          all = all && sends[i] != nullptr && recvs[i] != nullptr;
        }
        return all || HasFailure();
      }));
      cost.ms = thread_ms() - start;
    });
    cost.qps = verbs_made("qp") - cost.qps;
    cost.objects = verbs_made() - cost.objects;
    cost.registered_bytes = verbs_registered_bytes() - cost.registered_bytes;
    cost.queue_entries = verbs_queue_entries() - cost.queue_entries;
    for (std::size_t i = 0; i < handles.size(); ++i) {
      EXPECT_OK(net().close_listen(listens[i]));
      EXPECT_OK(net().close_send(sends[i]));
      EXPECT_OK(net().close_recv(recvs[i]));
    }
    finalize(sender);
    while (!receivers.empty()) {
      finalize(receivers.back());
      receivers.pop_back();
    }
    EXPECT_EQ(verbs_alive(), "");
    return cost;
  }
};
ONE_VERSION(PoolSetUp, 12);

TEST_P(PoolSetUp, ThousandConnections_NeedAsManyObjectsAsNative) {
  const Cost native = set_up("native");
  const Cost pool = set_up("staggered");
  // A NIC keeps an entry of a queue in 64 bytes or more.
  std::printf("%d connections pin, both ends: %.1f MiB of registered memory, and queues with %ld entries\n",
              kPeers * kFlows, static_cast<double>(pool.registered_bytes) / (1 << 20), pool.queue_entries);
  EXPECT_EQ(pool.registered_bytes, native.registered_bytes);
  EXPECT_EQ(native.qps, 2 * kPeers * kFlows);
  EXPECT_LE(static_cast<double>(pool.qps), 1.1 * static_cast<double>(native.qps));
  EXPECT_LE(static_cast<double>(pool.objects), 1.1 * static_cast<double>(native.objects));
}

class PoolSetUpBenchmark : public PoolSetUp {};
ONE_VERSION(PoolSetUpBenchmark, 12);

TEST_P(PoolSetUpBenchmark, ThousandConnections) {
  std::vector<double> native;
  std::vector<double> ratios;
  for (int round = 0; round < 9; ++round) {
    native.push_back(set_up("native").ms);
    ratios.push_back(set_up("staggered").ms / native.back());
  }
  verbatim::test::print_benchmark("set-up of 1,000 connections, native", "ms of processor time", native);
  verbatim::test::print_benchmark("set-up of 1,000 connections, staggered over native", "times", ratios);
}

// Each verb takes 0.4 ms (SOFTVERBS_FAULTS in meson.build), as with firmware that creates its objects one after the
// other. A call of connect or accept must take less than 10 ms: what is checked is how many verbs it makes, which does
// not depend on the load of the machine.
class SlowDevice : public Pool {
 protected:
  void SetUp() override {
    Pool::SetUp();
    watch_verbs([](const char* verb) {
      // The driver's library answers the first without the kernel; the others belong to the monitor and to the data
      // path.
      for (const char* other :
           {"ibv_query_ece", "ibv_get_async_event", "ibv_post_recv", "ibv_post_send", "ibv_poll_cq"}) {
        if (std::string(verb) == other) return;
      }
      ++verbs_;
      if (std::string(verb) == "ibv_query_port") ++port_queries_;
    });
  }
  void TearDown() override {
    watch_verbs(nullptr);
    Pool::TearDown();
  }

  // Makes one call on this thread and counts its verbs.
  void count(const std::function<void()>& call) {
    const long before = verbs_;
    const auto start = Clock::now();
    call();
    longest_ms_ = std::max(longest_ms_, std::chrono::duration<double, std::milli>(Clock::now() - start).count());
    most_verbs_ = std::max(most_verbs_, verbs_ - before);
  }

  // Connects `connections` times, in turns, and prints and checks the calls.
  void connect_all(void* sender, void* receiver, int connections) {
    const auto number = static_cast<std::size_t>(connections);
    std::vector<Handle> handles(number);
    std::vector<void*> listens(number);
    std::vector<void*> sends(number);
    std::vector<void*> recvs(number);
    service().run([&] {
      for (std::size_t i = 0; i < number; ++i) EXPECT_OK(net().listen(receiver, 0, handles[i].bytes, &listens[i]));
      EXPECT_TRUE(eventually(
          [&] {
            bool all = true;
            for (std::size_t i = 0; i < number && !HasFailure(); ++i) {
              if (sends[i] == nullptr) {
                count([&] { EXPECT_OK(net().connect(sender, 0, handles[i].bytes, &sends[i])); });
              }
              if (recvs[i] == nullptr) count([&] { EXPECT_OK(net().accept(listens[i], &recvs[i])); });
              all = all && sends[i] != nullptr && recvs[i] != nullptr;
            }
            return all || HasFailure();
          },
          60s));
      for (std::size_t i = 0; i < number; ++i) EXPECT_OK(net().close_listen(listens[i]));
    });
    for (std::size_t i = 0; i < number; ++i) {
      TestConnection made(*this, sends[i], recvs[i]);
      if (made) exchange_one(made, 10'000);
    }
    std::printf("longest call: %ld verbs; %.1f ms on this machine\n", most_verbs_, longest_ms_);
    EXPECT_GT(most_verbs_, 0);
    EXPECT_LT(static_cast<double>(most_verbs_) * 0.4, 10);
  }

  static inline thread_local long verbs_ = 0;
  static inline std::atomic<long> port_queries_{0};
  long most_verbs_ = 0;
  double longest_ms_ = 0;
};
ONE_VERSION(SlowDevice, 12);

TEST_P(SlowDevice, BlockOf1000Connections_EveryCallIsShort) {
  void* const sender = communicator(20, 50);
  void* const receiver = communicator(1, 10);
  const long before = port_queries_;
  connect_all(sender, receiver, 6);
  EXPECT_EQ(verbs_made("qp"), 1000 + 10);
  EXPECT_LE(port_queries_ - before, 6) << "one for each block; the monitor asks too";
}

TEST_P(SlowDevice, ManyQpsOfOneConnection_EveryCallIsShort) {
  for (const char* order : {"native", "staggered"}) {
    setenv("VERBATIM_QP_ORDER", order, 1);
    setenv("VERBATIM_QPS_PER_CONNECTION", "64", 1);
    connect_all(new_context(), new_context(), 2);
    unsetenv("VERBATIM_QPS_PER_CONNECTION");
  }
}

// The device has at most 64 QPs (SOFTVERBS_MAX_QP in meson.build).
class FullDevice : public Pool {};
ONE_VERSION(FullDevice, 12);

TEST_P(FullDevice, QpLimitReached_UnusedQpsAreDestroyed) {
  void* const sender = communicator(4, 4);
  void* const receiver = communicator(4, 4);
  void* const plain = new_context();
  {
    TestConnection pooled = link({sender, 0}, {receiver, 0});
    EXPECT_EQ(verbs_alive("qp"), 16 + 16);
    std::vector<TestConnection> links;
    for (int i = 0; i < 31; ++i) links.push_back(link({plain, 0}, {plain, 0}));
    EXPECT_EQ(verbs_alive("qp"), 64) << "the limit of the device; the native order would have as many";
    for (TestConnection& one : links) exchange_one(one, 1000);
    exchange_one(pooled, 1000);
  }
  EXPECT_TRUE(eventually([] { return verbs_alive("qp") == 0; })) << verbs_alive();
}

TEST_P(FullDevice, MoreAnnouncedThanQpLimit_BlockIsSmaller) {
  void* const sender = communicator(1000, 100);
  void* const receiver = communicator(1000, 100);
  TestConnection made = link({sender, 0}, {receiver, 0});
  EXPECT_EQ(verbs_alive("qp"), 16 + 16) << "each block has a quarter of the device's QPs";
  exchange_one(made, 1000);
}

}  // namespace
}  // namespace conformance
