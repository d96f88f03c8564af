// Side channels that ended with an error: a reset, a timeout, an unreachable host. That says nothing about the peer,
// whose data moves by RDMA: the management network may have failed alone. And side channels that lie on a lane that is
// down, or over which the peer does not answer a notice about a lane.
//
//   open --error--> lost --TCP connect to an address of the peer, kResume, kPing--> open
//                        --kResume of the peer came to the listener--> open
//
// Each end knows under which addresses the other one listens (wire::Hello), one on each of its interfaces. Both ends
// may make the side channel again, because only one may know that the lane is down; if they do so at the same time,
// the attempt of the connecting side is kept. A side channel without an error stays in use until the new one is
// accepted: the peer may be slow, or end. One that is replaced ends with a reset.
//
// While the side channel is lost, the comm gets an event from time to time to ask the peer's NIC (Comm::post_probes),
// and it fails when the NIC does not answer. A process that is killed closes its sockets with an end of file, or with a
// reset if it has not read everything. Its QPs answer nothing: the probe fails after all retries (VERBATIM_TIMEOUT,
// VERBATIM_RETRY_CNT). The other end knows sooner: the process has ended if the peer's listener refuses, and if
// the application has polled two timeouts of the transport (at least two seconds) after a probe, found no answer, and
// nothing else of the peer has arrived. None of these alone proves it: a firewall may refuse, packets may be lost, and
// an application that does not poll finds no answer. A connection that is closing ends at its deadline.
//
// The loss is reported when something is known: the NIC answers, the side channel is back, or time has passed.
//
// An end gives up its attempts with a reset, never with an end of file: the listener may have accepted
// them, and an end of file means that the process has ended.
#pragma once

#include <cstdint>

#include "net/monitor/connection_table.h"

namespace verbatim {

// Called by the monitoring thread.

// The side channel of the connection has ended with this error. False: there is no memory to make it again.
bool lose_channel(ConnectionTable& table, MonitoredConnection& connection, int error) VERBATIM_REQUIRES(table.mutex);
// A notice about a lane was sent: asks the peer's monitor for an answer.
void ask_for_answer(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now)
    VERBATIM_REQUIRES(table.mutex);
void receive_pong(ConnectionTable& table, MonitoredConnection& connection) VERBATIM_REQUIRES(table.mutex);
// Makes the side channel again if that answer is overdue. Returns when to look again.
std::uint64_t expect_answer(MonitoredConnection& connection, std::uint64_t now);
// Sets an event of the comm, and begins or gives up an attempt when it is time. False: the peer process has ended.
bool advance_lost_channel(ConnectionTable& table, MonitoredConnection& connection, std::uint64_t now)
    VERBATIM_REQUIRES(table.mutex);
// Continues the attempt, whose socket has become ready.
void advance_attempt(ConnectionTable& table, MonitoredConnection& connection) VERBATIM_REQUIRES(table.mutex);
// The peer has made the side channel again.
void accept_channel(ConnectionTable& table, MonitoredConnection& connection, UniqueFd socket)
    VERBATIM_REQUIRES(table.mutex);

}  // namespace verbatim
