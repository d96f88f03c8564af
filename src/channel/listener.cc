#include "channel/listener.h"

#include <sys/eventfd.h>
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
#include "channel/hello_limits.h"
#include "channel/message_stream.h"
#include "wire/limits.h"
#include "wire/notice.h"

namespace verbatim {
namespace {

// Connections that this end has removed and whose peers may still ask for them: a peer whose side channel is lost asks
// at least every 24 s. More of them learn it from the NIC, which does not answer.
constexpr std::size_t kMaxRemoved = 4096;

}  // namespace

Listener::Listener(const sockaddr_storage& address, std::span<const SocketInterface> interfaces,
                   const wire::KeyPair& own, std::span<const std::uint8_t> psk)
    : keys_(own, psk) {
  sockets_.push_back({address, {}});
  for (const SocketInterface& further : interfaces.subspan(std::min<std::size_t>(interfaces.size(), 1))) {
    if (sockets_.size() < wire::kMaxAddresses) sockets_.push_back({further.address, {}});
  }
}

Status Listener::open(Socket& one) {
  Result<UniqueFd> socket = tcp_listen(one.address);
  if (!socket && socket.error().sys_errno == EADDRINUSE) {  // another process has the port by now
    set_port(one.address, 0);
    socket = tcp_listen(one.address);
  }
  if (!socket) return socket.error();
  set_defer_accept(*socket, kHelloTimeoutS);
  const Result<sockaddr_storage> bound = local_address(*socket);
  if (!bound) return bound.error();
  one.address = *bound;
  one.socket = std::move(*socket);
  return {};
}

Status Listener::open() {
  Socket& first = sockets_.front();
  if (first.socket) return {};
  if (const Status opened = open(first); !opened) return opened;
  open_further();
  return {};
}

// On the same port where it is free, so that one rule of a firewall is enough. An interface that cannot be used is left
// out.
void Listener::open_further() {
  const in_port_t port = reinterpret_cast<const sockaddr_in&>(sockets_.front().address).sin_port;
  for (std::size_t i = 1; i < sockets_.size(); ++i) {
    set_port(sockets_[i].address, port);
    static_cast<void>(open(sockets_[i]));
  }
}

Result<sockaddr_storage> Listener::add(const wire::Secret& secret, int arrival) {
  const MutexLock lock(mutex_);
  if (const Status opened = open(); !opened) return opened.error();
  Listen& added = listens_[wire::listen_id(secret)];
  added.key = keys_.hello_key(secret);
  added.arrival = arrival;
  return sockets_.front().address;
}

std::vector<wire::Address> Listener::addresses(Use use) {
  const MutexLock lock(mutex_);
  static_cast<void>(open());
  if (use == Use::kHold) ++holders_;
  std::vector<wire::Address> found;
  for (const Socket& one : sockets_) {
    if (one.socket && !is_link_local(one.address)) found.push_back(wire::to_address(one.address));
  }
  return found;
}

void Listener::release() noexcept {
  const MutexLock lock(mutex_);
  --holders_;
  close_if_unused();
}

void Listener::remove(const wire::ListenId& id) noexcept {
  const MutexLock lock(mutex_);
  // Requests for this listen are rejected now: no later poll returns them.
  try {
    read_pending();
    static_cast<void>(accept_pending());
    for (const ConnectRequest& request : listens_[id].requests) reject(request.socket, kListenClosed);
  } catch (...) {  // no memory: the peers see only that the connection is closed
  }
  listens_.erase(id);
  close_if_unused();
}

void Listener::close_if_unused() {
  if (!listens_.empty() || !connections_.empty() || holders_ != 0) return;
  pending_.clear();
  for (Socket& one : sockets_) one.socket.reset();
}

bool Listener::add_connection(const wire::ConnectionEnd& end, const wire::Key& session, int key) {
  const MutexLock lock(mutex_);
  connections_.insert_or_assign(end, Connection{.session = session, .key = key});
  return connections_.size() == 1;
}

bool Listener::add_connection(const wire::ConnectionEnd& end, const wire::Key& session, EventHandler& handler) {
  const MutexLock lock(mutex_);
  connections_.insert_or_assign(end, Connection{.session = session, .handler = &handler});
  return connections_.size() == 1;
}

void Listener::remove_connection(const wire::ConnectionEnd& end, const wire::Key& session,
                                 std::optional<wire::MessageType> last) noexcept {
  const MutexLock lock(mutex_);
  const auto connection = connections_.extract(end);
  const std::uint64_t number = connection.empty() ? 0 : connection.mapped().number;
  resumed_.erase(end);
  if (last) {
    if (removed_.size() == kMaxRemoved) removed_.pop_front();
    try {
      removed_.push_back({end, session, number, *last});
    } catch (...) {  // no memory: the peer learns it from the NIC
    }
  }
  close_if_unused();
}

std::vector<Listener::Resumed> Listener::take_resumed(const std::function<void(int descriptor)>& watch) {
  const MutexLock lock(mutex_);
  for (const Socket& one : sockets_) {
    if (one.socket) watch(one.socket.get());
  }
  read_pending();
  static_cast<void>(accept_pending());  // poll() reports an error
  std::vector<Resumed> resumed;
  resumed.reserve(resumed_.size());
  for (auto next = resumed_.begin(); next != resumed_.end();) {
    const auto one = next++;
    const Connection& connection = connections_.at(one->first);
    if (connection.handler != nullptr) continue;
    resumed.push_back({one->first, connection.key, connection.number, std::move(one->second)});
    resumed_.erase(one);
  }
  return resumed;
}

std::optional<Listener::Resumed> Listener::take_resumed(const wire::ConnectionEnd& end) {
  const MutexLock lock(mutex_);
  auto found = resumed_.extract(end);
  if (found.empty()) return std::nullopt;
  const Connection& connection = connections_.at(end);
  return Resumed{end, connection.key, connection.number, std::move(found.mapped())};
}

bool Listener::has_connections() {
  const MutexLock lock(mutex_);
  return !connections_.empty();
}

void Listener::serve() {
  const MutexLock lock(mutex_);
  if (!connections_.empty()) return;  // the monitor does it
  const auto is_polled = [](const auto& listen) { return listen.second.arrival < 0; };
  if (std::ranges::any_of(listens_, is_polled)) return;  // NCCL calls accept
  read_pending();
  static_cast<void>(accept_pending());  // poll() reports an error
}

void reject(const UniqueFd& socket, const std::string& reason, std::uint16_t version) {
  static_cast<void>(OutgoingMessage(wire::encode_reject(reason, version)).send(socket));
}

Result<std::vector<ConnectRequest>> Listener::poll(const wire::ListenId& id) {
  const MutexLock lock(mutex_);
  // Serves existing connections before accepting new ones: many new connections must not displace a peer whose hello
  // has already arrived.
  read_pending();
  if (const Status accepted = accept_pending(); !accepted) return accepted.error();
  const auto listen = listens_.find(id);
  if (listen == listens_.end()) return std::vector<ConnectRequest>();
  return std::exchange(listen->second.requests, {});
}

std::uint64_t Listener::await(std::vector<pollfd>& sockets) {
  const MutexLock lock(mutex_);
  const std::uint64_t now = monotonic_ns();
  const bool accepts = !shortage_reported_ && !is_full(now);
  for (const Socket& one : sockets_) {
    if (one.socket && accepts) sockets.push_back({one.socket.get(), POLLIN, 0});
  }
  for (const PendingConnection& pending : pending_) sockets.push_back({pending.socket.get(), POLLIN, 0});
  return accepts ? UINT64_MAX : now + kMinPendingNs;
}

bool Listener::is_full(std::uint64_t now) const {
  return pending_.size() == kMaxPending && now < pending_.front().accepted_ns + kMinPendingNs;
}

void Listener::read_pending() {
  const std::uint64_t now = monotonic_ns();
  for (auto pending = pending_.begin(); pending != pending_.end();) {
    const bool stays = read_hello(*pending) && now < pending->accepted_ns + kHelloTimeoutNs;
    pending = stays ? std::next(pending) : pending_.erase(pending);
  }
}

Status Listener::accept_pending() {
  Status accepted;
  for (const Socket& one : sockets_) {
    if (!one.socket) continue;
    if (const Status status = accept_pending(one.socket); !status && accepted) accepted = status;
  }
  return accepted;
}

// Connections beyond kMaxPending stay in the socket's backlog. The bound on the loop lets poll return even if
// connections keep coming.
Status Listener::accept_pending(const UniqueFd& socket) {
  for (std::size_t i = 0; i < kMaxPending; ++i) {
    const std::uint64_t now = monotonic_ns();
    if (is_full(now)) return {};
    Result<std::optional<UniqueFd>> accepted = tcp_accept(socket);
    if (!accepted) return report_resource_shortage(accepted.error());
    if (!accepted->has_value()) return {};
    shortage_reported_ = false;
    if (pending_.size() == kMaxPending) pending_.pop_front();
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
  VERBATIM_WARN("connections to %s stay in the listen backlog: accept: %s. Next: %s",
                to_string(sockets_.front().address).c_str(), std::strerror(why), limit.c_str());
  return {};
}

// Both ends log the mismatch. This end does so once: further connections must not fill the log.
void Listener::reject_version(const UniqueFd& socket, std::uint16_t version) {
  const Result<sockaddr_storage> peer = remote_address(socket);
  char text[256];
  std::snprintf(text, sizeof text, "%s speaks protocol version %u of Verbatim, %s version %u",
                peer ? to_string(*peer).c_str() : "the peer", version, to_string(sockets_.front().address).c_str(),
                wire::kProtocolVersion);
  if (!std::exchange(version_mismatch_reported_, true)) {
    VERBATIM_WARN("a connection is rejected: %s. Next: run the same release on all hosts", text);
  }
  // The reject has the peer's version number, so that the peer reads it: header and reject are the same in all
  // versions.
  reject(socket, text, version);
}

// The line of this end comes once, as above.
void Listener::reject_mac(const UniqueFd& socket) {
  if (!std::exchange(wrong_mac_reported_, true)) {
    const Result<sockaddr_storage> peer = remote_address(socket);
    VERBATIM_WARN(
        "a connect request from %s does not show the secret of the listen that it names. Next: give all hosts of the "
        "job the same VERBATIM_PSK_FILE; if that host is not of the job, keep it from this port",
        peer ? to_string(*peer).c_str() : "a peer that has gone");
  }
  reject(socket, "VERBATIM_PSK_FILE is not the same at both ends");
}

void Listener::resume(PendingConnection& pending) {
  const std::optional<wire::Resume> resume = wire::decode_resume(pending.message.body());
  if (!resume) return;
  const auto is_new = [&](const wire::Key& session, std::uint64_t last) {
    return pending.message.authenticate(session) && resume->number > last;
  };
  if (const auto found = connections_.find(resume->end); found != connections_.end()) {
    Connection& connection = found->second;
    if (!is_new(connection.session, connection.number)) return;
    // A peer that asks again has given up its earlier attempt, and maybe this one.
    UniqueFd& resumed = resumed_[resume->end];
    resumed = std::move(pending.socket);
    connection.number = resume->number;
    if (!is_established(resumed)) resumed_.erase(resume->end);
    if (connection.handler != nullptr) connection.handler->call_at(0);
    return;
  }
  const auto removed = std::find_if(removed_.rbegin(), removed_.rend(),
                                    [&](const RemovedConnection& entry) { return entry.end == resume->end; });
  if (removed == removed_.rend()) return;  // it may not be known yet
  if (!is_new(removed->session, removed->number)) return;
  removed->number = resume->number;
  const wire::Notice last = removed->last == wire::MessageType::kClose
                                ? wire::Notice::without_body(wire::MessageType::kClose)
                                : wire::Notice::failed(ErrorKind::kNone, "");
  MessageStream answer;
  answer.begin(wire::channel_key(removed->session, 1 - resume->end.connecting, resume->number), resume->end.connecting);
  if (answer.add(pending.socket, last.bytes())) answer.flush(pending.socket);
}

bool Listener::read_hello(PendingConnection& pending) {
  IncomingMessage& message = pending.message;
  const Result<bool> first = message.receive_first(pending.socket, sizeof(wire::ConnectionId));
  if (!first && message.other_version()) reject_version(pending.socket, *message.other_version());
  if (!first || !*first) return static_cast<bool>(first);
  const wire::ConnectionId id = wire::decode_connection_id(message.body());
  const bool resumes = message.type() == wire::MessageType::kResume;
  const auto listen = listens_.find(id.listen);
  const bool connects = message.type() == wire::MessageType::kConnect && listen != listens_.end();
  if (!connects && !(resumes && message.body_bytes() == sizeof(wire::Resume) + wire::kMacBytes)) return false;
  const Result<bool> all = message.receive(pending.socket);
  if (!all || !*all) return static_cast<bool>(all);
  if (resumes) {
    resume(pending);
    return false;
  }
  if (!message.authenticate(listen->second.key)) {
    reject_mac(pending.socket);
    return false;
  }
  if (!listen->second.attempts.insert(id.attempt).second) return false;  // a replay
  listen->second.requests.push_back({std::move(pending.socket), std::move(message)});
  if (listen->second.arrival >= 0) ::eventfd_write(listen->second.arrival, 1);
  return false;
}

}  // namespace verbatim
