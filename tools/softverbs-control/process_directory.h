// The softverbs processes of this user in one namespace (SOFTVERBS_NAMESPACE). This program opens no device, but it
// joins the registry as those processes do, so that it can take shared locks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "softverbs/host/host_registry.h"
#include "softverbs/host/layout.h"
#include "softverbs/host/shm_file.h"

namespace verbatim::control {

// A running process and its segment. The segment stays readable after the process has ended.
class TargetProcess {
 public:
  TargetProcess(softverbs::RunningProcess process, softverbs::Mapping segment)
      : process_(process), segment_(std::move(segment)) {}

  std::uint32_t slot() const { return process_.slot; }
  pid_t pid() const { return process_.pid; }
  softverbs::Incarnation incarnation() const { return process_.incarnation; }
  softverbs::Segment& segment() const { return *segment_.as<softverbs::Segment>(); }
  const char* program() const { return segment().program; }

 private:
  softverbs::RunningProcess process_;
  softverbs::Mapping segment_;
};

class ProcessDirectory {
 public:
  // Throws Failure.
  ProcessDirectory();
  ~ProcessDirectory();
  ProcessDirectory(const ProcessDirectory&) = delete;
  ProcessDirectory& operator=(const ProcessDirectory&) = delete;

  softverbs::HostRegistry& registry() { return *registry_; }
  softverbs::Incarnation me() const { return registry_->me(); }

  // In the order in which they joined. A process that is starting or ending may be missing.
  std::vector<TargetProcess> processes() const;
  // The processes with these pids; all when `pids` is empty. Throws Failure for an unknown pid.
  std::vector<TargetProcess> processes(const std::vector<pid_t>& pids) const;

 private:
  std::unique_ptr<softverbs::HostRegistry> registry_;
};

}  // namespace verbatim::control
