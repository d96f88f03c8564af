// Comms that their owner has closed and whose QPs stay alive until the peer has closed too:
//
//   watched --Monitor::close_gracefully--> closing --peer's close, end of file or deadline--> being destroyed
//
// The side channel of a connection that is closing may get lost too (channel_losses.h): the close message is sent when
// it is made again. At the deadline the listener keeps it for the peer.
#pragma once

#include <cstdint>

#include "net/monitor/connection_table.h"

namespace verbatim {

// Of a connection that is closing: sends the close message. When both ends have closed or the deadline has passed,
// moves the connection from the table to its DeviceCalls, which destroys the comm, and returns true. While a request
// for its QP state is open, the connection stays.
bool advance_close(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now)
    VERBATIM_REQUIRES(table.mutex);

}  // namespace verbatim
