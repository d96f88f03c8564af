// The C API: devices, contexts, ports, asynchronous events.
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <memory>
#include <string>
#include <string_view>

#include "softverbs/api/device.h"
#include "softverbs/api/exports.h"
#include "softverbs/engine/call.h"
#include "softverbs/engine/completion_queue.h"
#include "softverbs/engine/process.h"
#include "softverbs/engine/qp.h"
#include "softverbs/engine/receive_queue.h"
#include "softverbs/host/device_attributes.h"

// The headers define macros with these names; this file defines the functions.
#undef ibv_get_device_list
#undef ibv_query_port

namespace verbatim::softverbs {
namespace {

// The kernel's path of a PCI device, without "/sys".
void fill_pci_path(const std::string& address, char (&path)[PATH_MAX]) {
  constexpr std::size_t kSys = std::string_view("/sys").size();
  char real[PATH_MAX];
  const std::string found = ::realpath(("/sys/bus/pci/devices/" + address).c_str(), real) != nullptr
                                ? std::string(real)
                                : invented_pci_path(address);
  std::snprintf(path, sizeof path, "%s", found.c_str() + kSys);
}

std::array<Device, kMaxDevices>& devices() {
  static std::array<Device, kMaxDevices> instance = [] {
    std::array<Device, kMaxDevices> all{};
    const Settings* const settings = verbatim::softverbs::settings();
    for (std::size_t index = 0; index < all.size(); ++index) {
      Device& device = all[index];
      device.node_type = IBV_NODE_CA;
      device.transport_type = IBV_TRANSPORT_IB;
      std::snprintf(device.name, sizeof device.name, "%s%zu", kDeviceNamePrefix.data(), index);
      std::snprintf(device.dev_name, sizeof device.dev_name, "uverbs%zu", index);
      // These files do not exist, because there is no kernel device.
      std::snprintf(device.dev_path, sizeof device.dev_path, "/sys/class/infiniband_verbs/%s", device.dev_name);
      std::snprintf(device.ibdev_path, sizeof device.ibdev_path, "/sys/class/infiniband/%s", device.name);
      device.is_mlx5 = settings != nullptr && !settings->data_direct.empty();
      device.reg_dmabuf_mr = reg_dmabuf_mr;
      if (settings != nullptr && index < settings->data_direct.size())
        fill_pci_path(settings->data_direct[index], device.data_direct);
    }
    return all;
  }();
  return instance;
}

std::uint32_t index_of(const ibv_device& device) {
  return static_cast<std::uint32_t>(static_cast<const Device*>(&device) - devices().data());
}

Result<ibv_device**> list_devices(int* count) {
  const Settings* settings = verbatim::softverbs::settings();
  if (settings == nullptr) return verbatim::system_error("settings", EINVAL);
  constexpr std::size_t kPointerBytes = sizeof(ibv_device*);  // NOLINT(bugprone-sizeof-expression)
  auto** list = static_cast<ibv_device**>(std::calloc(settings->devices + 1, kPointerBytes));
  if (list == nullptr) return verbatim::system_error("calloc", ENOMEM);
  for (std::uint32_t index = 0; index < settings->devices; ++index) list[index] = &devices()[index];
  if (count != nullptr) *count = static_cast<int>(settings->devices);
  return list;
}

int query_port(ibv_context* context, std::uint8_t port_number, ibv_port_attr* attributes, std::size_t bytes) {
  if (const int error = begin_call(Verb::kQueryPort, context); error != 0) return error;
  if (port_number != kPortNumber) return EINVAL;
  const Context& owner = context_of(context);
  Process& process = *owner.process;
  const ibv_port_attr all = port_attributes(process.segment().ports[owner.device], owner.device, process.settings());
  std::memcpy(attributes, &all, std::min(bytes, sizeof all));
  return 0;
}

Result<Context*> open_context(ibv_device* device) {
  Result<Process*> process = Process::join();
  if (!process) return process.error();
  if (Faults* all = faults(); all != nullptr) {
    const int error = all->refused_call(call_bit(Verb::kOpenDevice), index_of(*device));
    if (error != 0) return verbatim::system_error("open_device", error);
  }
  auto context = std::make_unique<Context>();
  Result<std::uint32_t> index = (*process)->context_table().allocate(kMaxContexts);
  if (!index) return index.error();
  Result<EventPipe> pipe = make_event_pipe();
  if (!pipe) {
    (*process)->context_table().release(*index);
    return pipe.error();
  }
  // Programs duplicate cmd_fd and pass it to other processes. Every command on it is refused with ENOTTY.
  context->command_fd = UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC));
  if (!context->command_fd) {
    const int error = errno;
    (*process)->context_table().release(*index);
    return verbatim::system_error("open", error);
  }
  context->pipe = *std::move(pipe);
  context->process = *process;
  context->device = index_of(*device);
  context->index = *index;
  context->shared = &(*process)->segment().contexts[*index];
  {
    SharedLockGuard lock(context->shared->lock, (*process)->me());
    context->shared->head = context->shared->tail = 0;
    context->shared->unwritten_events.store(0, std::memory_order_relaxed);
    context->shared->pipe_fd = context->pipe.write_end.get();
    context->shared->device = context->device;
    context->shared->is_open = 1;
  }

