// What is done about a side channel that has ended with an error, besides making it again (channel/channel.h).
//
// While it is lost, the comm gets an event from time to time to ask the peer's NIC (Comm::post_probes), and it fails
// when the NIC does not answer. A process that is killed closes its sockets with an end of file, or with a reset if it
// has not read everything. Its QPs answer nothing: the probe fails after all retries (VERBATIM_TIMEOUT,
// VERBATIM_RETRY_CNT). The other end knows sooner: the process has ended if the peer's listener refuses, and if
// the application has polled two timeouts of the transport (at least two seconds) after a probe, found no answer, and
// nothing else of the peer has arrived. None of these alone proves it: a firewall may refuse, packets may be lost, and
// an application that does not poll finds no answer. A connection that is closing ends at its deadline.
//
// The loss is reported when something is known: the NIC answers, the side channel is back, or time has passed.
#pragma once

#include <cstdint>

#include "net/monitor/connection_table.h"

namespace verbatim {

// Called by the monitoring thread.

// The side channel of the connection has ended with this error. False: there is no memory to make it again.
bool lose_channel(ConnectionTable& table, MonitoredConnection& connection, int error) VERBATIM_REQUIRES(table.mutex);
// What a call of the channel has returned.
void channel_changed(ConnectionTable& table, MonitoredConnection& connection, Channel::Change change)
    VERBATIM_REQUIRES(table.mutex);
// An event of one of its sockets has come.
void continue_channel(ConnectionTable& table, MonitoredConnection& connection) VERBATIM_REQUIRES(table.mutex);
// Sets an event of the comm, and calls Channel::advance. False: the peer process has ended.
bool advance_channel(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now)
    VERBATIM_REQUIRES(table.mutex);

}  // namespace verbatim
