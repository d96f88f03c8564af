#include "net/context/context.h"

#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "base/socket.h"
#include "base/socket_interface.h"
#include "net/connect/qp_dump.h"
#include "net/context/net_devices.h"
#include "net/context/psk.h"
#include "net/context/stats.h"
#include "net/monitor/monitor.h"
#include "net/transfer/lanes.h"
#include "verbs/device_inventory.h"
#include "verbs/verbs.h"

namespace verbatim {

// The last members are moved in after everything that can throw. The monitor is destroyed before the devices.
struct ProcessState {
  const Config config;  // of the first init: selects the devices
  const SocketInterface side_channel;
  const std::vector<SocketInterface> interfaces;  // for side channels that are made again; the first is side_channel
  const std::string host_name;
  const std::uint64_t host_id;
  const std::uint64_t process_id;
  const wire::KeyPair keys;
  const std::vector<std::uint8_t> psk;
  Listener listener{side_channel.address, interfaces, keys, psk};
  EndpointPools pools = {};  // of the contexts
  std::uint32_t contexts_made = 0;
  std::set<Context*> contexts = {};    // open
  std::size_t contexts_not_ended = 0;  // these, and those that are being destroyed
  const std::unique_ptr<const Verbs> verbs;
  const std::shared_ptr<const DeviceSurvey> inventory;
  const std::unique_ptr<NetDevices> devices;
  const std::unique_ptr<Monitor> monitor;
};

namespace {

Mutex g_mutex;  // held while devices open and close: inits of several communicators come at once
ProcessState* g_process VERBATIM_GUARDED_BY(g_mutex) = nullptr;
std::set<std::string>* g_interned_names VERBATIM_GUARDED_BY(g_mutex) = nullptr;  // NCCL keeps pointers to them

// Of the last process state that merged devices, for those that follow.
NetDevices::Table* g_device_table VERBATIM_GUARDED_BY(g_mutex) = nullptr;

// With VERBATIM_STATS: what connections and RMA have carried since the library was loaded, in all contexts.
struct EndedStats {
  std::vector<ConnectionStats> connections;
  std::vector<RmaStats> rma;
};
EndedStats* g_stats VERBATIM_GUARDED_BY(g_mutex) = nullptr;

const char* intern(const std::string& name) VERBATIM_REQUIRES(g_mutex) {
  if (g_interned_names == nullptr) g_interned_names = new std::set<std::string>;
  return g_interned_names->insert(name).first->c_str();
}

// Equal for all processes of one boot of one host, different everywhere else.
std::uint64_t read_host_id(const std::string& host_name) {
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char c : boot_id + host_name) hash = (hash ^ static_cast<std::uint8_t>(c)) * 0x100000001b3;
  return hash;
}

// The communicator's traffic class becomes the GRH's byte of that name; -1 is none.
Status check_traffic_class(int traffic_class) {
  if (traffic_class >= -1 && traffic_class <= UINT8_MAX) return {};
  VERBATIM_WARN("trafficClass %d of the communicator is out of range: 0 to 255, or -1 for none", traffic_class);
  return Error{ErrorKind::kUsage, 0, "trafficClass"};
}

Result<std::uint64_t> random_id() {
  std::uint64_t id = 0;
  if (const Status filled = fill_random(std::as_writable_bytes(std::span(&id, 1))); !filled) return filled.error();
  return id | 1;  // never 0, which means "none"
}

bool is_loopback(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET6) {
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
  }
  return ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

// The default choice ends at loopback if there is nothing else.
void warn_of_loopback(const SocketInterface& side_channel, const Config& config) {
  if (!config.socket_ifname.value.empty() || !is_loopback(side_channel.address)) return;
  VERBATIM_WARN(
      "the side channel uses the loopback interface %s, because no other network interface is up: processes on other "
      "hosts cannot connect. Next: set an interface up ('ip address'); if all processes are on this host, "
      "VERBATIM_SOCKET_IFNAME=lo says so",
      to_string(side_channel).c_str());
}

// The chosen interface comes first.
std::vector<SocketInterface> interfaces_of(const Config& config) {
  const Result<std::vector<SocketInterface>> present = list_socket_interfaces();
  if (!present) return {};
  return all_socket_interfaces(*present, config.socket_ifname.value, config.socket_family);
}

// What both ends have negotiated: "send to node2 (pid 4711): mlx5_0:1 to mlx5_0:1, MTU 4096, 2 QPs on 1 lane,
// completion by immediates".
std::string describe_connection(const Comm& comm) {
  const Endpoint& endpoint = comm.endpoint();
  const ConnectionStats stats = comm.stats();
  std::string remote_ports;
  for (const wire::HelloDevice& device : endpoint.remote().devices) {
    remote_ports += (remote_ports.empty() ? "" : "+") + device.name + ":" + std::to_string(device.port);
  }
  std::set<unsigned> mtus;
  for (const EndpointQp& end : endpoint.qps()) mtus.insert(128U << static_cast<unsigned>(end.path.mtu));
  std::string mtu;
  for (const unsigned bytes : mtus) mtu += (mtu.empty() ? "" : " and ") + std::to_string(bytes);
  const auto number_of = [](std::size_t count, const char* what) {
    return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
  };
  return (stats.sends ? "send to " : "receive from ") + endpoint.peer_name() + ": " + stats.device + " to " +
         remote_ports + ", MTU " + mtu + ", " + number_of(stats.qps, "QP") + " on " + number_of(stats.lanes, "lane") +
         ", completion by " + (stats.atomic ? "atomics" : "immediates");
}

Result<std::unique_ptr<ProcessState>> open_process(const Config& config, std::vector<std::uint8_t> psk)
    VERBATIM_REQUIRES(g_mutex) {
  const Result<SocketInterface> side_channel = choose_socket_interface(config);
  if (!side_channel) return side_channel.error();
  const std::vector<SocketInterface> interfaces = interfaces_of(config);
  Result<std::unique_ptr<const Verbs>> verbs = Verbs::load(config.verbs_library);
  if (!verbs) return verbs.error();
  Result<std::shared_ptr<const DeviceSurvey>> inventory = DeviceSurvey::open(**verbs, config);
  if (!inventory) return inventory.error();
  auto devices = std::make_unique<NetDevices>((*inventory)->ports);
  if (g_device_table != nullptr) devices->restore(*g_device_table);
  const std::string host_name = read_host_name();
  Result<std::unique_ptr<Monitor>> monitor =
      Monitor::start((*inventory)->devices, {.keepalive_ns = config.keepalive_s * kNanosecondsPerSecond,
                                             .stalls = {.warn_ns = config.stall_warn_s * kNanosecondsPerSecond,
                                                        .fail_ns = config.stall_fail_s * kNanosecondsPerSecond},
                                             .state_directory = config.state_directory,
                                             .state_socket = expand_path(config.state_socket, host_name),
                                             .host = host_name,
                                             .interfaces = interfaces});
  if (!monitor) {
    VERBATIM_WARN("starting the monitor thread failed: %s: %s", monitor.error().operation,
                  std::strerror(monitor.error().sys_errno));
    return monitor.error();
  }
  const Result<std::uint64_t> process_id = random_id();
  if (!process_id) return process_id.error();
  const Result<wire::KeyPair> keys = wire::make_key_pair();
  if (!keys) return keys.error();
  VERBATIM_INFO("side channel on %s%s", to_string(*side_channel).c_str(),
                psk.empty() ? "" : ", with VERBATIM_PSK_FILE");
  warn_of_loopback(*side_channel, config);
  auto process = std::unique_ptr<ProcessState>(new ProcessState{.config = config,
                                                                .side_channel = *side_channel,
                                                                .interfaces = interfaces,
                                                                .host_name = host_name,
                                                                .host_id = read_host_id(host_name),
                                                                .process_id = *process_id,
                                                                .keys = *keys,
                                                                .psk = std::move(psk),
                                                                .verbs = std::move(*verbs),
                                                                .inventory = std::move(*inventory),
                                                                .devices = std::move(devices),
                                                                .monitor = std::move(*monitor)});
  process->monitor->set_listener(process->listener);
  return process;
}

}  // namespace

