// Runs NCCL operations between ranks of one host. Each rank has its own NCCL_HOSTID, so that all traffic takes the
// network transport. The parent starts the ranks, collects their rows, prints one table, and checks in NCCL's own log
// that the requested transport carried them.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nccl_log.h"
#include "operations.h"
#include "parent.h"
#include "rank.h"
#include "scenarios.h"
#include "table.h"

namespace verbatim::gpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSocketOfRank = 3;  // a rank's descriptor for its parent
constexpr int kUsageStatus = 2;
constexpr int kWrongStatus = 3;  // all operations ran, some elements were wrong

struct Options {
  Plan plan;
  int rank = -1;  // 0 or more: this process is a rank
  std::chrono::seconds timeout{300};
  std::string net = "Verbatim";
  std::string protocol;  // empty: as NCCL chooses
  std::string log_directory = ".";
};

void print_usage() {
  std::printf(
      "usage: nccl_run [--ranks N] [--op NAME,...] [--scenario NAME,...] [-b BYTES] [-e BYTES] [-f FACTOR]\n"
      "                [-n ITERATIONS] [--proto NAME] [--net NAME] [--logs DIR] [--timeout SECONDS]\n"
      "                [--registered 1] [--mutate 1]\n"
      "operations:");
  for (const Operation& operation : kOperations) std::printf(" %s", operation.name);
  std::printf(
      "\n(those with put in their names: NCCL 2.29 and later, over the RMA table; run when named, not with others)\n"
      "scenarios:\n");
  for (const Scenario& scenario : kScenarios) std::printf("  %-19s %s\n", scenario.name, scenario.summary);
  std::printf(
      "\nSizes take K, M and G; NAME can be all. Defaults: 2 ranks, all operations and no scenario, 8 to 256M\n"
      "by 2, 10 timed calls (a quarter of them above 16M).\n"
      "--proto NAME  LL, LL128 or Simple (NCCL_PROTO): NCCL's log must show that every collective used it.\n"
      "--registered 1  the buffers of operations are allocated with ncclMemAlloc and registered with "
      "ncclCommRegister.\n"
      "--mutate 1    flips one bit of each result before the comparison, which must find it.\n"
      "Exit status: 0 success, %d wrong elements, 1 any other failure.\n",
      kWrongStatus);
}

std::optional<std::size_t> parse_size(std::string_view text) {
  std::size_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{}) return std::nullopt;
  const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  if (unit.empty()) return value;
  if (unit == "K") return value << 10U;
  if (unit == "M") return value << 20U;
  if (unit == "G") return value << 30U;
  return std::nullopt;
}

bool is_put(std::size_t operation) {
  return kOperations[operation].puts;
}

// Indices of the rows of `table` (kOperations, kScenarios) that `names` lists, in the order of the list.
template <typename Rows>
std::optional<std::vector<std::size_t>> parse_names(const Rows& table, std::string_view names) {
  std::vector<std::size_t> indices;
  if (names == "all") {
    indices.resize(table.size());
    std::iota(indices.begin(), indices.end(), std::size_t{0});
    return indices;
  }
  while (!names.empty()) {
    const std::string_view name = names.substr(0, names.find(','));
    names.remove_prefix(std::min(names.size(), name.size() + 1));
    const auto found = std::find_if(table.begin(), table.end(), [&](const auto& row) { return row.name == name; });
    if (found == table.end()) return std::nullopt;
    indices.push_back(static_cast<std::size_t>(found - table.begin()));
  }
  return indices;
}

