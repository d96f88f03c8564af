#include "ranks/new_connections.h"

#include <optional>
#include <utility>

#include "base/socket.h"
#include "ranks/meeting_point.h"

namespace verbatim::ranks {
namespace {

// In one call, so that the caller has time for other things.
constexpr std::size_t kMostAccepted = 64;

}  // namespace

std::vector<NewConnections::Arrived> NewConnections::take() {
  const std::uint64_t now = monotonic_ns();
  for (std::size_t count = 0; count < kMostAccepted; ++count) {
    auto accepted = tcp_accept(listener_);
    if (!accepted || !accepted->has_value()) break;
    UniqueFd socket = std::move(**accepted);
    if (is_local(socket) && !is_of_this_user(socket)) continue;
    waiting_.push_back({std::move(socket), FrameReader(kMaxFirstFrameBytes), now + limits_.first_frame_ns});
  }
  std::vector<Arrived> arrived;
  for (Waiting& one : waiting_) {
    const FrameReader::State state = one.reader.read(one.socket.get());
    if (auto first = one.reader.next()) {
      one.reader.allow(kMaxPayloadBytes);
      arrived.push_back({std::move(one.socket), std::move(one.reader), std::move(*first)});
    } else if (state == FrameReader::State::kClosed || now >= one.deadline_ns) {
      one.socket.reset();
    }
  }
  std::erase_if(waiting_, [](const Waiting& one) { return !one.socket; });
  if (waiting_.size() > limits_.connections) {
    waiting_.erase(waiting_.begin(), waiting_.end() - static_cast<std::ptrdiff_t>(limits_.connections));
  }
  return arrived;
}

void NewConnections::add_to(std::vector<pollfd>& polled) const {
  polled.push_back({listener_.get(), POLLIN, 0});
  for (const Waiting& one : waiting_) polled.push_back({one.socket.get(), POLLIN, 0});
}

}  // namespace verbatim::ranks