Result<Context*> open_context(int traffic_class, const Profiler& profiler) {
  Result<Config> config = Config::from_environment();
  if (!config) return config.error();
  return open_context(std::move(*config), traffic_class, profiler);
}

Result<Context*> open_context(Config config, int traffic_class, const Profiler& profiler) {
  if (const Status fits = check_traffic_class(traffic_class); !fits) return fits.error();
  std::unique_ptr<ProcessState> opened;  // becomes g_process once nothing can fail any more
  Result<std::vector<std::uint8_t>> psk = read_psk(config.psk_file);
  if (!psk) return psk.error();
  const MutexLock lock(g_mutex);
  if (g_process != nullptr && g_process->psk != *psk) {
    VERBATIM_WARN(
        "VERBATIM_PSK_FILE (%s) is not what it was when the first communicator of this process was made. "
        "Next: change it only while the process has none",
        config.psk_file.c_str());
    return Error{ErrorKind::kUsage, 0, "VERBATIM_PSK_FILE", true};
  }
  if (g_process == nullptr) {
    log_unused_variables(environ);
    warn_of_stats_path(expand_path(config.stats_file, read_host_name()));
    Result<std::unique_ptr<ProcessState>> process = open_process(config, std::move(*psk));
    if (!process) return process.error();
    opened = std::move(*process);
  }
  if (config.latency) begin_tick_scale();
  ProcessState& process = opened != nullptr ? *opened : *g_process;
  auto* context = new Context(std::move(config), traffic_class, process.contexts_made++, process, profiler);
  process.contexts.insert(context);
  ++process.contexts_not_ended;
  if (opened != nullptr) g_process = opened.release();
  return context;
}

