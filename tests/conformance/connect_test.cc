// listen, connect and accept: no call blocks; either order; many at a time; connections that are not completed.
#include <algorithm>
#include <cstring>

#include "conformance.h"

namespace conformance {
namespace {

class Connect : public Conformance {
 protected:
  // A call that waits for the peer returns after VERBATIM_CONNECT_TIMEOUT_S (60 s), or never.
  static constexpr Clock::duration kPrompt = 20s;

  // `call` must not block.
  template <typename Call>
  void expect_prompt(const Call& call) {
    const auto begin = Clock::now();
    EXPECT_OK(call());
    EXPECT_LT(Clock::now() - begin, kPrompt);
  }

  void close_listen(void* listen_comm) {
    service().run([&] { EXPECT_OK(net().close_listen(listen_comm)); });
  }
};
EVERY_VERSION(Connect);

TEST_P(Connect, AcceptBeforeConnect_Connects) {
  const End end{context(), 0};
  Handle handle;
  void* const listen_comm = listen(end, handle);
  ASSERT_NE(listen_comm, nullptr);
  void* recv_comm = nullptr;
  for (int i = 0; i < 20; ++i) {
    expect_prompt([&] { return net().accept(listen_comm, &recv_comm); });
    EXPECT_EQ(recv_comm, nullptr);
  }
  TestConnection link = connect(listen_comm, end, handle);
  close_listen(listen_comm);
  exchange_one(link, 1000);
}

TEST_P(Connect, ConnectBeforeAccept_Connects) {
  const End end{context(), 0};
  Handle handle;
  void* const listen_comm = listen(end, handle);
  ASSERT_NE(listen_comm, nullptr);
  TestConnection link(*this, nullptr, nullptr);
  for (int i = 0; i < 20 && link.send_comm == nullptr; ++i) {
    expect_prompt([&] { return net().connect(end.context, 0, handle.bytes, &link.send_comm); });
  }
  service().run([&] {
    EXPECT_TRUE(eventually([&] {
      if (link.recv_comm == nullptr) {
        EXPECT_OK(net().accept(listen_comm, &link.recv_comm));
      }
      if (link.send_comm == nullptr) {
        EXPECT_OK(net().connect(end.context, 0, handle.bytes, &link.send_comm));
      }
      return link || HasFailure();
    }));
  });
  close_listen(listen_comm);
  exchange_one(link, 1000);
}

// NCCL can place its 128 bytes at any address. The address is the same in all calls of one connect.
TEST_P(Connect, HandleAtOddAddress_Connects) {
  const End end{context(), 0};
  unsigned char bytes[nccl::kNetHandleMaxBytes + 2];
  std::memset(bytes, 0x77, sizeof bytes);
  void* listen_comm = nullptr;
  ASSERT_OK(net().listen(end.context, 0, bytes + 1, &listen_comm));
  ASSERT_NE(listen_comm, nullptr);
  TestConnection link(*this, nullptr, nullptr);
  EXPECT_TRUE(eventually([&] {
    if (link.recv_comm == nullptr) {
      EXPECT_OK(net().accept(listen_comm, &link.recv_comm));
    }
    if (link.send_comm == nullptr) {
      EXPECT_OK(net().connect(end.context, 0, bytes + 1, &link.send_comm));
    }
    return link || HasFailure();
  }));
  close_listen(listen_comm);
  EXPECT_EQ(bytes[0], 0x77);
  EXPECT_EQ(bytes[sizeof bytes - 1], 0x77);
  exchange_one(link, 1000);
}

// Several listen comms, connected in another order: each connect must reach the listen comm of its handle.
TEST_P(Connect, SeveralListens_EachConnectsItsPeer) {
  const End end{context(), 0};
  constexpr std::size_t kCount = 6;
  std::vector<Handle> handles(kCount);
  std::vector<void*> listens;
  for (Handle& handle : handles) listens.push_back(listen(end, handle));
  std::vector<void*> sends(kCount, nullptr);
  std::vector<void*> recvs(kCount, nullptr);
  service().run([&] {
    EXPECT_TRUE(eventually([&] {
      for (std::size_t i = kCount; i-- > 0;) {
        if (sends[i] == nullptr) {
          EXPECT_OK(net().connect(end.context, 0, handles[i].bytes, &sends[i]));
        }
      }
      for (std::size_t i = 0; i < kCount; ++i) {
        if (recvs[i] == nullptr) {
          EXPECT_OK(net().accept(listens[i], &recvs[i]));
        }
      }
      return HasFailure() ||
             std::count(sends.begin(), sends.end(), nullptr) + std::count(recvs.begin(), recvs.end(), nullptr) == 0;
    }));
  });
  std::vector<TestConnection> links;
  for (std::size_t i = 0; i < kCount; ++i) links.emplace_back(*this, sends[i], recvs[i]);
  for (void* const listen_comm : listens) close_listen(listen_comm);
  ASSERT_FALSE(HasFailure());

  // Over all connections at the same time: two comms that are paired wrongly would receive each other's content.
  Memory source(kCount * 100);
  Memory target(kCount * 100);
  std::vector<Registration> mrs;
  Traffic traffic(net());
  for (std::size_t i = 0; i < kCount; ++i) {
    source.write(i * 100, 100, i);
    target.expect(i * 100, 100, i);
    mrs.emplace_back(*this, links[i].send_comm, source.data(), source.size());
    traffic.send(links[i].send_comm, {source.data() + i * 100, 100, 0, mrs.back().get()});
    mrs.emplace_back(*this, links[i].recv_comm, target.data(), target.size());
    traffic.recv(links[i].recv_comm, {{target.data() + i * 100, 100, 0, mrs.back().get()}});
  }
  ASSERT_TRUE(traffic.run());
  EXPECT_TRUE(target.intact());
}

TEST_P(Connect, UnusedListenClosed_NextListenWorks) {
  const End end{context(), 0};
  for (int i = 0; i < 3; ++i) {
    Handle handle;
    void* const listen_comm = listen(end, handle);
    ASSERT_NE(listen_comm, nullptr);
    void* recv_comm = nullptr;
    EXPECT_OK(net().accept(listen_comm, &recv_comm));
    EXPECT_EQ(recv_comm, nullptr);
    close_listen(listen_comm);
  }
  TestConnection link = this->link();
  exchange_one(link, 100);
}

// A connect whose listen comm is closed may fail or remain incomplete. It must not block or return a comm, and other
// connections must work.
TEST_P(Connect, ListenClosedDuringConnect_GivesNoComm) {
  const End end{context(), 0};
  Handle handle;
  void* const listen_comm = listen(end, handle);
  ASSERT_NE(listen_comm, nullptr);
  void* send_comm = nullptr;
  for (int i = 0; i < 5; ++i) EXPECT_OK(net().connect(end.context, 0, handle.bytes, &send_comm));
  EXPECT_EQ(send_comm, nullptr);
  close_listen(listen_comm);
  const auto quiet_end = Clock::now() + kQuiet;
  while (Clock::now() < quiet_end) {
    const auto begin = Clock::now();
    const nccl::Result result = net().connect(end.context, 0, handle.bytes, &send_comm);
    EXPECT_LT(Clock::now() - begin, kPrompt);
    EXPECT_EQ(send_comm, nullptr);
    if (result != nccl::Result::kSuccess) break;
  }
  TestConnection link = this->link();
  exchange_one(link, 100);
  take_warnings();  // the plugin may log that the peer has closed
}

TEST_P(Connect, ConnectNotContinued_NextConnectionWorks) {
  const End end{context(), 0};
  Handle handle;
  void* const listen_comm = listen(end, handle);
  ASSERT_NE(listen_comm, nullptr);
  void* send_comm = nullptr;
  for (int i = 0; i < 5; ++i) EXPECT_OK(net().connect(end.context, 0, handle.bytes, &send_comm));
  EXPECT_EQ(send_comm, nullptr) << "connected without an accept";
  // Neither side calls connect or accept again. finalize must remove both.
  TestConnection link = this->link();
  exchange_one(link, 100);
  take_warnings();
}

TEST_P(Connect, ListenNotClosed_FinalizeClosesIt) {
  const End end{context(), 0};
  Handle handle;
  ASSERT_NE(listen(end, handle), nullptr);
  TestConnection link = this->link();
  exchange_one(link, 100);
}

// No process listens at the address: connect must fail or remain incomplete, and must not block or return a comm.
TEST_P(Connect, ConnectWithoutListener_GivesNoComm) {
  const End end{context(), 0};
  Handle handle;
  void* const listen_comm = listen(end, handle);
  ASSERT_NE(listen_comm, nullptr);
  close_listen(listen_comm);
  void* send_comm = nullptr;
  const auto quiet_end = Clock::now() + kQuiet;
  while (Clock::now() < quiet_end) {
    const auto begin = Clock::now();
    const nccl::Result result = net().connect(end.context, 0, handle.bytes, &send_comm);
    EXPECT_LT(Clock::now() - begin, kPrompt);
    EXPECT_EQ(send_comm, nullptr);
    if (result != nccl::Result::kSuccess) break;
  }
  take_warnings();
}

TEST_P(Connect, InvalidHandle_IsRejected) {
  const void* const unused = context();
  (void)unused;
  for (const int byte : {0x00, 0x5a, 0xff}) {
    Handle handle;
    std::memset(handle.bytes, byte, sizeof handle.bytes);
    void* send_comm = nullptr;
    EXPECT_NE(net().connect(context(), 0, handle.bytes, &send_comm), nccl::Result::kSuccess);
    EXPECT_EQ(send_comm, nullptr);
  }
  take_warnings();
}

TEST_P(Connect, ManyCommsOnOneContext_AllWork) {
  std::vector<TestConnection> links;
  for (int i = 0; i < 24; ++i) {
    links.push_back(link());
    ASSERT_TRUE(links.back());
  }
  for (std::size_t i = 0; i < links.size(); ++i) exchange_one(links[i], 100 * i);
  // Half of the connections are closed; the others must still work.
  for (std::size_t i = 0; i < 12; ++i) {
    links[2 * i].close_send();
    links[2 * i].close_recv();
  }
  for (std::size_t i = 0; i < 12; ++i) exchange_one(links[2 * i + 1], 5000);
}

TEST_P(Connect, EveryPairOfDevices_Connects) {
  const int count = std::min(device_count(), 3);
  for (int from = 0; from < count; ++from) {
    for (int to = 0; to < count; ++to) {
      SCOPED_TRACE(std::to_string(from) + " to " + std::to_string(to));
      TestConnection link = this->link({context(), from}, {context(), to});
      exchange(link, {{{{3000, 3000, 0}}, {}}, {{{0, 10, 1}}, {}}, {{{70'000, 80'000, 2}}, {}}});
    }
  }
}

TEST_P(Connect, EndsInDifferentContexts_Connect) {
  if (version() < 11) GTEST_SKIP() << "one context for all";
  void* const a = new_context();
  void* const b = new_context();
  void* const c = new_context();
  EXPECT_NE(a, b);
  EXPECT_NE(b, c);
  {
    TestConnection ab = link({a, 0}, {b, 0});
    TestConnection ca = link({c, 0}, {a, 0});
    exchange_one(ab, 1000);
    exchange_one(ca, 1000);
  }
  finalize(b);
  TestConnection ca = link({c, 0}, {a, 0});
  exchange_one(ca, 1000);
}

}  // namespace
}  // namespace conformance
