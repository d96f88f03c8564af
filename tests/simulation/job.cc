#include "simulation/job.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <iterator>
#include <mutex>
#include <new>
#include <numeric>
#include <random>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "base/unique_fd.h"
#include "netapi/log.h"
#include "netapi/plugin.h"
#include "simulation/messages.h"
#include "simulation/scheduler.h"
#include "support/counted_verbs/modifications.h"

namespace simulation {
namespace {

// A verb is a step: another thread may go on before it. What a thread posts, others poll for.
void step_before_verb(const char* verb) {
  if (!is_simulated()) return;
  step(verb);
  record(verb, 0);
  if (std::string_view(verb).starts_with("ibv_post_")) note_progress();
}

std::string verbs_alive() {
  std::string text;
  const verbatim::test::VerbsCounters& counters = verbatim::test::verbs_counters();
  for (std::size_t i = 0; i < counters.alive.size(); ++i) {
    if (counters.alive[i] == 0) continue;
    text.append(" ").append(verbatim::test::kVerbsObjectNames[i]).append(" ").append(std::to_string(counters.alive[i]));
  }
  return text;
}

constexpr std::size_t kGroups = 24;
constexpr std::size_t kMaxBytes = 200'000;
constexpr std::size_t kMaxConnections = 4;
constexpr std::size_t kMaxMembers = 8;  // of a receive, as NCCL has at most

// Before the run, and so not with its numbers. The same on all machines.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}

  std::size_t below(std::size_t bound) { return random_() % bound; }