void close_context(Context* context) {
  {
    // Before its memory is free: another context may get the same address at once.
    const MutexLock lock(g_mutex);
    g_process->contexts.erase(context);
  }
  delete context;
  const MutexLock lock(g_mutex);
  if (--g_process->contexts_not_ended == 0) {
    delete g_process;
    g_process = nullptr;
  }
}

void close_all_contexts() {
  while (true) {
    Context* any = nullptr;
    {
      const MutexLock lock(g_mutex);
      if (g_process != nullptr && !g_process->contexts.empty()) any = *g_process->contexts.begin();
    }
    if (any == nullptr) break;
    close_context(any);
  }
  const MutexLock lock(g_mutex);
  delete std::exchange(g_interned_names, nullptr);
  delete std::exchange(g_device_table, nullptr);
  delete std::exchange(g_stats, nullptr);
}

Result<std::size_t> device_count() {
  const MutexLock lock(g_mutex);
  if (g_process == nullptr) return Error{ErrorKind::kUsage, 0, "devices before init"};
  NetDevices& devices = *g_process->devices;
  // An NCCL that keeps the plugin loaded between its communicators remembers the devices and does not ask first. One
  // that loads it anew asks directly after init, and assumes that all devices are physical; the library's
  // state may have outlived that.
  if (devices.remove_unused()) *g_device_table = devices.table();
  return devices.count();
}

Result<std::size_t> physical_device_count() {
  const MutexLock lock(g_mutex);
  if (g_process == nullptr) return Error{ErrorKind::kUsage, 0, "devices before init"};
  return g_process->inventory->ports.size();
}

