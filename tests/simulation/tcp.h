// TCP between the sockets of a simulated host, in memory. Bytes arrive late, and in pieces; calls take and return fewer
// than were asked for. Connections break, and interfaces fail, as the run has planned it. Errors are negative errno
// values.
//
// All of it is arrays without pointers, in memory that the processes of the run share.
#pragma once

#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#include "simulation/scheduler.h"
#include "simulation/tcp_faults.h"

namespace simulation {

class Tcp {
 public:
  using Id = int;  // of an end of a connection, or of a listener
  static constexpr Id kNone = -1;

  explicit Tcp(const TcpFaults& faults) : faults_(faults) {}
  std::size_t interfaces() const { return faults_.interfaces; }

  Id make();
  int bind(Id id, const sockaddr_storage& address);
  int listen(Id id);
  // -EINPROGRESS: the socket becomes writable, and take_error() says whether it is connected.
  int connect(Id id, const sockaddr_storage& to);
  // A new end, or a negative errno.
  int accept(Id id);
  std::int64_t send(Id id, const void* data, std::size_t bytes);
  std::int64_t receive(Id id, void* data, std::size_t bytes, bool peek);
  int shut_down(Id id, int how);
  void close(Id id);

  int take_error(Id id);  // as SO_ERROR: returns 0 the next time
  bool is_established(Id id) const;
  int unacknowledged(Id id) const;  // sent bytes that have not arrived
  const sockaddr_storage& local(Id id) const { return ends_[index(id)].local; }
  const sockaddr_storage& remote(Id id) const { return ends_[index(id)].remote; }
  void reset_on_close(Id id, bool on) { ends_[index(id)].resets_on_close = on; }
  void defer_accept(Id id, int seconds) { ends_[index(id)].defer_s = seconds; }
  // TCP_USER_TIMEOUT: the end of a connection over which nothing is acknowledged, also of keepalives.
  void set_user_timeout(Id id, Time timeout);
  // SO_RCVLOWAT.
  void set_low_water(Id id, std::size_t bytes) { ends_[index(id)].low_water = bytes; }

  // Closes all that belongs to this process: it has ended.
  void close_all_of(std::size_t process);

  // As poll reports them, all of them.
  short events(Id id) const;
  // When the events may change without a call; kNever: only by a call.
  Time next_change(Id id) const;

 private:
  static constexpr std::size_t kMaxEnds = 1024;
  static constexpr std::size_t kBufferBytes = 16 << 10;
  static constexpr std::size_t kMaxPieces = 32;
  static constexpr std::size_t kMaxBacklog = 64;

  enum class State { kFree, kNew, kListening, kConnecting, kRefused, kConnected };
  struct Piece {
    std::uint64_t end;  // position in the stream
    Time arrives;
  };
  struct End {
    State state = State::kFree;
    std::size_t process = 0;  // whose descriptor it has, or will have
    std::size_t peer_process = 0;
    sockaddr_storage local{};
    sockaddr_storage remote{};
    Id peer = kNone;   // kNone: it has closed
    Time settles = 0;  // when a connection is made or refused, or reaches the listener
    // What arrives here.
    std::uint64_t sent = 0;
    std::uint64_t read = 0;
    std::array<Piece, kMaxPieces> pieces{};
    std::size_t piece_count = 0;
    Time last_arrival = 0;
    Time ends = kNever;    // when the peer's end of the stream arrives
    Time resets = kNever;  // when its reset arrives
    Time planned_reset = kNever;
    Time breaks = kNever;  // when nothing arrives any more
    Time user_timeout = 0;
    Time times_out = kNever;    // when it has waited for so long
    std::uint64_t unheard = 0;  // bytes that were sent to a peer that has closed, and never arrive
    std::size_t low_water = 1;
    bool reset_reported = false;
    bool write_closed = false;
    bool resets_on_close = false;
    int defer_s = 0;
    std::array<Id, kMaxBacklog> backlog{};
    std::size_t backlog_count = 0;
    std::array<char, kBufferBytes> buffer;

    bool is_reset() const { return std::min(resets, times_out) <= now(); }
    int error() const { return times_out < resets ? ETIMEDOUT : ECONNRESET; }
    bool has_ended() const { return ends <= now(); }
    // A call of send needs up to two pieces.
    bool is_full() const { return sent - read == kBufferBytes || piece_count + 2 > kMaxPieces; }
  };

  static std::size_t index(Id id) { return static_cast<std::size_t>(id); }
  End& end(Id id) { return ends_[index(id)]; }
  const End& end(Id id) const { return ends_[index(id)]; }
  Id find_listener(const sockaddr_storage& address) const;
  static std::uint64_t arrived(const End& end);
  bool meets(const TcpFaults::Outage& outage, const End& to) const;
  // When it arrives what is sent to this end at this time, after what was sent before.
  Time arrival(const End& to, Time sent) const;
  void add_piece(End& own, End& to, std::uint64_t position);
  // Whether connections to the address are refused now.
  bool is_refused(const sockaddr_storage& to, std::size_t process) const;
  void plan_break(End& own, End& other);
  static int report(End& end);  // the error of a connection that was reset or timed out
  static Time next_arrival(const End& end);
  // When this connection can be taken from the backlog.
  Time acceptable(const End& listener, const End& connection) const;

  const TcpFaults faults_;
  std::uint64_t connections_ = 0;  // that were begun
  std::array<End, kMaxEnds> ends_;
  in_port_t next_port_ = 40'000;
};

in_addr address_of(std::size_t interface);  // of the host
// Of the next run only.
void plan_tcp_faults(const TcpFaults& faults);
// In memory that children of this process share. Called before the run begins.
void make_tcp();
Tcp& tcp();

}  // namespace simulation
