// From which address to which address a side channel is made again.
#pragma once

#include <sys/socket.h>

#include <optional>

#include "net/monitor/connection_table.h"

namespace verbatim {

// Called by the monitoring thread.

// The address of the peer that the side channel uses; nullopt: it is not known.
std::optional<wire::Address> used_address(const MonitoredConnection& connection);
// Whether this end or the peer has an address that the side channel does not use.
bool has_other_path(const ConnectionTable& table, const MonitoredConnection& connection) VERBATIM_REQUIRES(table.mutex);
// Fills `lost.targets`. The address that was used comes first, and last if the side channel moves.
void find_targets(const MonitoredConnection& connection, LostChannel& lost);
// The address of the present attempt.
const wire::Address& target_of(const LostChannel& lost);
// The address from which the attempt is made; AF_UNSPEC: as the kernel's routes say.
sockaddr_storage source_of(const ConnectionTable& table, const MonitoredConnection& connection,
                           const sockaddr_storage& target) VERBATIM_REQUIRES(table.mutex);
// Whether nothing but the peer has the address of the present attempt: another host may have one that the peer uses in
// a network of its own.
bool is_peers_for_sure(const MonitoredConnection& connection);

}  // namespace verbatim
