#include "ranks/coordinator.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/socket.h"

namespace verbatim::ranks {
namespace {

constexpr int kTickMs = 50;
// How long after an abort serve() waits for the ranks to close their connections. The launcher kills ranks that remain.
constexpr std::uint64_t kAbortGraceNs = 2 * kNanosecondsPerSecond;

}  // namespace

Coordinator::Coordinator(UniqueFd listener, int ranks, std::uint64_t token, int timeout_s)
    : listener_(std::move(listener)),
      ranks_(ranks),
      token_(token),
      deadline_ns_(monotonic_ns() + static_cast<std::uint64_t>(timeout_s) * kNanosecondsPerSecond),
      timeout_s_(timeout_s) {}

ExitStatus Coordinator::serve(const std::function<std::optional<ProcessExit>()>& tick) {
  std::uint64_t leave_at_ns = ~std::uint64_t{0};
  while (!all_ranks_done() && monotonic_ns() < leave_at_ns) {
    wait_for_sockets();
    accept_all();
    for (Peer& peer : peers_) serve_peer(peer);
    std::erase_if(peers_, [](const Peer& peer) { return !peer.socket && peer.rank < 0; });
    gather();
    if (const auto exited = tick(); exited && (exited->unexplained || status_ == ExitStatus::kOk)) {
      give_up(ExitStatus::kFailed, exited->text);
    }
    if (status_ == ExitStatus::kOk && monotonic_ns() > deadline_ns_) {
      give_up(ExitStatus::kTimeout, "not finished after " + std::to_string(timeout_s_) + " s (--timeout)");
    }
    if (status_ != ExitStatus::kOk) leave_at_ns = std::min(leave_at_ns, monotonic_ns() + kAbortGraceNs);
  }
  return status_;
}

void Coordinator::wait_for_sockets() {
  std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
  for (const Peer& peer : peers_) {
    if (peer.socket) polled.push_back({peer.socket.get(), POLLIN, 0});
  }
  ::poll(polled.data(), polled.size(), kTickMs);
}

void Coordinator::accept_all() {
  for (;;) {
    auto accepted = tcp_accept(listener_);
    if (!accepted || !accepted->has_value()) return;
    peers_.push_back({.socket = std::move(**accepted)});
  }
}

void Coordinator::serve_peer(Peer& peer) {
  if (!peer.socket) return;
  const FrameReader::State state = peer.reader.read(peer.socket.get());
  while (const auto frame = peer.reader.next()) {
    handle_frame(peer, *frame);
    if (!peer.socket) return;
  }
  if (state == FrameReader::State::kOpen) return;
  peer.socket.reset();
  if (peer.rank >= 0 && !std::exchange(peer.done, true) && status_ == ExitStatus::kOk) {
    give_up(ExitStatus::kFailed, "rank " + std::to_string(peer.rank) + " closed its connection unexpectedly");
  }
}

void Coordinator::handle_frame(Peer& peer, const Frame& frame) {
  if (peer.rank < 0) {
    handle_hello(peer, frame);
    return;
  }
  switch (frame.kind) {
    case FrameKind::kGather:
      peer.part = frame.payload;
      return;
    case FrameKind::kFinished:
      peer.done = true;
      return;
    case FrameKind::kFail: {
      auto status = ExitStatus::kFailed;
      if (frame.payload.size() >= sizeof status) std::memcpy(&status, frame.payload.data(), sizeof status);
      peer.done = true;
      give_up(status, "rank " + std::to_string(peer.rank) + ": " +
                          frame.payload.substr(std::min(frame.payload.size(), sizeof status)));
      return;
    }
    default:
      peer.socket.reset();
      peer.done = true;
      give_up(ExitStatus::kFailed, "rank " + std::to_string(peer.rank) + " sent an invalid message");
  }
}

void Coordinator::handle_hello(Peer& peer, const Frame& frame) {
  Hello hello{};
  if (frame.kind != FrameKind::kHello || frame.payload.size() != sizeof hello) return peer.socket.reset();
  std::memcpy(&hello, frame.payload.data(), sizeof hello);
  if (hello.token != token_) return peer.socket.reset();
  const auto rank = static_cast<int>(hello.rank);
  const bool duplicate =
      std::any_of(peers_.begin(), peers_.end(), [rank](const Peer& other) { return other.rank == rank; });
  if (hello.ranks != static_cast<std::uint32_t>(ranks_) || rank < 0 || rank >= ranks_ || duplicate) {
    peer.socket.reset();
    give_up(ExitStatus::kUsage, "a process announced itself as rank " + std::to_string(hello.rank) + " of " +
                                    std::to_string(hello.ranks) +
                                    (duplicate ? ", but that rank is already connected" : ""));
    return;
  }
  peer.rank = rank;
  if (status_ != ExitStatus::kOk) send_abort(peer);  // the job has failed already
}

void Coordinator::gather() {
  std::vector<std::string> parts(static_cast<std::size_t>(ranks_));
  int received = 0;
  for (const Peer& peer : peers_) {
    if (peer.rank < 0 || !peer.part) continue;
    parts[static_cast<std::size_t>(peer.rank)] = *peer.part;
    ++received;
  }
  if (received < ranks_) return;
  const std::string packed = pack(parts);
  for (Peer& peer : peers_) {
    if (peer.rank < 0) continue;
    peer.part.reset();
    send_frame(peer.socket.get(), FrameKind::kGathered, packed);  // serve_peer() sees a failure as a closed socket
  }
}

void Coordinator::give_up(ExitStatus status, const std::string& why) {
  print_error(why);
  if (status_ != ExitStatus::kOk) return;
  status_ = status;
  // Rank 0 last: in a job started with --root this code runs in rank 0's process, which exits when it receives the
  // abort.
  for (const bool first_rank : {false, true}) {
    for (const Peer& peer : peers_) {
      if (peer.socket && (peer.rank == 0) == first_rank) send_abort(peer);
    }
  }
}

void Coordinator::send_abort(const Peer& peer) const {
  send_frame(peer.socket.get(), FrameKind::kAbort, {reinterpret_cast<const char*>(&status_), sizeof status_});
}

// After a failure: all ranks have closed their connections. Otherwise: all ranks have connected and finished.
bool Coordinator::all_ranks_done() const {
  int finished = 0;
  for (const Peer& peer : peers_) {
    if (peer.rank >= 0 && peer.done) ++finished;
    if (status_ != ExitStatus::kOk && peer.socket) return false;
  }
  return status_ != ExitStatus::kOk || finished == ranks_;
}

}  // namespace verbatim::ranks