std::optional<Options> parse_options(int argc, char** argv) {
  Options options;
  bool chosen = false;
  for (int i = 1; i < argc; i += 2) {
    const std::string_view name = argv[i];
    if (i + 1 == argc) return std::nullopt;
    const char* const value = argv[i + 1];
    if (name == "--net") {
      options.net = value;
      continue;
    }
    if (name == "--logs") {
      options.log_directory = value;
      continue;
    }
    if (name == "--proto") {
      options.protocol = value;
      continue;
    }
    if (name == "--op" || name == "--scenario") {
      const auto rows = name == "--op" ? parse_names(kOperations, value) : parse_names(kScenarios, value);
      if (!rows) return std::nullopt;
      (name == "--op" ? options.plan.operations : options.plan.scenarios) = *rows;
      if (name == "--op" && std::string_view(value) == "all") std::erase_if(options.plan.operations, is_put);
      chosen = true;
      continue;
    }
    const auto number = parse_size(value);
    if (!number) return std::nullopt;
    if (name == "--ranks") {
      options.plan.ranks = static_cast<int>(*number);
    } else if (name == "--rank") {
      options.rank = static_cast<int>(*number);
    } else if (name == "-b") {
      options.plan.first_bytes = *number;
    } else if (name == "-e") {
      options.plan.last_bytes = *number;
    } else if (name == "-f") {
      options.plan.factor = *number;
    } else if (name == "-n") {
      options.plan.iterations = static_cast<unsigned>(*number);
    } else if (name == "--registered") {
      options.plan.registered = *number != 0;
    } else if (name == "--mutate") {
      options.plan.mutate = *number != 0;
    } else if (name == "--replacement") {
      options.plan.replacement = *number != 0;
    } else if (name == "--timeout") {
      options.timeout = std::chrono::seconds(static_cast<long>(*number));
    } else {
      return std::nullopt;
    }
  }
  Plan& plan = options.plan;
  if (!chosen) {
    plan.operations = *parse_names(kOperations, "all");
    std::erase_if(plan.operations, is_put);  // puts are run only when they are named
  }
  const auto puts = std::count_if(plan.operations.begin(), plan.operations.end(), is_put);
  const bool one_kind = puts == 0 || (static_cast<std::size_t>(puts) == plan.operations.size() && !plan.registered);
  const bool valid = one_kind && plan.ranks >= 2 && plan.factor >= 2 && plan.iterations >= 1 &&
                     plan.first_bytes >= sizeof(Element) && plan.first_bytes <= plan.last_bytes;
  return valid ? std::optional(options) : std::nullopt;
}

struct Child {
  pid_t pid = -1;
  int socket = -1;
  bool done = false;
  bool at_barrier = false;
  std::string description;
};

std::string log_path(const Options& options, int rank) {
  return options.log_directory + "/nccl.rank" + std::to_string(rank) + ".log";
}

// Sets the variables for identity, transport and log; the caller's other NCCL variables apply unchanged.
void set_rank_environment(const Options& options, int rank) {
  setenv("NCCL_SET_THREAD_NAME", "1", 1);  // rank.cc finds progress threads by name
  setenv("NCCL_HOSTID", ("verbatim-rank-" + std::to_string(rank)).c_str(), 1);
  setenv("NCCL_NET", options.net.c_str(), 1);
  setenv("NCCL_NET_PLUGIN", options.net == "Verbatim" ? "verbatim" : "none", 1);
  setenv("NCCL_DEBUG", "INFO", 1);
  setenv("NCCL_DEBUG_FILE", log_path(options, rank).c_str(), 1);
  if (!options.protocol.empty()) {
    setenv("NCCL_PROTO", options.protocol.c_str(), 1);
    setenv("NCCL_DEBUG_SUBSYS", "INIT,NET,TUNING", 0);  // one line per call with its protocol
  }
  // NCCL 2.30 and later refuse two ranks on one GPU without it; earlier versions ignore it.
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
}

std::optional<Child> start_rank(const Options& options, int rank, char** argv, bool replacement) {
  std::array<int, 2> ends{};
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) return std::nullopt;
  const pid_t pid = fork();
  if (pid < 0) return std::nullopt;
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    set_rank_environment(options, rank);
    if (ends[1] == kSocketOfRank) {
      fcntl(kSocketOfRank, F_SETFD, 0);
    } else {
      dup2(ends[1], kSocketOfRank);
    }
    std::vector<char*> arguments;
    for (char** argument = argv; *argument != nullptr; ++argument) arguments.push_back(*argument);
    std::string flag = "--rank";
    std::string number = std::to_string(rank);
    arguments.insert(arguments.end(), {flag.data(), number.data()});
    std::string replaces = "--replacement";
    std::string yes = "1";
    if (replacement) arguments.insert(arguments.end(), {replaces.data(), yes.data()});
    arguments.push_back(nullptr);
    execv("/proc/self/exe", arguments.data());
    std::perror("execv");
    _exit(1);
  }
  close(ends[1]);
  Child child;
  child.pid = pid;
  child.socket = ends[0];
  return child;
}

// The parent's view of the ranks: their processes, sockets and rows.
class Ranks {
 public:
  Ranks(const Options& options, char** argv) : options_(options), argv_(argv) {}

