// The monitor: the one thread that the plugin keeps in a process, for the work that cannot wait for a call of NCCL. It
// reads the asynchronous events of devices, exchanges messages with the peers over the side channels, finds peers that
// send nothing and connections that have stalled, and keeps closed connections alive until their peer has closed too.
// It modifies no QP that a comm uses. It reports to a comm by Comm::set_device_event.
//
// This class owns the loop, whose handlers are the parts (the other headers of this folder), and the table of
// connections.
//
// A device that hangs in a verb stops only what belongs to it: the loop calls no verb. The verbs that may hang
// (get_async_event, query_gid, query_qp, destroying a comm) are left to DeviceCalls, and none is called under the
// table's mutex. If a device hangs, only these wait: the reading of its events, the destruction of its closed
// comms, drain() of their owner, and unwatch() of a comm while its QPs are queried.
//
// Started with the first device, joined before the process state ends: NCCL unloads the library after that.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/result.h"
#include "base/state_directory.h"
#include "net/monitor/connection_table.h"
#include "net/monitor/device_calls.h"
#include "net/monitor/keepalive.h"
#include "net/monitor/rma_sets.h"
#include "net/monitor/stall_reports.h"
#include "net/monitor/state_socket.h"
#include "net/transfer/comm_observer.h"
#include "verbs/device.h"

namespace verbatim {

struct MonitorSettings {
  std::uint64_t keepalive_ns = 0;  // 0: a peer may send nothing for any time
  StallSettings stalls = {};
  std::string state_directory = kNoStateDirectory;  // VERBATIM_STATE_DIR
  std::string state_socket = {};                    // path; empty: none
  std::string host = {};
  std::vector<SocketInterface> interfaces = {};  // from which side channels are made again; empty: any
};

// Owned by the process state. Any thread may call the public functions.
class Monitor final : public CommObserver {
 public:
  // `devices` must outlive the monitor.
  static Result<std::unique_ptr<Monitor>> start(std::span<const std::unique_ptr<Device>> devices,
                                                const MonitorSettings& settings = {});
  // Joins the threads. No comm may be watched or closing any more.
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  // From now on `comm` gets comm events for the events of its devices and of its peer, and at once for earlier failures
  // of its devices. An error has been logged, and the comm is not watched then. `owner`: an opaque key for drain().
  Status watch(Comm& comm, const void* owner) VERBATIM_EXCLUDES(table_.mutex);
  // The peer is notified that the comm has failed or was aborted.
  void unwatch(Comm& comm) VERBATIM_EXCLUDES(table_.mutex);

  // Takes over a watched comm that its owner has closed with nothing outstanding: notifies the peer, keeps the QPs
  // alive until the peer has closed too or `timeout_ns` has passed, and destroys the comm. Returns at once.
  void close_gracefully(std::unique_ptr<Comm> comm, std::uint64_t timeout_ns) VERBATIM_EXCLUDES(table_.mutex);

  // Returns when all comms of `owner` that were closed gracefully are destroyed. `at_once`: without waiting for a peer.
  void drain(const void* owner, bool at_once) VERBATIM_EXCLUDES(table_.mutex);

  // Where peers make lost side channels again. Called before the first watch(); it must outlive the monitor.
  void set_listener(Listener& listener) VERBATIM_EXCLUDES(table_.mutex);

  // For the channels of RMA.
  EventLoop& loop() { return table_.loop; }
  // The listener has its first connection: it is served from now on, as long as it has any.
  void serve_listener() { listener_.call_at(0); }
  // The contexts of RMA.
  RmaSets& rma_sets() { return rma_sets_; }

  // The monitor looks at the comm's connection, if it watches it, at once.
  void comm_changed(Comm& comm) noexcept override VERBATIM_EXCLUDES(table_.mutex);

  // How often the monitor has looked at a connection since it was started: its work.
  std::uint64_t visits() VERBATIM_EXCLUDES(table_.mutex);

 private:
  // Devices by their index.
  using DeviceSet = std::set<std::uint32_t>;

  Monitor(std::span<const std::unique_ptr<Device>> devices, const MonitorSettings& settings);

  Status open(const MonitorSettings& settings);
  void open_state_sockets(const MonitorSettings& settings);
  // Returns whether QPs that no watched comm had at that time have failed before.
  Result<bool> add(Comm& comm, const void* owner) VERBATIM_EXCLUDES(table_.mutex);

  // What the loop calls. Nothing may throw: an allocation that can fail is caught where it is made.
  std::uint64_t attend_all() noexcept VERBATIM_EXCLUDES(table_.mutex);
  // The side channels that peers have made again.
  std::uint64_t accept_channels() noexcept VERBATIM_EXCLUDES(table_.mutex);
  // Does what is due for a connection, and sets its next deadline.
  void attend(MonitoredConnection& connection, std::uint64_t now) VERBATIM_REQUIRES(table_.mutex);
  // Takes down lanes that acknowledge nothing, makes new QPs for lanes that are down, and ends a connection that has
  // waited too long for one. Returns when it is to be called again.
  std::uint64_t look_after_lanes(MonitoredConnection& connection, std::uint64_t now) VERBATIM_REQUIRES(table_.mutex);

  const std::span<const std::unique_ptr<Device>> devices_;
  ConnectionTable table_;
  RmaSets rma_sets_;
  StallReports stall_reports_;
  Keepalive keepalive_ VERBATIM_GUARDED_BY(table_.mutex);
  std::vector<std::unique_ptr<StateSocket>> state_sockets_;  // two at most
  // For each device, and for each set of devices that a comm uses together: for the life of the monitor.
  std::map<DeviceSet, DeviceCalls> device_calls_ VERBATIM_GUARDED_BY(table_.mutex);
  std::uint64_t last_accept_ns_ = 0;  // the monitoring thread's
  EventHandler listener_;
  std::thread thread_;
};

}  // namespace verbatim
