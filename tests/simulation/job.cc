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
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "base/unique_fd.h"
#include "netapi/log.h"
#include "netapi/plugin.h"
#include "netapi/rma.h"
#include "simulation/device.h"
#include "simulation/job_parts.h"
#include "simulation/memory.h"
#include "simulation/messages.h"
#include "simulation/puts.h"
#include "simulation/scheduler.h"
#include "simulation/tcp.h"
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

// One process of a job, with the tables that it needs. Its problems are in `problems`.
class Process {
 public:
  Process(const Job& job, std::size_t number)
      : job_(job), number_(number), call_("process " + std::to_string(number), [&job, number] {
          return job.faults.may_end_job || job.faults.qp.process == number;
        }) {}

  void run() {
    void* context = nullptr;
    const bool needs_net = !job_.connections.empty() || job_.ports[number_] > 1;
    bool ok = (!needs_net || open(net_, netapi::open_plugin(job_.plugin))) &&
              (job_.puts.ranks == 0 || open(rma_, netapi::open_rma_plugin(job_.plugin, job_.puts.version)));
    const Faults::RefusedMemory& memory = job_.faults.memory;
    if (ok && memory.nth != 0 && memory.process == number_) refuse_memory(job_.plugin, memory.nth);
    ok = ok && (!needs_net || begin_net(context));
    if (ok) exchange(context);
    if (!ok) give_up();
    if (context != nullptr) call_("table finalize", [&] { return net_->finalize(context); });
    add(call_);
  }
  const std::vector<std::string>& problems() const { return problems_; }
  // A call that may.
  bool has_failed() const { return has_failed_; }

 private:
  template <typename Plugin, typename Opened>
  bool open(std::unique_ptr<Plugin>& plugin, Opened opened) {
    plugin = std::move(opened.plugin);
    if (plugin == nullptr) call_.add_problem(opened.error);
    return plugin != nullptr;
  }

  bool begin_net(void*& context) {
    if (!call_(
            "table init", [&] { return net_->init(1, {}, &context); }, job_.faults.may_leave_no_port()))
      return false;
    netapi::Properties properties;
    if (!call_("table getProperties", [&] { return net_->properties(0, &properties); })) return false;
    if (properties.max_recvs < int{kMaxMembers}) call_.add_problem("maxRecvs is too low");
    int count = 0;
    if (!call_("table devices", [&] { return net_->devices(&count); })) return false;
    // A port whose link is down is left out.
    const std::size_t ports = std::min<std::size_t>(job_.ports[number_], static_cast<std::size_t>(count));
    if (ports < job_.ports[number_] && !job_.faults.may_leave_no_port()) call_.add_problem("a port is left out");
    std::vector<int> devices(ports);
    std::iota(devices.begin(), devices.end(), 0);
    int merged = 0;
    if (devices.size() > 1 && !call_("table makeVDevice", [&] { return net_->make_vdevice(devices, &merged); })) {
      return false;
    }
    if (job_.uses_merged) device_ = merged;
    return true;
  }

  // The others need not wait for this process.
  void give_up() {
    for (const ConnectionPlan& plan : job_.connections) {
      if (plan.receiver == number_ || plan.sender == number_) job_.handles[plan.number].is_given_up = true;
    }
    job_.handles[kMaxConnections + number_].is_given_up = true;
    note_progress();
  }

  void exchange(void* context) {
    std::deque<Connection> connections;
    std::optional<Rank> rank;
    std::vector<std::thread> threads;
    for (const ConnectionPlan& plan : job_.connections) {
      if (plan.receiver != number_ && plan.sender != number_) continue;
      Connection& connection =
          connections.emplace_back(*net_, context, device_, plan, job_.faults, job_.handles[plan.number]);
      if (plan.receiver == number_) threads.emplace_back([&] { connection.receive(); });
      if (plan.sender == number_) threads.emplace_back([&] { connection.send(); });
    }
    if (job_.puts.ranks != 0) {
      rank.emplace(*rma_, job_.puts, number_, job_.faults, job_.handles + kMaxConnections);
      threads.emplace_back([&] { rank->run(); });
    }
    for (std::thread& thread : threads) thread.join();
    for (const Connection& connection : connections) {
      add(connection.receiver());
      add(connection.sender());
      record("bytes checked", static_cast<std::int64_t>(connection.bytes_checked()));
    }
    if (has_failed_) note_end_at_once();
    if (!rank) return;
    add(rank->calls());
    record("bytes checked", static_cast<std::int64_t>(rank->bytes_checked()));
  }

