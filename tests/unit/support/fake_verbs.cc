#include "unit/support/fake_verbs.h"

#include <arpa/inet.h>
#include <endian.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace verbatim {
namespace {

FakeVerbs* g_current = nullptr;

// The ibv_context is the last member of a verbs_context, as in libibverbs, also when abi_compat does not announce it.
struct FakeContext {
  FakeDevice* device = nullptr;
  verbs_context extended = {};
};

FakeContext& of(ibv_context* context) {
  auto* bytes =
      reinterpret_cast<std::byte*>(context) - offsetof(verbs_context, context) - offsetof(FakeContext, extended);
  return *reinterpret_cast<FakeContext*>(bytes);
}

int injected_errno(const char* verb) {
  return FakeVerbs::current().fails(verb) ? errno : 0;
}

FakePort* port_of(ibv_context* context, std::uint32_t port_num) {
  std::vector<FakePort>& ports = of(context).device->ports;
  return port_num >= 1 && port_num <= ports.size() ? &ports[port_num - 1] : nullptr;
}

template <typename T>
T* create(const char* verb, const char* object) {
  if (FakeVerbs::current().fails(verb)) return nullptr;
  FakeVerbs::current().count(object, 1);
  return new T{};
}

template <typename T>
int destroy(const char* verb, const char* object, T* instance) {
  if (const int error = injected_errno(verb)) return error;
  FakeVerbs::current().count(object, -1);
  delete instance;
  return 0;
}

ibv_device** get_device_list(int* count) {
  if (FakeVerbs::current().fails("get_device_list")) return nullptr;
  auto& devices = FakeVerbs::current().devices();
  auto** list = static_cast<ibv_device**>(std::calloc(devices.size() + 1, sizeof(ibv_device*)));
  for (std::size_t i = 0; i < devices.size(); ++i) list[i] = &devices[i]->device;
  *count = static_cast<int>(devices.size());
  FakeVerbs::current().count("list", 1);
  return list;
}

void free_device_list(ibv_device** list) {
  std::free(list);
  FakeVerbs::current().count("list", -1);
}

const char* get_device_name(ibv_device* device) {
  return device->name;
}

int query_port_full(ibv_context* context, std::uint8_t port_num, ibv_port_attr* attributes, std::size_t bytes) {
  if (const int error = injected_errno("query_port")) return error;
  const FakePort* port = port_of(context, port_num);
  if (port == nullptr) return EINVAL;
  if (port->query_errno != 0) return port->query_errno;
  std::memcpy(attributes, &port->attributes, bytes);
  return 0;
}

// The old call fills in only the fields before `flags`.
int query_port(ibv_context* context, std::uint8_t port_num, _compat_ibv_port_attr* attributes) {
  return query_port_full(context, port_num, reinterpret_cast<ibv_port_attr*>(attributes),
                         offsetof(ibv_port_attr, flags));
}

ibv_context* open_device(ibv_device* found) {
  if (FakeVerbs::current().fails("open_device")) return nullptr;
  const auto& devices = FakeVerbs::current().devices();
  const auto device =
      std::find_if(devices.begin(), devices.end(), [&](const auto& one) { return &one->device == found; });
  if ((*device)->open_errno != 0) {
    errno = (*device)->open_errno;
    return nullptr;
  }
  auto* context = new FakeContext;
  context->device = device->get();
  context->extended.sz = sizeof(verbs_context);
  context->extended.query_port = query_port_full;
  context->extended.context.device = found;
  if (context->device->extended) context->extended.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
  FakeVerbs::current().count("context", 1);
  return &context->extended.context;
}

int close_device(ibv_context* context) {
  return destroy("close_device", "context", &of(context));
}

int fork_init() {
  return injected_errno("fork_init");
}

int query_device(ibv_context* context, ibv_device_attr* attributes) {
  if (const int error = injected_errno("query_device")) return error;
  *attributes = of(context).device->attributes;
  attributes->phys_port_cnt = static_cast<std::uint8_t>(of(context).device->ports.size());
  return 0;
}

const std::optional<ibv_gid_entry>* slot_of(ibv_context* context, std::uint32_t port_num, std::uint32_t index) {
  const FakePort* port = port_of(context, port_num);
  return port != nullptr && index < port->gids.size() ? &port->gids[index] : nullptr;
}

int query_gid(ibv_context* context, std::uint8_t port_num, int index, ibv_gid* gid) {
  const auto* slot = slot_of(context, port_num, static_cast<std::uint32_t>(index));
  if (FakeVerbs::current().fails("query_gid")) return -1;
  if (slot == nullptr || !slot->has_value()) {
    errno = EIO;
    return -1;
  }
  *gid = (*slot)->gid;
  return 0;
}

int query_gid_ex(ibv_context* context, std::uint32_t port_num, std::uint32_t index, ibv_gid_entry* entry, std::uint32_t,
                 std::size_t) {
  if (const int error = injected_errno("query_gid_ex")) return error;
  const auto* slot = slot_of(context, port_num, index);
  if (slot == nullptr || !slot->has_value()) return ENODATA;
  *entry = **slot;
  return 0;
}

int query_pkey(ibv_context*, std::uint8_t, int, __be16* pkey) {
  *pkey = htobe16(0xffff);
  return injected_errno("query_pkey");
}

ibv_pd* alloc_pd(ibv_context* context) {
  auto* pd = create<ibv_pd>("alloc_pd", "pd");
  if (pd != nullptr) pd->context = context;
  return pd;
}

int dealloc_pd(ibv_pd* pd) {
  return destroy("dealloc_pd", "pd", pd);
}

ibv_mr* make_mr(ibv_pd* pd, FakeVerbs::Registration registration) {
  static std::atomic<std::uint32_t> keys{0x1000};
  FakeVerbs& fake = FakeVerbs::current();
  if (fake.on_register) fake.on_register();
  auto* mr = create<ibv_mr>(registration.verb.c_str(), "mr");
  if (mr == nullptr) return nullptr;
  mr->pd = pd;
  mr->context = pd->context;
  mr->addr = reinterpret_cast<void*>(registration.address);
  mr->length = registration.bytes;
  mr->lkey = keys.fetch_add(1);
  mr->rkey = mr->lkey | 0x80000000U;
  fake.record(std::move(registration));
  return mr;
}

ibv_mr* reg_mr(ibv_pd* pd, void* address, std::size_t bytes, int access) {
  return make_mr(pd, {.verb = "reg_mr",
                      .address = reinterpret_cast<std::uintptr_t>(address),
                      .bytes = bytes,
                      .access = static_cast<unsigned>(access)});
}

ibv_mr* reg_mr_iova2(ibv_pd* pd, void* address, std::size_t bytes, std::uint64_t iova, unsigned access) {
  if (iova != reinterpret_cast<std::uintptr_t>(address)) {
    errno = EINVAL;
    return nullptr;
  }
  return make_mr(
      pd,
      {.verb = "reg_mr_iova2", .address = reinterpret_cast<std::uintptr_t>(address), .bytes = bytes, .access = access});
}

ibv_mr* reg_dmabuf_mr(ibv_pd* pd, std::uint64_t offset, std::size_t bytes, std::uint64_t iova, int fd, int access) {
  const int error = of(pd->context).device->dmabuf_errno;
  const bool aligned = offset % 4096 == iova % 4096;  // the kernel requires this
  if (error != 0 || fd < 0 || !aligned) {
    errno = error != 0 ? error : fd < 0 ? EBADF : EINVAL;
    return nullptr;
  }
  return make_mr(pd, {.verb = "reg_dmabuf_mr",
                      .address = static_cast<std::uintptr_t>(iova),
                      .bytes = bytes,
                      .access = static_cast<unsigned>(access),
                      .fd = fd,
                      .offset = offset});
}

int dereg_mr(ibv_mr* mr) {
  return destroy("dereg_mr", "mr", mr);
}

ibv_cq* create_cq(ibv_context* context, int depth, void*, ibv_comp_channel*, int) {
  auto* cq = create<ibv_cq>("create_cq", "cq");
  if (cq == nullptr) return nullptr;
  cq->context = context;
  cq->cqe = depth;
  return cq;
}

int destroy_cq(ibv_cq* cq) {
  return destroy("destroy_cq", "cq", cq);
}

ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* attributes) {
  static std::atomic<std::uint32_t> numbers{100};
  FakeVerbs::current().record(*attributes);
  const FakeDevice& device = *of(pd->context).device;
  if (attributes->cap.max_inline_data > device.max_inline) {
    errno = EINVAL;
    return nullptr;
  }
  if (FakeVerbs& fake = FakeVerbs::current(); fake.on_create_qp) {
    if (const int error = fake.on_create_qp()) {
      errno = error;
      return nullptr;
    }
  }
  auto* qp = create<ibv_qp>("create_qp", "qp");
  if (qp == nullptr) return nullptr;
  qp->context = pd->context;
  qp->pd = pd;
  qp->send_cq = attributes->send_cq;
  qp->recv_cq = attributes->recv_cq;
  qp->qp_num = numbers.fetch_add(1);
  if (FakeVerbs& fake = FakeVerbs::current(); fake.qp_number) {
    qp->qp_num = fake.qp_number(static_cast<std::uint32_t>(fake.calls("create_qp")));
  }
  attributes->cap.max_inline_data = device.max_inline;  // a device reports its own maximum
  return qp;
}

int modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
  if (const int error = injected_errno("modify_qp")) return error;
  const std::function<int()>& fails = FakeVerbs::current().on_modify_qp;
  if (const int error = fails ? fails() : 0) return error;
  if ((mask & IBV_QP_STATE) != 0) qp->state = attributes->qp_state;
  FakeVerbs::current().record(FakeVerbs::Modification{*attributes, mask});
  return 0;
}

int query_qp(ibv_qp* qp, ibv_qp_attr* attributes, int, ibv_qp_init_attr*) {
  attributes->qp_state = qp->state;
  return injected_errno("query_qp");
}

int destroy_qp(ibv_qp* qp) {
  return destroy("destroy_qp", "qp", qp);
}

int query_ece(ibv_qp* qp, ibv_ece* ece) {
  ece->vendor_id = 0x15b3;
  ece->options = 7;
  return of(qp->context).device->ece_errno;
}

int set_ece(ibv_qp* qp, ibv_ece* ece) {
  const int error = of(qp->context).device->ece_errno;
  if (error == 0) FakeVerbs::current().ece_set = *ece;
  return error;
}

int get_async_event(ibv_context*, ibv_async_event*) {
  errno = EAGAIN;
  return -1;
}

void ack_async_event(ibv_async_event*) {}
const char* wc_status_str(ibv_wc_status) {
  return "status";
}
const char* event_type_str(ibv_event_type) {
  return "event";
}

}  // namespace

