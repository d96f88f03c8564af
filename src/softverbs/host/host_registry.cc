#include "softverbs/host/host_registry.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <functional>

#include "base/log.h"
#include "softverbs/host/abandoned_files.h"
#include "softverbs/host/traffic.h"
#include "softverbs/host/with_memory.h"

namespace verbatim::softverbs {
namespace {

constexpr std::uint32_t kSenderLock = kMaxProcesses;  // the byte after those of the slots

constexpr std::uint32_t kFirstQpn = 0x100;  // 0 and 1 are reserved for management
// The first number of a registry is at most this one. The numbers above leave room for eight million QPs before the
// numbers begin anew.
constexpr std::uint32_t kLastInitialQpn = 1U << 23;

bool set_slot_lock(int fd, std::uint32_t slot, short type) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(slot);
  lock.l_len = 1;
  return ::fcntl(fd, F_SETLK, &lock) == 0;
}

// Registries begin with different numbers. Otherwise two processes that cannot see each other (of two containers, say)
// would have the same numbers, and each would send to a QP of its own instead of the other's. The number depends on
// nothing that changes from run to run, because a run may be repeated with the QP numbers of its trace.
std::uint32_t initial_qpn(const std::string& name, std::uint32_t seed) {
  utsname host{};
  ::uname(&host);
  const std::string group = name + " " + std::to_string(own_pid_namespace()) + " " + host.nodename;
  const std::size_t hash = std::hash<std::string>{}(group + " " + std::to_string(seed));
  return kFirstQpn + static_cast<std::uint32_t>(hash % (kLastInitialQpn - kFirstQpn));
}

Status flock_retrying(int fd) {
  while (::flock(fd, LOCK_EX) != 0) {
    if (errno != EINTR) return system_error("flock", errno);
  }
  return {};
}

}  // namespace

