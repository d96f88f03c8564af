#include "rma/peer_channel.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <new>

#include "base/clock.h"
#include "base/log.h"
#include "base/socket.h"
#include "channel/listener.h"
#include "net/diagnose/path_facts.h"

namespace verbatim::rma {
namespace {

// A rank is at most one collective call ahead of another, whose messages are at most three.
constexpr std::size_t kMaxReceived = 16;
// They are taken soon.
constexpr std::size_t kMaxLaneMessages = 1024;
constexpr std::size_t kMaxUnacknowledged = 1024;
// The rank keeps its messages until then.
constexpr std::uint32_t kMaxToAcknowledge = 64;
// Then other connections are served: a peer may send faster than this thread reads.
constexpr int kMaxMessagesPerRead = 16;
constexpr std::uint64_t kSendRetryNs = 10 * kNanosecondsPerMillisecond;
constexpr std::uint64_t kMaxPauseNs = kNanosecondsPerSecond;
constexpr const char* kUnknown = "a message that does not belong here";

}  // namespace

PeerChannel::PeerChannel(const Process& process, UniqueFd socket, const wire::ConnectionEnd& end,
                         const wire::Key& session, std::vector<wire::Address> addresses)
    : own_(end), addresses_(std::move(addresses)), process_(process) {
  const MutexLock lock(mutex_);
  channel_.set_socket(std::move(socket), session);
}

void PeerChannel::open(std::function<void()> changed) {
  changed_ = std::move(changed);
  handler_ = std::make_unique<EventHandler>(
      process_.monitor.loop(), [this](int) { ready(); }, [this] { return attend(); });
  const MutexLock lock(mutex_);
  channel_process_.emplace(Channel::Process{*handler_, process_.interfaces, kMaxPauseNs});
  if (process_.keepalive_s != 0) set_keepalive(channel_.socket(), process_.keepalive_s);
  const bool is_first = process_.listener.add_connection(own_, channel_.session(), *handler_);
  if (is_first) process_.monitor.serve_listener();
  if (const Status opened = channel_.open(*channel_process_, {own_, addresses_}); !opened) {
    set_end(End::kLost, to_string(opened.error()));
    return stop(last());
  }
  state_ = State::kServed;
}

void PeerChannel::close() noexcept {
  {
    const MutexLock lock(mutex_);
    stop(last());
  }
  handler_.reset();
}

void PeerChannel::stop(std::optional<wire::MessageType> last) noexcept {
  const State before = std::exchange(state_, State::kStopped);
  if (before == State::kStopped) return;
  if (before == State::kServed) {
    // The rank learns why nothing comes any more. It must not wait for the rest of a message.
    if (last == wire::MessageType::kFailed && channel_.is_open()) {
      if (!last_) last_ = wire::Notice::failed(ErrorKind::kRemote, reason_);
      try_last();
      if (!last_sent_ || !channel_.flush()) ::shutdown(channel_.socket().get(), SHUT_RDWR);
    }
    channel_.stop();
  }
  process_.listener.remove_connection(own_, channel_.session(), last);
}

wire::MessageType PeerChannel::last() const {
  return last_ ? last_->type() : wire::MessageType::kFailed;
}

void PeerChannel::send(std::vector<std::uint8_t> message) {
  const MutexLock lock(mutex_);
  if (state_ != State::kServed || last_ || end_.load(std::memory_order_relaxed) != End::kOpen) return;
  if (channel_.unacknowledged() == kMaxUnacknowledged) {
    set_end(End::kLost, "it acknowledges nothing");
    return handler_->call_at(0);
  }
  const std::uint64_t now = monotonic_ns();
  ask_for_answer(now);
  if (!channel_.send(std::move(message))) throw std::bad_alloc();
  handler_->call_at(due_ns(now));
}

void PeerChannel::send_last(const wire::Notice& notice) {
  const MutexLock lock(mutex_);
  if (state_ != State::kServed || last_) return;
  const std::uint64_t now = monotonic_ns();
  ask_for_answer(now);
  last_ = notice;
  try_last();
  handler_->call_at(due_ns(now));
}

void PeerChannel::try_last() {
  if (last_ && !last_sent_) last_sent_ = channel_.send(*last_);
}

// A rank from which nothing has come may not serve the channel yet.
void PeerChannel::ask_for_answer(std::uint64_t now) {
  if (has_received_ && !channel_.has_unsent()) channel_.ask_for_answer(now, false);
}

void PeerChannel::give_up(const char* reason) {
  const MutexLock lock(mutex_);
  set_end(End::kLost, reason);
  if (state_ == State::kServed) handler_->call_at(0);
}

void PeerChannel::ready() noexcept {
  const std::uint64_t next = attend();
  const MutexLock lock(mutex_);
  if (state_ == State::kServed) handler_->call_at(next);
}

std::uint64_t PeerChannel::attend() noexcept {
  std::uint64_t next = kNever;
  std::string line;
  bool has_changed = false;
  {
    const MutexLock lock(mutex_);
    if (state_ != State::kServed) return kNever;
    const std::uint64_t now = monotonic_ns();
    const std::size_t unacknowledged = channel_.unacknowledged();
    try {
      advance(now);
    } catch (...) {
      set_end(End::kLost, "out of memory");  // as short as this it needs none
    }
    if (end_.load(std::memory_order_relaxed) == End::kLost) stop(last());
    if (state_ == State::kServed) next = due_ns(now);
    line.swap(line_);
    has_changed =
        std::exchange(has_changed_, false) || state_ != State::kServed || channel_.unacknowledged() != unacknowledged;
  }
  if (!line.empty()) VERBATIM_INFO("%s", line.c_str());
  if (has_changed) changed_();
  return next;
}

void PeerChannel::advance(std::uint64_t now) {
  if (std::optional<Listener::Resumed> resumed = process_.listener.take_resumed(own_)) {
    changed(channel_.accept(std::move(resumed->socket), resumed->number, now), now);
  }
  if (channel_.is_being_made()) changed(channel_.ready(now), now);
  read(now);
  if (state_ != State::kServed) return;
  try_last();
  changed(channel_.advance(now), now);
  if (lost_ns_ == 0) return;
  if (channel_.is_refused()) {
    set_end(End::kEnded, loss_ + ", and a new TCP connection was refused");
  } else if (now >= loss_deadline_ns()) {
    set_end(End::kLost, loss_ + ", and no new TCP connection could be made within " + to_seconds(process_.max_loss_ns));
  } else {
    return;
  }
  stop(last());  // also when the rank has closed before
}

void PeerChannel::read(std::uint64_t now) {
  for (int i = 0; i < kMaxMessagesPerRead && channel_.is_open(); ++i) {
    const Result<std::optional<Channel::Message>> message = channel_.receive();
    if (!message) return lose(message.error(), now);
    if (!*message) return;
    has_received_ = true;
    process(**message);
  }
}

void PeerChannel::lose(const Error& error, std::uint64_t now) {
  const int number = error.sys_errno;
  const End known = end_.load(std::memory_order_relaxed);
  // A rank that has closed waits for the close of this one.
  const bool goes_on =
      known == End::kOpen || (known == End::kClosed && (!last_sent_ || channel_.unacknowledged() != 0));
  const bool is_of_network = number != 0 && number != EPROTO && number != ENOMEM;
  if (is_of_network && goes_on && channel_.lose(now)) {
    if (lost_ns_ == 0) lost_ns_ = now;
    loss_ = to_string(error);
    return;
  }
  set_end(number == 0 ? End::kEnded : End::kLost, number == EPROTO ? kUnknown : to_string(error));
  stop(number == 0 ? std::nullopt : std::optional(last()));
}

void PeerChannel::changed(Channel::Change change, std::uint64_t now) {
  if (change == Channel::Change::kNone) return;
  if (change == Channel::Change::kBroken) return lose({ErrorKind::kSystem, EMFILE, "dup3"}, now);
  // Its end is the only sign of a host that has failed while nothing is put to it.
  if (process_.keepalive_s != 0) set_keepalive(channel_.socket(), process_.keepalive_s);
  const std::uint64_t lost_ns = std::exchange(lost_ns_, 0);
  if (end_.load(std::memory_order_relaxed) != End::kOpen) return;
  const std::optional<Channel::Path> path = channel_.path();
  line_ = "RMA: a TCP connection to " + (path ? to_string(path->peer) : "a rank") + " is used in place of one that ";
  line_ += change == Channel::Change::kMoved ? "did not answer"
           : lost_ns == 0                    ? "the other end has given up"
                                             : "ended " + to_seconds(now - lost_ns) + " ago: " + loss_;
}

// When to call attend() again.
std::uint64_t PeerChannel::due_ns(std::uint64_t now) {
  std::uint64_t next = std::min(channel_.expect_answer(now), channel_.due_ns());
  if (!channel_.flush(end_.load(std::memory_order_relaxed) == End::kOpen ? kMaxToAcknowledge : 1))
    next = std::min(next, now + kSendRetryNs);
  if (last_ && !last_sent_) next = std::min(next, now + kSendRetryNs);
  return std::min(next, loss_deadline_ns());
}

// A rank from which nothing has come may not serve the channel yet: until then the collective call ends it.
std::uint64_t PeerChannel::loss_deadline_ns() const {
  return lost_ns_ != 0 && has_received_ ? lost_ns_ + process_.max_loss_ns : kNever;
}

void PeerChannel::process(const Channel::Message& message) {
  switch (message.type) {
    case wire::MessageType::kPing:
    case wire::MessageType::kPong:
    case wire::MessageType::kAck:
      return;  // the channel's own
    case wire::MessageType::kExchange: {
      Result<wire::RmaExchange> exchange = wire::decode_rma_exchange(message.body);
      if (!exchange) return set_end(End::kLost, exchange.error().operation);
      if (received_.size() == kMaxReceived) return set_end(End::kLost, "more messages than calls");
      has_changed_ = true;
      return received_.push_back(std::move(*exchange));
    }
    case wire::MessageType::kRmaLane: {
      Result<wire::RmaLane> lane = wire::decode_rma_lane(message.body);
      if (!lane) return set_end(End::kLost, lane.error().operation);
      if (lanes_.size() == kMaxLaneMessages) return set_end(End::kLost, "more messages about lanes than a rank sends");
      has_changed_ = true;
      return lanes_.push_back(std::move(*lane));
    }
    case wire::MessageType::kClose:
      return set_end(End::kClosed, "it has closed");
    case wire::MessageType::kFailed:
      if (const std::optional<wire::FailureNotice> failed = wire::decode_failure(message.body)) {
        return set_end(End::kFailed, failed->text.empty() ? "it has ended" : std::string(failed->text));
      }
      break;
    default:
      break;
  }
  set_end(End::kLost, kUnknown);
}

// Only the first one counts.
void PeerChannel::set_end(End end, std::string reason) {
  if (end_.load(std::memory_order_relaxed) != End::kOpen) return;
  has_changed_ = true;
  reason_ = std::move(reason);
  ended_ns_.store(monotonic_ns(), std::memory_order_relaxed);
  end_.store(end, std::memory_order_release);
}

std::optional<wire::RmaExchange> PeerChannel::take() {
  const MutexLock lock(mutex_);
  if (received_.empty()) return std::nullopt;
  wire::RmaExchange next = std::move(received_.front());
  received_.pop_front();
  return next;
}

std::optional<wire::RmaLane> PeerChannel::take_lane() {
  const MutexLock lock(mutex_);
  if (lanes_.empty()) return std::nullopt;
  wire::RmaLane next = std::move(lanes_.front());
  lanes_.pop_front();
  return next;
}

std::string PeerChannel::reason() const {
  const MutexLock lock(mutex_);
  return reason_;
}

bool PeerChannel::is_over() const {
  const MutexLock lock(mutex_);
  return end_.load(std::memory_order_relaxed) != End::kOpen &&
         (state_ != State::kServed || (channel_.unacknowledged() == 0 && (!last_ || last_sent_)));
}

}  // namespace verbatim::rma
