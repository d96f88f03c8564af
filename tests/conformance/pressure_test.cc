// As many outstanding requests as NCCL's interface requires must be accepted. Further calls must return a null request
// and no error.
#include "conformance.h"

namespace conformance {
namespace {

class Pressure : public Conformance {
 protected:
  static constexpr std::size_t kBytes = 40;

  // The number of outstanding messages that one comm must accept.
  std::size_t required_messages() { return max_recvs() * std::size_t{nccl::kNetMaxRequests}; }

  void post_recvs(Traffic& traffic, TestConnection& link, Memory& target, void* mhandle, std::size_t from,
                  std::size_t to) {
    for (std::size_t i = from; i < to; ++i) {
      target.expect(i * kBytes, kBytes, i);
      traffic.recv(link.recv_comm, {{target.data() + i * kBytes, kBytes, 0, mhandle}});
    }
  }
  void post_sends(Traffic& traffic, TestConnection& link, Memory& source, void* mhandle, std::size_t from,
                  std::size_t to) {
    for (std::size_t i = from; i < to; ++i) {
      source.write(i * kBytes, kBytes, i);
      traffic.send(link.send_comm, {source.data() + i * kBytes, kBytes, 0, mhandle});
    }
  }
};
EVERY_VERSION(Pressure);

TEST_P(Pressure, MaxReceives_AreAccepted) {
  TestConnection link = this->link();
  const std::size_t count = required_messages();
  Memory source(count * kBytes);
  Memory target(count * kBytes);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
  Traffic recvs(net());
  post_recvs(recvs, link, target, target_mr.get(), 0, count);
  std::size_t accepted = 0;
  // There are no sends yet, so all receives are outstanding at the same time.
  eventually([&] { return !recvs.step() || (accepted = recvs.posted()) == count; }, 3s);
  EXPECT_EQ(accepted, count);
  Traffic sends(net());
  post_sends(sends, link, source, source_mr.get(), 0, count);
  ASSERT_TRUE(eventually([&] { return !recvs.step() || !sends.step() || recvs.open() + sends.open() == 0; }));
  EXPECT_EQ(recvs.open() + sends.open(), 0U);
  EXPECT_TRUE(target.intact());
}

// All sends must be accepted before the first is tested: isend must not depend on calls of test.
TEST_P(Pressure, MaxSends_AreAccepted) {
  TestConnection link = this->link();
  const std::size_t count = required_messages();
  Memory source(count * kBytes);
  Memory target(count * kBytes);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
  Traffic recvs(net());
  post_recvs(recvs, link, target, target_mr.get(), 0, count);
  std::vector<void*> requests;
  ASSERT_TRUE(eventually([&] {
    if (!recvs.step()) return true;
    const std::size_t at = requests.size() * kBytes;
    void* request = nullptr;
    source.write(at, kBytes, requests.size());
    EXPECT_OK(net().isend(link.send_comm, source.data() + at, kBytes, 0, source_mr.get(), &request));
    if (request != nullptr) requests.push_back(request);
    return requests.size() == count;
  })) << requests.size()
      << " of " << count;
  for (void* const request : requests) {
    int done = 0;
    int size = -1;
    ASSERT_TRUE(eventually(
        [&] { return !recvs.step() || net().test(request, &done, &size) != nccl::Result::kSuccess || done != 0; }));
    EXPECT_EQ(done, 1);
    EXPECT_EQ(size, int{kBytes});
  }
  ASSERT_TRUE(recvs.run());
  EXPECT_TRUE(target.intact());
}

TEST_P(Pressure, MaxGroups_AreAccepted) {
  TestConnection link = this->link();
  const std::size_t n = max_recvs();
  const std::size_t groups = nccl::kNetMaxRequests;
  Memory source(groups * n * kBytes);
  Memory target(groups * n * kBytes);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
  Traffic recvs(net());
  Traffic sends(net());
  for (std::size_t group = 0; group < groups; ++group) {
    std::vector<Part> members;
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t at = (group * n + i) * kBytes;
      source.write(at, kBytes, at);
      target.expect(at, kBytes, at);
      members.push_back({target.data() + at, kBytes, static_cast<int>(i), target_mr.get()});
      sends.send(link.send_comm, {source.data() + at, kBytes, static_cast<int>(i), source_mr.get()});
    }
    recvs.recv(link.recv_comm, members);
  }
  eventually([&] { return !recvs.step() || recvs.posted() == groups; }, 3s);
  EXPECT_EQ(recvs.posted(), groups);
  ASSERT_TRUE(eventually([&] { return !recvs.step() || !sends.step() || recvs.open() + sends.open() == 0; }));
  EXPECT_EQ(recvs.open() + sends.open(), 0U);
  EXPECT_TRUE(target.intact());
}

TEST_P(Pressure, ReceivesBeyondLimitSenderLate_AllComplete) {
  TestConnection link = this->link();
  const std::size_t count = 3 * required_messages();
  Memory source(count * kBytes);
  Memory target(count * kBytes);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
  Traffic traffic(net());
  post_recvs(traffic, link, target, target_mr.get(), 0, count);
  ASSERT_TRUE(traffic.run_for(kQuiet));  // irecv returns null requests here
  post_sends(traffic, link, source, source_mr.get(), 0, count);
  ASSERT_TRUE(traffic.run());
  EXPECT_TRUE(target.intact());
}

TEST_P(Pressure, SendsBeyondLimitReceiverLate_AllComplete) {
  TestConnection link = this->link();
  const std::size_t count = 3 * required_messages();
  Memory source(count * kBytes);
  Memory target(count * kBytes);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
  Traffic sends(net());
  post_sends(sends, link, source, source_mr.get(), 0, count);
  ASSERT_TRUE(sends.run_for(kQuiet));
  EXPECT_EQ(sends.posted(), 0U) << "a send was accepted without a receive";
  Traffic recvs(net());
  post_recvs(recvs, link, target, target_mr.get(), 0, count);
  ASSERT_TRUE(eventually([&] { return !recvs.step() || !sends.step() || recvs.open() + sends.open() == 0; }));
  EXPECT_EQ(recvs.open() + sends.open(), 0U);
  EXPECT_TRUE(target.intact());
}

// The receiver does not test its requests for a while. No data that arrives in this time may be lost.
TEST_P(Pressure, ReceiverNotPolling_LosesNothing) {
  TestConnection link = this->link();
  const std::size_t count = required_messages();
  Memory source(count * kBytes);
  Memory target(count * kBytes);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
  Traffic recvs(net());
  Traffic sends(net());
  post_recvs(recvs, link, target, target_mr.get(), 0, count);
  post_sends(sends, link, source, source_mr.get(), 0, count);
  ASSERT_TRUE(recvs.run_for(kQuiet));
  ASSERT_TRUE(sends.run_for(2 * kQuiet));
  ASSERT_TRUE(eventually([&] { return !recvs.step() || !sends.step() || recvs.open() + sends.open() == 0; }));
  EXPECT_EQ(recvs.open() + sends.open(), 0U);
  EXPECT_TRUE(target.intact());
}

}  // namespace
}  // namespace conformance
