#include "rma/instance.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <set>
#include <span>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "rma/device_tests.h"
#include "rma/handshake.h"
#include "verbs/device.h"
#include "verbs/qp.h"

namespace verbatim::rma {
namespace {

// A rank whose TCP connections cannot be made again for so long has failed.
constexpr unsigned kMaxLossS = 10;

Mutex g_instances_mutex;
std::set<Instance*>* g_instances VERBATIM_GUARDED_BY(g_instances_mutex) = nullptr;  // open

// A signal is an atomic.
bool has_atomics(const Port& port) {
  const Device& device = *port.device;
  return device.attributes().atomic_cap != IBV_ATOMIC_NONE && responder_reads(device) != 0 &&
         initiator_reads(device) != 0;
}

}  // namespace

Result<Instance*> Instance::open() {
  Result<Config> config = Config::from_environment();
  if (!config) return config.error();
  if (!config->rma) {
    VERBATIM_INFO(
        "RMA is not offered: VERBATIM_RMA is 0. Next: nothing, NCCL uses another RMA plugin or its own; 1 offers it");
    return Error{ErrorKind::kUsage, 0, "VERBATIM_RMA", true};
  }
  const Result<Context*> context = open_context(std::move(*config), -1);
  if (!context) return context.error();
  const std::span<const Port> ports = (*context)->process_parts().ports;
  if (std::none_of(ports.begin(), ports.end(), has_atomics)) {
    VERBATIM_INFO(
        "RMA is not offered: no device executes atomics, which signals need. Next: nothing, NCCL goes without");
    close_context(*context);
    return Error{ErrorKind::kUsage, 0, "atomics", true};
  }
  auto* const made = new Instance(**context);
  const MutexLock lock(g_instances_mutex);
  if (g_instances == nullptr) g_instances = new std::set<Instance*>;
  g_instances->insert(made);
  return made;
}

void Instance::close(Instance* instance) {
  {
    const MutexLock lock(g_instances_mutex);
    if (g_instances == nullptr || g_instances->erase(instance) == 0) return;
    if (g_instances->empty()) delete std::exchange(g_instances, nullptr);
  }
  Context* const context = &instance->context_;
  delete instance;
  close_context(context);
}

void Instance::close_all() {
  while (true) {
    Instance* any = nullptr;
    {
      const MutexLock lock(g_instances_mutex);
      if (g_instances != nullptr) any = *g_instances->begin();
    }
    if (any == nullptr) return;
    close(any);
  }
}

Instance::Instance(Context& context)
    : context_(context),
      process_(context.process_parts()),
      channels_{.monitor = process_.monitor,
                .listener = process_.listener,
                .interfaces = process_.interfaces,
                .keepalive_s = context.config().keepalive_s,
                .max_loss_ns = std::min(context.config().reconnect_s, kMaxLossS) * kNanosecondsPerSecond},
      settings_{.config = context.config(),
                .host_name = process_.host_name,
                .monitor = process_.monitor,
                .memories = memories_,
                .max_recvs = process_.max_recvs,
                .owner = *this} {}

Instance::~Instance() {
  try {
    end_communicators();
  } catch (...) {
    VERBATIM_WARN(
        "ending the communicators of RMA failed: out of memory; other ranks may say that this one has ended. Next: "
        "look "
        "at what else uses the memory of %s",
        process_.host_name.c_str());
  }
}

void Instance::end_communicators() {
  decltype(listens_) listens;  // destroyed without the lock
  decltype(comms_) abandoned;
  {
    const MutexLock lock(mutex_);
    listens.swap(listens_);
    abandoned.swap(comms_);
  }
  const std::uint64_t deadline_ns = monotonic_ns() + settings_.config.close_timeout_ms * kNanosecondsPerMillisecond;
  std::vector<Closing> closing;
  for (auto& [key, comm] : abandoned) {
    if (comm->begin_close()) closing.push_back({std::move(comm), deadline_ns});
  }
  {
    const MutexLock lock(mutex_);
    for (Closing& one : closing_) closing.push_back(std::move(one));
    closing_.clear();
  }
  for (const Closing& one : closing) one.comm->wait_for_ends(one.deadline_ns);
}

// The ports that NCCL has merged with it for messages.
LanePorts Instance::lane_ports(const Port& port) const {
  if (!settings_.config.failover) return {{&port}};
  LanePorts lanes{process_.devices.merged_with(static_cast<std::size_t>(&port - process_.ports.data()))};
  std::vector<const Port*>& ports = lanes.ports;
  std::erase_if(ports, [&](const Port* other) { return other != &port && !has_atomics(*other); });
  if (!atomics_exclude_each_other(ports)) {
    lanes.why_one_device =
        "; this rank uses no other device, because the atomics of two devices do not exclude each other";
    std::erase_if(ports, [&](const Port* other) { return other->device != port.device; });
    VERBATIM_INFO(
        "RMA on %s: the atomics of the devices with which it is merged and its own do not exclude each other "
        "(IBV_ATOMIC_HCA), and signals over two devices could be lost: no other device is used. Next: nothing, but a "
        "communicator fails when no port of %s works",
        port.name.c_str(), port.device->name().c_str());
  }
  const auto is_wrong = [&](const Port* other) {
    return executed_report(*other, settings_.config) == ExecutedReport::kWrong;
  };
  if (ports.size() > 1 && std::ranges::any_of(ports, is_wrong)) ports.resize(1);
  return lanes;
}

Result<ListenComm*> Instance::listen(std::size_t device, std::span<std::uint8_t, wire::kHandleBytes> bytes) {
  if (device >= process_.ports.size()) return Error{ErrorKind::kArgument, 0, "listen on a device that does not exist"};
  const Port& port = process_.ports[device];
  if (!has_atomics(port)) {
    VERBATIM_WARN("%s does not execute atomics, which the signals of RMA need. Next: leave it out of VERBATIM_HCA",
                  port.name.c_str());
    return Error{ErrorKind::kUsage, 0, "atomics", true};
  }
  auto made = std::make_unique<ListenComm>(*this, process_.listener, port);
  Status filled = fill_random(std::as_writable_bytes(std::span(made->handle.secret)));
  if (filled) filled = fill_random(std::as_writable_bytes(std::span(&made->attempt, 1)));
  if (!filled) return log_listen_failure(filled.error());
  made->id = wire::listen_id(made->handle.secret);
  made->arrival = UniqueFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  const Result<sockaddr_storage> address = process_.listener.add(made->handle.secret, made->arrival.get());
  if (!address) return log_listen_failure(address.error());
  made->handle.address = *address;
  const MutexLock lock(mutex_);
  made->handle.listener = process_.identity;
  made->handle.listener.device_guid = port.guid;
  made->handle.listener.listen = listens_made_++;
  wire::encode_handle(made->handle, bytes);
  ListenComm* const added = made.get();
  listens_.emplace(added, std::move(made));
  return added;
}

Error Instance::log_listen_failure(const Error& error) const {
  VERBATIM_WARN("listening on %s for RMA failed: %s. Next: look at the limits of the process (ulimit -n)",
                process_.side_channel_name.c_str(), to_string(error).c_str());
  return {error.kind, error.sys_errno, error.operation, true};
}

Result<CollComm*> Instance::connect(ListenComm& listen, void* const* handles, int ranks, int rank) {
  if (handles == nullptr || ranks < 1 || rank < 0 || rank >= ranks) {
    return Error{ErrorKind::kArgument, 0, "connect with an impossible rank"};
  }
  std::vector<wire::Handle> decoded;
  for (int i = 0; i < ranks; ++i) {
    const Result<wire::Handle> handle = wire::decode_handle(std::span<const std::uint8_t, wire::kHandleBytes>(
        static_cast<const std::uint8_t*>(handles[i]), wire::kHandleBytes));
    if (!handle) {
      VERBATIM_WARN("connect of RMA was given a %s for rank %d", handle.error().operation, i);
      return handle.error();
    }
    decoded.push_back(*handle);
  }
  if (decoded[static_cast<std::size_t>(rank)].secret != listen.handle.secret) {
    VERBATIM_WARN("connect of RMA was given another handle for its own rank %d than that of its listen", rank);
    return Error{ErrorKind::kArgument, 0, "handle of the own rank"};
  }
  const auto own_rank = static_cast<std::uint32_t>(rank);
  Handshake handshake(settings_.config, process_, channels_, listen, decoded, own_rank);
  Result<std::vector<PeerRank>> peers = handshake.run();
  if (!peers) return peers.error();
  Result<std::unique_ptr<CollComm>> comm =
      CollComm::create(settings_, lane_ports(*listen.port), std::move(*peers), own_rank);
  if (!comm) return comm.error();
  CollComm* const made = comm->get();
  const MutexLock lock(mutex_);
  comms_.emplace(made, std::move(*comm));
  return made;
}

void Instance::close(ListenComm& listen) {
  decltype(listens_)::node_type closing;
  const MutexLock lock(mutex_);
  closing = listens_.extract(&listen);
}

void Instance::close(CollComm& comm) {
  std::unique_ptr<CollComm> closing;
  {
    const MutexLock lock(mutex_);
    auto node = comms_.extract(&comm);
    if (node.empty()) return;  // closed already
    closing = std::move(node.mapped());
  }
  remove_closed();
  if (!closing->begin_close()) return;
  const std::uint64_t deadline_ns = monotonic_ns() + settings_.config.close_timeout_ms * kNanosecondsPerMillisecond;
  const MutexLock lock(mutex_);
  closing_.push_back({std::move(closing), deadline_ns});
}

void Instance::remove_closed() noexcept {
  const std::uint64_t now = monotonic_ns();
  while (true) {
    Closing ended;  // destroyed without the lock
    const MutexLock lock(mutex_);
    const auto found = std::ranges::find_if(
        closing_, [&](const Closing& one) { return one.comm->all_ended() || now >= one.deadline_ns; });
    if (found == closing_.end()) return;
    ended = std::move(*found);
    closing_.erase(found);
  }
}

}  // namespace verbatim::rma