Result<DeviceProperties> device(std::size_t index) {
  const MutexLock lock(g_mutex);
  if (g_process == nullptr) return Error{ErrorKind::kUsage, 0, "getProperties before init"};
  const Result<std::vector<const Port*>> ports = g_process->devices->ports(index);
  if (!ports) return ports.error();
  const Port& first = *ports->front();
  DeviceProperties properties{.name = intern(virtual_device_name(*ports, index)),
                              .pci_path = first.pci_path ? intern(*first.pci_path) : nullptr,
                              .guid = first.guid,
                              .topology_port = first.topology_port,
                              .ptr_support = first.ptr_support,
                              .rail_id = first.rail_id,
                              .plane_id = first.plane_id,
                              .members = g_process->devices->members(index),
                              .max_qps = first.device->attributes().max_qp,
                              .max_recvs = g_process->config.max_recvs};
  std::uint32_t fastest = 0;
  for (const Port* port : *ports) fastest = std::max(fastest, port->speed_mbps);
  for (const Port* port : *ports) {
    // A lane of a slower port would be a standby.
    if (std::uint64_t{kStandbyFactor} * port->speed_mbps >= fastest) properties.speed_mbps += port->speed_mbps;
    properties.ptr_support &= port->ptr_support;
    properties.force_flush = properties.force_flush || port->data_direct;
    if (port->rail_id != first.rail_id) properties.rail_id = -1;
    if (port->plane_id != first.plane_id) properties.plane_id = -1;
    properties.max_qps = std::min(properties.max_qps, port->device->attributes().max_qp);
  }
  return properties;
}

Result<std::size_t> merge_devices(const int* members, int count, std::size_t max) {
  const MutexLock lock(g_mutex);
  if (g_process == nullptr) return Error{ErrorKind::kUsage, 0, "makeVDevice before init"};
  if (count > 1 && !g_process->config.merge_nics) {
    VERBATIM_INFO(
        "%d devices are not merged: VERBATIM_MERGE_NICS (or NCCL_IB_MERGE_NICS) is 0. Next: nothing, NCCL uses each "
        "alone; with 1 it may merge them",
        count);
    return Error{ErrorKind::kUsage, 0, "makeVDevice", true};
  }
  if (count < 1 || static_cast<std::size_t>(count) > max) {
    VERBATIM_WARN(
        "%d devices cannot be merged: 1 to %zu are possible. Next: name fewer in NCCL_NET_FORCE_MERGE, or set "
        "NCCL_NET_MERGE_LEVEL=LOC, which merges none",
        count, max);
    return Error{ErrorKind::kUsage, 0, "makeVDevice", true};
  }
  NetDevices& devices = *g_process->devices;
  const std::size_t before = devices.count();
  const Result<std::size_t> merged = devices.merge({members, static_cast<std::size_t>(count)});
  if (!merged || devices.count() == before) return merged;
  if (g_device_table == nullptr) g_device_table = new NetDevices::Table;
  *g_device_table = devices.table();
  const Result<std::vector<const Port*>> ports = devices.ports(*merged);
  VERBATIM_INFO("device %zu for NCCL is %s, merged of %s", *merged, virtual_device_name(*ports, *merged).c_str(),
                join_names(*ports).c_str());
  return merged;
}

Context::Context(Config config, int traffic_class, std::uint32_t ordinal, ProcessState& process,
                 const Profiler& profiler)
    : rma_overwrites_(traffic_class),
      config_(std::move(config)),
      process_(process),
      endpoints_(config_, process.pools),
      comm_settings_{config_, process.host_name, process.config.max_recvs, &registrations_, this, profiler},
      connect_settings_{comm_settings_,
                        endpoints_,
                        process.listener,
                        process.side_channel.address,
                        to_string(process.side_channel),
                        {.host_id = process.host_id, .process_id = process.process_id, .context = ordinal},
                        traffic_class} {}

