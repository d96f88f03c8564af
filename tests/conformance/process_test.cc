// Connections between two processes of one host; in some tests one of them is killed.
#include "process.h"

#include "conformance.h"
#include "roles.h"

namespace conformance {
namespace {

class Processes : public Conformance {
 protected:
  void* connect_to(Process& peer) {
    Handle handle;
    EXPECT_TRUE(peer.read(handle.bytes, sizeof handle.bytes)) << "no handle from the other process";
    if (HasFailure()) return nullptr;
    void* send_comm = nullptr;
    void* const own = context();
    service().run([&] {
      EXPECT_TRUE(eventually([&] {
        EXPECT_OK(net().connect(own, 0, handle.bytes, &send_comm));
        return HasFailure() || send_comm != nullptr;
      }));
    });
    return send_comm;
  }

  // Sends what the role "receiver" expects, and waits for its end.
  void send_all(Process& peer) {
    send_messages(peer);
    // This end is closed: otherwise that of the peer would stay open until VERBATIM_CLOSE_TIMEOUT_MS.
    const Exit end = peer.wait();
    EXPECT_EQ(end.status, 0) << end.output;
  }

 private:
  void send_messages(Process& peer) {
    const TestConnection link(*this, connect_to(peer), nullptr);
    ASSERT_NE(link.send_comm, nullptr);
    std::size_t total = 0;
    for (std::size_t i = 0; i < kMessages; ++i) total += message_bytes(i);
    Memory source(total);
    const Registration mr(*this, link.send_comm, source.data(), source.size());
    Traffic traffic(net());
    std::size_t at = 0;
    for (std::size_t i = 0; i < kMessages; ++i) {
      source.write(at, message_bytes(i), i + 1);
      traffic.send(link.send_comm, {source.data() + at, message_bytes(i), static_cast<int>(i), mr.get()});
      at += message_bytes(i);
    }
    EXPECT_TRUE(traffic.run());
    char received = 0;
    EXPECT_TRUE(peer.read(&received, 1)) << "the other process has not received everything";
  }
};
EVERY_VERSION(Processes);

TEST_P(Processes, MessagesBetweenTwoProcesses_ArriveWhole) {
  Process peer("receiver", version());
  send_all(peer);
}

// All table versions have the same transport, so their peers can use different versions.
TEST_P(Processes, PeerWithOtherTableVersion_Connects) {
  Process peer("receiver", version() == 12 ? 6 : version() + 1);
  send_all(peer);
}

TEST_P(Processes, PeerKilledBeforeSend_IsRemoteError) {
  // An acknowledgement timeout of 67 ms instead of 4 s.
  setenv("VERBATIM_TIMEOUT", "14", 1);
  context();
  unsetenv("VERBATIM_TIMEOUT");
  Process peer("idle", version());
  const TestConnection link(*this, connect_to(peer), nullptr);
  ASSERT_NE(link.send_comm, nullptr);
  Memory source(1000);
  const Registration mr(*this, link.send_comm, source.data(), source.size());
  Traffic traffic(net());
  traffic.send(link.send_comm, {source.data(), 1000, 0, mr.get()});
  ASSERT_TRUE(traffic.run());
  char ready = 0;
  ASSERT_TRUE(peer.read(&ready, 1));
  peer.kill();
  EXPECT_EQ(peer.wait().status, 128 + 9);
  // The send must fail: in isend, or in a later test. It must not succeed and not remain outstanding.
  nccl::Result result = nccl::Result::kSuccess;
  void* request = nullptr;
  int done = 0;
  EXPECT_TRUE(eventually([&] {
    result = request == nullptr ? net().isend(link.send_comm, source.data(), 1000, 0, mr.get(), &request)
                                : net().test(request, &done, nullptr);
    return result != nccl::Result::kSuccess || done != 0;
  })) << (request == nullptr ? "isend returns null requests" : "neither done nor failed");
  EXPECT_EQ(result, nccl::Result::kRemoteError);
  EXPECT_EQ(done, 0);
  take_warnings();  // the failure is logged
}

TEST_P(Processes, ExitWithEverythingOpen_ExitsCleanly) {
  Process peer("leave", version());
  const Exit end = peer.wait();
  EXPECT_EQ(end.status, 0) << end.output;
}

}  // namespace
}  // namespace conformance
