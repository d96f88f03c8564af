// The softverbs processes of this user in one namespace (SOFTVERBS_NAMESPACE), as a program sees them that holds no
// device itself. It enters the registry as they do, so that it may take their shared locks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "softverbs/layout.h"
#include "softverbs/registry.h"
#include "softverbs/shm_file.h"

namespace verbatim::control {

// A running process and its segment, which stays readable when the process ends.
class Target {
 public:
  Target(softverbs::RunningProcess process, softverbs::Mapping segment)
      : process_(process), segment_(std::move(segment)) {}

  std::uint32_t slot() const { return process_.slot; }
  pid_t pid() const { return process_.pid; }
  softverbs::Incarnation incarnation() const { return process_.incarnation; }
  softverbs::Segment& segment() const { return *segment_.as<softverbs::Segment>(); }
  std::string program() const;  // its name, "?" when it has just ended

 private:
  softverbs::RunningProcess process_;
  softverbs::Mapping segment_;
};

class Host {
 public:
  // Throws Failure.
  Host();
  ~Host();
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  softverbs::HostRegistry& registry() { return *registry_; }
  softverbs::Incarnation me() const { return registry_->me(); }

  // In the order in which they joined. A process that is just starting or ending may be missing.
  std::vector<Target> processes() const;
  // Those with these pids, all when `pids` is empty. Throws Failure for a pid that is not there.
  std::vector<Target> processes(const std::vector<pid_t>& pids) const;

 private:
  std::unique_ptr<softverbs::HostRegistry> registry_;
};

}  // namespace verbatim::control