FakeDevice::FakeDevice(const std::string& name) {
  name.copy(device.name, sizeof device.name - 1);
  device.node_type = IBV_NODE_CA;
  device.transport_type = IBV_TRANSPORT_IB;
  attributes.max_qp_wr = 1024;
  attributes.max_sge = 4;
  attributes.max_qp_rd_atom = 16;
  attributes.max_qp_init_rd_atom = 16;
  attributes.atomic_cap = IBV_ATOMIC_HCA;
  attributes.sys_image_guid = htobe64(0x1122334455667700);
}

FakePort& FakeDevice::add_roce_port() {
  FakePort port;
  port.attributes.state = IBV_PORT_ACTIVE;
  port.attributes.link_layer = IBV_LINK_LAYER_ETHERNET;
  port.attributes.active_mtu = IBV_MTU_4096;
  port.attributes.active_speed = 64;
  port.attributes.active_width = 2;
  port.attributes.max_msg_sz = 1U << 30;
  port.attributes.gid_tbl_len = 4;
  port.gids = {fake_gid("::ffff:10.0.0.1", IBV_GID_TYPE_ROCE_V2)};
  ports.push_back(port);
  return ports.back();
}

FakePort& FakeDevice::add_infiniband_port() {
  FakePort& port = add_roce_port();
  port.attributes.link_layer = IBV_LINK_LAYER_INFINIBAND;
  port.attributes.lid = 17;
  port.gids = {fake_gid("fe80::1", IBV_GID_TYPE_IB)};
  return port;
}