  std::size_t size() {
    switch (below(8)) {
      case 0:
        return 0;
      case 1:
        return below(kMaxBytes);
      case 2:
        return below(20'000);
      default:
        return 1 + below(2'000);
    }
  }

  Group group() {
    Group drawn;
    drawn.sizes.resize(1 + below(kMaxMembers));
    for (std::size_t& size : drawn.sizes) size = this->size();
    drawn.order.resize(drawn.sizes.size());
    std::iota(drawn.order.begin(), drawn.order.end(), std::size_t{0});
    for (std::size_t i = drawn.order.size(); i > 1; --i) std::swap(drawn.order[i - 1], drawn.order[below(i)]);
    drawn.spare = below(2) * below(500);
    return drawn;
  }

 private:
  std::mt19937_64 random_;
};

// Returns what was not as it must be.
std::vector<std::string> connect_and_exchange(netapi::Plugin& net, void* context, const Job& job, std::size_t process) {
  netapi::Properties properties;
  if (net.properties(0, &properties) != nccl::Result::kSuccess || properties.max_recvs < int{kMaxMembers}) {
    return {"getProperties failed, or maxRecvs is too low"};
  }
  std::deque<Connection> connections;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < job.connections.size(); ++i) {
    const ConnectionPlan& plan = job.connections[i];
    if (plan.receiver != process && plan.sender != process) continue;
    Connection& connection = connections.emplace_back(net, context, i, plan, job.handles[i]);
    if (plan.receiver == process) threads.emplace_back([&] { connection.receive(); });
    if (plan.sender == process) threads.emplace_back([&] { connection.send(); });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<std::string> problems;
  for (const Connection& connection : connections) {
    problems.insert(problems.end(), connection.problems().begin(), connection.problems().end());
    record("bytes checked", static_cast<std::int64_t>(connection.bytes_checked()));
  }
  return problems;
}

Handle* make_handles() {
  void* const memory =
      mmap(nullptr, sizeof(Handle[kMaxConnections]), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return new (memory) Handle[kMaxConnections];
}

// The files of softverbs. In /dev/shm other processes look at them when they start or end, and lock them for a moment.
// The numbers of QPs follow from the name, which therefore is the same whenever this program runs.
class Directory {
 public:
  Directory() {
    const char* const space = std::getenv("SOFTVERBS_NAMESPACE");
    if (space != nullptr) path_.append("-").append(space);
    ::mkdir(path_.c_str(), S_IRWXU);
    lock_ = verbatim::UniqueFd(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (lock_.get() < 0 || ::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) fail(path_);
  }
  ~Directory() {
    std::error_code ignored;
    if (owner_ == ::getpid()) {
      std::filesystem::remove_all(path_, ignored);
    } else {
      static_cast<void>(lock_.release());  // a process of a run has closed it, and has another file of this number
    }
  }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  // An empty one, for one run.
  std::string make(std::uint64_t number) const {
    const std::string made = path_ + "/" + std::to_string(number);
    std::error_code ignored;
    std::filesystem::remove_all(made, ignored);
    if (::mkdir(made.c_str(), S_IRWXU) != 0) fail(made);
    return made;
  }

 private:
  [[noreturn]] static void fail(const std::string& path) {
    std::fprintf(stderr, "%s cannot be used: %s. Next: if another user or simulation has it, set SOFTVERBS_NAMESPACE\n",
                 path.c_str(), std::strerror(errno));
    std::exit(1);
  }

  std::string path_ = "/dev/shm/simulation";
  verbatim::UniqueFd lock_;
  const pid_t owner_ = ::getpid();
};

// What was set for other programs must not change the run.
void unset_others() {
  std::vector<std::string> names;
  for (char** each = environ; *each != nullptr; ++each) {
    const std::string_view name = std::string_view(*each).substr(0, std::string_view(*each).find('='));
    const bool stays = name == "VERBATIM_VERBS_LIBRARY" || name == "SOFTVERBS_FAULTS" || name == "SOFTVERBS_NAMESPACE";
    const bool is_read = name.starts_with("VERBATIM_") || name.starts_with("NCCL_") || name.starts_with("SOFTVERBS_");
    if (is_read && !stays) names.emplace_back(name);
  }
  for (const std::string& name : names) ::unsetenv(name.c_str());
}

void set_environment(std::uint64_t seed, std::uint64_t addresses) {
  static const Directory directory;
  unset_others();
  const auto set = [](const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); };
  set("SOFTVERBS_ENGINE", "inline");
  set("SOFTVERBS_DMABUF", "1");
  set("SOFTVERBS_LOCK_LIMIT", "none");
  set("SOFTVERBS_SEED", std::to_string(seed % 1'000'000));
  set("SOFTVERBS_DIRECTORY", directory.make(addresses));
  set("VERBATIM_STATE_DIR", "none");  // its socket is of another family
  set("VERBATIM_QPS_PER_CONNECTION", seed % 2 == 0 ? "1" : "2");
  set("VERBATIM_COMPLETION", seed % 3 == 0 ? "atomic" : "imm");
}

}  // namespace

Job draw_job(std::uint64_t seed, const std::string& plugin, std::uint64_t addresses) {
  set_environment(seed, addresses);
  Draw draw(seed);
  static Handle* const handles = make_handles();
  for (Handle* each = handles; each != handles + kMaxConnections; ++each) each->is_there = false;
  Job job{.plugin = plugin, .processes = 1 + draw.below(3), .connections = {}, .handles = handles};
  job.connections.resize(1 + draw.below(kMaxConnections));
  for (ConnectionPlan& connection : job.connections) {
    connection.receiver = draw.below(job.processes);
    connection.sender = draw.below(job.processes);
    connection.receives_in_gpu_memory = draw.below(2) == 0;
    std::generate_n(std::back_inserter(connection.groups), kGroups, [&] { return draw.group(); });
  }
  return job;
}

bool run_job(const Job& job, std::size_t process) {
  std::vector<std::string> problems;
  std::mutex mutex;
  netapi::set_log_callback([&](const netapi::LogLine& line) {
    if (job.prints_log) std::fprintf(stderr, "  log: %s\n", line.text.c_str());
    if (line.level != nccl::DebugLogLevel::kWarn) return;
    const std::lock_guard lock(mutex);
    problems.push_back("a warning: " + line.text);
  });
  verbatim::test::verbs_counters().before = step_before_verb;
  netapi::Opened opened = netapi::open_plugin(job.plugin);
  void* context = nullptr;
  if (opened.plugin == nullptr) {
    problems.push_back(opened.error);
  } else if (opened.plugin->init(1, {}, &context) != nccl::Result::kSuccess) {
    problems.emplace_back("init failed");
  } else {
    const std::vector<std::string> found = connect_and_exchange(*opened.plugin, context, job, process);
    if (opened.plugin->finalize(context) != nccl::Result::kSuccess) problems.emplace_back("finalize failed");
    problems.insert(problems.end(), found.begin(), found.end());
  }
  opened.plugin.reset();
  netapi::set_log_callback({});
  if (const std::string alive = verbs_alive(); !alive.empty()) problems.push_back("leak of verbs objects:" + alive);
  for (const std::string& problem : problems) std::fprintf(stderr, "%s\n", problem.c_str());
  return problems.empty();
}

}  // namespace simulation
