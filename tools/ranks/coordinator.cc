#include "ranks/coordinator.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/socket.h"
#include "ranks/meeting_point.h"

namespace verbatim::ranks {
namespace {

constexpr int kTickMs = 50;
// How long after a failure serve() waits for the ranks to close their connections, and for those that have not
// connected yet, so that they get the reason. The launcher kills ranks that remain.
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
      give_up(ExitStatus::kTimeout,
              "not finished after " + std::to_string(timeout_s_) + " s (--timeout)" + missing_ranks());
    }
    if (status_ != ExitStatus::kOk) leave_at_ns = std::min(leave_at_ns, monotonic_ns() + kAbortGraceNs);
  }
  // Rank 0 last: in a job whose ranks were started separately this code runs in rank 0's process, which exits when it
  // receives the abort.
  for (const Peer& peer : peers_) {
    if (status_ != ExitStatus::kOk && peer.socket && peer.rank == 0) send_abort(peer);
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
      const Reason reason = reason_in(frame.payload);
      peer.done = true;
      give_up(reason.status, "rank " + std::to_string(peer.rank) + ": " + reason.text);
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
  if (frame.kind != FrameKind::kHello) return peer.socket.reset();
  if (frame.payload.size() != sizeof hello) return refuse(peer, "it is another build of this program");
  std::memcpy(&hello, frame.payload.data(), sizeof hello);
  const auto rank = static_cast<int>(hello.rank);
  if (hello.token != token_) {
    print_error("rejected a process at " + peer_of(peer.socket) + " that calls itself rank " + std::to_string(rank) +
                ": it has another --token");
    return refuse(peer, "it has another --token. Next: give all ranks of the job the same --token");
  }
  if (status_ != ExitStatus::kOk) {
    if (!has(rank)) peer.rank = rank;
    if (rank != 0) send_abort(peer);
    return;
  }
  if (hello.ranks != static_cast<std::uint32_t>(ranks_)) {
    const std::string why = "--nranks " + std::to_string(hello.ranks) + " instead of " + std::to_string(ranks_);
    refuse(peer, why);
    return give_up(ExitStatus::kUsage, "rank " + std::to_string(rank) + " disagrees with rank 0: " + why);
  }
  if (rank < 0 || rank >= ranks_) return refuse(peer, "there is no such rank");
  if (!has(rank)) {
    peer.rank = rank;
    send_frame(peer.socket.get(), FrameKind::kWelcome, {});
  } else if (missing_ranks().empty()) {
    // The job is complete: this is a rank of the next one, which the same launcher has started at the same address.
    send_frame(peer.socket.get(), FrameKind::kBusy, {});
    peer.socket.reset();
  } else {
    const std::string why = "two processes are rank " + std::to_string(rank);
    refuse(peer, why + " (--rank)");
    give_up(ExitStatus::kUsage, why + " (--rank), and" + missing_ranks().substr(1));
  }
}

void Coordinator::refuse(Peer& peer, const std::string& why) const {
  send_frame(peer.socket.get(), FrameKind::kRefused, to_payload({ExitStatus::kUsage, why}));
  peer.socket.reset();
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
  why_ = why.substr(0, why.find('\n'));
  for (const Peer& peer : peers_) {
    if (peer.socket && peer.rank != 0) send_abort(peer);
  }
}

void Coordinator::send_abort(const Peer& peer) const {
  send_frame(peer.socket.get(), FrameKind::kAbort, to_payload({status_, why_}));
}

// All ranks have connected and finished. After a failure: all except rank 0 have closed their connections, and at the
// timeout no rank is awaited.
bool Coordinator::all_ranks_done() const {
  int finished = 0;
  for (const Peer& peer : peers_) {
    if (peer.rank >= 0 && peer.done) ++finished;
    if (status_ != ExitStatus::kOk && peer.rank > 0 && peer.socket) return false;
  }
  if (status_ == ExitStatus::kOk) return finished == ranks_;
  return status_ == ExitStatus::kTimeout || missing_ranks().empty();
}

bool Coordinator::has(int rank) const {
  return std::any_of(peers_.begin(), peers_.end(), [rank](const Peer& peer) { return peer.rank == rank; });
}

// ": rank 1, 3 did not connect", or nothing.
std::string Coordinator::missing_ranks() const {
  std::string missing;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (!has(rank)) missing += (missing.empty() ? ": rank " : ", ") + std::to_string(rank);
  }
  return missing.empty() ? "" : missing + " did not connect";
}

}  // namespace verbatim::ranks
