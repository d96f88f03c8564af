#include "channel/channel.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "base/clock.h"
#include "base/socket.h"

namespace verbatim {
namespace {

constexpr std::uint64_t kAttemptTimeoutNs = 5 * kNanosecondsPerSecond;
// Of the first attempt at each of several addresses.
constexpr std::uint64_t kFirstAttemptTimeoutNs = 250 * kNanosecondsPerMillisecond;
// After an error the connecting side begins at once, the other one after this time.
constexpr std::uint64_t kAcceptingSideWaitsNs = 50 * kNanosecondsPerMillisecond;
// The peer's monitor answers a ping at once, whatever its application does. If it takes longer than this, the channel
// is made again, also if the peer was only slow: then nothing is lost.
constexpr std::uint64_t kAnswerNs = 100 * kNanosecondsPerMillisecond;
// For so long the connecting side prefers its own attempt to one of the peer, if both ends make one. If the peer has
// not answered then, another host has the address that it tries.
constexpr std::uint64_t kPrefersOwnNs = 5 * kNanosecondsPerMillisecond;
// A channel that is as new as this does not move because its path is down, and is not made again at once.
constexpr std::uint64_t kNewNs = kNanosecondsPerSecond;
constexpr std::uint64_t kFirstPauseNs = 100 * kNanosecondsPerMillisecond;
constexpr unsigned kMaxDoublings = 7;  // 12.8 s
// After limit_attempts(); they take 25 s or more. The peer may have ended.
constexpr unsigned kLastAttempts = 9;
// Beyond it messages wait at the caller.
constexpr std::size_t kMaxKept = 32;

bool must_arrive(wire::MessageType type) {
  switch (type) {
    case wire::MessageType::kPing:
    case wire::MessageType::kPong:
    case wire::MessageType::kAck:
    case wire::MessageType::kStatusQuery:
    case wire::MessageType::kStatusReply:
      return false;
    default:
      return true;
  }
}

// From how many bytes on epoll reports the socket as readable.
void set_low_water(const UniqueFd& socket, int bytes) {
  ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

// The peer's first message shows that it has accepted the channel, or that it has ended the connection. It stays in the
// socket.
enum class Answer : std::uint8_t { kNone, kAccepted, kOther };
// `key`: of the messages on this TCP connection.
Answer read_answer(const UniqueFd& socket, const wire::Key& key, std::uint64_t sender) {
  std::uint8_t bytes[wire::kMaxNoticeBytes + wire::kMacBytes];
  const ssize_t count = ::recv(socket.get(), bytes, sizeof bytes, MSG_PEEK | MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return Answer::kNone;
  if (count <= 0) return Answer::kOther;
  const std::span<const std::uint8_t> read = std::span(bytes).first(static_cast<std::size_t>(count));
  std::size_t whole = wire::kHeaderBytes;
  if (read.size() >= whole) {
    const Result<wire::Header> header = wire::decode_header(read.first<wire::kHeaderBytes>());
    if (!header) return Answer::kOther;
    const wire::MessageType type = header->type;
    const bool known =
        type == wire::MessageType::kAck || type == wire::MessageType::kClose || type == wire::MessageType::kFailed;
    whole += header->body_bytes;
    if (!known || whole > sizeof bytes) return Answer::kOther;
    if (read.size() >= whole)
      return wire::has_mac(read.first(whole), key, wire::message_context(sender, 0)) ? Answer::kAccepted
                                                                                     : Answer::kOther;
  }
  // A connection that has ended does not bring the rest.
  if (!is_established(socket)) return Answer::kOther;
  set_low_water(socket, static_cast<int>(whole));
  return Answer::kNone;
}

}  // namespace

Status Channel::open(const Process& process, const Ends& ends) {
  if (const Status watched = process.handler.watch(key(), EventHandler::kReadable, key()); !watched) return watched;
  process_ = &process;
  ends_ = ends;
  dialed_ = ends.own.connecting != 0;
  stream_.begin(key_of(dialed_, 0), ends.own.connecting);
  find_path();
  return {};
}

void Channel::stop() {
  process_->handler.unwatch(key());
  end_loss();
  ends_.peer = {};  // it does not move any more
  answer_due_ns_ = 0;
}

bool Channel::has_room() try {
  kept_.reserve(kept_.size() + 1);
  if (spare_ == nullptr) spare_ = std::make_unique<std::vector<std::uint8_t>>();
  spare_->reserve(wire::kMaxNoticeBytes);
  return kept_.size() < kMaxKept;
} catch (...) {
  return false;
}

bool Channel::send(const wire::Notice& notice) try {
  const std::span<const std::uint8_t> bytes = notice.bytes();
  if (!must_arrive(notice.type())) return is_open() && stream_.add(socket_, bytes) && (flush(), true);
  std::vector<std::uint8_t> message;
  if (spare_ != nullptr) message.swap(*spare_);
  message.assign(bytes.begin(), bytes.end());
  return send(std::move(message));
} catch (...) {
  return false;
}

bool Channel::send(std::vector<std::uint8_t> message) try {
  kept_.push_back(std::move(message));
  flush();
  return true;
} catch (...) {
  return false;
}

bool Channel::flush(std::uint32_t unacknowledged) {
  if (!is_open()) return true;
  while (to_acknowledge_ >= unacknowledged || transmitted_ < kept_.size()) {
    if (!stream_.add(socket_, wire::Notice::ack({received_, acknowledged_ + transmitted_}).bytes())) break;
    to_acknowledge_ = 0;
    if (transmitted_ == kept_.size() || !stream_.add(socket_, kept_[transmitted_])) break;
    ++transmitted_;
  }
  const wire::Notice pong = wire::Notice::without_body(wire::MessageType::kPong);
  while (pongs_owed_ != 0 && stream_.add(socket_, pong.bytes())) --pongs_owed_;
  return stream_.flush(socket_) && to_acknowledge_ < unacknowledged && transmitted_ == kept_.size() && pongs_owed_ == 0;
}

bool Channel::send_ping() {
  if (!send(wire::Notice::without_body(wire::MessageType::kPing))) return false;
  ++pings_sent_;
  return true;
}

bool Channel::is_acknowledged() const {
  int bytes = 0;
  return ::ioctl(socket_.get(), SIOCOUTQ, &bytes) == 0 && bytes == 0;
}

Result<std::optional<Channel::Message>> Channel::receive() {
  while (true) {
    Result<std::optional<Message>> message = stream_.receive(socket_);
    if (!message && !is_peers()) return Error{ErrorKind::kRemote, ECONNRESET, "a message on the side channel"};
    if (!message || !*message) return message;
    const wire::MessageType type = (*message)->type;
    if (type == wire::MessageType::kPing) {
      ++pongs_owed_;
      flush();
    }
    if (type == wire::MessageType::kPong) receive_pong();
    if (type == wire::MessageType::kAck && !receive_ack((*message)->body)) {
      return Error{ErrorKind::kRemote, EPROTO, "a message on the side channel"};
    }
    if (!must_arrive(type) || !peers_number_) return message;
    ++to_acknowledge_;
    if ((*peers_number_)++ < received_) continue;  // a repeat
    ++received_;
    return message;
  }
}

// False: the peer cannot have received so many, or leaves some out.
bool Channel::receive_ack(std::span<const std::uint8_t> body) {
  const std::optional<wire::Ack> ack = wire::decode<wire::Ack>(body);
  if (!ack || ack->number > received_) return false;
  peers_number_ = ack->number;
  if (ack->received <= acknowledged_) return true;
  if (ack->received - acknowledged_ > kept_.size()) return false;
  const auto number = static_cast<std::size_t>(ack->received - acknowledged_);
  kept_.erase(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(number));
  acknowledged_ = ack->received;
  transmitted_ -= std::min(transmitted_, number);
  if (kept_.empty()) kept_.shrink_to_fit();
  return true;
}

void Channel::receive_pong() {
  ++pongs_received_;
  if (static_cast<std::int32_t>(pongs_received_ - awaited_pongs_) < 0) return;
  answer_due_ns_ = 0;
  // Once kResume is sent, the peer may use the new one.
  if (lost_ != nullptr && lost_->moves && !lost_->resume_sent) end_loss();
}

// A socket that has been reset has no addresses any more.
void Channel::find_path() {
  const Result<sockaddr_storage> peer = remote_address(socket_);
  const Result<sockaddr_storage> own = local_address(socket_);
  if (!peer || !own || (peer->ss_family != AF_INET && peer->ss_family != AF_INET6)) return;
  if (path_ == nullptr) path_.reset(new (std::nothrow) ShortPath);
  if (path_ == nullptr) return;
  std::memcpy(&path_->own, &*own, sizeof path_->own);
  std::memcpy(&path_->peer, &*peer, sizeof path_->peer);
}

std::optional<Channel::Path> Channel::path() const {
  if (path_ == nullptr) return std::nullopt;
  Path wide{};
  std::memcpy(&wide.own, &path_->own, sizeof path_->own);
  std::memcpy(&wide.peer, &path_->peer, sizeof path_->peer);
  return wide;
}

// Whether this end or the peer has an address that the channel does not use.
bool Channel::has_other_path() const {
  if (ends_.peer.empty()) return false;
  if (process_->interfaces.size() > 1 || path_ == nullptr) return true;
  const wire::Address used = wire::to_address(path()->peer);
  return std::ranges::any_of(ends_.peer, [&](const wire::Address& address) { return address.ip != used.ip; });
}

// The address that was used comes first, and last if the channel moves.
void Channel::find_targets(Lost& lost) const {
  const wire::Address peer = path_ != nullptr ? wire::to_address(path()->peer) : wire::Address{};
  const bool is_listener = path_ != nullptr && dialed_;
  if (is_listener) lost.targets[lost.target_count++] = peer;
  for (const wire::Address& address : ends_.peer) {
    if (!is_listener || address != peer) lost.targets[lost.target_count++] = address;
  }
  if (!lost.moves || path_ == nullptr) return;
  std::stable_partition(lost.targets.begin(), lost.targets.begin() + lost.target_count,
                        [&](const wire::Address& address) { return address.ip != peer.ip; });
}

// The address from which an attempt is made; AF_UNSPEC: as the kernel's routes say.
sockaddr_storage Channel::source_of(const sockaddr_storage& target) const {
  const sockaddr_storage used = path_ != nullptr ? path()->own : sockaddr_storage{};
  const bool is_same = path_ != nullptr && wire::to_address(target).ip == wire::to_address(path()->peer).ip;
  if (is_same && !lost_->moves) return used;
  const sockaddr_storage except = lost_->moves ? used : sockaddr_storage{};
  return address_in_subnet_of(target, process_->interfaces, except).value_or(is_same ? used : sockaddr_storage{});
}

// Whether nothing but the peer has the address of the present attempt: another host may have one that the peer uses in
// a network of its own.
bool Channel::is_peers_for_sure() const {
  return (dialed_ && path_ != nullptr && target() == wire::to_address(path()->peer)) ||
         (!ends_.peer.empty() && target() == ends_.peer.front());
}

// After an attempt at the last address. Channels that are lost together do not try again together.
std::uint64_t Channel::pause_ns() const {
  if ((lost_->failed_attempts + 1) % lost_->target_count != 0) return 0;
  const std::uint64_t doubled = kFirstPauseNs << std::min(lost_->failed_attempts / lost_->target_count, kMaxDoublings);
  const std::uint64_t pause = std::min(doubled, process_->max_pause_ns);
  return pause + pause / 8 * (static_cast<unsigned>(key()) % 8);
}

bool Channel::begin_loss(std::uint64_t now, bool moves) {
  lost_.reset(new (std::nothrow) Lost);
  if (lost_ == nullptr) return false;
  lost_->moves = moves;
  find_targets(*lost_);
  const bool is_new = since_ns_ != 0 && now - since_ns_ < kNewNs;
  lost_->attempt_ns = now + (moves || ends_.own.connecting != 0 ? 0 : kAcceptingSideWaitsNs);
  if (!moves && is_new) lost_->attempt_ns += kFirstPauseNs;
  if (lost_->target_count == 0) lost_->attempt_ns = kNever;
  answer_due_ns_ = 0;
  return true;
}

void Channel::drop_attempt() {
  if (!lost_->attempt) return;
  process_->handler.unwatch(lost_->attempt.get());
  close_with_reset(lost_->attempt);
  lost_->resume_sent = false;
}

void Channel::end_loss() {
  if (lost_ == nullptr) return;
  drop_attempt();
  if (lost_->offered) close_with_reset(lost_->offered);
  lost_.reset();
}

bool Channel::lose(std::uint64_t now) {
  end_loss();  // it may have been moving
  if (!begin_loss(now, false)) return false;
  process_->handler.unwatch(key());
  reset_connection(socket_);  // the peer may not have noticed
  stream_.reset();
  transmitted_ = 0;
  peers_number_.reset();
  return true;
}

void Channel::limit_attempts() {
  if (lost_ != nullptr && !std::exchange(lost_->is_limited, true)) lost_->failed_attempts = 0;
}

void Channel::set_refused(bool refused) {
  if (lost_->moves) return;  // the old one tells how the peer is
  lost_->refused = refused;
  if (refused) ++lost_->refusals;
}

Channel::Change Channel::give_up_attempt(std::uint64_t now) {
  drop_attempt();
  lost_->attempt_ns = now + pause_ns();
  ++lost_->failed_attempts;
  if (lost_->is_limited && lost_->failed_attempts >= kLastAttempts * lost_->target_count) lost_->attempt_ns = kNever;
  return Change::kNone;
}

void Channel::begin_attempt(std::uint64_t now) {
  const sockaddr_storage to = wire::to_sockaddr(target());
  lost_->resume_sent = false;
  Result<UniqueFd> socket = tcp_connect(to, source_of(to));
  if (is_peers_for_sure()) set_refused(!socket && socket.error().sys_errno == ECONNREFUSED);
  if (socket) {
    lost_->attempt = std::move(*socket);
    const bool is_short = lost_->target_count > 1 && lost_->failed_attempts < lost_->target_count;
    lost_->attempt_ns = now + (is_short ? kFirstAttemptTimeoutNs : kAttemptTimeoutNs);
    if (process_->handler.watch(lost_->attempt.get(), EventHandler::kWritableOnce, key())) return;
  }
  give_up_attempt(now);
}

Channel::Change Channel::ready(std::uint64_t now) {
  if (lost_ == nullptr || !lost_->attempt) return Change::kNone;
  const UniqueFd& attempt = lost_->attempt;
  if (!lost_->resume_sent) {
    const Result<bool> connected = tcp_connected(attempt);
    if (is_peers_for_sure()) set_refused(!connected && connected.error().sys_errno == ECONNREFUSED);
    if (connected && !*connected) {
      if (process_->handler.watch(attempt.get(), EventHandler::kWritableOnce, key())) return Change::kNone;
    } else if (connected) {
      const wire::Notice resume = wire::Notice::resume({ends_.own.other(), ++resumes_}, session_);
      const std::span<const std::uint8_t> bytes = resume.bytes();
      const ssize_t sent = ::send(attempt.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      lost_->resume_sent = sent == static_cast<ssize_t>(bytes.size());
      set_low_water(attempt, wire::kHeaderBytes);
      if (lost_->resume_sent && process_->handler.watch(attempt.get(), EventHandler::kReadableOnce, key())) {
        return Change::kNone;
      }
    }
    return give_up_attempt(now);
  }
  const Answer answer = read_answer(attempt, key_of(true, resumes_), ends_.own.other().connecting);
  if (answer == Answer::kNone && process_->handler.watch(attempt.get(), EventHandler::kReadableOnce, key())) {
    return Change::kNone;
  }
  if (answer != Answer::kAccepted) return give_up_attempt(now);
  const Change change = replace(std::move(lost_->attempt), true, resumes_, now);
  return change == Change::kNone ? give_up_attempt(now) : change;
}

wire::Key Channel::key_of(bool dialed, std::uint64_t number) const {
  return wire::channel_key(session_, dialed ? ends_.own.connecting : ends_.own.other().connecting, number);
}

Channel::Change Channel::accept(UniqueFd socket, std::uint64_t number, std::uint64_t now) {
  if (!is_established(socket)) {
    close_with_reset(socket);
    return Change::kNone;
  }
  // Both ends make it again. The peer gives up its attempt when it gets this one.
  if (lost_ == nullptr || !lost_->resume_sent || ends_.own.connecting == 0)
    return replace(std::move(socket), false, number, now);
  if (!lost_->offered) lost_->offered_ns = now + kPrefersOwnNs;
  if (lost_->offered) close_with_reset(lost_->offered);  // the peer has given that one up
  lost_->offered = std::move(socket);
  lost_->offered_number = number;
  return Change::kNone;
}

Channel::Change Channel::advance(std::uint64_t now) {
  if (lost_ == nullptr) return Change::kNone;
  if (lost_->offered && (now >= lost_->offered_ns || !lost_->attempt)) {
    UniqueFd offered = std::move(lost_->offered);
    if (is_established(offered)) return replace(std::move(offered), false, lost_->offered_number, now);
    close_with_reset(offered);
  }
  if (now < lost_->attempt_ns) return Change::kNone;
  if (lost_->attempt) return give_up_attempt(now);
  begin_attempt(now);
  return Change::kNone;
}

std::uint64_t Channel::due_ns() const {
  if (lost_ == nullptr) return kNever;
  return std::min(lost_->attempt_ns, lost_->offered ? lost_->offered_ns : kNever);
}

// Puts the socket in the place of the channel's, whose descriptor number stays the same. kNone: that has failed, and it
// is lost as before.
Channel::Change Channel::replace(UniqueFd socket, bool dialed, std::uint64_t number, std::uint64_t now) {
  const bool was_open = is_open();
  const bool moves = was_open && lost_ != nullptr;
  process_->handler.unwatch(key());
  process_->handler.unwatch(socket.get());
  set_low_water(socket, 1);
  // The old one, or the new one if a call fails, ends with a reset: an end of file is the end of the process.
  reset_on_close(socket_);
  reset_on_close(socket);
  if (::dup3(socket.get(), key(), O_CLOEXEC) < 0 || !process_->handler.watch(key(), EventHandler::kReadable, key())) {
    return was_open ? Change::kBroken : Change::kNone;
  }
  reset_on_close(socket_, false);
  stream_.begin(key_of(dialed, number), ends_.own.connecting);
  dialed_ = dialed;
  transmitted_ = 0;
  peers_number_.reset();
  to_acknowledge_ = 1;  // so the peer knows that its attempt is accepted
  pongs_owed_ = pings_sent_ = pongs_received_ = awaited_pongs_ = 0;
  answer_due_ns_ = 0;
  since_ns_ = now;
  find_path();
  end_loss();
  flush();
  if (!kept_.empty() && !has_unsent()) ask_for_answer(now, false);
  return moves ? Change::kMoved : Change::kNew;
}

void Channel::ask_for_answer(std::uint64_t now, bool is_down) {
  if (answer_due_ns_ != 0 || lost_ != nullptr || !has_other_path()) return;
  if (!send_ping()) return;
  awaited_pongs_ = pings_sent_;
  const bool is_new = since_ns_ != 0 && now - since_ns_ < kNewNs;
  answer_due_ns_ = is_down && !is_new ? now : now + kAnswerNs;
}

std::uint64_t Channel::expect_answer(std::uint64_t now) {
  if (answer_due_ns_ == 0 || lost_ != nullptr) return kNever;
  if (now < answer_due_ns_) return answer_due_ns_;
  return begin_loss(now, true) ? lost_->attempt_ns : kNever;
}

bool Channel::may_be_made() const {
  return lost_ == nullptr ? answer_due_ns_ != 0
                          : !lost_->moves || has_other_path() || lost_->failed_attempts < lost_->target_count;
}

}  // namespace verbatim
