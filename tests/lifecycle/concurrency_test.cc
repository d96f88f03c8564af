// Calls that NCCL's threads make at the same time. All tests of this file also run under ThreadSanitizer.
#include <atomic>
#include <thread>

#include "conformance.h"
#include "process_resources.h"

namespace conformance {
namespace {

class Concurrency : public Conformance {
 protected:
  // Runs each call on its own thread.
  static void together(const std::vector<std::function<void()>>& calls) {
    std::vector<std::thread> threads;
    for (const auto& call : calls) threads.emplace_back(call);
    for (std::thread& thread : threads) thread.join();
  }

  // Establishes a connection within `context` on the calling thread. False when that fails.
  bool connect_here(void* context, void*& send_comm, void*& recv_comm) {
    Handle handle;
    void* listen_comm = nullptr;
    EXPECT_OK(net().listen(context, 0, handle.bytes, &listen_comm));
    if (listen_comm == nullptr) return false;
    send_comm = nullptr;
    recv_comm = nullptr;
    EXPECT_TRUE(eventually([&] {
      if (send_comm == nullptr) {
        EXPECT_OK(net().connect(context, 0, handle.bytes, &send_comm));
      }
      if (recv_comm == nullptr) {
        EXPECT_OK(net().accept(listen_comm, &recv_comm));
      }
      return HasFailure() || (send_comm != nullptr && recv_comm != nullptr);
    }));
    EXPECT_OK(net().close_listen(listen_comm));
    return send_comm != nullptr && recv_comm != nullptr;
  }