ibv_gid_entry fake_gid(const std::string& ipv6, unsigned type) {
  ibv_gid_entry entry = {};
  inet_pton(AF_INET6, ipv6.c_str(), entry.gid.raw);
  entry.gid_type = type;
  return entry;
}

FakeVerbs::FakeVerbs() {
  g_current = this;
  table = {.get_device_list = get_device_list,
           .free_device_list = free_device_list,
           .get_device_name = get_device_name,
           .open_device = open_device,
           .close_device = close_device,
           .fork_init = fork_init,
           .query_device = query_device,
           .query_port = query_port,
           .query_gid = query_gid,
           .query_pkey = query_pkey,
           .alloc_pd = alloc_pd,
           .dealloc_pd = dealloc_pd,
           .reg_mr = reg_mr,
           .reg_mr_iova2 = reg_mr_iova2,
           .reg_dmabuf_mr = reg_dmabuf_mr,
           .dereg_mr = dereg_mr,
           .create_cq = create_cq,
           .destroy_cq = destroy_cq,
           .create_qp = create_qp,
           .modify_qp = modify_qp,
           .query_qp = query_qp,
           .destroy_qp = destroy_qp,
           .query_ece = query_ece,
           .set_ece = set_ece,
           .get_async_event = get_async_event,
           .ack_async_event = ack_async_event,
           .wc_status_str = wc_status_str,
           .event_type_str = event_type_str,
           .query_gid_ex = query_gid_ex};
}

FakeVerbs::~FakeVerbs() {
  g_current = nullptr;
}

FakeVerbs& FakeVerbs::current() {
  return *g_current;
}

FakeDevice& FakeVerbs::add_device(const std::string& name) {
  devices_.push_back(std::make_unique<FakeDevice>(name));
  return *devices_.back();
}

bool FakeVerbs::fails(const char* verb) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++calls_[verb];
  const auto failure = failures.find(verb);
  if (failure == failures.end()) return false;
  errno = failure->second;
  return true;
}

void FakeVerbs::count(const char* object, int change) {
  const std::lock_guard<std::mutex> lock(mutex_);
  live_[object] += change;
}

void FakeVerbs::record(Registration registration) {
  const std::lock_guard<std::mutex> lock(mutex_);
  registrations_.push_back(std::move(registration));
}

void FakeVerbs::record(Modification modification) {
  const std::lock_guard<std::mutex> lock(mutex_);
  modifications_.push_back(modification);
}

void FakeVerbs::record(const ibv_qp_init_attr& attributes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  created_qps_.push_back(attributes);
}

std::vector<FakeVerbs::Registration> FakeVerbs::registrations() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return registrations_;
}

std::vector<FakeVerbs::Modification> FakeVerbs::modifications() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return modifications_;
}

std::vector<ibv_qp_init_attr> FakeVerbs::created_qps() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return created_qps_;
}

int FakeVerbs::live(const std::string& object) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = live_.find(object);
  return found != live_.end() ? found->second : 0;
}

int FakeVerbs::calls(const std::string& verb) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = calls_.find(verb);
  return found != calls_.end() ? found->second : 0;
}

}  // namespace verbatim