Context::~Context() {
  // What NCCL has not closed: listens, attempts and comms.
  decltype(comms_) abandoned;
  {
    const MutexLock lock(mutex_);
    connectors_.clear();
    listens_.clear();
    abandoned.swap(comms_);
  }
  for (auto& [key, comm] : abandoned) close_or_abort(std::move(comm));
  if (!config_.stats_file.empty()) write_stats();
  process_.monitor->drain(this, aborted_.load() && !process_wide_);
}

void Context::report_no_atomics(const Comm& comm) {
  if (no_atomics_reported_.exchange(true)) return;
  const Endpoint& endpoint = comm.endpoint();
  VERBATIM_WARN(
      "VERBATIM_COMPLETION=atomic is not used between %s and host %s: %s; immediates signal arrivals. Next: unset it, "
      "or choose devices with atomics, and set it, at both ends",
      join_names(endpoint.ports()).c_str(), endpoint.remote().host.c_str(), comm.atomics_refused());
}

ProcessParts Context::process_parts() const {
  return {.ports = process_.inventory->ports,
          .devices = *process_.devices,
          .monitor = *process_.monitor,
          .listener = process_.listener,
          .side_channel = process_.side_channel.address,
          .interfaces = process_.interfaces,
          .side_channel_name = connect_settings_.side_channel_name,
          .host_name = process_.host_name,
          .identity = connect_settings_.process,
          .max_recvs = process_.config.max_recvs};
}

Result<std::vector<const Port*>> Context::ports(std::size_t device) const {
  return process_.devices->ports(device);
}

Result<ListenComm*> Context::listen(std::size_t device, std::span<std::uint8_t, wire::kHandleBytes> handle_bytes) {
  Result<std::vector<const Port*>> listen_ports = ports(device);
  if (!listen_ports) return listen_ports.error();
  const MutexLock lock(mutex_);
  wire::Handle handle;
  Result<std::unique_ptr<ListenComm>> listen =
      ListenComm::create(connect_settings_, std::move(*listen_ports), listens_made_++, handle);
  if (!listen) return listen.error();
  wire::encode_handle(handle, handle_bytes);
  ListenComm* made = listen->get();
  listens_.emplace(made, std::move(*listen));
  return made;
}

Result<SendComm*> Context::connect(std::size_t device, std::span<std::uint8_t, wire::kHandleBytes> handle_bytes,
                                   int traffic_class) {
  Connector* connector = nullptr;
  std::uint64_t token = wire::load_connect_token(handle_bytes);
  {
    const MutexLock lock(mutex_);
    const auto known = connectors_.find(token);
    if (known != connectors_.end()) connector = known->second.get();
  }
  if (connector == nullptr) {
    if (const Status fits = check_traffic_class(traffic_class); !fits) return fits.error();
    Result<std::vector<const Port*>> connect_ports = ports(device);
    if (!connect_ports) return connect_ports.error();
    const Result<wire::Handle> handle = wire::decode_handle(handle_bytes);
    if (!handle) {
      VERBATIM_WARN("connect was given a %s", handle.error().operation);
      return handle.error();
    }
    const Result<std::uint64_t> fresh = random_id();
    if (!fresh) return fresh.error();
    token = *fresh;
    std::unique_ptr<Connector> made =
        std::make_unique<Connector>(connect_settings_, std::move(*connect_ports), *handle,
                                    traffic_class < 0 ? connect_settings_.traffic_class : traffic_class, token);
    connector = made.get();
    const MutexLock lock(mutex_);
    connectors_.emplace(token, std::move(made));
  }
  wire::store_connect_token(handle_bytes, token);
  Result<std::unique_ptr<SendComm>> comm = connector->advance();
  if (comm && *comm == nullptr) return static_cast<SendComm*>(nullptr);

  wire::store_connect_token(handle_bytes, 0);
  decltype(connectors_)::node_type finished;  // destroyed without the lock: the device may be slow to destroy QPs
  {
    const MutexLock lock(mutex_);
    finished = connectors_.extract(token);
  }
  if (!comm) return comm.error();
  return add_comm(std::move(*comm));
}

