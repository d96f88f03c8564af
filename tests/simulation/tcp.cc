#include "simulation/tcp.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "simulation/faults.h"

namespace simulation {
namespace {

constexpr Time kLatency = 50 * kMicrosecond;
constexpr Time kLongLatency = 20 * kMillisecond;
constexpr Time kAgain = 200 * kMillisecond;  // until something is sent again

bool one_in(std::uint64_t count) {
  return random_below(count) == 0;
}

Time latency() {
  return 1 + random_below(one_in(16) ? kLongLatency : kLatency);
}

bool same(const sockaddr_storage& a, const sockaddr_storage& b) {
  const auto& one = reinterpret_cast<const sockaddr_in&>(a);
  const auto& other = reinterpret_cast<const sockaddr_in&>(b);
  return one.sin_port == other.sin_port && one.sin_addr.s_addr == other.sin_addr.s_addr;
}

std::size_t interface_of(const sockaddr_storage& address) {
  const std::uint32_t ip = ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr);
  return ip == ntohl(address_of(1).s_addr) ? 1 : 0;
}

TcpFaults& planned() {
  static TcpFaults faults;
  return faults;
}

Tcp* g_tcp = nullptr;

}  // namespace

in_addr address_of(std::size_t interface) {
  return {htonl(0x0a01'0101U + (static_cast<std::uint32_t>(interface) << 8))};  // 10.1.1.1, 10.1.2.1
}

void plan_tcp_faults(const TcpFaults& faults) {
  planned() = faults;
}

void make_tcp() {
  void* const memory = mmap(nullptr, sizeof(Tcp), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  if (g_tcp != nullptr) munmap(g_tcp, sizeof(Tcp));
  g_tcp = new (memory) Tcp(std::exchange(planned(), {}));
}

Tcp& tcp() {
  return *g_tcp;
}

Tcp::Id Tcp::make() {
  for (std::size_t i = 0; i < kMaxEnds; ++i) {
    End& found = ends_[i];
    if (found.state != State::kFree) continue;
    found = {};
    found.state = State::kNew;
    found.process = own_process();
    return static_cast<Id>(i);
  }
  fail_run("too many sockets");
}

Tcp::Id Tcp::find_listener(const sockaddr_storage& address) const {
  for (std::size_t i = 0; i < kMaxEnds; ++i) {
    if (ends_[i].state == State::kListening && same(ends_[i].local, address)) return static_cast<Id>(i);
  }
  return kNone;
}

int Tcp::bind(Id id, const sockaddr_storage& address) {
  auto& local = reinterpret_cast<sockaddr_in&>(end(id).local);
  const bool chooses = reinterpret_cast<const sockaddr_in&>(address).sin_port == 0;
  if (!chooses && find_listener(address) != kNone) return -EADDRINUSE;
  end(id).local = address;
  if (chooses) local.sin_port = htons(next_port_++);
  return 0;
}

int Tcp::listen(Id id) {
  end(id).state = State::kListening;
  return 0;
}

int Tcp::connect(Id id, const sockaddr_storage& to) {
  End& own = end(id);
  if (to.ss_family == AF_UNSPEC) {  // the connection ends with a reset
    const std::size_t process = own.process;
    own.resets_on_close = true;
    close(id);
    own = {};
    own.state = State::kNew;
    own.process = process;
    return 0;
  }
  if (own.local.ss_family == 0) {
    own.local = to;
    reinterpret_cast<sockaddr_in&>(own.local).sin_port = htons(next_port_++);
  }
  own.remote = to;
  const Id found = find_listener(to);
  const bool is_refused = found != kNone && this->is_refused(to, end(found).process);
  if (is_refused) count_fault(Fault::kRefused);
  if (found == kNone || is_refused || end(found).backlog_count == kMaxBacklog) {
    own.settles = now() + latency() + latency();
    own.state = State::kRefused;
    return -EINPROGRESS;
  }
  own.state = State::kConnecting;
  own.peer = make();
  End& other = end(own.peer);
  other.state = State::kConnected;
  other.local = to;
  other.remote = own.local;
  other.peer = id;
  End& listener = end(found);
  other.process = own.peer_process = listener.process;
  other.peer_process = own.process;
  other.settles = arrival(other, now());
  own.settles = arrival(own, other.settles);
  plan_break(own, other);
  listener.backlog[listener.backlog_count++] = own.peer;
  return -EINPROGRESS;
}

Time Tcp::acceptable(const End& listener, const End& connection) const {
  if (listener.defer_s == 0) return connection.settles;
  const Time first =
      connection.piece_count == 0 ? (connection.sent > connection.read ? 0 : kNever) : connection.pieces[0].arrives;
  const Time deferred = connection.settles + static_cast<Time>(listener.defer_s) * kSecond;
  return std::max(connection.settles, std::min({first, deferred, connection.ends, connection.resets}));
}

int Tcp::accept(Id id) {
  End& listener = end(id);
  for (std::size_t i = 0; i < listener.backlog_count; ++i) {
    const Id accepted = listener.backlog[i];
    if (acceptable(listener, end(accepted)) > now()) continue;
    for (std::size_t k = i + 1; k < listener.backlog_count; ++k) listener.backlog[k - 1] = listener.backlog[k];
    --listener.backlog_count;
    return accepted;
  }
  return -EAGAIN;
}

// A piece is kept until all of it is read, so what lies before the first one is read.
std::uint64_t Tcp::arrived(const End& end) {
  std::uint64_t position = end.sent;
  for (std::size_t i = end.piece_count; i-- > 0 && end.pieces[i].arrives > now();) {
    position = i == 0 ? end.read : end.pieces[i - 1].end;
  }
  return std::max(position, end.read);
}

bool Tcp::is_refused(const sockaddr_storage& to, std::size_t process) const {
  return std::any_of(faults_.outages.begin(), faults_.outages.begin() + faults_.outage_count, [&](const auto& outage) {
    return outage.refuses && outage.process == process && outage.interface == interface_of(to) &&
           outage.begin <= now() && now() < outage.end;
  });
}

void Tcp::plan_break(End& own, End& other) {
  ++connections_;
  for (std::size_t i = 0; i < faults_.break_count; ++i) {
    const TcpFaults::Break& planned = faults_.breaks[i];
    if (planned.number != connections_) continue;
    const Time at = now() + planned.after;
    if (planned.resets && own.settles != kNever) {
      own.resets = own.planned_reset = other.resets = other.planned_reset = std::max(at, own.settles);
    } else if (!planned.resets) {
      own.breaks = other.breaks = at;
    }
  }
}

bool Tcp::meets(const TcpFaults::Outage& outage, const End& to) const {
  return !outage.refuses && (outage.process == to.process || outage.process == to.peer_process) &&
         outage.interface == interface_of(to.local);
}

void Tcp::set_user_timeout(Id id, Time timeout) {
  End& own = end(id);
  own.user_timeout = timeout;
  const auto times_out_after = [&](Time begin) {
    if (begin != kNever) own.times_out = std::min(own.times_out, std::max(begin, now()) + timeout);
  };
  times_out_after(own.breaks);
  for (std::size_t i = 0; i < faults_.outage_count; ++i) {
    const TcpFaults::Outage& outage = faults_.outages[i];
    if (meets(outage, own) && outage.end > std::max(outage.begin, now()) + timeout) times_out_after(outage.begin);
  }
}

// What meets an outage is sent again until it has ended.
Time Tcp::arrival(const End& to, Time sent) const {
  Time arrives = sent == kNever ? kNever : std::max(to.last_arrival, sent + latency());
  for (bool moved = true; moved && arrives != kNever;) {
    moved = false;
    for (std::size_t i = 0; i < faults_.outage_count; ++i) {
      const TcpFaults::Outage& outage = faults_.outages[i];
      if (!meets(outage, to) || arrives < outage.begin || arrives >= outage.end) continue;
      count_fault(Fault::kCut);
      moved = true;
      arrives = outage.end == kNever ? kNever : outage.end + kAgain / 2 + random_below(kAgain);
    }
  }
  if (arrives >= to.breaks) count_fault(Fault::kUnanswered);
  if (arrives >= std::min(to.breaks, to.resets)) arrives = kNever;
  return arrives;
}

void Tcp::add_piece(End& own, End& to, std::uint64_t position) {
  to.last_arrival = arrival(to, now());
  to.pieces[to.piece_count++] = {position, to.last_arrival};
  if (own.user_timeout != 0 && to.last_arrival > now() + own.user_timeout) {
    own.times_out = std::min(own.times_out, now() + own.user_timeout);
  }
}

std::int64_t Tcp::send(Id id, const void* data, std::size_t bytes) {
  End& own = end(id);
  if (own.state == State::kRefused || own.write_closed) return -EPIPE;
  if (own.state != State::kConnected && !(own.state == State::kConnecting && own.settles <= now())) return -EAGAIN;
  if (own.is_reset()) return own.reset_reported ? -EPIPE : report(own);
  if (own.peer == kNone) {  // it answers with a reset
    const Time answered = arrival(own, now() + latency());
    own.resets = std::min(own.resets, answered);
    if (answered == kNever) own.unheard += bytes;
    return static_cast<std::int64_t>(bytes);
  }
  End& other = end(own.peer);
  if (other.is_full()) return -EAGAIN;
  std::size_t taken = std::min(bytes, kBufferBytes - static_cast<std::size_t>(other.sent - other.read));
  if (one_in(8)) taken = 1 + random_below(taken);
  for (std::size_t i = 0; i < taken; ++i) {
    other.buffer[(other.sent + i) % kBufferBytes] = static_cast<const char*>(data)[i];
  }
  if (taken > 1 && one_in(4)) add_piece(own, other, other.sent + 1 + random_below(taken - 1));
  other.sent += taken;
  add_piece(own, other, other.sent);
  return static_cast<std::int64_t>(taken);
}

std::int64_t Tcp::receive(Id id, void* data, std::size_t bytes, bool peek) {
  End& own = end(id);
  if (own.state == State::kRefused) return -ECONNREFUSED;
  if (own.state != State::kConnected && own.state != State::kConnecting) return -ENOTCONN;
  std::size_t given = std::min(bytes, static_cast<std::size_t>(arrived(own) - own.read));
  if (given == 0) {
    if (own.is_reset()) return own.reset_reported ? 0 : report(own);
    return own.has_ended() ? 0 : -EAGAIN;
  }
  if (one_in(8)) given = 1 + random_below(given);
  for (std::size_t i = 0; i < given; ++i) {
    static_cast<char*>(data)[i] = own.buffer[(own.read + i) % kBufferBytes];
  }
  if (peek) return static_cast<std::int64_t>(given);
  own.read += given;
  std::size_t gone = 0;
  while (gone < own.piece_count && own.pieces[gone].end <= own.read) ++gone;
  for (std::size_t i = gone; i < own.piece_count; ++i) own.pieces[i - gone] = own.pieces[i];
  own.piece_count -= gone;
  return static_cast<std::int64_t>(given);
}

int Tcp::shut_down(Id id, int how) {
  End& own = end(id);
  if (own.state != State::kConnected && own.state != State::kConnecting) return -ENOTCONN;
  if (how == SHUT_RD) return 0;
  if (!own.write_closed && own.peer != kNone) {
    End& other = end(own.peer);
    other.ends = other.last_arrival = arrival(other, now());
  }
  own.write_closed = true;
  return 0;
}

void Tcp::close(Id id) {
  End& own = end(id);
  for (std::size_t i = 0; i < own.backlog_count; ++i) {
    end(own.backlog[i]).resets_on_close = true;
    close(own.backlog[i]);
  }
  if (own.peer != kNone) {
    End& other = end(own.peer);
    if (own.resets_on_close || own.sent != own.read) {
      other.resets = std::min(other.resets, std::max(arrival(other, now()), other.settles));
    } else {
      shut_down(id, SHUT_RDWR);
    }
    if (own.last_arrival == kNever) other.unheard = own.sent - arrived(own);
    other.peer = kNone;
  }
  own.state = State::kFree;
}

void Tcp::close_all_of(std::size_t process) {
  for (std::size_t i = 0; i < kMaxEnds; ++i) {
    if (ends_[i].state != State::kFree && ends_[i].process == process) close(static_cast<Id>(i));
  }
}

int Tcp::take_error(Id id) {
  End& own = end(id);
  if (own.state == State::kRefused && own.settles <= now()) {
    own = {};
    own.state = State::kNew;
    return ECONNREFUSED;
  }
  if (own.is_reset() && !own.reset_reported) return -report(own);
  return 0;
}

int Tcp::unacknowledged(Id id) const {
  const Id peer = end(id).peer;
  return static_cast<int>(peer == kNone ? end(id).unheard : end(peer).sent - arrived(end(peer)));
}

bool Tcp::is_established(Id id) const {
  const End& own = end(id);
  const bool made = own.state == State::kConnected || (own.state == State::kConnecting && own.settles <= now());
  return made && !own.is_reset() && !own.has_ended() && !own.write_closed;
}

short Tcp::events(Id id) const {
  const End& own = end(id);
  constexpr short kFailed = POLLIN | POLLOUT | POLLERR | POLLHUP | POLLRDHUP;
  switch (own.state) {
    case State::kFree:
      return POLLNVAL;
    case State::kNew:
      return POLLOUT | POLLHUP;
    case State::kListening:
      for (std::size_t i = 0; i < own.backlog_count; ++i) {
        if (acceptable(own, end(own.backlog[i])) <= now()) return POLLIN;
      }
      return 0;
    case State::kRefused:
      return own.settles <= now() ? kFailed : short{0};
    case State::kConnecting:
      if (own.settles > now()) return 0;
      break;
    case State::kConnected:
      break;
  }
  if (own.is_reset()) return kFailed;
  int found = 0;
  if (arrived(own) >= own.read + own.low_water) found |= POLLIN;
  if (own.has_ended()) found |= POLLIN | POLLRDHUP | (own.write_closed ? POLLHUP : 0);
  if (own.peer == kNone || !end(own.peer).is_full()) found |= POLLOUT;
  return static_cast<short>(found);
}

int Tcp::report(End& end) {
  end.reset_reported = true;
  if (end.resets == end.planned_reset && end.resets <= end.times_out) count_fault(Fault::kReset);
  return -end.error();
}

Time Tcp::next_arrival(const End& end) {
  for (std::size_t i = 0; i < end.piece_count; ++i) {
    if (end.pieces[i].arrives > now()) return end.pieces[i].arrives;
  }
  return kNever;
}

Time Tcp::next_change(Id id) const {
  const End& own = end(id);
  const auto future = [](Time time) { return time > now() ? time : kNever; };
  Time next =
      std::min({next_arrival(own), future(own.ends), future(own.resets), future(own.times_out), future(own.settles)});
  for (std::size_t i = 0; i < own.backlog_count; ++i) {
    next = std::min(next, future(acceptable(own, end(own.backlog[i]))));
  }
  return next;
}

}  // namespace simulation