// Each process holds a record lock on one byte of the registry's file, the byte of its slot. The kernel releases the
// lock when the process dies or executes another program, and a forked child does not inherit it. Unlike a pid, the
// lock cannot belong to a later process.
bool is_slot_held(int fd, std::uint32_t slot) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(slot);
  lock.l_len = 1;
  return ::fcntl(fd, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

std::uint64_t own_pid_namespace() {
  struct stat space {};
  return ::stat("/proc/self/ns/pid", &space) == 0 ? space.st_ino : 0;
}

// Processes access each other's memory by pid, which is valid only within one PID namespace. Therefore each PID
// namespace has a registry of its own, unless the user names a directory for processes of several ones.
std::string registry_name(const Settings& settings) {
  std::string name =
      (settings.directory.empty() ? "/dev/shm" : settings.directory) + "/softverbs" + std::to_string(kLayoutVersion);
  name += settings.directory.empty() ? "-" + std::to_string(::geteuid()) + "-" + std::to_string(own_pid_namespace())
                                     : "-shared";
  if (!settings.name_space.empty()) name += "-" + settings.name_space;
  return name;
}

// Segments are not truncated while their process runs, but a process that was killed early has left a shorter file.
Result<Mapping> map_segment(const std::string& name) {
  const Result<UniqueFd> fd = open_shm(name, OpenMode::kExisting);
  if (!fd) return fd.error();
  struct stat info {};
  if (::fstat(fd->get(), &info) != 0) return system_error("fstat", errno);
  if (info.st_size < static_cast<off_t>(sizeof(Segment))) return system_error("map_segment", EINVAL);
  return map_shm(*fd, sizeof(Segment));
}

// Holds mutex_ and the file's flock. The kernel releases the flock when the process dies.
class VERBATIM_THREAD_ANNOTATION(scoped_lockable) HostRegistry::FileLock {
 public:
  explicit FileLock(HostRegistry& registry) VERBATIM_THREAD_ANNOTATION(acquire_capability(registry.mutex_))
      : registry_(registry) {
    registry_.mutex_.lock();
    if (!flock_retrying(registry_.fd_.get())) {
      VERBATIM_WARN("the registry cannot be locked: flock: %s", std::strerror(errno));
    }
  }
  ~FileLock() VERBATIM_THREAD_ANNOTATION(release_capability()) {
    ::flock(registry_.fd_.get(), LOCK_UN);
    registry_.mutex_.unlock();
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  HostRegistry& registry_;
};

Result<std::unique_ptr<HostRegistry>> HostRegistry::open(const Settings& settings) {
  const std::string name = registry_name(settings);
  remove_abandoned_files(name);
  for (;;) {
    Result<UniqueFd> fd = open_shm(name, OpenMode::kCreateOrOpen);
    if (!fd) return fd.error();
    if (Status locked = flock_retrying(fd->get()); !locked) return locked.error();
    struct stat info {};
    if (::fstat(fd->get(), &info) != 0) return system_error("fstat", errno);
    if (info.st_nlink == 0) continue;  // another process has just removed the file: create a new one
    if (info.st_size == 0 && ::ftruncate(fd->get(), sizeof(Registry)) != 0) {
      const int error = errno;
      ::unlink(name.c_str());
      return system_error("ftruncate", error);
    }
    if (Status backed = back_with_memory(*fd, 0, offsetof(Registry, staging_bytes)); !backed) return backed.error();
    Result<Mapping> mapping = map_shm(*fd, sizeof(Registry));
    if (!mapping) return mapping.error();
    std::unique_ptr<HostRegistry> registry(new HostRegistry(name, *std::move(fd), *std::move(mapping)));
    // The flock of this function is held until join() has added the process: an empty registry may be removed.
    if (Status joined = registry->join(settings); !joined) return joined.error();
    return registry;
  }
}

Status HostRegistry::join(const Settings& settings) {
  FileLock lock(*this);
  if (shared().last_qpn.load(std::memory_order_relaxed) == 0) {
    shared().last_qpn.store(initial_qpn(name_, settings.seed), std::memory_order_relaxed);
  }
  reap_dead_processes();
  for (std::uint32_t index = 0; index < kMaxProcesses; ++index) {
    ProcessSlot& slot = shared().slots[index];
    if (slot.incarnation.load(std::memory_order_relaxed) != 0) continue;
    if (!set_slot_lock(fd_.get(), index, F_WRLCK)) continue;
    slot.pid.store(::getpid(), std::memory_order_relaxed);
    slot.pid_namespace.store(own_pid_namespace(), std::memory_order_relaxed);
    slot.is_threaded.store(settings.threaded ? 1 : 0, std::memory_order_relaxed);
    slot.faults_applied.store(shared().faults.sequence.load(std::memory_order_acquire), std::memory_order_relaxed);
    slot_ = index;
    do {
      me_ = shared().last_incarnation.fetch_add(1, std::memory_order_relaxed) + 1;
    } while (me_ == 0);
    slot.incarnation.store(me_, std::memory_order_release);
    return {};
  }
  VERBATIM_WARN("the device cannot be opened: %u processes of this user have devices open, which is the limit",
                kMaxProcesses);
  return system_error("join", EUSERS);
}

Status HostRegistry::back_staging() const {
  return back_with_memory(fd_, offsetof(Registry, staging_bytes), sizeof shared().staging_bytes);
}

void HostRegistry::free_slot(ProcessSlot& slot) {
  const Incarnation owner = slot.incarnation.load(std::memory_order_relaxed);
  std::atomic<std::uint32_t>& departures = shared().departures;
  departures.store(departures.load(std::memory_order_relaxed) | 1U, std::memory_order_release);
  if (is_linked()) {
    path_.assign(name_).append(".").append(std::to_string(owner));
    if (const Result<Mapping> segment = map_segment(path_); segment) {
      add_traffic(shared().ended_traffic, *segment->as<Segment>());
    }
    ::unlink(path_.c_str());
  }
  for (QpnEntry& entry : shared().qpns) {
    const std::uint64_t key = entry.key.load(std::memory_order_relaxed);
    if (key != 0 && static_cast<Incarnation>(key) == owner) entry.key.store(0, std::memory_order_release);
  }
  slot.incarnation.store(0, std::memory_order_release);
  departures.fetch_add(1, std::memory_order_release);
}

void HostRegistry::reap_dead_processes() {
  for (std::uint32_t index = 0; index < kMaxProcesses; ++index) {
    ProcessSlot& slot = shared().slots[index];
    const Incarnation owner = slot.incarnation.load(std::memory_order_relaxed);
    if (owner == 0 || owner == me_) continue;  // F_GETLK does not report a lock of this process itself
    if (!is_slot_held(fd_.get(), index)) free_slot(slot);
  }
}

void HostRegistry::leave() {
  FileLock lock(*this);
  if (has_left_) return;
  has_left_ = true;
  free_slot(shared().slots[slot_]);
  set_slot_lock(fd_.get(), slot_, F_UNLCK);
  reap_dead_processes();
  // Without memory they are left for the next process that starts or ends.
  static_cast<void>(with_memory([&] { remove_abandoned_files(name_); }));
  for (const ProcessSlot& slot : shared().slots) {
    if (slot.incarnation.load(std::memory_order_relaxed) != 0) return;
  }
  if (is_linked() && shared().clock.held == 0) ::unlink(name_.c_str());
}

HostRegistry::~HostRegistry() {
  if (me_ != 0) leave();
}

bool HostRegistry::is_linked() const {
  struct stat info {};
  return ::fstat(fd_.get(), &info) == 0 && info.st_nlink != 0;
}

Result<std::uint32_t> HostRegistry::allocate_qpn(std::uint32_t index) {
  FileLock lock(*this);
  if (const std::optional<std::uint32_t> qpn = take_qpn(index)) return *qpn;
  reap_dead_processes();
  if (const std::optional<std::uint32_t> qpn = take_qpn(index)) return *qpn;
  return system_error("allocate_qpn", ENOMEM);
}

std::optional<std::uint32_t> HostRegistry::take_qpn(std::uint32_t index) {
  std::uint32_t qpn = shared().last_qpn.load(std::memory_order_relaxed);
  for (std::uint32_t tried = 0; tried < kMaxHostQps; ++tried) {
    qpn = (qpn + 1) & k24Bits;
    if (qpn < kFirstQpn) qpn = kFirstQpn;
    QpnEntry& entry = shared().qpns[qpn % kMaxHostQps];
    if (entry.key.load(std::memory_order_relaxed) != 0) continue;
    shared().last_qpn.store(qpn, std::memory_order_relaxed);
    entry.location.store(std::uint64_t{slot_} << 32 | index, std::memory_order_relaxed);
    entry.key.store(std::uint64_t{qpn} << 32 | me_, std::memory_order_release);
    return qpn;
  }
  return std::nullopt;
}

void HostRegistry::release_qpn(std::uint32_t qpn) {
  FileLock lock(*this);
  QpnEntry& entry = shared().qpns[qpn % kMaxHostQps];
  if (entry.key.load(std::memory_order_relaxed) == (std::uint64_t{qpn} << 32 | me_)) {
    entry.key.store(0, std::memory_order_release);
  }
}

std::optional<QpLocation> HostRegistry::find_qpn(std::uint32_t qpn) const {
  const QpnEntry& entry = shared().qpns[qpn % kMaxHostQps];
  const std::uint64_t key = entry.key.load(std::memory_order_acquire);
  if (key >> 32 != qpn || key == 0) return std::nullopt;
  const std::uint64_t location = entry.location.load(std::memory_order_acquire);
  if (entry.key.load(std::memory_order_acquire) != key) return std::nullopt;
  return QpLocation{static_cast<Incarnation>(key), static_cast<std::uint32_t>(location >> 32),
                    static_cast<std::uint32_t>(location)};
}

bool HostRegistry::shares_pid_namespace(std::uint32_t slot) const {
  const std::uint64_t own = shared().slots[slot_].pid_namespace.load(std::memory_order_relaxed);
  return slot == slot_ || (own != 0 && own == shared().slots[slot].pid_namespace.load(std::memory_order_relaxed));
}

Reach HostRegistry::reach(std::uint32_t qpn) const {
  const std::optional<QpLocation> location = find_qpn(qpn);
  if (!location) return Reach::kUnknownQp;
  const auto is_threaded = [&](std::uint32_t slot) {
    return shared().slots[slot].is_threaded.load(std::memory_order_relaxed) != 0;
  };
  if (shares_pid_namespace(location->slot) || (is_threaded(slot_) && is_threaded(location->slot))) return Reach::kYes;
  return Reach::kNoCopy;
}

std::optional<FaultCommand> HostRegistry::next_fault_command() const {
  const SharedFaults& faults = shared().faults;
  for (;;) {
    const std::uint32_t sequence = faults.sequence.load(std::memory_order_acquire);
    if (sequence == shared().slots[slot_].faults_applied.load(std::memory_order_relaxed)) return std::nullopt;
    if (sequence % 2 != 0) return std::nullopt;  // the sender requests service again when the text is complete
    FaultCommand command{sequence, std::string(faults.text, std::min(faults.bytes, kMaxFaultBytes))};
    const Incarnation target = faults.target.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (faults.sequence.load(std::memory_order_relaxed) != sequence) continue;
    if (target != 0 && target != me_) command.text.clear();
    return command;
  }
}

void HostRegistry::acknowledge_fault_command(std::uint32_t sequence) {
  shared().slots[slot_].faults_applied.store(sequence, std::memory_order_release);
}

Result<std::uint32_t> HostRegistry::send_fault_command(std::string_view text, Incarnation target) {
  if (text.size() > kMaxFaultBytes) return system_error("send_fault_command", E2BIG);
  FileLock lock(*this);
  if (!set_slot_lock(fd_.get(), kSenderLock, F_WRLCK)) return system_error("send_fault_command", EBUSY);
  SharedFaults& faults = shared().faults;
  // A sender that died while it wrote has left an odd number.
  const std::uint32_t before = faults.sequence.load(std::memory_order_relaxed) & ~1U;
  faults.sequence.store(before + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  faults.target.store(target, std::memory_order_relaxed);
  faults.bytes = static_cast<std::uint32_t>(text.size());
  std::memcpy(faults.text, text.data(), text.size());
  faults.sequence.store(before + 2, std::memory_order_release);
  return before + 2;
}

bool HostRegistry::has_applied_fault_command(std::uint32_t slot, std::uint32_t sequence) const {
  return static_cast<std::int32_t>(shared().slots[slot].faults_applied.load(std::memory_order_acquire) - sequence) >= 0;
}

pid_t HostRegistry::pid_of(std::uint32_t slot, Incarnation incarnation) const {
  const ProcessSlot& entry = shared().slots[slot];
  const pid_t pid = entry.pid.load(std::memory_order_relaxed);
  return entry.incarnation.load(std::memory_order_acquire) == incarnation ? pid : 0;
}

bool HostRegistry::is_alive(std::uint32_t slot, Incarnation incarnation) const {
  if (incarnation == me_) return true;
  return shared().slots[slot].incarnation.load(std::memory_order_acquire) == incarnation &&
         is_slot_held(fd_.get(), slot);
}

std::vector<RunningProcess> HostRegistry::other_processes() const {
  std::vector<RunningProcess> running;
  for (std::uint32_t slot = 0; slot < kMaxProcesses; ++slot) {
    const Incarnation incarnation = shared().slots[slot].incarnation.load(std::memory_order_acquire);
    if (incarnation == 0 || incarnation == me_ || !is_alive(slot, incarnation)) continue;
    const pid_t pid = pid_of(slot, incarnation);
    if (pid != 0) running.push_back({slot, incarnation, pid});
  }
  return running;
}

bool HostRegistry::is_alive(Incarnation incarnation) const {
  for (std::uint32_t slot = 0; slot < kMaxProcesses; ++slot) {
    if (shared().slots[slot].incarnation.load(std::memory_order_acquire) == incarnation) {
      return is_alive(slot, incarnation);
    }
  }
  return false;
}

}  // namespace verbatim::softverbs
