#include "verbatim-kv/rendezvous.h"

#include <poll.h>

#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/socket.h"
#include "ranks/new_connections.h"

namespace verbatim::kv {
namespace {

using ranks::Failure;

constexpr std::size_t kMaxFamilies = 2;
constexpr std::uint64_t kTimeoutNs = 60 * kNanosecondsPerSecond;
constexpr int kSleepMs = 1;
constexpr std::size_t kOtherConnections = 64;  // to a listener, from processes that are no decode ranks

static_assert(sizeof(JoinMessage) <= ranks::kMaxFirstFrameBytes);

using Addresses = std::array<sockaddr_storage, kMaxFamilies>;

template <typename Attempt>
auto retry(const std::string& what, Attempt attempt) {
  const std::uint64_t deadline = monotonic_ns() + kTimeoutNs;
  for (;;) {
    if (auto done = attempt()) return std::move(*done);
    if (monotonic_ns() > deadline) throw Failure(what + ": timeout");
    ::poll(nullptr, 0, kSleepMs);
  }
}

Channel connect_to(const sockaddr_storage& address, const JoinMessage& join) {
  auto started = tcp_connect(address, {});
  if (!started)
    throw Failure("connecting to a prefill rank at " + to_string(address) + ": " +
                  std::strerror(started.error().sys_errno));
  UniqueFd socket = std::move(*started);
  retry("connecting to a prefill rank", [&]() -> std::optional<bool> {
    const auto connected = tcp_connected(socket);
    if (!connected) throw Failure("connecting to a prefill rank at " + to_string(address));
    return *connected ? std::optional(true) : std::nullopt;
  });
  Channel channel(std::move(socket));
  channel.send(MessageKind::kJoin, ranks::to_bytes(join));
  return channel;
}

// Waits for all decode ranks of `family`, and returns their channels in the order of their indexes. Connections without
// the token are closed. A decode rank does not connect again, so none of them is closed because it is late.
std::vector<Channel> accept_decodes(UniqueFd listener, std::uint64_t token, std::uint32_t family, std::size_t decodes) {
  ranks::NewConnections connections(std::move(listener), {kOtherConnections + decodes, kTimeoutNs});
  std::vector<std::optional<Channel>> joined(decodes);
  std::size_t missing = decodes;
  const auto admit = [&](ranks::NewConnections::Arrived& arrived) {
    if (static_cast<MessageKind>(arrived.first.kind) != MessageKind::kJoin) return;
    if (arrived.first.payload.size() != sizeof(JoinMessage)) return;
    const auto join = ranks::from_bytes<JoinMessage>(arrived.first.payload);
    if (join.token != token || join.family != family) return;
    if (join.decode >= decodes || joined[join.decode]) throw Failure("a decode rank announced an invalid index");
    joined[join.decode].emplace(std::move(arrived.socket), std::move(arrived.reader));
    --missing;
  };
  retry("waiting for decode ranks", [&]() -> std::optional<bool> {
    for (ranks::NewConnections::Arrived& arrived : connections.take()) admit(arrived);
    return missing == 0 ? std::optional(true) : std::nullopt;
  });
  std::vector<Channel> channels;
  for (std::optional<Channel>& channel : joined) channels.push_back(std::move(*channel));
  return channels;
}

}  // namespace

std::vector<std::vector<Channel>> connect_channels(const ranks::Job& job, ranks::CoordinatorConnection& coordinator,
                                                   std::size_t families, int prefills) {
  const bool is_prefill = job.rank < prefills;
  std::vector<UniqueFd> listeners;
  Addresses own{};
  for (std::size_t family = 0; is_prefill && family < families; ++family) {
    auto listener = tcp_listen(coordinator.own_address());
    if (!listener)
      throw Failure(std::string("listening for decode ranks: ") + std::strerror(listener.error().sys_errno));
    const auto address = local_address(*listener);
    if (!address) throw Failure("listening for decode ranks: cannot get the socket's address");
    own[family] = *address;
    listeners.push_back(std::move(*listener));
  }
  const std::vector<Addresses> all = coordinator.all_gather_values(own);

  std::vector<std::vector<Channel>> channels(families);
  for (std::uint32_t family = 0; family < families; ++family) {
    if (is_prefill) {
      const auto decodes = static_cast<std::size_t>(job.nranks - prefills);
      channels[family] = accept_decodes(std::move(listeners[family]), coordinator.token(), family, decodes);
    } else {
      const JoinMessage join{coordinator.token(), family, static_cast<std::uint32_t>(job.rank - prefills)};
      for (int prefill = 0; prefill < prefills; ++prefill) {
        channels[family].push_back(connect_to(all[static_cast<std::size_t>(prefill)][family], join));
      }
    }
  }
  return channels;
}

}  // namespace verbatim::kv