Result<RecvComm*> Context::accept(ListenComm& listen) {
  Result<std::unique_ptr<RecvComm>> comm = listen.accept();
  if (!comm) return comm.error();
  if (*comm == nullptr) return static_cast<RecvComm*>(nullptr);
  return add_comm(std::move(*comm));
}

template <typename C>
Result<C*> Context::add_comm(std::unique_ptr<C> comm) {
  C* const made = comm.get();
  if (made->atomics_refused() != nullptr) report_no_atomics(*made);
  VERBATIM_INFO("%s", describe_connection(*made).c_str());
  decltype(comms_) added;  // allocated here, so that nothing can fail once it is watched
  added.emplace(made, std::move(comm));
  if (const Status watched = process_.monitor->watch(*made, this); !watched) return watched.error();
  const MutexLock lock(mutex_);
  comms_.merge(added);
  if (!config_.qp_dump.empty()) {
    dump_qps(expand_path(config_.qp_dump, process_.host_name), *made,
             connect_settings_.identity(*made->endpoint().ports().front()));
  }
  return made;
}

void Context::close(ListenComm& listen) {
  decltype(listens_)::node_type closing;
  const MutexLock lock(mutex_);
  closing = listens_.extract(&listen);
}

void Context::close(Comm& comm) {
  std::unique_ptr<Comm> closing;
  {
    const MutexLock lock(mutex_);
    auto node = comms_.extract(&comm);
    if (node.empty()) return;  // closed already
    closing = std::move(node.mapped());
  }
  close_or_abort(std::move(closing));
  {
    const MutexLock lock(mutex_);
    if (!connectors_.empty() || !comms_.empty()) return;
  }
  endpoints_.reset_order();
}

// Without memory the connection is missing in the file.
void Context::remember_stats(const Comm& comm) noexcept try {
  const MutexLock lock(mutex_);
  closed_stats_.push_back(comm.stats());
} catch (...) {
  VERBATIM_WARN("no memory to remember what a connection has carried (VERBATIM_STATS)");
}

void Context::write_stats() noexcept try {
  std::vector<ConnectionStats> ended;
  {
    const MutexLock lock(mutex_);
    ended.swap(closed_stats_);
  }
  const std::string path = expand_path(config_.stats_file, process_.host_name);
  const MutexLock lock(g_mutex);
  if (g_stats == nullptr) g_stats = new EndedStats;
  g_stats->connections.insert(g_stats->connections.end(), ended.begin(), ended.end());
  std::vector<RmaStats> rma = process_.monitor->rma_sets().take_removed();
  std::move(rma.begin(), rma.end(), std::back_inserter(g_stats->rma));
  const std::string json = stats_json(process_.host_name, process_.process_id, g_stats->connections, g_stats->rma);
  if (const Status written = verbatim::write_stats(path, json); !written) {
    VERBATIM_WARN("writing %s (VERBATIM_STATS) failed: %s", path.c_str(), to_string(written.error()).c_str());
  }
} catch (...) {
  VERBATIM_WARN("no memory to write %s (VERBATIM_STATS)", config_.stats_file.c_str());
}

void Context::close_or_abort(std::unique_ptr<Comm> comm) {
  comm->stop_monitor_acting();
  if (!config_.stats_file.empty()) remember_stats(*comm);
  if (comm->error() == nullptr && comm->all_done()) {
    process_.monitor->close_gracefully(std::move(comm), config_.close_timeout_ms * kNanosecondsPerMillisecond);
    return;
  }
  aborted_.store(true);
  process_.monitor->unwatch(*comm);
  comm->abort();
}

bool Context::idle() const {
  const MutexLock lock(mutex_);
  return listens_.empty() && connectors_.empty() && comms_.empty();
}

}  // namespace verbatim