  bool start();
  // Receives the ranks' messages until all ranks are done. False: a rank failed, or the deadline passed.
  bool serve();
  // Waits for the ends of the ranks; kills them first unless `served`. False: a rank did not exit with status 0.
  bool reap(bool served);

  void print_descriptions() const;
  const Table& table() const { return table_; }

 private:
  bool handle_report(std::size_t rank);
  bool send_to(std::size_t rank, const Report& report);
  bool pass_barrier();
  bool replace(std::size_t rank);
  bool all(bool Child::*member) const {
    return std::all_of(children_.begin(), children_.end(), [&](const Child& child) { return child.*member; });
  }

  const Options& options_;
  char** const argv_;
  std::vector<Child> children_;
  std::vector<std::vector<Report>> rows_;  // of each rank
  Table table_;
};

bool Ranks::start() {
  rows_.resize(static_cast<std::size_t>(options_.plan.ranks));
  for (int rank = 0; rank < options_.plan.ranks; ++rank) {
    std::remove(log_path(options_, rank).c_str());
    const auto child = start_rank(options_, rank, argv_, false);
    if (!child) {
      std::perror("starting a rank");
      return false;
    }
    children_.push_back(*child);
  }
  return true;
}

bool Ranks::send_to(std::size_t rank, const Report& report) {
  return send(children_[rank].socket, &report, sizeof report, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof report);
}

bool Ranks::pass_barrier() {
  if (!all(&Child::at_barrier)) return true;
  for (std::size_t rank = 0; rank < children_.size(); ++rank) {
    children_[rank].at_barrier = false;
    if (!send_to(rank, make_report(Report::Kind::kBarrier))) return false;
  }
  return true;
}

// Rank `rank` kills itself; a new process replaces it.
bool Ranks::replace(std::size_t rank) {
  Child& child = children_[rank];
  int status = 0;
  waitpid(child.pid, &status, 0);
  close(child.socket);
  const auto replacement = start_rank(options_, static_cast<int>(rank), argv_, true);
  if (!replacement) {
    child = Child{};
    return false;
  }
  child = *replacement;
  return true;
}

// Handles one message of rank `rank`. False: the rank failed or ended early.
bool Ranks::handle_report(std::size_t rank) {
  Child& child = children_[rank];
  Report report{};
  const ssize_t received = recv(child.socket, &report, sizeof report, 0);
  if (received != static_cast<ssize_t>(sizeof report)) {
    std::printf("rank %zu ended without a report\n", rank);
    return false;
  }
  switch (report.kind) {
    case Report::Kind::kId:
      for (std::size_t other = 1; other < children_.size(); ++other) {
        if (!send_to(other, report)) return false;
      }
      return true;
    case Report::Kind::kBarrier:
      child.at_barrier = true;
      return pass_barrier();
    case Report::Kind::kRow:
    case Report::Kind::kScenario:
      rows_[rank].push_back(report);
      return true;
    case Report::Kind::kAboutToBeKilled:
      return replace(rank);
    case Report::Kind::kDone:
      child.done = true;
      child.description = report.text;
      return true;
    case Report::Kind::kError:
      std::printf("rank %zu: %s\n", rank, report.text);
      return false;
  }
  return false;
}

bool Ranks::serve() {
  const auto deadline = Clock::now() + options_.timeout;
  while (!all(&Child::done)) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    std::vector<pollfd> waiting;
    for (const Child& child : children_) waiting.push_back({child.done ? -1 : child.socket, POLLIN, 0});
    const int ready = left > 0 ? poll(waiting.data(), waiting.size(), static_cast<int>(left)) : 0;
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) {
      std::printf("time-out after %lld s, %zu rows complete; see the logs in %s\n",
                  static_cast<long long>(options_.timeout.count()), table_.printed(), options_.log_directory.c_str());
      return false;
    }
    for (std::size_t rank = 0; rank < children_.size(); ++rank) {
      if (waiting[rank].revents != 0 && !handle_report(rank)) return false;
    }
    table_.print_complete_rows(rows_);
  }
  return true;
}

bool Ranks::reap(bool served) {
  bool all_exited = served;
  for (const Child& child : children_) {
    if (child.pid < 0) continue;
    if (!served) kill(child.pid, SIGKILL);
    int status = 0;
    waitpid(child.pid, &status, 0);
    if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL) {
      std::printf("process %d: %s\n", static_cast<int>(child.pid), strsignal(WTERMSIG(status)));
    }
    all_exited = all_exited && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    close(child.socket);
  }
  return all_exited;
}

