#include "ranks/coordinator.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "ranks/meeting_point.h"
#include "ranks/token.h"

namespace verbatim::ranks {
namespace {

constexpr int kTickMs = 50;
constexpr int kPrintedRejections = 8;
// How long after a failure serve() waits for the ranks to close their connections, and for those that have not
// connected yet, so that they get the reason. The launcher kills ranks that remain.
constexpr std::uint64_t kAbortGraceNs = 2 * kNanosecondsPerSecond;

}  // namespace

Coordinator::Coordinator(UniqueFd listener, int ranks, std::uint64_t token, int timeout_s)
    : new_connections_(std::move(listener), {}),
      is_local_(is_local(new_connections_.listener())),
      ranks_(ranks),
      token_(token),
      comm_id_(random_number()),
      deadline_ns_(monotonic_ns() + static_cast<std::uint64_t>(timeout_s) * kNanosecondsPerSecond),
      timeout_s_(timeout_s) {}

ExitStatus Coordinator::serve(const std::function<std::optional<ProcessExit>()>& tick) {
  std::uint64_t leave_at_ns = ~std::uint64_t{0};
  while (!all_ranks_done() && monotonic_ns() < leave_at_ns) {
    wait_for_sockets();
    for (NewConnections::Arrived& arrived : new_connections_.take()) admit(std::move(arrived));
    for (Peer& peer : peers_) serve_peer(peer);
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
    if (status_ != ExitStatus::kOk && peer.socket && peer.rank == 0) send_abort(peer.socket);
  }
  return status_;
}

void Coordinator::wait_for_sockets() {
  std::vector<pollfd> polled;
  new_connections_.add_to(polled);
  for (const Peer& peer : peers_) {
    if (peer.socket) polled.push_back({peer.socket.get(), POLLIN, 0});
  }
  ::poll(polled.data(), polled.size(), kTickMs);
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
  if (!std::exchange(peer.done, true) && status_ == ExitStatus::kOk) {
    give_up(ExitStatus::kFailed, "rank " + std::to_string(peer.rank) + " closed its connection unexpectedly");
  }
}

void Coordinator::handle_frame(Peer& peer, const Frame& frame) {
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

// Nothing of a hello is used before it was checked.
void Coordinator::admit(NewConnections::Arrived arrived) {
  UniqueFd& socket = arrived.socket;
  const auto refuse = [&socket](const std::string& why) {
    send_frame(socket.get(), FrameKind::kRefused, to_payload({ExitStatus::kUsage, why}));
  };
  if (arrived.first.kind != FrameKind::kHello) return;
  Hello hello{};
  if (arrived.first.payload.size() != sizeof hello) return refuse("it is another build of this program");
  std::memcpy(&hello, arrived.first.payload.data(), sizeof hello);
  if (!is_local_ && hello.token != token_) {
    reject_token(socket, hello.rank);
    return refuse(
        std::string("it has another ") + kTokenVariable +
        ", or is of another job. Next: give all ranks of a job the same one, and each job a place of its own");
  }
  if (hello.ranks != static_cast<std::uint32_t>(ranks_) && status_ == ExitStatus::kOk) {
    const std::string why = "--nranks " + std::to_string(hello.ranks) + " instead of " + std::to_string(ranks_);
    refuse(why);
    return give_up(ExitStatus::kUsage, "rank " + std::to_string(hello.rank) + " disagrees with rank 0: " + why);
  }
  if (hello.rank >= static_cast<std::uint32_t>(ranks_)) return refuse("there is no such rank");
  const auto rank = static_cast<int>(hello.rank);
  if (status_ != ExitStatus::kOk) {
    if (rank != 0) send_abort(socket);
    if (!has(rank)) peers_.push_back({std::move(socket), std::move(arrived.reader), rank});
  } else if (!has(rank)) {
    send_frame(socket.get(), FrameKind::kWelcome, to_bytes(Welcome{token_, comm_id_}));
    peers_.push_back({std::move(socket), std::move(arrived.reader), rank});
  } else if (missing_ranks().empty()) {
    // The job is complete: this is a rank of the next one, which the same launcher has started at the same address.
    send_frame(socket.get(), FrameKind::kBusy, {});
  } else {
    const std::string why = "two processes are rank " + std::to_string(rank);
    refuse(why + " (--rank)");
    give_up(ExitStatus::kUsage, why + " (--rank), and" + missing_ranks().substr(1));
  }
}

void Coordinator::reject_token(const UniqueFd& socket, std::uint32_t rank) {
  if (++rejected_ > kPrintedRejections) return;
  print_error("rejected a process at " + peer_of(socket) + " that calls itself rank " + std::to_string(rank) +
              ": it has another " + kTokenVariable + (rejected_ == kPrintedRejections ? "; more are not printed" : ""));
}

void Coordinator::gather() {
  if (status_ != ExitStatus::kOk) return;  // ranks that come after a failure get nothing but the abort
  std::vector<std::string> parts(static_cast<std::size_t>(ranks_));
  int received = 0;
  for (const Peer& peer : peers_) {
    if (!peer.part) continue;
    parts[static_cast<std::size_t>(peer.rank)] = *peer.part;
    ++received;
  }
  if (received < ranks_) return;
  const std::string packed = pack(parts);
  for (Peer& peer : peers_) {
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
    if (peer.socket && peer.rank != 0) send_abort(peer.socket);
  }
}

void Coordinator::send_abort(const UniqueFd& socket) const {
  send_frame(socket.get(), FrameKind::kAbort, to_payload({status_, why_}));
}

// All ranks have connected and finished. After a failure: all except rank 0 have closed their connections, and at the
// timeout no rank is awaited.
bool Coordinator::all_ranks_done() const {
  int finished = 0;
  for (const Peer& peer : peers_) {
    if (peer.done) ++finished;
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