  context->sz = sizeof(verbs_context);
  context->query_port = query_port;
  ibv_context& base = context->verbs_context::context;
  base.device = device;
  base.cmd_fd = context->command_fd.get();
  base.async_fd = context->pipe.read_end.get();
  base.num_comp_vectors = 1;
  pthread_mutex_init(&base.mutex, nullptr);
  base.abi_compat = __VERBS_ABI_IS_EXTENDED;
  base.ops.poll_cq = poll_cq;
  base.ops.req_notify_cq = req_notify_cq;
  base.ops.post_send = post_send;
  base.ops.post_recv = post_recv;
  base.ops.post_srq_recv = post_srq_recv;
  fill_extended_calls(*context);
  return context.release();
}

const SharedPort& port_of(ibv_context* context) {
  const Context& owner = context_of(context);
  return owner.process->segment().ports[owner.device];
}

int query_gid_entry(ibv_context* context, std::uint32_t port_number, std::uint32_t index, ibv_gid_entry& entry) {
  if (port_number != kPortNumber || index >= kGidTableLength) return EINVAL;
  const SharedGid& slot = port_of(context).gids()[index];
  if (slot.valid == 0) return ENODATA;
  entry = {slot.gid, index, port_number, slot.type, 0};
  return 0;
}

bool pop_event(Context& context, AsyncEntry& event) {
  SharedContext& queue = *context.shared;
  SharedLockGuard lock(queue.lock, context.process->me());
  if (queue.head == queue.tail) return false;
  event = queue.entries[queue.head % kAsyncQueueLength];
  ++queue.head;
  return true;
}

template <typename Object>
bool find_object(const std::list<Object*>& objects, const AsyncEntry& event, std::uint32_t (*serial)(const Object&),
                 Object*& found) {
  for (Object* object : objects) {
    if (object->index != event.index || serial(*object) != event.serial) continue;
    found = object;
    return true;
  }
  return false;
}

// Fills `result`, and counts the event as delivered, so that destroying its object waits for the acknowledgement.
// False: the object has been destroyed already.
bool deliver_event(Context& context, const AsyncEntry& event, ibv_async_event& result) {
  result.event_type = static_cast<ibv_event_type>(event.type);
  MutexLock lock(context.objects_mutex);
  switch (event.target) {
    case EventTarget::kPort:
      result.element.port_num = static_cast<int>(event.index);
      return true;
    case EventTarget::kCq: {
      Cq* cq = nullptr;
      if (!find_object<Cq>(
              context.cqs, event, [](const Cq& c) { return c.shared->serial; }, cq))
        return false;
      result.element.cq = cq;
      pthread_mutex_lock(&cq->mutex);
      ++cq->async_events_delivered;
      pthread_mutex_unlock(&cq->mutex);
      return true;
    }
    case EventTarget::kQp: {
      Qp* qp = nullptr;
      if (!find_object<Qp>(
              context.qps, event, [](const Qp& q) { return q.qp_num; }, qp))
        return false;
      result.element.qp = qp;
      pthread_mutex_lock(&qp->mutex);
      ++qp->events_delivered;
      pthread_mutex_unlock(&qp->mutex);
      return true;
    }
    case EventTarget::kSrq: {
      Srq* srq = nullptr;
      if (!find_object<Srq>(
              context.srqs, event, [](const Srq& s) { return s.shared->serial; }, srq))
        return false;
      result.element.srq = srq;
      pthread_mutex_lock(&srq->mutex);
      ++srq->events_delivered;
      pthread_mutex_unlock(&srq->mutex);
      return true;
    }
  }
  return false;
}

