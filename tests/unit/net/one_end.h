// One end of a connection, watched by a monitor of its own. The test is the peer, with a TCP connection and a listener.
#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/socket.h"
#include "channel/listener.h"
#include "connected_comms.h"
#include "net/monitor/monitor.h"
#include "support/loopback.h"
#include "unit/support/log_capture.h"
#include "unit/support/peer_socket.h"

namespace verbatim {

class OneEnd : public ::testing::Test {
 protected:
  void SetUp() override { start(0); }
  // The end uses the ports of this device.
  void start(std::size_t device) {
    ASSERT_NO_FATAL_FAILURE(link_.connect(device, device));
    listener_ = std::make_unique<Listener>(test::loopback());
    Result<UniqueFd> listening = tcp_listen(test::loopback());
    ASSERT_TRUE(listening);
    listening_ = std::move(*listening);
    Result<std::unique_ptr<Monitor>> monitor = Monitor::start({}, {.state_socket = state_});
    ASSERT_TRUE(monitor);
    monitor_ = std::move(*monitor);
    monitor_->set_listener(*listener_);
  }
  void TearDown() override {
    if (watched_ && comm_ != nullptr) monitor_->unwatch(*comm_);
    monitor_.reset();
  }

  void watch(std::unique_ptr<Comm> comm) {
    comm_ = std::move(comm);
    const Result<sockaddr_storage> address = local_address(listening_);
    ASSERT_TRUE(address);
    Result<UniqueFd> own = tcp_connect(*address, {});
    ASSERT_TRUE(own);
    comm_->channel().set_socket(std::move(*own), {});
    peer_ = test::PeerSocket(accepted(), comm_->kind() == CommKind::kSend ? 0 : 1);
    ASSERT_TRUE(!!peer_);
    ASSERT_TRUE(monitor_->watch(*comm_, this));
    watched_ = true;
  }
  void watch_receiver() {
    std::unique_ptr<RecvComm> comm = link_.make_recv_comm(link_.ports(), 1);
    ASSERT_NE(comm, nullptr);
    watch(std::move(comm));
  }
  void watch_sender() {
    const Config& config = link_.context().config();
    Result<Endpoint> endpoint = Endpoint::create(link_.ports(), SendComm::endpoint_sizes(1, 1, config), config);
    ASSERT_TRUE(endpoint);
    Result<std::unique_ptr<SendComm>> comm = SendComm::create(link_.context().comm_settings(), std::move(*endpoint), 1);
    ASSERT_TRUE(comm);
    watch(std::move(*comm));
  }

  UniqueFd accepted() { return accepted(listening_); }
  static UniqueFd accepted(const UniqueFd& listening) {
    UniqueFd socket;
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      Result<std::optional<UniqueFd>> next = tcp_accept(listening);
      EXPECT_TRUE(next);
      if (next && *next) socket = std::move(**next);
      return !!socket;
    }));
    return socket;
  }
  // An attempt of the end to make the side channel again.
  test::PeerSocket asked() { return asked(listening_); }
  static test::PeerSocket asked(const UniqueFd& listening) { return test::PeerSocket::asked(accepted(listening)); }
  // The type of the next message but kAck; nullopt: the connection has ended, with `error_`.
  std::optional<wire::MessageType> next(test::PeerSocket& peer) {
    std::optional<wire::MessageType> type = first(peer);
    while (type == wire::MessageType::kAck) type = first(peer);
    return type;
  }
  // The same, also of kAck.
  std::optional<wire::MessageType> first(test::PeerSocket& peer) {
    std::optional<wire::MessageType> type;
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      const auto message = peer.receive();
      error_ = message ? 0 : message.error().sys_errno;
      if (message && *message) type = (*message)->type;
      return !message || type;
    }));
    return type;
  }
  static void say(test::PeerSocket& peer, const wire::Notice& notice) { ASSERT_TRUE(peer.say(notice)); }
  static void say(test::PeerSocket& peer, wire::MessageType type) { ASSERT_TRUE(peer.say(type)); }
  // A new TCP connection that asks to become the side channel.
  static test::PeerSocket resume(const sockaddr_storage& address, const wire::ConnectionEnd& end = {}) {
    Result<UniqueFd> made = tcp_connect(address, {});
    EXPECT_TRUE(made);
    if (!made) return {};
    EXPECT_TRUE(ConnectedComms::eventually([&] { return *tcp_connected(*made); }));
    static std::uint64_t number = 0;
    const wire::Notice request = wire::Notice::resume({end, ++number}, {});
    EXPECT_EQ(::send(made->get(), request.bytes().data(), request.bytes().size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(request.bytes().size()));
    const std::uint64_t own = end.other().connecting;
    return {std::move(*made), own, own, number};
  }
  bool has(CommEvent event) const { return (comm_->slow_path_flags() & static_cast<std::uint32_t>(event)) != 0; }
  bool eventually_has(CommEvent event) const {
    return ConnectedComms::eventually([&] {
      std::this_thread::yield();
      return has(event);
    });
  }

  ConnectedComms link_;  // its context provides the settings
  const LogCapture log_;
  const std::string state_ = testing::TempDir() + "lost-" + std::to_string(::getpid());
  std::unique_ptr<Listener> listener_;
  UniqueFd listening_;
  test::PeerSocket peer_;
  int error_ = 0;
  bool watched_ = false;
  std::unique_ptr<Comm> comm_;
  std::unique_ptr<Monitor> monitor_;
};

}  // namespace verbatim
