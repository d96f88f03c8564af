// One end of a connection, watched by a monitor of its own. The test is the peer, with a TCP connection and a listener.
#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstring>
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
#include "support/log_capture.h"
#include "support/loopback.h"

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
    peer_ = accepted();
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
  // The type of the next message but kAck; nullopt: the connection has ended, with `error_`.
  std::optional<wire::MessageType> next(const UniqueFd& socket) {
    std::optional<wire::MessageType> type = first(socket);
    while (type == wire::MessageType::kAck) type = first(socket);
    return type;
  }
  // The same, also of kAck.
  std::optional<wire::MessageType> first(const UniqueFd& socket) {
    std::array<std::uint8_t, wire::kMaxNoticeBytes> bytes{};
    std::size_t filled = 0;
    std::optional<wire::MessageType> type;
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      const Result<bool> all = receive_into(socket, std::span(bytes).first(wire::kHeaderBytes), filled);
      error_ = all ? 0 : all.error().sys_errno;
      if (!all || !*all) return !all;
      const Result<wire::Header> header = wire::decode_header(std::span(bytes).first<wire::kHeaderBytes>());
      EXPECT_TRUE(header);
      if (!header) return true;
      type = header->type;
      std::size_t body = 0;
      while (body < header->body_bytes && receive_into(socket, std::span(bytes).first(header->body_bytes), body))
        continue;
      return true;
    }));
    return type;
  }
  // False: the other end has closed the connection.
  static bool try_to_say(const UniqueFd& socket, const wire::Notice& notice) {
    const auto bytes = notice.bytes();
    return ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }
  static void say(const UniqueFd& socket, const wire::Notice& notice) { ASSERT_TRUE(try_to_say(socket, notice)); }
  // A new TCP connection that asks to become the side channel.
  static UniqueFd resume(const sockaddr_storage& address, const wire::ConnectionEnd& end = {}) {
    Result<UniqueFd> made = tcp_connect(address, {});
    EXPECT_TRUE(made);
    if (!made) return {};
    EXPECT_TRUE(ConnectedComms::eventually([&] { return *tcp_connected(*made); }));
    static std::uint64_t number = 0;
    say(*made, wire::Notice::resume({end, ++number}, {}));
    return std::move(*made);
  }
  static void close_with_reset(UniqueFd& socket) {
    const linger none{.l_onoff = 1, .l_linger = 0};
    ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &none, sizeof none);
    socket.reset();
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
  UniqueFd peer_;
  int error_ = 0;
  bool watched_ = false;
  std::unique_ptr<Comm> comm_;
  std::unique_ptr<Monitor> monitor_;
};

}  // namespace verbatim
