// The one thing that all softverbs processes of a user share: who is there, and which process owns which QP number.
// Held in /dev/shm while any of them runs; the last to leave removes it, and whoever joins buries the dead.
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

// Thread-safe.
class HostRegistry {
 public:
  // Enters this process. EUSERS: every slot belongs to a live process.
  static Result<std::unique_ptr<HostRegistry>> open(const Settings& settings);
  // Leaves, unless that has been done.
  ~HostRegistry();
  HostRegistry(const HostRegistry&) = delete;
  HostRegistry& operator=(const HostRegistry&) = delete;

  // Frees slot and QP numbers, unlinks the segment, and the registry itself when nobody is left and its clock runs.
  void leave();

  Incarnation me() const { return me_; }
  std::uint32_t slot() const { return slot_; }
  std::string segment_name(Incarnation incarnation) const { return name_ + "." + std::to_string(incarnation); }

  // ENOMEM: all numbers of the host are taken.
  Result<std::uint32_t> allocate_qpn(std::uint32_t index);
  void release_qpn(std::uint32_t qpn);
  std::optional<QpLocation> find_qpn(std::uint32_t qpn) const;

  // A fault script that was sent to this process since it joined, and that it has not acknowledged.
  std::optional<FaultCommand> next_fault_command() const;
  void acknowledge_fault_command(std::uint32_t sequence);
  // The other side: leaves a script of at most kMaxFaultBytes for process `pid`, for all when 0; whoever shall
  // take it must be called. EBUSY: another program sends until it ends.
  Result<std::uint32_t> send_fault_command(std::string_view text, pid_t pid);
  bool has_applied_fault_command(std::uint32_t slot, std::uint32_t sequence) const;

  // Of the ports with a rate; see link.h.
  VirtualClock& clock() const { return shared().clock; }

  // 0: not registered.
  pid_t pid_of(std::uint32_t slot, Incarnation incarnation) const;
  bool is_alive(std::uint32_t slot, Incarnation incarnation) const;  // one system call
  bool is_alive(Incarnation incarnation) const;

  // Those that run at the moment, in the order of their slots; this one is not among them.
  std::vector<RunningProcess> other_processes() const;

 private:
  class FileLock;

  HostRegistry(std::string name, UniqueFd fd, Mapping mapping)
      : name_(std::move(name)), fd_(std::move(fd)), mapping_(std::move(mapping)) {}

  Registry& shared() const { return *mapping_.as<Registry>(); }
  Status join();
  // False once somebody removed the file: its names may belong to another registry's processes by now.
  bool is_linked() const;
  void free_slot(ProcessSlot& slot) VERBATIM_REQUIRES(mutex_);
  void reap_dead_processes() VERBATIM_REQUIRES(mutex_);
  std::optional<std::uint32_t> take_qpn(std::uint32_t index) VERBATIM_REQUIRES(mutex_);

  const std::string name_;
  const UniqueFd fd_;
  const Mapping mapping_;
  Incarnation me_ = 0;  // 0: not entered
  std::uint32_t slot_ = 0;
  bool has_left_ VERBATIM_GUARDED_BY(mutex_) = false;
  Mutex mutex_;  // flock() is one per open file: threads of one process need this beside it
};

}  // namespace verbatim::softverbs
