#include "softverbs/engine/process.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <string>

#include "base/log.h"
#include "softverbs/engine/events.h"
#include "softverbs/engine/late_writes.h"
#include "softverbs/engine/memory_region.h"
#include "softverbs/engine/qp.h"
#include "softverbs/engine/responder.h"
#include "softverbs/faults/faults.h"
#include "softverbs/gpu/exports.h"
#include "softverbs/gpu/gpu.h"
#include "softverbs/gpu/imports.h"
#include "softverbs/gpu/staging.h"
#include "softverbs/host/device_attributes.h"
#include "softverbs/host/traffic.h"
#include "softverbs/host/with_memory.h"

namespace verbatim::softverbs {
namespace {

// The statistics list this many destroyed QPs one by one; later ones are in the sums only.
constexpr std::size_t kRecordedQps = 4096;

std::atomic<Process*> g_process{nullptr};
std::atomic<pid_t> g_process_pid{0};
Mutex g_join_mutex;

Result<std::shared_ptr<ProcessView>> map_view(const UniqueFd& fd, const HostRegistry& registry, std::uint32_t slot,
                                              pid_t pid) {
  Result<Mapping> mapping = map_shm(fd, kSegmentBytes);
  if (!mapping) return mapping.error();
  return std::make_shared<ProcessView>(*std::move(mapping), registry, slot, pid);
}

Result<UniqueFd> make_segment(const HostRegistry& registry) {
  const std::string name = registry.segment_name(registry.me());
  ::unlink(name.c_str());  // a file may be left from a registry that was removed by hand
  Result<UniqueFd> fd = open_shm(name, OpenMode::kCreateNew);
  if (!fd) return fd;
  if (::ftruncate(fd->get(), static_cast<off_t>(kSegmentBytes)) != 0) return system_error("ftruncate", errno);
  if (Status backed = back_with_memory(*fd, 0, offsetof(Segment, contexts)); !backed) return backed.error();
  return fd;
}

}  // namespace

bool is_alive(Incarnation incarnation) {
  Process* process = Process::joined();
  return process == nullptr || process->registry().is_alive(incarnation);
}

Process* Process::joined() {
  return g_process.load(std::memory_order_acquire);
}

Result<Process*> Process::join() {
  MutexLock lock(g_join_mutex);
  if (Process* process = joined(); process != nullptr) return process;
  Result<Process*> process = create();
  if (!process) return process;
  static const int registered = ::pthread_atfork(nullptr, nullptr, reset_in_child);
  static_cast<void>(registered);
  g_process_pid.store(::getpid(), std::memory_order_relaxed);
  g_process.store(*process, std::memory_order_release);
  return process;
}

Result<Process*> Process::create() {
  const Settings* settings = softverbs::settings();
  if (settings == nullptr) return system_error("settings", EINVAL);
  Result<std::unique_ptr<HostRegistry>> registry = HostRegistry::open(*settings);
  if (!registry) return registry.error();
  Result<UniqueFd> fd = make_segment(**registry);
  if (!fd) return fd.error();
  Result<std::shared_ptr<ProcessView>> view = map_view(*fd, **registry, (*registry)->slot(), ::getpid());
  if (!view) return view.error();
  Segment& segment = (*view)->segment();
  segment.incarnation = (*registry)->me();
  segment.pid = ::getpid();
  std::ifstream("/proc/self/comm").get(segment.program, sizeof segment.program);
  segment.is_threaded = settings->threaded ? 1 : 0;
  segment.probe_address = reinterpret_cast<std::uintptr_t>(&g_process);
  for (std::uint32_t device = 0; device < settings->devices; ++device) {
    fill_port(segment.ports[device], device, *settings);
  }
  // Yama requires this permission before peers may access our memory. Without Yama the call fails and is not needed.
  ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  std::unique_ptr<Process> process(new Process(*settings, *std::move(registry), *std::move(fd), *std::move(view)));
  if (Status prepared = prepare_late_writes(*process); !prepared) return prepared.error();
  if (process->link_) {
    if (Status opened = process->link_->start(); !opened) return opened.error();
  }
  if (Status engine = process->engine_.start(*process); !engine) return engine.error();
  Status started = start_late_writes(*process);
  if (started && !with_memory([&] { start_faults(segment, process->settings_, *process); }))
    started = system_error("start_faults", ENOMEM);
  if (started) return process.release();
  process->engine_.stop();
  process->registry_->leave();
  static_cast<void>(process.release());  // threads of its engine may still use it
  return started.error();
}

Process::Process(const Settings& settings, std::unique_ptr<HostRegistry> registry, UniqueFd fd,
                 std::shared_ptr<ProcessView> view)
    : settings_(settings),
      registry_(std::move(registry)),
      fd_(std::move(fd)),
      view_(std::move(view)),
      arena_(fd_),
      contexts_(fd_, offsetof(Segment, contexts), sizeof(SharedContext), kMaxContexts, objects(ObjectKind::kContext)),
      qps_(fd_, offsetof(Segment, qps), sizeof(SharedQp), kMaxQps, objects(ObjectKind::kQp)),
      cqs_(fd_, offsetof(Segment, cqs), sizeof(SharedCq), kMaxCqs, objects(ObjectKind::kCq)),
      srqs_(fd_, offsetof(Segment, srqs), sizeof(SharedSrq), kMaxSrqs, objects(ObjectKind::kSrq)),
      mrs_(fd_, offsetof(Segment, mrs), sizeof(SharedMr), kMaxMrs, objects(ObjectKind::kMr)),
      qp_pointers_(kMaxQps),
      link_(settings_.has_rate() ? std::make_unique<Link>(*registry_, settings_) : nullptr),
      engine_(settings_, link_.get()) {
  if (!settings_.stats_file.empty()) destroyed_qps_.reserve(kRecordedQps);  // ibv_destroy_qp adds them without memory
}

void Process::leave_at_exit() {
  Process* process = joined();
  if (process == nullptr || g_process_pid.load(std::memory_order_relaxed) != ::getpid()) return;
  // A running step may hold shared locks. Once this process has left the registry, others would treat its locks as
  // those of a dead process.
  process->engine_.stop();
  if (!with_memory([&] { process->write_stats(); })) process->report_unwritten_stats(ENOMEM);
  process->segment().closed.store(1, std::memory_order_release);
  process->registry_->leave();
}

void Process::write_stats() {
  if (settings_.stats_file.empty()) return;
  ProcessStats stats = read_stats(segment());
  {
    MutexLock lock(destroyed_qps_mutex_);
    stats.qps.insert(stats.qps.begin(), destroyed_qps_.begin(), destroyed_qps_.end());
  }
  const std::string text = to_json(stats) + "\n";
  const UniqueFd file(::open(stats_file_name(settings_.stats_file, ::getpid()).c_str(),
                             O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, S_IRUSR | S_IWUSR));
  if (file && ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size())) return;
  report_unwritten_stats(errno);
}

