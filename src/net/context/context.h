// The transport as the plugin's tables use it: the state of the process, and one Context per communicator, which owns
// the listens, connection attempts and comms of the communicator.
//
// Process state (configuration of the first init, devices, the TCP listener) lives from the first open_context to the
// last close_context. There is no static object with a destructor: NCCL may unload the library or exit at any time.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/config.h"
#include "base/mutex.h"
#include "base/result.h"
#include "base/socket_interface.h"
#include "net/connect/connector.h"
#include "net/connect/endpoint_pool.h"
#include "net/connect/listen_comm.h"
#include "net/context/net_devices.h"
#include "net/transfer/comm.h"
#include "verbs/device.h"
#include "wire/handle.h"

namespace verbatim {

class Monitor;
struct ProcessState;

// What RMA uses of the process while a context is open.
struct ProcessParts {
  std::span<const Port> ports;  // physical devices, by NCCL's index
  const NetDevices& devices;
  Monitor& monitor;
  Listener& listener;
  const sockaddr_storage& side_channel;            // address for TCP, port 0
  const std::vector<SocketInterface>& interfaces;  // for TCP; the first is side_channel
  std::string side_channel_name;                   // interface and address, for messages
  const std::string& host_name;
  wire::PeerIdentity identity;  // without a device and a listen
  unsigned max_recvs = 1;
};

// One init of NCCL: from v11 on one per communicator, before that one per process. Any thread.
class Context {
 public:
  Context(Config config, int traffic_class, std::uint32_t ordinal, ProcessState& process, const Profiler& profiler);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // `handle` is filled for the peer.
  Result<ListenComm*> listen(std::size_t device, std::span<std::uint8_t, wire::kHandleBytes> handle);

  // The comm when it is established, nullptr before: call again with the same `handle`, which has the token of the
  // attempt. `traffic_class` -1: that of the context.
  Result<SendComm*> connect(std::size_t device, std::span<std::uint8_t, wire::kHandleBytes> handle, int traffic_class);

  Result<RecvComm*> accept(ListenComm& listen);

  void close(ListenComm& listen);
  // Returns at once. A comm without outstanding operations goes to the monitor until the peer closes too; any other is
  // aborted.
  void close(Comm& comm);
  bool idle() const;  // owns nothing

  // This context serves all communicators of the process, as up to v10: an aborted comm of one does not concern the
  // others.
  void set_process_wide() { process_wide_ = true; }

  const Config& config() const { return config_; }
  const CommSettings& comm_settings() const { return comm_settings_; }
  ProcessParts process_parts() const;

  // What NCCL announces of the connections and the work that follow.
  void announce(const Announcement& announcement) { endpoints_.announce(announcement); }

 private:
  // Takes over an established comm: from here on the monitor watches it.
  template <typename C>
  Result<C*> add_comm(std::unique_ptr<C> comm) VERBATIM_EXCLUDES(mutex_);
  // Logs for the first such comm that the connection does not use the atomics that were configured.
  void report_no_atomics(const Comm& comm);
  void close_or_abort(std::unique_ptr<Comm> comm);
  void remember_stats(const Comm& comm) noexcept VERBATIM_EXCLUDES(mutex_);
  void write_stats() noexcept VERBATIM_EXCLUDES(mutex_);
  Result<std::vector<const Port*>> ports(std::size_t device) const;

  // NCCL's RMA proxy (2.29 to 2.30) treats the context of a net plugin as its own: it reads and writes a traffic class
  // in the first four bytes. The plugin does not use them.
  [[maybe_unused]] std::int32_t rma_overwrites_;
  const Config config_;
  ProcessState& process_;
  bool process_wide_ = false;
  // A comm was closed with outstanding operations: NCCL aborts the communicator, whose peers wait for nothing more.
  std::atomic<bool> aborted_{false};
  std::atomic<bool> no_atomics_reported_{false};
  EndpointPool endpoints_;
  Registrations<MemoryHandle> registrations_;  // end after the comms
  const CommSettings comm_settings_;
  const ConnectSettings connect_settings_;
  mutable Mutex mutex_;
  std::uint32_t listens_made_ VERBATIM_GUARDED_BY(mutex_) = 0;
  std::map<const void*, std::unique_ptr<ListenComm>> listens_ VERBATIM_GUARDED_BY(mutex_);
  std::map<std::uint64_t, std::unique_ptr<Connector>> connectors_ VERBATIM_GUARDED_BY(mutex_);
  std::map<const void*, std::unique_ptr<Comm>> comms_ VERBATIM_GUARDED_BY(mutex_);
  std::vector<ConnectionStats> closed_stats_ VERBATIM_GUARDED_BY(mutex_);  // only with VERBATIM_STATS
};

// Reads the configuration and, the first time, opens the devices. An error has been logged.
Result<Context*> open_context(int traffic_class, const Profiler& profiler = {});
// The same with a configuration that the caller has read.
Result<Context*> open_context(Config config, int traffic_class, const Profiler& profiler = {});

// Destroys the context with everything that it owns, and the process state with the last context.
void close_context(Context* context);
// For the unloading of the library: closes all contexts, and frees the names that NCCL may point to until then.
void close_all_contexts();

// The devices, while any context is open: kUsage otherwise.
Result<std::size_t> device_count();
// The properties of one for NCCL. A virtual device has the place in the machine of its first member, the speed of all,
// and the abilities that all have.
struct DeviceProperties {
  const char* name = nullptr;
  const char* pci_path = nullptr;  // both are valid until the library is unloaded; nullptr: not a PCI device
  std::uint64_t guid = 0;          // these: as in Port
  std::uint32_t topology_port = 1;
  std::uint64_t speed_mbps = 0;
  unsigned ptr_support = kPtrHost;
  bool force_flush = false;  // whatever the GPU: a member uses Data Direct
  int rail_id = -1;
  int plane_id = -1;
  std::vector<int> members;  // indices of physical devices
  int max_qps = 0;
  unsigned max_recvs = 0;
};
Result<DeviceProperties> device(std::size_t index);
// The number of physical devices, which have the first indices.
Result<std::size_t> physical_device_count();

// makeVDevice: the device of these `count` devices, of which NCCL's table allows `max`. See NetDevices::merge. Virtual
// devices stay until the library is unloaded, because NCCL makes them once: also when all contexts end and others
// begin. An error has been logged.
Result<std::size_t> merge_devices(const int* members, int count, std::size_t max);

}  // namespace verbatim
