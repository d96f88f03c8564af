#include "net/listener.h"

#include <sys/resource.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "base/socket.h"
#include "wire/limits.h"

namespace verbatim {
namespace {

// A peer of ours sends its hello right after connecting.
constexpr int kSilentSeconds = 3;
constexpr std::uint64_t kSilentNs = kSilentSeconds * kNanosecondsPerSecond;
// Nobody may hold more than this many descriptors of ours by staying silent. Beyond them the first ones go, once they
// have had time for the rest of a hello.
constexpr std::size_t kMaxStrangers = 128;
constexpr std::uint64_t kGraceNs = 20 * kNanosecondsPerMillisecond;

}  // namespace

Status Listener::open() {
  Result<UniqueFd> socket = tcp_listen(address_);
  if (!socket && socket.error().sys_errno == EADDRINUSE) {  // another process has the port by now
    set_port(address_, 0);
    socket = tcp_listen(address_);
  }
  if (!socket) return socket.error();
  keep_silent_out(*socket, kSilentSeconds);
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
  listens_.erase(secret);
  if (listens_.empty()) {
    strangers_.clear();
    socket_.reset();
    return;
  }
  // Peers that have come for it are sent away now: nobody else may ever look.
  try {
    hear_all();
    static_cast<void>(welcome());
  } catch (...) {  // no memory: they wait until somebody does
  }
}

Result<std::vector<Introduction>> Listener::poll(const wire::Secret& secret) {
  const MutexLock lock(mutex_);
  // Those who are known first, so that a crowd at the door makes nobody lose a place; then who else has come.
  hear_all();
  if (const Status welcomed = welcome(); !welcomed) return welcomed.error();
  const auto listen = listens_.find(secret);
  if (listen == listens_.end()) return std::vector<Introduction>();
  return std::exchange(listen->second.waiting, {});
}

void Listener::hear_all() {
  const std::uint64_t now = monotonic_ns();
  for (auto stranger = strangers_.begin(); stranger != strangers_.end();) {
    const Verdict verdict = hear(*stranger);
    const bool stays = verdict == Verdict::kWait && now < stranger->came_ns + kSilentNs;
    stranger = stays ? std::next(stranger) : strangers_.erase(stranger);
  }
}

// What is beyond the limit waits in the system's queue. A flood that never ends is met a crowd at a time.
Status Listener::welcome() {
  for (std::size_t i = 0; i < kMaxStrangers; ++i) {
    const std::uint64_t now = monotonic_ns();
    const bool full = strangers_.size() == kMaxStrangers;
    if (full && now < strangers_.front().came_ns + kGraceNs) return {};
    Result<std::optional<UniqueFd>> accepted = tcp_accept(socket_);
    if (!accepted) return go_short(accepted.error());
    if (!accepted->has_value()) return {};
    is_short_ = false;
    if (full) strangers_.pop_front();
    Stranger& stranger = strangers_.emplace_back();
    stranger.socket = std::move(**accepted);
    stranger.came_ns = now;
    stranger.message.resize(wire::kHeaderBytes);
    if (hear(stranger) != Verdict::kWait) strangers_.pop_back();
  }
  return {};
}

// What passes is said once, on the host that has too little: who waits outside hears nothing of why.
Status Listener::go_short(const Error& error) {
  const int why = error.sys_errno;
  if (why != EMFILE && why != ENFILE && why != ENOBUFS && why != ENOMEM) return error;
  if (std::exchange(is_short_, true)) return {};
  rlimit descriptors{};
  ::getrlimit(RLIMIT_NOFILE, &descriptors);
  const std::string limit =
      why == EMFILE ? "raise the limit of " + std::to_string(descriptors.rlim_cur) + " (ulimit -n, LimitNOFILE=)"
                    : "see what the host's memory and files (fs.file-max) are used for";
  VERBATIM_WARN("connections to %s wait outside: accept: %s. Next: %s", to_string(address_).c_str(), std::strerror(why),
                limit.c_str());
  return {};
}

// Both logs have it, and here once: whoever comes again, or in hostile mood, does not fill it.
void Listener::refuse_version(const Stranger& stranger) {
  const std::span<const std::uint8_t, wire::kHeaderBytes> header(stranger.message.data(), wire::kHeaderBytes);
  const Result<sockaddr_storage> peer = remote_address(stranger.socket);
  char text[256];
  std::snprintf(text, sizeof text, "%s speaks protocol version %u of Verbatim, %s version %u",
                peer ? to_string(*peer).c_str() : "the peer", wire::protocol_version(header),
                to_string(address_).c_str(), wire::kProtocolVersion);
  if (!std::exchange(has_refused_version_, true)) {
    VERBATIM_WARN("a connection is refused: %s. Next: run the same release on all hosts", text);
  }
  // In the version that the peer understands: header and reject look the same in all.
  static_cast<void>(OutgoingMessage(wire::encode_reject(text, wire::protocol_version(header))).send(stranger.socket));
}

Listener::Verdict Listener::hear(Stranger& stranger) {
  while (true) {
    const Result<bool> all = receive_into(stranger.socket, stranger.message, stranger.filled);
    if (!all) return Verdict::kDrop;
    if (!*all) return Verdict::kWait;
    const Result<wire::Header> header = wire::decode_header(
        std::span<const std::uint8_t, wire::kHeaderBytes>(stranger.message.data(), wire::kHeaderBytes));
    if (!header) {
      if (header.error().kind == ErrorKind::kUsage) refuse_version(stranger);
      return Verdict::kDrop;
    }
    const std::size_t message_bytes = wire::kHeaderBytes + header->body_bytes;
    if (stranger.filled < message_bytes) {
      stranger.message.resize(message_bytes);
      continue;
    }
    if (header->type != wire::MessageType::kConnect) return Verdict::kDrop;
    Result<wire::Hello> hello = wire::decode_hello(std::span(stranger.message).subspan(wire::kHeaderBytes));
    if (!hello) return Verdict::kDrop;
    const auto listen = listens_.find(hello->secret);
    if (listen == listens_.end()) return Verdict::kDrop;
    if (!listen->second.attempts.insert(hello->attempt).second) return Verdict::kDrop;  // a replay
    listen->second.waiting.push_back({std::move(stranger.socket), std::move(*hello)});
    return Verdict::kIntroduced;
  }
}

}  // namespace verbatim
