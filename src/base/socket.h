// Non-blocking TCP: no call waits, and every read and write may be partial. An error is of kind kRemote when the peer
// or the path to it failed, and kSystem when a call failed on this host.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "base/unique_fd.h"

namespace verbatim {

// "10.0.0.1:4711", "[fe80::1%2]:4711".
std::string to_string(const sockaddr_storage& address);
// The same without the port: "10.0.0.1", "fe80::1%2".
std::string host_to_string(const sockaddr_storage& address);

bool is_link_local(const sockaddr_storage& address);       // of IPv6
void set_port(sockaddr_storage& address, in_port_t port);  // `port` in network byte order

// Listens at `address`; with port 0 the kernel chooses the port.
Result<UniqueFd> tcp_listen(const sockaddr_storage& address);
// TCP_DEFER_ACCEPT, for a protocol in which the connecting side sends first: the kernel keeps a connection without data
// out of the accept queue for up to `seconds`. Without kernel support tcp_accept returns such connections at once.
void set_defer_accept(const UniqueFd& listener, int seconds);
Result<sockaddr_storage> local_address(const UniqueFd& socket);
Result<sockaddr_storage> remote_address(const UniqueFd& socket);

// The next connection from the accept queue of `listener`, nullopt when the queue is empty. After EMFILE, ENFILE,
// ENOBUFS or ENOMEM the connection stays in the queue, so the caller can try again later.
Result<std::optional<UniqueFd>> tcp_accept(const UniqueFd& listener);

// Starts to connect to `remote` from `local` (the port of `local` is ignored; AF_UNSPEC: any address). tcp_connected
// returns true when the connection is established, and false while it is in progress.
Result<UniqueFd> tcp_connect(const sockaddr_storage& remote, const sockaddr_storage& local);
Result<bool> tcp_connected(const UniqueFd& socket);
// Errors of these two that can pass: the listener is not open yet or overloaded, routes and neighbours change.
bool is_passing(const Error& error);

// The connection fails (ETIMEDOUT) when the peer's host has acknowledged nothing for `seconds`, not more than about a
// day: neither data nor the kernel's keepalive probes. Without kernel support it stays open.
void set_keepalive(const UniqueFd& socket, unsigned seconds);

// When it is closed, the peer gets a reset, and no end of file.
void reset_on_close(const UniqueFd& socket, bool resets = true);
void close_with_reset(UniqueFd& socket);
// Ends the connection with a reset, and keeps the descriptor.
void reset_connection(const UniqueFd& socket);
// Whether neither end has closed or reset the connection, as far as this host knows.
bool is_established(const UniqueFd& socket);

// Sends what the socket accepts now of `bytes` from position `sent` on, and advances `sent`. True when the kernel has
// accepted all.
Result<bool> send_from(const UniqueFd& socket, std::span<const std::uint8_t> bytes, std::size_t& sent);

// A message that is sent in as many parts as the socket accepts.
class OutgoingMessage {
 public:
  OutgoingMessage() = default;
  explicit OutgoingMessage(std::vector<std::uint8_t> bytes) : bytes_(std::move(bytes)) {}

  Result<bool> send(const UniqueFd& socket) { return send_from(socket, bytes_, sent_); }

 private:
  std::vector<std::uint8_t> bytes_;
  std::size_t sent_ = 0;
};

// Reads into `buffer` from position `filled` on, and advances `filled`. True when the buffer is full. End of file is an
// error of kind kRemote.
Result<bool> receive_into(const UniqueFd& socket, std::span<std::uint8_t> buffer, std::size_t& filled);

// The same errors, without reading: end of file, or a connection that failed.
Status check_open(const UniqueFd& socket);

}  // namespace verbatim
