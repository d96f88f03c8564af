#include "net/connect/listener.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "base/socket.h"
#include "net/transfer/side_channel.h"
#include "wire/limits.h"
#include "wire/notice.h"

namespace verbatim {
namespace {

// A connector sends its hello right after the TCP connect.
constexpr int kHelloTimeoutS = 3;
constexpr std::uint64_t kHelloTimeoutNs = kHelloTimeoutS * kNanosecondsPerSecond;
// Connections without a complete hello hold at most this many descriptors. For a further connection the oldest is
// closed, but not before it has had kMinPendingNs to send the rest of its hello.
constexpr std::size_t kMaxPending = 128;
constexpr std::uint64_t kMinPendingNs = 20 * kNanosecondsPerMillisecond;
// Connections that this end has removed and whose peers may still ask for them: a peer whose side channel is lost asks
// at least every 24 s. More of them learn it from the NIC, which does not answer.
constexpr std::size_t kMaxRemoved = 4096;

}  // namespace

Status Listener::open() {
  Result<UniqueFd> socket = tcp_listen(address_);
  if (!socket && socket.error().sys_errno == EADDRINUSE) {  // another process has the port by now
    set_port(address_, 0);
    socket = tcp_listen(address_);
  }
  if (!socket) return socket.error();
  set_defer_accept(*socket, kHelloTimeoutS);
  const Result<sockaddr_storage> bound = local_address(*socket);
  if (!bound) return bound.error();
  address_ = *bound;
  socket_ = std::move(*socket);
  return {};
}

Result<sockaddr_storage> Listener::add(const wire::Secret& secret) {
  const MutexLock lock(mutex_);
  if (!socket_) {
    if (const Status opened = open(); !opened) return opened.error();
  }
  listens_.try_emplace(secret);
  return address_;
}

void Listener::remove(const wire::Secret& secret) noexcept {
  const MutexLock lock(mutex_);
  // Requests for this listen are rejected now: no later poll returns them.
  try {
    read_pending();
    static_cast<void>(accept_pending());
    for (const ConnectRequest& request : listens_[secret].requests) reject(request.socket, kListenClosed);
  } catch (...) {  // no memory: the peers see only that the connection is closed
  }
  listens_.erase(secret);
  close_if_unused();
}

void Listener::close_if_unused() {
  if (!listens_.empty() || !connections_.empty()) return;
  pending_.clear();
  socket_.reset();
}

void Listener::add_connection(const wire::ConnectionId& connection, int key) {
  const MutexLock lock(mutex_);
  connections_.insert_or_assign(connection, key);
}

void Listener::remove_connection(const wire::ConnectionId& connection, std::optional<wire::MessageType> last) noexcept {
  const MutexLock lock(mutex_);
  connections_.erase(connection);
  resumed_.erase(connection);
  if (last) {
    if (removed_.size() == kMaxRemoved) removed_.pop_front();
    try {
      removed_.push_back({connection, *last});
    } catch (...) {  // no memory: the peer learns it from the NIC
    }
  }
  close_if_unused();
}

std::vector<SideChannelSource::Resumed> Listener::take_resumed() {
  const MutexLock lock(mutex_);
  if (!socket_) return {};
  read_pending();
  static_cast<void>(accept_pending());  // accept() reports an error
  std::vector<Resumed> resumed;
  resumed.reserve(resumed_.size());
  for (auto& [id, socket] : resumed_) resumed.push_back({id, connections_.at(id), std::move(socket)});
  resumed_.clear();
  return resumed;
}

void reject(const UniqueFd& socket, const std::string& reason, std::uint16_t version) {
  static_cast<void>(OutgoingMessage(wire::encode_reject(reason, version)).send(socket));
}

Result<std::vector<ConnectRequest>> Listener::poll(const wire::Secret& secret) {
  const MutexLock lock(mutex_);
  // Serves existing connections before accepting new ones: many new connections must not displace a peer whose hello
  // has already arrived.
  read_pending();
  if (const Status accepted = accept_pending(); !accepted) return accepted.error();
  const auto listen = listens_.find(secret);
  if (listen == listens_.end()) return std::vector<ConnectRequest>();
  return std::exchange(listen->second.requests, {});
}

void Listener::read_pending() {
  const std::uint64_t now = monotonic_ns();
  for (auto pending = pending_.begin(); pending != pending_.end();) {
    const bool stays = read_hello(*pending) && now < pending->accepted_ns + kHelloTimeoutNs;
    pending = stays ? std::next(pending) : pending_.erase(pending);
  }
}

// Connections beyond kMaxPending stay in the socket's backlog. The bound on the loop lets poll return even if
// connections keep coming.
Status Listener::accept_pending() {
  for (std::size_t i = 0; i < kMaxPending; ++i) {
    const std::uint64_t now = monotonic_ns();
    const bool full = pending_.size() == kMaxPending;
    if (full && now < pending_.front().accepted_ns + kMinPendingNs) return {};
    Result<std::optional<UniqueFd>> accepted = tcp_accept(socket_);
    if (!accepted) return report_resource_shortage(accepted.error());
    if (!accepted->has_value()) return {};
    shortage_reported_ = false;
    if (full) pending_.pop_front();
    PendingConnection& pending = pending_.emplace_back();
    pending.socket = std::move(**accepted);
    pending.accepted_ns = now;
    if (!read_hello(pending)) pending_.pop_back();
  }
  return {};
}

// A shortage of descriptors or memory may pass, so it is no error of the listen. It is logged once, here, because the
// peers in the backlog cannot see the cause.
Status Listener::report_resource_shortage(const Error& error) {
  const int why = error.sys_errno;
  if (why != EMFILE && why != ENFILE && why != ENOBUFS && why != ENOMEM) return error;
  if (std::exchange(shortage_reported_, true)) return {};
  rlimit descriptors{};
  ::getrlimit(RLIMIT_NOFILE, &descriptors);
  const std::string limit =
      why == EMFILE ? "raise the limit of " + std::to_string(descriptors.rlim_cur) + " (ulimit -n, LimitNOFILE=)"
                    : "see what the host's memory and files (fs.file-max) are used for";
  VERBATIM_WARN("connections to %s stay in the listen backlog: accept: %s. Next: %s", to_string(address_).c_str(),
                std::strerror(why), limit.c_str());
  return {};
}

// Both ends log the mismatch. This end does so once: further connections must not fill the log.
void Listener::reject_version(const UniqueFd& socket, std::uint16_t version) {
  const Result<sockaddr_storage> peer = remote_address(socket);
  char text[256];
  std::snprintf(text, sizeof text, "%s speaks protocol version %u of Verbatim, %s version %u",
                peer ? to_string(*peer).c_str() : "the peer", version, to_string(address_).c_str(),
                wire::kProtocolVersion);
  if (!std::exchange(version_mismatch_reported_, true)) {
    VERBATIM_WARN("a connection is rejected: %s. Next: run the same release on all hosts", text);
  }
  // The reject has the peer's version number, so that the peer reads it: header and reject are the same in all
  // versions.
  reject(socket, text, version);
}

void Listener::resume(PendingConnection& pending) {
  const std::optional<wire::ConnectionId> connection = wire::decode_resume(pending.message.body());
  if (!connection) return;
  // A peer that asks again has given up its earlier attempt.
  if (connections_.contains(*connection))
    return void(resumed_.insert_or_assign(*connection, std::move(pending.socket)));
  const auto removed = std::find_if(removed_.rbegin(), removed_.rend(),
                                    [&](const RemovedConnection& entry) { return entry.id == *connection; });
  if (removed == removed_.rend()) return;  // it may not be known yet
  const wire::Notice last = removed->last == wire::MessageType::kClose
                                ? wire::Notice::without_body(wire::MessageType::kClose)
                                : wire::Notice::failed(ErrorKind::kNone, "");
  SideChannel().send(pending.socket, last);
}

bool Listener::read_hello(PendingConnection& pending) {
  IncomingMessage& message = pending.message;
  const Result<bool> all = message.receive(pending.socket);
  if (!all && message.other_version()) reject_version(pending.socket, *message.other_version());
  if (!all) return false;
  if (!*all) return true;
  if (message.type() == wire::MessageType::kResume) resume(pending);
  if (message.type() != wire::MessageType::kConnect) return false;
  Result<wire::Hello> hello = wire::decode_hello(message.body());
  if (!hello) return false;
  const auto listen = listens_.find(hello->secret);
  if (listen == listens_.end()) return false;
  if (!listen->second.attempts.insert(hello->attempt).second) return false;  // a replay
  listen->second.requests.push_back({std::move(pending.socket), std::move(*hello)});
  return false;
}

}  // namespace verbatim
