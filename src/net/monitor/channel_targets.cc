#include "net/monitor/channel_targets.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/socket_interface.h"

namespace verbatim {
namespace {

// nullopt: not known.
std::optional<sockaddr_storage> own_address(const MonitoredConnection& connection) {
  if (connection.addresses == nullptr) return std::nullopt;
  sockaddr_storage own{};
  std::memcpy(&own, &connection.addresses->own, sizeof connection.addresses->own);
  return own;
}

const std::vector<wire::Address>& addresses_of_peer(const MonitoredConnection& connection) {
  return connection.comm->endpoint().remote().addresses;
}

}  // namespace

std::optional<wire::Address> used_address(const MonitoredConnection& connection) {
  if (connection.addresses == nullptr) return std::nullopt;
  sockaddr_storage peer{};
  std::memcpy(&peer, &connection.addresses->peer, sizeof connection.addresses->peer);
  return wire::to_address(peer);
}

bool has_other_path(const ConnectionTable& table, const MonitoredConnection& connection) {
  const std::optional<wire::Address> used = used_address(connection);
  const std::vector<wire::Address>& addresses = addresses_of_peer(connection);
  if (addresses.empty()) return false;
  return table.interfaces.size() > 1 || !used ||
         std::ranges::any_of(addresses, [&](const wire::Address& address) { return address.ip != used->ip; });
}

void find_targets(const MonitoredConnection& connection, LostChannel& lost) {
  const std::optional<wire::Address> used = used_address(connection);
  const auto add = [&](const wire::Address& address) { lost.targets[lost.target_count++] = address; };
  const bool is_listener = used && connection.dialed;
  if (is_listener) add(*used);
  for (const wire::Address& address : addresses_of_peer(connection)) {
    if (!is_listener || address != *used) add(address);
  }
  if (!lost.moves || !used) return;
  std::stable_partition(lost.targets.begin(), lost.targets.begin() + lost.target_count,
                        [&](const wire::Address& address) { return address.ip != used->ip; });
}

const wire::Address& target_of(const LostChannel& lost) {
  return lost.targets[lost.failed_attempts % lost.target_count];
}

sockaddr_storage source_of(const ConnectionTable& table, const MonitoredConnection& connection,
                           const sockaddr_storage& target) {
  const std::optional<wire::Address> used = used_address(connection);
  const std::optional<sockaddr_storage> own = own_address(connection);
  const bool moves = connection.lost->moves;
  if (used && !moves && wire::to_address(target).ip == used->ip) return *own;
  const sockaddr_storage except = moves && own ? *own : sockaddr_storage{};
  return address_in_subnet_of(target, table.interfaces, except).value_or(sockaddr_storage{});
}

bool is_peers_for_sure(const MonitoredConnection& connection) {
  const wire::Address& target = target_of(*connection.lost);
  const std::vector<wire::Address>& known = addresses_of_peer(connection);
  return (connection.dialed && target == used_address(connection)) || (!known.empty() && target == known.front());
}

}  // namespace verbatim