  void add(const Calls& calls) {
    problems_.insert(problems_.end(), calls.problems().begin(), calls.problems().end());
    has_failed_ = has_failed_ || calls.has_failed();
  }

  const Job& job_;
  const std::size_t number_;
  std::unique_ptr<netapi::Plugin> net_;
  std::unique_ptr<netapi::RmaPlugin> rma_;
  int device_ = 0;  // of the connections
  Calls call_;
  std::vector<std::string> problems_;
  bool has_failed_ = false;
};

constexpr std::size_t kHandles = kMaxConnections + kMostProcesses;

Handle* make_handles() {
  void* const memory =
      mmap(nullptr, sizeof(Handle[kHandles]), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return new (memory) Handle[kHandles];
}

// The files of softverbs. In /dev/shm other processes look at them when they start or end, and lock them for a moment.
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
  std::string make() const {
    std::string made = path_ + "/run";
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
    const bool stays = name == "VERBATIM_VERBS_LIBRARY" || name == "SOFTVERBS_FAULTS";
    const bool is_read = name.starts_with("VERBATIM_") || name.starts_with("NCCL_") || name.starts_with("SOFTVERBS_");
    if (is_read && !stays) names.emplace_back(name);
  }
  for (const std::string& name : names) ::unsetenv(name.c_str());
}

// In a process of a run. The plugin has a string for each variable of the environment, and its calls for memory are
// counted. So only those are left that it, softverbs or a plugin that mutates read.
void unset_unread(const std::string& plugin) {
  const bool mutates = std::filesystem::path(plugin).filename().string().find("mutate") != std::string::npos;
  char** kept = environ;
  for (char** each = environ; *each != nullptr; ++each) {
    const std::string_view variable(*each);
    const bool is_read = variable.starts_with("VERBATIM_") || variable.starts_with("SOFTVERBS_") ||
                         variable.starts_with("MUTANT=") || (mutates && variable.starts_with("MUTATE"));
    if (is_read) *kept++ = *each;
  }
  *kept = nullptr;
}

// The first numbers of QPs follow from the name of the directory, and lines with them cross the network: so the name is
// the same for all runs, with any SOFTVERBS_NAMESPACE.
constexpr const char* kNameOfDirectory = "/proc/self/cwd";

// Of a driver: an RMA communicator may use one device only.
bool has_profile(const std::string& devices) {
  return devices != kDevices.front() && devices != "ib";
}

void set_environment(std::uint64_t seed, Job& job) {
  static const Directory directory;
  unset_others();
  job.directory = directory.make();
  const auto set = [](const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); };
  set("SOFTVERBS_ENGINE", "inline");
  set("SOFTVERBS_DMABUF", "1");
  set("SOFTVERBS_LOCK_LIMIT", "none");
  set("SOFTVERBS_DEVICES", std::to_string(*std::max_element(job.ports.begin(), job.ports.end())));
  if (seed % 5 == 0) {  // requests wait for room in the queue, and have several pieces
    set("SOFTVERBS_MAX_QP_WR", "20");
    set("SOFTVERBS_MAX_MSG_SZ", "17000");  // a ring of CTS entries is one piece
  }
  if (seed % 4 == 1) set("SOFTVERBS_ORDERING", "adaptive-routing");
  set("SOFTVERBS_SEED", std::to_string(seed % 1'000'000));
  set("SOFTVERBS_DIRECTORY", kNameOfDirectory);
  if (const char* const library = std::getenv("VERBATIM_VERBS_LIBRARY"); library != nullptr) {
    set("VERBATIM_VERBS_LIBRARY", std::filesystem::absolute(library));
  }
  set("VERBATIM_STATE_DIR", "none");  // its socket is of another family
  set("VERBATIM_QPS_PER_CONNECTION", seed % 2 == 0 ? "1" : "2");
  set("VERBATIM_COMPLETION", seed % 3 == 0 ? "atomic" : "imm");
  if (job.devices == "ib") set("SOFTVERBS_LINK_LAYER", "ib");
  if (has_profile(job.devices)) {
    set("SOFTVERBS_PROFILE", job.devices);
    if (!job.faults.renumbers_gids) set("SOFTVERBS_GID_TABLE", "fixed");  // else the fault gid explains it
  } else {
    set("SOFTVERBS_ATOMICS", "glob");  // one word, several devices
  }
  if (job.faults.renumbers_gids) set("SOFTVERBS_GID_TABLE", "renumbered");
  if (job.faults.names_gid) set("VERBATIM_GID_INDEX", "3");
  if (job.faults.timeout != 0) set("VERBATIM_TIMEOUT", std::to_string(job.faults.timeout));
  if (job.faults.keepalive_s != 0) set("VERBATIM_KEEPALIVE_S", std::to_string(job.faults.keepalive_s));
  if (job.faults.stall_warn_s != 0) set("VERBATIM_STALL_WARN_S", std::to_string(job.faults.stall_warn_s));
  if (job.faults.stall_fail_s != 0) {
    set("VERBATIM_STALL_WARN_S", "0");
    set("VERBATIM_STALL_FAIL_S", std::to_string(job.faults.stall_fail_s));
  }
  if (job.faults.reconnect_s != 0) set("VERBATIM_RECONNECT_S", std::to_string(job.faults.reconnect_s));
}