void Process::report_unwritten_stats(int error) const {
  VERBATIM_WARN("SOFTVERBS_STATS=%s cannot be written: %s", settings_.stats_file.c_str(), std::strerror(error));
}

void Process::record_counters(const Qp& qp) {
  add_shared(segment().counters.destroyed_qps, qp.shared->counters);
  add_traffic(segment().destroyed_traffic, *qp.shared);
  MutexLock lock(destroyed_qps_mutex_);
  if (!settings_.stats_file.empty() && destroyed_qps_.size() < kRecordedQps) {
    destroyed_qps_.push_back(read_qp_stats(segment(), qp.index));
    destroyed_qps_.back().is_alive = false;
  }
}

// Segment and engine belong to the parent. The child leaves the inherited objects alone and joins as a new process.
void Process::reset_in_child() {
  g_process.store(nullptr, std::memory_order_release);
  forget_regions_of_parent();
  forget_staging_of_parent();
  forget_exports_of_parent();
  forget_imports_of_parent();
  Gpu::forget_those_of_parent();
}

void Process::apply_fault_commands() {
  static_cast<void>(with_memory([&] {
    const std::optional<FaultCommand> command = registry_->next_fault_command();
    if (!command) return;
    std::variant<FaultScript, std::string> parsed = parse_faults(command->text);
    if (const auto* script = std::get_if<FaultScript>(&parsed)) {
      add_faults(*script);
    } else {
      VERBATIM_WARN("a fault command of tools/softverbs is refused: %s", std::get<std::string>(parsed).c_str());
    }
    registry_->acknowledge_fault_command(command->sequence);
  }));
}

void count(Verb verb) {
  if (Process* process = Process::joined(); process != nullptr) {
    process->segment().counters.calls[static_cast<std::size_t>(verb)].add_shared(1);
  }
}

void Process::set_alarm(std::uint64_t due_ns) {
  engine_.set_alarm(due_ns);
}

void Process::raise_device_event(std::uint32_t device, ibv_event_type type) {
  softverbs::raise_device_event(*this, device, type);
}

void Process::fail_qps(std::uint32_t device) {
  for_each_qp([&](Qp& qp) {
    if (qp.shared->device != device) return;
    SharedLockGuard lock(qp.shared->lock, me());
    fail_qp(view(), me(), qp.index);
  });
}

void Process::publish(std::uint32_t index, Qp* qp) {
  MutexLock lock(qps_mutex_);
  qp_pointers_[index].store(qp, std::memory_order_release);
}

std::shared_ptr<ProcessView> Process::find(const QpLocation& location) {
  if (location.incarnation == me()) return view_;
  std::shared_ptr<ProcessView> found;
  return with_memory([&] { found = find_peer(location); }) ? found : nullptr;
}

std::shared_ptr<ProcessView> Process::find_peer(const QpLocation& location) {
  MutexLock lock(peers_mutex_);
  std::weak_ptr<ProcessView>& cached = peers_[location.slot];
  if (std::shared_ptr<ProcessView> view = cached.lock(); view && view->incarnation() == location.incarnation)
    return view;
  const pid_t pid = registry_->pid_of(location.slot, location.incarnation);
  if (pid == 0) return nullptr;
  Result<UniqueFd> fd = open_shm(registry_->segment_name(location.incarnation), OpenMode::kExisting);
  if (!fd) return nullptr;
  Result<std::shared_ptr<ProcessView>> view = map_view(*fd, *registry_, location.slot, pid);
  if (!view || !registry_->is_alive(location.slot, location.incarnation)) return nullptr;
  cached = *view;
  return *view;
}

}  // namespace verbatim::softverbs