  // Sends and receives one message on the calling thread.
  void exchange_here(void* send_comm, void* recv_comm, std::size_t size, std::uint64_t seed) {
    Memory source(size);
    Memory target(size);
    void* mrs[2] = {};
    EXPECT_OK(net().reg_mr(send_comm, source.data(), size, nccl::kPtrHost, &mrs[0]));
    EXPECT_OK(net().reg_mr(recv_comm, target.data(), size, nccl::kPtrHost, &mrs[1]));
    source.write(0, size, seed);
    target.expect(0, size, seed);
    Traffic traffic(net());
    traffic.recv(recv_comm, {{target.data(), size, 0, mrs[1]}});
    traffic.send(send_comm, {source.data(), size, 0, mrs[0]});
    EXPECT_TRUE(traffic.run());
    EXPECT_TRUE(target.intact());
    EXPECT_OK(net().dereg_mr(send_comm, mrs[0]));
    EXPECT_OK(net().dereg_mr(recv_comm, mrs[1]));
  }
};
INSTANTIATE_TEST_SUITE_P(Net, Concurrency, ::testing::Values(8, 12), version_name);

// The service thread registers user buffers, also device memory, while the progress threads use the same comms. Each
// end has its own progress thread.
TEST_P(Concurrency, RegistrationDuringTraffic_Works) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  constexpr std::size_t kBytes = 20'000;
  constexpr int kMessages = 60;
  Memory source(kBytes * kMessages);
  Memory target(kBytes * kMessages);
  std::vector<unsigned char> user(1 << 20);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
  source.write(0, source.size(), 1);
  target.expect(0, target.size(), 1);
  std::atomic<int> ends = 2;
  std::atomic<int> registered = 0;
  const auto move = [&](bool sends) {
    Traffic traffic(net());
    for (int i = 0; i < kMessages; ++i) {
      const std::size_t at = kBytes * static_cast<std::size_t>(i);
      if (sends) {
        traffic.send(link.send_comm, {source.data() + at, kBytes, 0, source_mr.get()});
      } else {
        traffic.recv(link.recv_comm, {{target.data() + at, kBytes, 0, target_mr.get()}});
      }
    }
    EXPECT_TRUE(traffic.run());
    --ends;
  };
  const auto register_on = [&](void* comm, int type) {
    std::size_t at = 0;
    do {
      void* mrs[2] = {};
      EXPECT_OK(net().reg_mr(comm, user.data() + at, 5000, type, &mrs[0]));
      EXPECT_OK(net().reg_mr(comm, user.data() + at / 2, 90'000, type, &mrs[1]));
      EXPECT_OK(net().dereg_mr(comm, mrs[0]));
      EXPECT_OK(net().dereg_mr(comm, mrs[1]));
      at = (at + 4096) % 900'000;
      ++registered;
    } while (ends > 0);
  };
  together({[&] { move(true); }, [&] { move(false); }, [&] { register_on(link.send_comm, nccl::kPtrHost); },
            [&] { register_on(link.recv_comm, nccl::kPtrCuda); }});
  EXPECT_GE(registered, 2);
  EXPECT_TRUE(target.intact());
}

// Several threads of one context create, use and close comms, while another thread queries the device's properties.
TEST_P(Concurrency, CommsOfManyThreads_Work) {
  void* const own = context();
  std::atomic<int> running = 3;
  std::vector<std::function<void()>> calls;
  for (std::uint64_t thread = 0; thread < 3; ++thread) {
    calls.emplace_back([&, thread] {
      for (std::uint64_t round = 0; round < 8 && !HasFailure(); ++round) {
        void* send_comm = nullptr;
        void* recv_comm = nullptr;
        if (!connect_here(own, send_comm, recv_comm)) break;
        exchange_here(send_comm, recv_comm, 3000, 10 * thread + round);
        EXPECT_OK(net().close_send(send_comm));
        EXPECT_OK(net().close_recv(recv_comm));
      }
      --running;
    });
  }
  calls.emplace_back([&] {
    while (running > 0) {
      int count = 0;
      netapi::Properties properties;
      EXPECT_OK(net().devices(&count));
      EXPECT_OK(net().properties(0, &properties));
      EXPECT_FALSE(properties.name.empty());
    }
  });
  together(calls);
}

// One thread establishes connections and closes their ends in both orders, while another thread of the same context
// exchanges data.
TEST_P(Concurrency, CloseDuringTrafficOfOthers_Works) {
  void* const own = context();
  TestConnection busy = this->link();
  ASSERT_TRUE(busy);
  std::atomic<bool> is_over = false;
  together({[&] {
              for (std::uint64_t i = 0; !is_over && !HasFailure(); ++i) {
                exchange_here(busy.send_comm, busy.recv_comm, 5000, i);
              }
            },
            [&] {
              for (int round = 0; round < 10 && !HasFailure(); ++round) {
                void* send_comm = nullptr;
                void* recv_comm = nullptr;
                if (!connect_here(own, send_comm, recv_comm)) break;
                EXPECT_OK(round % 2 == 0 ? net().close_send(send_comm) : net().close_recv(recv_comm));
                EXPECT_OK(round % 2 == 0 ? net().close_recv(recv_comm) : net().close_send(send_comm));
              }
              is_over = true;
            }});
}

class ConcurrentContexts : public Concurrency {};
INSTANTIATE_TEST_SUITE_P(Net, ConcurrentContexts, ::testing::Values(11, 12), version_name);

// Several threads init and finalize contexts. The objects of the process are created with the first context and
// destroyed with the last.
TEST_P(ConcurrentContexts, InitAndFinalizeOnManyThreads_Work) {
  std::vector<std::function<void()>> calls;
  for (std::uint64_t thread = 0; thread < 4; ++thread) {
    calls.emplace_back([&, thread] {
      for (std::uint64_t round = 0; round < 12 && !HasFailure(); ++round) {
        void* own = nullptr;
        EXPECT_OK(net().init(thread, {}, &own));
        if (own == nullptr) break;
        netapi::Properties properties;
        EXPECT_OK(net().properties(0, &properties));
        void* send_comm = nullptr;
        void* recv_comm = nullptr;
        if (round % 3 != 0 && connect_here(own, send_comm, recv_comm)) {
          exchange_here(send_comm, recv_comm, 1000, thread + round);
          if (round % 3 == 1) {
            EXPECT_OK(net().close_recv(recv_comm));
            EXPECT_OK(net().close_send(send_comm));
          }
        }
        EXPECT_OK(net().finalize(own));
      }
    });
  }
  together(calls);
  EXPECT_EQ(verbs_alive(), "");
}

// Where an allocator gives the memory of a context that has just been finalized to the next one, both have one address.
// A finalize must not take the other context, and with it the process's objects, for its own.
TEST_P(ConcurrentContexts, ContextGetsTheAddressOfAFinalizedOne_StaysOpen) {
  std::vector<std::function<void()>> calls;
  for (std::uint64_t thread = 0; thread < 3; ++thread) {
    calls.emplace_back([&, thread] {
      for (int round = 0; round < repetitions(1000) && !HasFailure(); ++round) {
        void* own = nullptr;
        EXPECT_OK(net().init(thread, {}, &own));
        if (own == nullptr) break;
        int count = 0;
        EXPECT_OK(net().devices(&count)) << "the process's objects are gone";
        EXPECT_OK(net().finalize(own));
      }
    });
  }
  together(calls);
  EXPECT_EQ(verbs_alive(), "");
}

// Before the first init and after the last finalize, queries must return kInvalidUsage.
TEST_P(ConcurrentContexts, DevicesBeforeInitOrAfterFinalize_IsInvalidUsage) {
  std::atomic<bool> is_over = false;
  together({[&] {
              while (!is_over) {
                int count = -1;
                const nccl::Result result = net().devices(&count);
                EXPECT_TRUE(result == nccl::Result::kInvalidUsage || count > 0);
                EXPECT_OK(net().finalize(nullptr));
              }
            },
            [&] {
              while (!is_over) {
                netapi::Properties properties;
                const nccl::Result result = net().properties(0, &properties);
                EXPECT_TRUE(result == nccl::Result::kInvalidUsage || !properties.name.empty());
              }
            },
            [&] {
              for (int round = 0; round < 30; ++round) {
                void* own = nullptr;
                EXPECT_OK(net().init(1, {}, &own));
                EXPECT_OK(net().finalize(own));
              }
              is_over = true;
            }});
}

}  // namespace
}  // namespace conformance
