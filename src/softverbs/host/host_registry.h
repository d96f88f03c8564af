// What all softverbs processes of a user share: the list of processes, and the owner of each QP number. The registry is
// a file while any of these processes runs, in /dev/shm for the processes of one PID namespace, or in the directory
// that SOFTVERBS_DIRECTORY names. The last process removes it; each process that starts or ends removes what dead
// processes left, also those of other namespaces.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "softverbs/host/layout.h"
#include "softverbs/host/shm_file.h"

namespace verbatim::softverbs {

struct QpLocation {
  Incarnation incarnation;
  std::uint32_t slot;
  std::uint32_t index;
};

struct FaultCommand {
  std::uint32_t sequence;
  std::string text;
};

struct RunningProcess {
  std::uint32_t slot;
  Incarnation incarnation;
  pid_t pid;
};

enum class Reach {
  kYes,
  kUnknownQp,  // no process of this registry has the QP
  kNoCopy,  // that process is in another PID namespace or in an unknown one, and not both engines have threads to copy
};

// The path of the registry's file.
std::string registry_name(const Settings& settings);
// An inode number; 0 when it is unknown (no /proc), and then two processes may be in different ones.
std::uint64_t own_pid_namespace();
inline std::string segment_name(const std::string& registry, Incarnation incarnation) {
  return registry + "." + std::to_string(incarnation);
}
Result<Mapping> map_segment(const std::string& name);
bool is_slot_held(int registry_fd, std::uint32_t slot);

// Thread-safe. Process owns one; softverbs-control opens one of its own.
class HostRegistry {
 public:
  // Adds this process. EUSERS: every slot belongs to a running process.
  static Result<std::unique_ptr<HostRegistry>> open(const Settings& settings);
  // Calls leave().
  ~HostRegistry();
  HostRegistry(const HostRegistry&) = delete;
  HostRegistry& operator=(const HostRegistry&) = delete;

  // Frees the slot and the QP numbers, unlinks the segment, and the registry too when no process is left and the clock
  // is not held. Has no effect after the first call. Needs no memory.
  void leave();

  Incarnation me() const { return me_; }
  std::uint32_t slot() const { return slot_; }
  std::string segment_name(Incarnation incarnation) const { return softverbs::segment_name(name_, incarnation); }

  // ENOMEM: all QP numbers of the host are in use.
  Result<std::uint32_t> allocate_qpn(std::uint32_t index);
  void release_qpn(std::uint32_t qpn);
  std::optional<QpLocation> find_qpn(std::uint32_t qpn) const;
  // Whether this process and the owner of the QP can send to each other. The answer is the same at both.
  Reach reach(std::uint32_t qpn) const;
  bool shares_pid_namespace(std::uint32_t slot) const;  // false when it is unknown
  std::string_view directory() const { return std::string_view(name_).substr(0, name_.rfind('/')); }

  // A fault script sent to this process that it has not acknowledged yet.
  std::optional<FaultCommand> next_fault_command() const;
  void acknowledge_fault_command(std::uint32_t sequence);
  // Stores a script of at most kMaxFaultBytes for one process, for all processes when 0. The caller must then call
  // request_service for them. EBUSY: another program has sent a script and has not ended yet.
  Result<std::uint32_t> send_fault_command(std::string_view text, Incarnation target);
  bool has_applied_fault_command(std::uint32_t slot, std::uint32_t sequence) const;

  // Shared by the ports with a rate; see link.h.
  VirtualClock& clock() const { return shared().clock; }

  // The buffers through which copies of GPU memory pass. back_staging() must be called before they are accessed.
  GpuStaging& gpu_staging() const { return shared().gpu_staging; }
  std::byte* staging_bytes(std::uint32_t buffer) const { return shared().staging_bytes[buffer]; }
  Status back_staging() const;

  // 0: that process is not registered.
  pid_t pid_of(std::uint32_t slot, Incarnation incarnation) const;
  bool is_alive(std::uint32_t slot, Incarnation incarnation) const;  // one system call
  bool is_alive(Incarnation incarnation) const;

  // The running processes in the order of their slots, without this process.
  std::vector<RunningProcess> other_processes() const;

 private:
  class FileLock;

  HostRegistry(std::string name, UniqueFd fd, Mapping mapping)
      : name_(std::move(name)), fd_(std::move(fd)), mapping_(std::move(mapping)) {
    constexpr std::size_t kMaxDigits = 10;
    path_.reserve(name_.size() + 1 + kMaxDigits);
  }

  Registry& shared() const { return *mapping_.as<Registry>(); }
  Status join(const Settings& settings);
  // False once the file was removed: processes of another registry may use its names now.
  bool is_linked() const;
  void free_slot(ProcessSlot& slot) VERBATIM_REQUIRES(mutex_);
  void reap_dead_processes() VERBATIM_REQUIRES(mutex_);
  std::optional<std::uint32_t> take_qpn(std::uint32_t index) VERBATIM_REQUIRES(mutex_);

  const std::string name_;
  const UniqueFd fd_;
  const Mapping mapping_;
  Incarnation me_ = 0;  // 0: not joined
  std::uint32_t slot_ = 0;
  bool has_left_ VERBATIM_GUARDED_BY(mutex_) = false;
  std::string path_ VERBATIM_GUARDED_BY(mutex_);  // of a segment: leave() needs no memory for it
  Mutex mutex_;  // excludes threads of this process: flock() belongs to the open file, which they share
};

}  // namespace verbatim::softverbs