void Ranks::print_descriptions() const {
  std::printf("\n");
  for (std::size_t rank = 0; rank < children_.size(); ++rank) {
    std::printf("# rank %zu: %s\n", rank, children_[rank].description.c_str());
  }
}

bool uses_protocol(const NcclLog& log, const Plan& plan, std::string protocol) {
  if (std::none_of(plan.operations.begin(), plan.operations.end(), [](auto i) { return kOperations[i].collective; })) {
    return true;
  }
  std::transform(protocol.begin(), protocol.end(), protocol.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return log.protocols.size() == 1 && log.protocols.count(protocol) == 1;
}

// Whether puts go over Verbatim's RMA table. With VERBATIM_RMA=0 they go over NCCL's own.
bool expects_rma(const Options& options) {
  const char* const setting = std::getenv("VERBATIM_RMA");
  return options.net == "Verbatim" && (setting == nullptr || std::strcmp(setting, "0") != 0);
}

// NCCL's log names the chosen transport and, for each channel, the transport that carries it; for puts, Verbatim's own
// line of its RMA table.
bool logs_agree(const Options& options) {
  bool agree = true;
  const bool puts = !options.plan.operations.empty() && is_put(options.plan.operations.front());
  NcclLog first;
  for (int rank = 0; rank < options.plan.ranks; ++rank) {
    const std::string path = log_path(options, rank);
    const NcclLog log = read_nccl_log(path, options.net);
    if (puts && expects_rma(options) != log.used_rma) {
      std::printf("rank %d: %s %s a line of Verbatim's RMA table\n", rank, path.c_str(),
                  log.used_rma ? "contains" : "does not contain");
      agree = false;
    }
    if (!log.chose_network || (!log.used_network && !puts)) {
      std::printf("rank %d: %s does not contain \"%s %s\"\n", rank, path.c_str(),
                  log.chose_network ? "via" : "Using network", options.net.c_str());
      agree = false;
    }
    // only rank 0 logs the protocols, which NCCL chooses for all ranks
    if (rank == 0) first = log;
    if (rank == 0 && !options.protocol.empty() && !uses_protocol(log, options.plan, options.protocol)) {
      std::printf("rank %d: %s does not show that all collectives used %s:", rank, path.c_str(),
                  options.protocol.c_str());
      for (const auto& [protocol, calls] : log.protocols) std::printf(" %s %u", protocol.c_str(), calls);
      std::printf("\n");
      agree = false;
    }
  }
  if (!agree) return false;
  std::printf("# NCCL's logs: all %d ranks used network %s%s%s, %s channels\n", options.plan.ranks, options.net.c_str(),
              first.plugin.empty() ? "" : ", plugin ", first.plugin.c_str(), first.channels.c_str());
  for (const auto& [protocol, calls] : first.protocols) {
    std::printf("# NCCL's logs: %u calls of collectives with protocol %s\n", calls, protocol.c_str());
  }
  return true;
}

int run_parent(const Options& options, char** argv) {
  Ranks ranks(options, argv);
  const bool served = ranks.start() && ranks.serve();
  const bool all_exited = ranks.reap(served);
  if (!served) return 1;
  ranks.print_descriptions();
  if (!all_exited) std::printf("a rank crashed after its last result\n");
  const bool agree = logs_agree(options);
  const Table& table = ranks.table();
  std::printf("# elements compared: %llu, wrong: %llu\n", static_cast<unsigned long long>(table.checked()),
              static_cast<unsigned long long>(table.wrong()));
  if (!all_exited || !agree || table.printed() == 0) return 1;
  return table.wrong() == 0 ? 0 : kWrongStatus;
}

}  // namespace
}  // namespace verbatim::gpu

int main(int argc, char** argv) {
  const auto options = verbatim::gpu::parse_options(argc, argv);
  if (!options) {
    verbatim::gpu::print_usage();
    return verbatim::gpu::kUsageStatus;
  }
  if (options->rank >= 0) return verbatim::gpu::run_rank(options->plan, options->rank, verbatim::gpu::kSocketOfRank);
  return verbatim::gpu::run_parent(*options, argv);
}
