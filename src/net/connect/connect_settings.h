// What a connector and a listen comm need of the communicator and of the process. The context makes one; it outlives
// all that it is given to.
#pragma once

#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <string>

#include "base/clock.h"
#include "channel/listener.h"
#include "net/connect/endpoint_pool.h"
#include "net/transfer/comm_settings.h"
#include "verbs/port.h"

namespace verbatim {

// An end that repeatedly cannot resolve the peer's address gives up this long before its deadline. The peer learns the
// cause before its own deadline if both ends have begun within this time.
inline std::uint64_t resolve_reserve_ns(const Endpoint& endpoint, const Config& config) {
  return endpoint.resolve_repeated() ? config.connect_timeout_s * kNanosecondsPerSecond / 8 : 0;
}

// Follows the error of a call that was repeated until the deadline of connect or accept.
constexpr const char* kRepeated = ", repeated until the deadline (VERBATIM_CONNECT_TIMEOUT_S)";

// The failure of a connection that has no QPs at its deadline.
constexpr Error kQpsNotCreated = {ErrorKind::kSystem, ETIMEDOUT, "creating QPs", false, SetupStep::kCreateQueue};

struct ConnectSettings {
  const CommSettings& comm;
  EndpointPool& endpoints;                // of this communicator
  Listener& listener;                     // of the process
  const sockaddr_storage& local_address;  // of side channels, port 0
  const std::string side_channel_name;    // interface and address, for messages
  const wire::PeerIdentity process;       // identity of the process and the communicator, without a device
  const int traffic_class;                // of the communicator, -1: none

  wire::PeerIdentity identity(const Port& port) const {
    wire::PeerIdentity identity = process;
    identity.device_guid = port.guid;
    return identity;
  }
};

}  // namespace verbatim
