// Non-blocking TCP: every call answers at once, every read and write may be partial. Errors are of kind kRemote when
// the peer or the path to it failed, kSystem when this host did.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/unique_fd.h"

namespace verbatim {

// "10.0.0.1:4711", "[fe80::1%2]:4711".
std::string to_string(const sockaddr_storage& address);

void set_port(sockaddr_storage& address, in_port_t port);  // in network order

// Listens at `address`; port 0 lets the system choose.
Result<UniqueFd> tcp_listen(const sockaddr_storage& address);
// For a protocol in which whoever connects speaks first: the system keeps the silent ones to itself for so many
// seconds, as many as its own queue holds. Where it cannot, tcp_accept gives them, too.
void set_defer_accept(const UniqueFd& listener, int seconds);
Result<sockaddr_storage> local_address(const UniqueFd& socket);
Result<sockaddr_storage> remote_address(const UniqueFd& socket);

// The next connection waiting at `listener`, nullopt when there is none. EMFILE, ENFILE, ENOBUFS and ENOMEM pass: it
// goes on waiting.
Result<std::optional<UniqueFd>> tcp_accept(const UniqueFd& listener);

// Starts connecting from `local` (its port is ignored; family AF_UNSPEC: any) to `remote`; tcp_connected tells when the
// connection stands (true) or is still under way (false).
Result<UniqueFd> tcp_connect(const sockaddr_storage& remote, const sockaddr_storage& local);
Result<bool> tcp_connected(const UniqueFd& socket);

// Bytes on their way out; `send` pushes what the socket takes.
class OutgoingMessage {
 public:
  OutgoingMessage() = default;
  explicit OutgoingMessage(std::vector<std::uint8_t> bytes) : bytes_(std::move(bytes)) {}

  // True when all is with the system.
  Result<bool> send(const UniqueFd& socket);

 private:
  std::vector<std::uint8_t> bytes_;
  std::size_t sent_ = 0;
};

// Fills `buffer` from position `filled` on. True when it is full. An end of file is an error of kind kRemote.
Result<bool> receive_into(const UniqueFd& socket, std::span<std::uint8_t> buffer, std::size_t& filled);

}  // namespace verbatim
