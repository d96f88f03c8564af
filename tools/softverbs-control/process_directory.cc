#include "softverbs-control/process_directory.h"

#include <algorithm>

#include "softverbs-control/subcommand.h"

namespace verbatim::softverbs {
namespace {

// The registry of the program's only ProcessDirectory, for waiters of a shared lock.
HostRegistry* g_registry = nullptr;

}  // namespace

bool is_alive(Incarnation incarnation) {
  return g_registry == nullptr || g_registry->is_alive(incarnation);
}

}  // namespace verbatim::softverbs

namespace verbatim::control {

using softverbs::HostRegistry;
using softverbs::Mapping;
using softverbs::OpenMode;
using softverbs::RunningProcess;
using softverbs::Segment;

ProcessDirectory::ProcessDirectory() {
  const softverbs::Settings* settings = softverbs::settings();
  if (settings == nullptr) throw Failure("a SOFTVERBS_* variable is malformed: see the line before this one");
  Result<std::unique_ptr<HostRegistry>> registry = HostRegistry::open(*settings);
  if (!registry) throw Failure("the registry cannot be opened: " + to_string(registry.error()));
  registry_ = *std::move(registry);
  softverbs::g_registry = registry_.get();
}

ProcessDirectory::~ProcessDirectory() {
  softverbs::g_registry = nullptr;
}

std::vector<TargetProcess> ProcessDirectory::processes() const {
  std::vector<TargetProcess> found;
  for (const RunningProcess& process : registry_->other_processes()) {
    Result<UniqueFd> fd = softverbs::open_shm(registry_->segment_name(process.incarnation), OpenMode::kExisting);
    if (!fd) continue;
    Result<Mapping> mapping = softverbs::map_shm(*fd, softverbs::kSegmentBytes);
    // A segment without memory belongs to a process that is starting. An access would allocate its first pages.
    if (!mapping || !softverbs::is_backed(*fd) || mapping->as<Segment>()->incarnation != process.incarnation) continue;
    found.emplace_back(process, *std::move(mapping));
  }
  std::sort(found.begin(), found.end(),
            [](const TargetProcess& a, const TargetProcess& b) { return a.incarnation() < b.incarnation(); });
  return found;
}

std::vector<TargetProcess> ProcessDirectory::processes(const std::vector<pid_t>& pids) const {
  std::vector<TargetProcess> all = processes();
  if (pids.empty()) return all;
  for (const pid_t pid : pids) {
    if (std::none_of(all.begin(), all.end(), [&](const TargetProcess& target) { return target.pid() == pid; })) {
      throw Failure("process " + std::to_string(pid) + " holds no softverbs device in this namespace");
    }
  }
  std::erase_if(all, [&](const TargetProcess& target) {
    return std::find(pids.begin(), pids.end(), target.pid()) == pids.end();
  });
  return all;
}

}  // namespace verbatim::control
