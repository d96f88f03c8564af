// The transport as the plugin's tables see it: what the process shares, and one Context per communicator that owns all
// that the communicator made.
//
// Process state (configuration of the first init, devices, the TCP listener) lives from the first open_context to the
// last close_context. There is no static object with a destructor: NCCL may unload the library or exit at any time.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/mutex.h"
#include "base/result.h"
#include "net/connect/connector.h"
#include "net/connect/endpoint_pool.h"
#include "net/connect/listen_comm.h"
#include "net/connect/listener.h"
#include "net/transfer/comm.h"
#include "verbs/device.h"
#include "wire/handle.h"

namespace verbatim {

class Monitor;
struct ProcessState;

// One init of NCCL: from v11 on one per communicator, before that one per process. Any thread.
class Context {
 public:
  Context(Config config, int traffic_class, std::uint32_t ordinal, ProcessState& process);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // `handle` is filled for the peer.
  Result<ListenComm*> listen(std::size_t device, std::span<std::uint8_t, wire::kHandleBytes> handle);

  // The comm when it stands, nullptr while it does not: call again with the same `handle`, where the attempt keeps its
  // place. `traffic_class` -1: the context's.
  Result<SendComm*> connect(std::size_t device, std::span<std::uint8_t, wire::kHandleBytes> handle, int traffic_class);

  Result<RecvComm*> accept(ListenComm& listen);

  void close(ListenComm& listen);
  // Answers at once. A comm with nothing outstanding is parked until the peer closes too; any other is aborted.
  void close(Comm& comm);
  bool idle() const;  // owns nothing

  // This context serves all communicators of the process, as up to v10: what one aborts says nothing of the others.
  void set_process_wide() { process_wide_ = true; }

  const Config& config() const { return config_; }
  const CommSettings& comm_settings() const { return comm_settings_; }

  // What NCCL says of the connections and the work that follow.
  void announce(const Announcement& announcement) { endpoints_.announce(announcement); }
  EndpointPool& endpoints() { return endpoints_; }

 private:
  // Takes over a comm that stands: from here on it hears of events.
  template <typename C>
  Result<C*> add_comm(std::unique_ptr<C> comm) VERBATIM_EXCLUDES(mutex_);
  // Logs for the first such comm that the connection does not use the atomics that were configured.
  void report_no_atomics(const Comm& comm);
  void close_or_abort(std::unique_ptr<Comm> comm);
  void remember_stats(const Comm& comm) noexcept VERBATIM_EXCLUDES(mutex_);
  void write_stats() noexcept VERBATIM_EXCLUDES(mutex_);
  void reset_order_when_idle() VERBATIM_EXCLUDES(mutex_);
  Result<std::vector<const Port*>> ports(std::size_t device) const;

  // NCCL's RMA proxy takes a net plugin's context for its own and writes the first four bytes (2.29 to 2.30): they are
  // the communicator's traffic class for it to read, and nothing to us.
  [[maybe_unused]] std::int32_t rma_overwrites_;
  const int traffic_class_;
  const Config config_;
  ProcessState& process_;
  bool process_wide_ = false;
  // The communicator gave up a comm with work outstanding: it is being aborted, and its peers need nothing more of it.
  std::atomic<bool> aborted_{false};
  std::atomic<bool> no_atomics_reported_{false};
  EndpointPool endpoints_;
  Registrations registrations_;  // end after the comms
  const CommSettings comm_settings_;
  const ConnectSettings connect_settings_;
  mutable Mutex mutex_;
  std::uint32_t listens_made_ VERBATIM_GUARDED_BY(mutex_) = 0;
  std::map<const void*, std::unique_ptr<ListenComm>> listens_ VERBATIM_GUARDED_BY(mutex_);
  std::map<std::uint64_t, std::unique_ptr<Connector>> connectors_ VERBATIM_GUARDED_BY(mutex_);
  std::map<const void*, std::unique_ptr<Comm>> comms_ VERBATIM_GUARDED_BY(mutex_);
  std::vector<ConnectionStats> closed_stats_ VERBATIM_GUARDED_BY(mutex_);  // only with VERBATIM_STATS
};

// Reads the configuration and, the first time, opens the devices. What fails has been logged.
Result<Context*> open_context(int traffic_class);

// Ends everything that the context owns, and the process state with the last one.
void close_context(Context* context);
// The library is being unloaded: all of them, and what NCCL may keep pointers to until then.
void close_all_contexts();

// The devices, while any context is open: kUsage otherwise.
Result<std::size_t> device_count();
// What NCCL is told of one: a copy, because the last context may end while a thread still reads it.
struct DeviceProperties {
  const char* name;      // valid until the library is unloaded
  const char* pci_path;  // the same, or nullptr
  std::uint64_t guid;
  unsigned ptr_support;
  std::uint32_t speed_mbps;
  std::uint32_t topology_port;
  int max_qps;
  unsigned max_recvs;
  int rail_id;
  int plane_id;
};
Result<DeviceProperties> device(std::size_t index);

}  // namespace verbatim
