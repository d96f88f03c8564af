#include "roles.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <iostream>
#include <thread>

#include "conformance.h"
#include "merged_plugin.h"
#include "netapi/log.h"
#include "process.h"

namespace conformance {
namespace {

// GoogleTest counts the failures of assertions outside of tests in its ad hoc result.
bool failed() {
  return ::testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed();
}

void* accept_one(netapi::Plugin& net, void* context) {
  Handle handle;
  void* listen_comm = nullptr;
  EXPECT_OK(net.listen(context, 0, handle.bytes, &listen_comm));
  if (listen_comm == nullptr) return nullptr;
  EXPECT_EQ(write(STDOUT_FILENO, handle.bytes, sizeof handle.bytes), static_cast<ssize_t>(sizeof handle.bytes));
  void* recv_comm = nullptr;
  EXPECT_TRUE(eventually([&] {
    EXPECT_OK(net.accept(listen_comm, &recv_comm));
    return failed() || recv_comm != nullptr;
  }));
  EXPECT_OK(net.close_listen(listen_comm));
  return recv_comm;
}

void receive(netapi::Plugin& net, void* context) {
  netapi::Properties properties;
  EXPECT_OK(net.properties(0, &properties));
  const auto group = static_cast<std::size_t>(std::max(1, properties.max_recvs));
  void* const recv_comm = accept_one(net, context);
  if (recv_comm == nullptr) return;
  std::size_t total = 0;
  for (std::size_t i = 0; i < kMessages; ++i) total += message_bytes(i) + 1;
  Memory target(total);
  void* mhandle = nullptr;
  EXPECT_OK(net.reg_mr(recv_comm, target.data(), target.size(), nccl::kPtrHost, &mhandle));
  Traffic traffic(net);
  std::size_t at = 0;
  for (std::size_t i = 0; i < kMessages;) {
    const std::size_t n = i < kMessages / 2 ? 1 : std::min(group, kMessages - i);
    std::vector<Part> parts;
    for (std::size_t member = 0; member < n; ++member, ++i) {
      target.expect(at, message_bytes(i), i + 1);
      parts.push_back({target.data() + at, message_bytes(i), static_cast<int>(i), mhandle});
      at += message_bytes(i) + 1;
    }
    traffic.recv(recv_comm, parts);
  }
  EXPECT_TRUE(traffic.run());
  EXPECT_TRUE(target.intact());
  EXPECT_EQ(write(STDOUT_FILENO, "r", 1), 1);
  EXPECT_OK(net.dereg_mr(recv_comm, mhandle));
  EXPECT_OK(net.close_recv(recv_comm));
}

void idle(netapi::Plugin& net, void* context) {
  void* const recv_comm = accept_one(net, context);
  if (recv_comm == nullptr) return;
  Memory target(2000);
  void* mhandle = nullptr;
  EXPECT_OK(net.reg_mr(recv_comm, target.data(), target.size(), nccl::kPtrHost, &mhandle));
  Traffic traffic(net);
  const Operation& first = traffic.recv(recv_comm, {{target.data(), 1000, 0, mhandle}});
  traffic.recv(recv_comm, {{target.data() + 1000, 1000, 0, mhandle}});
  // The CTS entry of the second receive was sent directly after the first: when the first is done, the peer has both.
  EXPECT_TRUE(eventually([&] { return !traffic.step() || first.done; }));
  traffic.run_for(200ms);
  EXPECT_EQ(write(STDOUT_FILENO, "r", 1), 1);
  traffic.run_for(kDeadline);
}

// A process that exits without closing or finalizing. It must not crash or hang.
void leave(netapi::Plugin& net, void* context) {
  Handle handle;
  void* listen_comm = nullptr;
  void* send_comm = nullptr;
  void* recv_comm = nullptr;
  EXPECT_OK(net.listen(context, 0, handle.bytes, &listen_comm));
  EXPECT_TRUE(eventually([&] {
    if (send_comm == nullptr) {
      EXPECT_OK(net.connect(context, 0, handle.bytes, &send_comm));
    }
    if (recv_comm == nullptr) {
      EXPECT_OK(net.accept(listen_comm, &recv_comm));
    }
    return failed() || (send_comm != nullptr && recv_comm != nullptr);
  }));
  if (recv_comm == nullptr) return;
  static auto* const memory =
      new Memory(100'000);  // never deleted, because the thread below uses it after main returns
  void* mhandle = nullptr;
  EXPECT_OK(net.reg_mr(recv_comm, memory->data(), memory->size(), nccl::kPtrHost, &mhandle));
  static auto* const traffic = new Traffic(net);
  for (int i = 0; i < 8; ++i) traffic->recv(recv_comm, {{memory->data(), memory->size(), 0, mhandle}});
  static auto* const polled = new std::atomic<int>(0);
  std::thread([] {
    while (traffic->step()) ++*polled;
  }).detach();
  EXPECT_TRUE(eventually([&] { return *polled > 100; }));
}

}  // namespace

int run_role(const std::string& role, int api) {
  const bool prints = role == "init";
  netapi::set_log_callback([prints](const netapi::LogLine& line) {
    if (line.level == nccl::DebugLogLevel::kWarn) (prints ? std::cout : std::cerr) << line.text << "\n";
  });
  netapi::Opened opened = open_plugin(options().plugin, api);
  if (opened.plugin == nullptr) {
    std::cerr << opened.error << "\n";
    return 2;
  }
  netapi::Plugin& net = *opened.plugin;
  void* context = nullptr;
  const nccl::Result result = net.init(1, {}, &context);
  if (prints) {
    std::cout << "init " << netapi::result_name(result) << "\n";
    int count = -1;
    if (result == nccl::Result::kSuccess) {
      std::cout << "devices " << netapi::result_name(net.devices(&count)) << " " << count << "\n";
      EXPECT_OK(net.finalize(context));
    }
    return failed() ? 1 : 0;
  }
  EXPECT_OK(result);
  if (result != nccl::Result::kSuccess) return 1;
  if (role == "receiver") receive(net, context);
  if (role == "idle") idle(net, context);
  if (role == "leave") {
    leave(net, context);
    static netapi::Plugin* const stays_loaded = opened.plugin.release();
    (void)stays_loaded;
    return failed() ? 1 : 0;
  }
  EXPECT_OK(net.finalize(context));
  return failed() ? 1 : 0;
}

}  // namespace conformance