// What is left is as it was: a number or a place that was drawn stays the same.
void leave_out(Job& job, const Choice& choice) {
  job.processes = std::min(job.processes, choice.processes);
  job.ports.resize(job.processes);
  leave_out(job.faults, job.processes);
  const auto is_chosen = [&](std::size_t part) { return !choice.parts || choice.parts->contains(part); };
  std::erase_if(job.connections, [&](const ConnectionPlan& plan) {
    return !is_chosen(plan.number) || std::max(plan.receiver, plan.sender) >= job.processes;
  });
  for (ConnectionPlan& plan : job.connections) plan.groups.resize(std::min(plan.groups.size(), choice.operations));
  const bool has_puts = is_chosen(kPutsPart) && job.processes > 1 && job.processes % job.puts.stride == 0;
  if (job.puts.ranks != 0 && !has_puts) job.puts = {};
  if (job.puts.ranks != 0) leave_out(job.puts, job.processes, choice.operations);
}

// One job in 64 has 5 to 16, from numbers of its own; 0: another job.
std::size_t draw_many_processes(std::uint64_t seed) {
  constexpr std::size_t kFewest = 5;
  Draw draw(seed ^ 0x3a11);
  return draw.one_in(64) ? kFewest + draw.below(kMostProcesses - kFewest + 1) : 0;
}

// In a third of the jobs each second connection, from numbers of its own. Returns whether there are any.
bool make_optional(std::uint64_t seed, const Choice& choice, std::vector<ConnectionPlan>& connections) {
  Draw draw(seed ^ 0x0b71);
  const bool is_drawn = draw.one_in(3) && !choice.faults;
  bool has_any = false;
  for (ConnectionPlan& connection : connections) {
    const bool is_next = draw.one_in(2);
    const bool all = draw.one_in(2);
    if (!is_next || !choice.has_optional.value_or(is_drawn)) continue;
    complete_optionally(connection, all);
    has_any = true;
  }
  return has_any;
}

// In a third of the runs others than the first, from numbers of their own.
std::string draw_devices(std::uint64_t seed, const Choice& choice) {
  Draw draw(seed ^ 0xdec5);
  const bool are_others = draw.one_in(3) && !choice.faults;
  const std::string_view others = kDevices[1 + draw.below(kDevices.size() - 1)];
  return choice.devices.value_or(std::string(are_others ? others : kDevices.front()));
}

// A warning that says what devices of a driver lack.
bool is_of_devices(const Job& job, std::string_view line) {
  return has_profile(job.devices) &&
         (line.find(" does not say what a QP in the error state has executed (") != std::string_view::npos ||
          line.find("VERBATIM_COMPLETION=atomic is not used between ") != std::string_view::npos);
}

// Beside those that are set for all processes.
void add_faults_of_softverbs(const std::string& clauses) {
  if (clauses.empty()) return;
  const char* const of_all = std::getenv("SOFTVERBS_FAULTS");
  ::setenv("SOFTVERBS_FAULTS", (of_all == nullptr ? clauses : std::string(of_all) + "; " + clauses).c_str(), 1);
}

}  // namespace

