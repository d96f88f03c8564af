//: in lifecycle

// The number of round trips until a connection is established, counted by a relay on the side channel.
#include <netinet/in.h>
#include <sys/socket.h>

#include <span>
#include <vector>

#include "base/socket.h"
#include "base/unique_fd.h"
#include "conformance/conformance.h"
#include "wire/handle.h"

namespace conformance {
namespace {

// Forwards one TCP connection and counts its flights. A flight is all data in one direction until data goes in the
// other direction.
class Relay {
 public:
  explicit Relay(const sockaddr_storage& to) : to_(to) {
    sockaddr_storage any_port = to;
    reinterpret_cast<sockaddr_in&>(any_port).sin_port = 0;  // sin6_port has the same offset
    auto listener = verbatim::tcp_listen(any_port);
    EXPECT_TRUE(listener);
    if (listener) listener_ = std::move(*listener);
  }

  sockaddr_storage address() const { return *verbatim::local_address(listener_); }
  int flights() const { return flights_; }

  void step() {
    if (!client_) {
      auto accepted = verbatim::tcp_accept(listener_);
      if (!accepted || !accepted->has_value()) return;
      client_ = std::move(**accepted);
      auto server = verbatim::tcp_connect(to_, {});
      ASSERT_TRUE(server);
      server_ = std::move(*server);
      ASSERT_TRUE(eventually([&] { return *verbatim::tcp_connected(server_); }));
    }
    forward(client_, server_, Direction::kToServer);
    forward(server_, client_, Direction::kToClient);
  }

 private:
  enum class Direction { kNone, kToServer, kToClient };

  void forward(const verbatim::UniqueFd& from, const verbatim::UniqueFd& to, Direction direction) {
    char bytes[65536];
    const ssize_t got = ::recv(from.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (got <= 0) return;
    if (last_ != direction) ++flights_;
    last_ = direction;
    EXPECT_EQ(::send(to.get(), bytes, static_cast<std::size_t>(got), MSG_NOSIGNAL), got);
  }

  const sockaddr_storage to_;
  verbatim::UniqueFd listener_;
  verbatim::UniqueFd client_;
  verbatim::UniqueFd server_;
  Direction last_ = Direction::kNone;
  int flights_ = 0;
};

class Handshake : public Conformance {};
INSTANTIATE_TEST_SUITE_P(Net, Handshake, ::testing::Values(8, 12), version_name);

TEST_P(Handshake, NewConnection_TakesOneAndAHalfRoundTrips) {
  namespace wire = verbatim::wire;
  const End end{context(), 0};
  Handle handle;
  void* const listen_comm = listen(end, handle);
  ASSERT_NE(listen_comm, nullptr);
  const std::span<std::uint8_t, wire::kHandleBytes> bytes(handle.bytes);
  auto decoded = wire::decode_handle(bytes);
  ASSERT_TRUE(decoded);
  TestConnection link(*this, nullptr, nullptr);
  {
    Relay relay(decoded->address);
    decoded->address = relay.address();
    wire::encode_handle(*decoded, bytes);
    int until_connected = 0;
    int until_accepted = 0;
    ASSERT_TRUE(eventually([&] {
      if (link.send_comm == nullptr) {
        EXPECT_OK(net().connect(end.context, 0, handle.bytes, &link.send_comm));
        until_connected = relay.flights();
      }
      if (link.recv_comm == nullptr) {
        EXPECT_OK(net().accept(listen_comm, &link.recv_comm));
        until_accepted = relay.flights();
      }
      relay.step();
      return HasFailure() || link;
    }));
    EXPECT_EQ(until_connected, 2) << "kConnect and kAccept";
    EXPECT_EQ(until_accepted, 3) << "kConnect, kAccept and kReady";
    exchange_one(link, 1000);
    EXPECT_EQ(relay.flights(), 3) << "the side channel carries no data";
  }
  EXPECT_OK(net().close_listen(listen_comm));
}

}  // namespace
}  // namespace conformance
