#include "softverbs-control/host.h"

#include <algorithm>
#include <fstream>

#include "softverbs-control/subcommand.h"

namespace verbatim::softverbs {
namespace {

// The program's one Host, for those who wait for a shared lock.
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

std::string Target::program() const {
  std::ifstream file("/proc/" + std::to_string(pid()) + "/comm");
  std::string name;
  return std::getline(file, name) ? name : "?";
}

Host::Host() {
  const softverbs::Settings* settings = softverbs::settings();
  if (settings == nullptr) throw Failure("a SOFTVERBS_* variable is malformed");
  Result<std::unique_ptr<HostRegistry>> registry = HostRegistry::open(*settings);
  if (!registry) throw Failure("the registry in /dev/shm cannot be opened: " + to_string(registry.error()));
  registry_ = *std::move(registry);
  softverbs::g_registry = registry_.get();
}

Host::~Host() {
  softverbs::g_registry = nullptr;
}

std::vector<Target> Host::processes() const {
  std::vector<Target> found;
  for (const RunningProcess& process : registry_->others()) {
    Result<UniqueFd> fd = softverbs::open_shm(registry_->segment_name(process.incarnation), OpenMode::kExisting);
    if (!fd) continue;
    Result<Mapping> mapping = softverbs::map_shm(*fd, softverbs::kSegmentBytes);
    // Without memory under it a segment's first pages may not be touched: its process is just starting.
    if (!mapping || !softverbs::is_backed(*fd) || mapping->as<Segment>()->incarnation != process.incarnation) continue;
    found.emplace_back(process, *std::move(mapping));
  }
  std::sort(found.begin(), found.end(),
            [](const Target& a, const Target& b) { return a.incarnation() < b.incarnation(); });
  return found;
}

std::vector<Target> Host::processes(const std::vector<pid_t>& pids) const {
  std::vector<Target> all = processes();
  if (pids.empty()) return all;
  for (const pid_t pid : pids) {
    if (std::none_of(all.begin(), all.end(), [&](const Target& target) { return target.pid() == pid; })) {
      throw Failure("process " + std::to_string(pid) + " holds no softverbs device in this namespace");
    }
  }
  std::erase_if(all,
                [&](const Target& target) { return std::find(pids.begin(), pids.end(), target.pid()) == pids.end(); });
  return all;
}

}  // namespace verbatim::control