Job draw_job(const Choice& choice, const std::string& plugin) {
  const std::uint64_t seed = choice.seed;
  Draw draw(seed);
  static Handle* const handles = make_handles();
  for (Handle* each = handles; each != handles + kHandles; ++each)
    each->is_there = each->is_given_up = false, each->connected_ends = 0;
  Job job;
  job.plugin = std::filesystem::absolute(plugin);
  const std::size_t many = draw_many_processes(seed);
  job.processes = 1 + draw.below(3);
  if (many != 0) job.processes = many;
  job.handles = handles;
  const bool has_puts = draw.one_in(2);
  if (has_puts) {
    job.puts = draw_puts(draw, many);
    job.processes = job.puts.ranks;
  }
  if (!has_puts || draw.one_in(3)) job.connections = draw_connections(draw, job.processes);
  const std::size_t most_ports = draw.one_in(2) ? 1 : 3;
  for (std::size_t process = 0; process < job.processes; ++process) job.ports.push_back(1 + draw.below(most_ports));
  job.uses_merged = draw.one_in(2);
  job.has_optional = make_optional(seed, choice, job.connections);
  job.devices = draw_devices(seed, choice);
  const bool have_lanes =
      (job.connections.empty() || job.uses_merged) && (job.puts.ranks == 0 || !has_profile(job.devices));
  job.faults = draw_faults(seed, {job.ports, have_lanes, job.has_optional}, choice.faults);
  // What changes are addresses of RoCE.
  if (job.devices == "ib" && job.faults.kinds.contains(Fault::kGid)) job.devices = kDevices.front();
  job.order = choice.order;
  leave_out(job, choice);
  reset_fault_counts();
  plan_tcp_faults(job.faults.tcp);
  set_environment(seed, job);
  return job;
}

Plan plan_of(const Job& job, std::uint64_t seed) {
  Plan plan;
  plan.seed = seed;
  plan.order = job.order;
  plan.trace = job.prints_log;
  const FaultSet& kinds = job.faults.kinds;
  const bool all_else_works = !kinds.empty() && std::all_of(kinds.begin(), kinds.end(), is_of_process);
  plan.limit = all_else_works ? kLimitAfterDeath : kJobLimit;
  plan.dies_at = job.faults.dies_at;
  return plan;
}

bool run_job(const Job& job, std::size_t process) {
  if (::chdir(job.directory.c_str()) != 0) std::abort();
  unset_unread(job.plugin);
  add_faults_of_softverbs(job.faults.clauses[process]);
  if (const char* const clauses = std::getenv("SOFTVERBS_FAULTS"); clauses != nullptr && job.prints_log) {
    std::fprintf(stderr, "  faults of process %zu: %s\n", process, clauses);
  }
  std::vector<std::string> problems;
  bool is_explained = false;
  std::mutex mutex;
  netapi::set_log_callback([&](const netapi::LogLine& line) {
    if (job.prints_log) std::fprintf(stderr, "  log: %s\n", line.text.c_str());
    count_faults_in(line.text);
    if (job.faults.names_failed_qp(line.text)) count_fault(Fault::kQp);
    if (line.level != nccl::DebugLogLevel::kWarn) return;
    const std::lock_guard lock(mutex);
    is_explained = is_explained || job.faults.explain(line.text);
    if (!job.faults.allow(line.text) && !is_of_devices(job, line.text)) problems.push_back("a warning: " + line.text);
  });
  verbatim::test::verbs_counters().before = step_before_verb;
  const bool has_refused_verb = job.faults.verb.name != nullptr && job.faults.verb.process == process;
  {
    std::optional<DeviceClock> clock;
    if (job.faults.may_leave_no_port() || job.has_optional) clock.emplace();
    if (has_refused_verb) {
      verbatim::test::verbs_counters().fail.arm(job.faults.verb.name, job.faults.verb.nth, job.faults.verb.error);
    }
    Process running(job, process);
    running.run();
    const std::lock_guard lock(mutex);
    problems.insert(problems.end(), running.problems().begin(), running.problems().end());
    if (running.has_failed()) count_failed_process();
    if (running.has_failed() && !is_explained)
      problems.emplace_back("calls have failed, and no warning names the cause");
  }
  netapi::set_log_callback({});
  if (has_refused_memory()) count_fault(Fault::kMemory);
  if (has_refused_verb && verbatim::test::verbs_counters().fail.has_failed()) count_fault(Fault::kVerb);
  if (const std::string alive = verbs_alive(); !alive.empty()) problems.push_back("leak of verbs objects:" + alive);
  for (const std::string& problem : problems) std::fprintf(stderr, "%s\n", problem.c_str());
  return problems.empty();
}

}  // namespace simulation