void acknowledge(pthread_mutex_t& mutex, pthread_cond_t& condition, std::uint32_t& completed) {
  pthread_mutex_lock(&mutex);
  ++completed;
  pthread_cond_broadcast(&condition);
  pthread_mutex_unlock(&mutex);
}

// Resets the QPs that the program has not destroyed, so that peers cannot reach them any more.
void reset_remaining_qps(Context& context) {
  MutexLock lock(context.objects_mutex);
  for (Qp* qp : context.qps) {
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_RESET;
    modify_qp(*qp, attributes, IBV_QP_STATE);
  }
}

}  // namespace
}  // namespace verbatim::softverbs

using namespace verbatim::softverbs;

extern "C" {

SOFTVERBS_EXPORT ibv_device** ibv_get_device_list(int* count) {
  if (count != nullptr) *count = 0;
  return call_and_return_pointer([&] { return list_devices(count); });
}

SOFTVERBS_EXPORT void ibv_free_device_list(ibv_device** list) {
  std::free(list);
}

SOFTVERBS_EXPORT const char* ibv_get_device_name(ibv_device* device) {
  return device->name;
}

SOFTVERBS_EXPORT __be64 ibv_get_device_guid(ibv_device* device) {
  return device_guid(index_of(*device));
}

SOFTVERBS_EXPORT int ibv_get_device_index(ibv_device* device) {
  return static_cast<int>(index_of(*device));
}

SOFTVERBS_EXPORT ibv_context* ibv_open_device(ibv_device* device) {
  Context* context = call_and_return_pointer([&] { return open_context(device); });
  count(Verb::kOpenDevice);
  return context != nullptr ? &context->verbs_context::context : nullptr;
}

SOFTVERBS_EXPORT int ibv_close_device(ibv_context* handle) {
  if (const int error = begin_call(Verb::kCloseDevice, handle); error != 0) return error;
  Context& context = context_of(handle);
  reset_remaining_qps(context);
  {
    SharedLockGuard lock(context.shared->lock, context.process->me());
    context.shared->is_open = 0;
    context.shared->pipe_fd = -1;  // the descriptor may soon belong to another file
  }
  context.process->context_table().release(context.index);
  pthread_mutex_destroy(&handle->mutex);
  delete &context;
  return 0;
}

SOFTVERBS_EXPORT ibv_context* ibv_import_device(int) {
  errno = EOPNOTSUPP;
  return nullptr;
}

SOFTVERBS_EXPORT int ibv_query_device(ibv_context* context, ibv_device_attr* attributes) {
  if (const int error = begin_call(Verb::kQueryDevice, context); error != 0) return error;
  const Context& owner = context_of(context);
  *attributes = device_attributes(owner.device, owner.process->settings());
  return 0;
}

// For programs built with headers whose ibv_port_attr has no port_cap_flags2.
SOFTVERBS_EXPORT int ibv_query_port(ibv_context* context, std::uint8_t port_number, _compat_ibv_port_attr* attributes) {
  return query_port(context, port_number, reinterpret_cast<ibv_port_attr*>(attributes),
                    offsetof(ibv_port_attr, port_cap_flags2));
}

// Of rdma-core releases after 44; the header does not declare it. The speed is in units of 100 Mbit/s. Counted, and
// failed by faults, as ibv_query_port.
SOFTVERBS_EXPORT int ibv_query_port_speed(ibv_context* context, std::uint32_t port_number, std::uint64_t* speed) {
  if (const int error = begin_call(Verb::kQueryPort, context); error != 0) return error;
  if (port_number != kPortNumber) return EINVAL;
  const Context& owner = context_of(context);
  *speed = std::uint64_t{owner.process->settings().speed_gbps[owner.device]} * 10;
  return 0;
}

SOFTVERBS_EXPORT int ibv_query_gid(ibv_context* context, std::uint8_t port_number, int index, ibv_gid* gid) {
  if (begin_call(Verb::kQueryGid, context) != 0) return -1;
  if (port_number != kPortNumber || index < 0 || static_cast<std::uint32_t>(index) >= kGidTableLength) {
    errno = EINVAL;
    return -1;
  }
  *gid = port_of(context).gids()[index].gid;  // zero in an empty entry
  return 0;
}

SOFTVERBS_EXPORT int _ibv_query_gid_ex(ibv_context* context, std::uint32_t port_number, std::uint32_t index,
                                       ibv_gid_entry* entry, std::uint32_t flags, std::size_t entry_bytes) {
  if (const int error = begin_call(Verb::kQueryGidEx, context); error != 0) return error;
  if (flags != 0) return EOPNOTSUPP;
  if (entry_bytes < sizeof(ibv_gid_entry)) return EINVAL;
  return query_gid_entry(context, port_number, index, *entry);
}

SOFTVERBS_EXPORT ssize_t _ibv_query_gid_table(ibv_context* context, ibv_gid_entry* entries, std::size_t max_entries,
                                              std::uint32_t flags, std::size_t entry_bytes) {
  if (const int error = begin_call(Verb::kQueryGidTable, context); error != 0) return -error;
  if (flags != 0) return -EOPNOTSUPP;
  if (entry_bytes < sizeof(ibv_gid_entry)) return -EINVAL;
  std::size_t count = 0;
  for (std::uint32_t index = 0; index < kGidTableLength; ++index) {
    ibv_gid_entry entry{};
    if (query_gid_entry(context, kPortNumber, index, entry) != 0) continue;
    if (count == max_entries) return -EINVAL;
    std::memcpy(reinterpret_cast<std::byte*>(entries) + count * entry_bytes, &entry, sizeof entry);
    ++count;
  }
  return static_cast<ssize_t>(count);
}

// Used by rdma-core's tools. The type is 0 for IB and RoCE v1, 1 for RoCE v2.
SOFTVERBS_EXPORT int ibv_query_gid_type(ibv_context* context, std::uint8_t port_number, unsigned index,
                                        std::uint32_t* type) {
  if (port_number != kPortNumber || index >= kGidTableLength) {
    errno = EINVAL;
    return -1;
  }
  *type = port_of(context).gids()[index].type == IBV_GID_TYPE_ROCE_V2 ? 1 : 0;
  return 0;
}

SOFTVERBS_EXPORT int ibv_query_pkey(ibv_context* context, std::uint8_t port_number, int index, __be16* pkey) {
  if (begin_call(Verb::kQueryPkey, context) != 0) return -1;
  if (port_number != kPortNumber || index < 0 || index >= kPkeyTableLength) {
    errno = EINVAL;
    return -1;
  }
  *pkey = kDefaultPkey;
  return 0;
}

SOFTVERBS_EXPORT int ibv_get_pkey_index(ibv_context* context, std::uint8_t port_number, __be16 pkey) {
  if (begin_call(Verb::kGetPkeyIndex, context) != 0) return -1;
  if (port_number == kPortNumber && pkey == kDefaultPkey) return 0;
  errno = EINVAL;
  return -1;
}

SOFTVERBS_EXPORT int ibv_get_async_event(ibv_context* handle, ibv_async_event* event) {
  if (begin_call(Verb::kGetAsyncEvent, handle) != 0) return -1;
  Context& context = context_of(handle);
  for (;;) {
    if (!await_event(context.pipe.read_end.get(), *context.process)) return -1;
    AsyncEntry entry{};
    if (pop_event(context, entry) && deliver_event(context, entry, *event)) return 0;
  }
}

SOFTVERBS_EXPORT void ibv_ack_async_event(ibv_async_event* event) {
  count(Verb::kAckAsyncEvent);
  switch (event->event_type) {
    case IBV_EVENT_CQ_ERR: {
      ibv_cq& cq = *event->element.cq;
      return acknowledge(cq.mutex, cq.cond, cq.async_events_completed);
    }
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED: {
      ibv_qp& qp = *event->element.qp;
      return acknowledge(qp.mutex, qp.cond, qp.events_completed);
    }
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED: {
      ibv_srq& srq = *event->element.srq;
      return acknowledge(srq.mutex, srq.cond, srq.events_completed);
    }
    default:
      return;
  }
}

SOFTVERBS_EXPORT int ibv_fork_init() {
  return 0;
}

SOFTVERBS_EXPORT ibv_fork_status ibv_is_fork_initialized() {
  return IBV_FORK_UNNEEDED;
}

}  // extern "C"
