// Runs NCCL operations between ranks of one host, each made to look like a host of its own (NCCL_HOSTID), so that all
// traffic takes the network transport. The parent starts the ranks, gathers their rows, prints one table, and reads in
// NCCL's own log that the transport asked for carried them.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "operations.h"
#include "rank.h"

namespace verbatim::gpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSocketOfRank = 3;  // the descriptor on which a rank finds its parent
constexpr int kUsageStatus = 2;
constexpr int kWrongStatus = 3;  // all ran, but not every element was right

struct Options {
  Plan plan;
  int rank = -1;  // 0 or more: this process is a rank
  std::chrono::seconds timeout{300};
  std::string net = "Verbatim";
  std::string log_directory = ".";
};

void print_usage() {
  std::printf(
      "usage: nccl_run [--ranks N] [--op NAME,...] [-b BYTES] [-e BYTES] [-f FACTOR] [-n ITERATIONS]\n"
      "                [--net NAME] [--logs DIR] [--timeout SECONDS] [--mutate 1]\n"
      "operations:");
  for (const Operation& operation : kOperations) std::printf(" %s", operation.name);
  std::printf(
      "\nSizes take K, M and G. Defaults: 2 ranks, all_reduce,sendrecv, 8 to 64M by 2, 10 timed calls.\n"
      "--mutate 1 flips one bit of each result before it is compared, to show that this is found.\n"
      "Exit status: 0 all right, %d wrong elements, 1 any other failure.\n",
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

std::optional<std::vector<std::size_t>> parse_operations(std::string_view names) {
  std::vector<std::size_t> operations;
  while (!names.empty()) {
    const std::string_view name = names.substr(0, names.find(','));
    names.remove_prefix(std::min(names.size(), name.size() + 1));
    const auto found = std::find_if(kOperations.begin(), kOperations.end(),
                                    [&](const Operation& operation) { return operation.name == name; });
    if (found == kOperations.end()) return std::nullopt;
    operations.push_back(static_cast<std::size_t>(found - kOperations.begin()));
  }
  return operations;
}

std::optional<Options> parse_options(int argc, char** argv) {
  Options options;
  options.plan.operations = {0, 1};
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
    if (name == "--op") {
      const auto operations = parse_operations(value);
      if (!operations) return std::nullopt;
      options.plan.operations = *operations;
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
    } else if (name == "--mutate") {
      options.plan.mutate = *number != 0;
    } else if (name == "--timeout") {
      options.timeout = std::chrono::seconds(static_cast<long>(*number));
    } else {
      return std::nullopt;
    }
  }
  const Plan& plan = options.plan;
  const bool sane = plan.ranks >= 2 && plan.factor >= 2 && plan.iterations >= 1 &&
                    plan.first_bytes >= sizeof(Element) && plan.first_bytes <= plan.last_bytes;
  return sane ? std::optional(options) : std::nullopt;
}

struct Child {
  pid_t pid = -1;
  int socket = -1;
  bool done = false;
  std::string description;
  std::vector<Report> rows;
};

std::string log_path(const Options& options, int rank) {
  return options.log_directory + "/nccl.rank" + std::to_string(rank) + ".log";
}

// Only what concerns identity, transport and log is set here; every other variable of NCCL passes from the caller.
void set_rank_environment(const Options& options, int rank) {
  setenv("NCCL_HOSTID", ("verbatim-rank-" + std::to_string(rank)).c_str(), 1);
  setenv("NCCL_NET", options.net.c_str(), 1);
  setenv("NCCL_NET_PLUGIN", options.net == "Verbatim" ? "verbatim" : "none", 1);
  setenv("NCCL_DEBUG", "INFO", 1);
  setenv("NCCL_DEBUG_FILE", log_path(options, rank).c_str(), 1);
  // NCCL 2.30 and later refuse two ranks on one GPU without it; earlier ones do not know it.
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
}

std::optional<Child> start_rank(const Options& options, int rank, char** argv) {
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
    arguments.insert(arguments.end(), {flag.data(), number.data(), nullptr});
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

void print_header(const Operation& operation) {
  std::printf("\n# %s\n#%12s %12s %8s %10s %9s %9s %7s\n", operation.name, "size", "count", "type", "time", "algbw",
              "busbw", "#wrong");
  std::printf("#%12s %12s %8s %10s %9s %9s\n", "(B)", "(elements)", "", "(us)", "(GB/s)", "(GB/s)");
}

class Table {
 public:
  // Prints the row once every rank has sent it: the slowest rank's time, the wrong elements of all.
  void print_complete_rows(const std::vector<Child>& children) {
    for (;; ++printed_) {
      Report total{};
      for (const Child& child : children) {
        if (child.rows.size() <= printed_) return;
        const Report& row = child.rows[printed_];
        total.operation = row.operation;
        total.count = row.count;
        total.microseconds = std::max(total.microseconds, row.microseconds);
        total.wrong += row.wrong;
        total.checked += row.checked;
      }
      print(total, static_cast<int>(children.size()));
    }
  }

  std::size_t printed() const { return printed_; }
  std::uint64_t wrong() const { return wrong_; }
  std::uint64_t checked() const { return checked_; }

 private:
  void print(const Report& row, int ranks) {
    const Operation& operation = kOperations[row.operation];
    if (printed_ == 0 || row.operation != operation_) print_header(operation);
    operation_ = row.operation;
    wrong_ += row.wrong;
    checked_ += row.checked;
    const std::size_t bytes = row.count * sizeof(Element);
    const double algbw = static_cast<double>(bytes) / row.microseconds / 1e3;
    std::printf(" %12zu %12zu %8s %10.1f %9.2f %9.2f %7llu\n", bytes, static_cast<std::size_t>(row.count), "uint32",
                row.microseconds, algbw, algbw * operation.bus_factor(ranks),
                static_cast<unsigned long long>(row.wrong));
    std::fflush(stdout);
  }

  std::size_t printed_ = 0;
  std::uint32_t operation_ = 0;
  std::uint64_t wrong_ = 0;
  std::uint64_t checked_ = 0;
};

// Takes in one message of rank `rank`. False when the rank failed or left early.
bool take_report(std::vector<Child>& children, std::size_t rank) {
  Child& child = children[rank];
  Report report{};
  const ssize_t received = recv(child.socket, &report, sizeof report, 0);
  if (received != static_cast<ssize_t>(sizeof report)) {
    std::printf("rank %zu ended without a word\n", rank);
    return false;
  }
  switch (report.kind) {
    case Report::Kind::kId:
      for (std::size_t other = 1; other < children.size(); ++other) {
        if (send(children[other].socket, &report, sizeof report, MSG_NOSIGNAL) < 0) return false;
      }
      return true;
    case Report::Kind::kRow:
      child.rows.push_back(report);
      return true;
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

// Serves the ranks until all are done. False when one failed or the deadline passed.
bool serve(const Options& options, std::vector<Child>& children, Table& table) {
  const auto deadline = Clock::now() + options.timeout;
  while (!std::all_of(children.begin(), children.end(), [](const Child& child) { return child.done; })) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    std::vector<pollfd> waiting;
    for (const Child& child : children) waiting.push_back({child.done ? -1 : child.socket, POLLIN, 0});
    const int ready = left > 0 ? poll(waiting.data(), waiting.size(), static_cast<int>(left)) : 0;
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) {
      std::printf("time-out after %lld s, %zu rows complete; see the logs in %s\n",
                  static_cast<long long>(options.timeout.count()), table.printed(), options.log_directory.c_str());
      return false;
    }
    for (std::size_t rank = 0; rank < children.size(); ++rank) {
      if (waiting[rank].revents != 0 && !take_report(children, rank)) return false;
    }
    table.print_complete_rows(children);
  }
  return true;
}

// NCCL says in its log which transport it chose and, for each channel, which one carries it.
bool transport_carried(const Options& options) {
  bool carried = true;
  for (int rank = 0; rank < options.plan.ranks; ++rank) {
    std::ifstream log(log_path(options, rank));
    bool chosen = false;
    bool used = false;
    for (std::string line; std::getline(log, line);) {
      if (line.find("Using network " + options.net) != std::string::npos) chosen = true;
      if (line.find("via NET/" + options.net + "/") != std::string::npos) used = true;
    }
    if (chosen && used) continue;
    std::printf("rank %d: %s does not say \"%s %s\"\n", rank, log_path(options, rank).c_str(),
                chosen ? "via" : "Using network", options.net.c_str());
    carried = false;
  }
  return carried;
}

int run_parent(const Options& options, char** argv) {
  std::vector<Child> children;
  for (int rank = 0; rank < options.plan.ranks; ++rank) {
    std::remove(log_path(options, rank).c_str());
    auto child = start_rank(options, rank, argv);
    if (!child) {
      std::perror("starting a rank");
      for (const Child& started : children) kill(started.pid, SIGKILL);
      return 1;
    }
    children.push_back(std::move(*child));
  }

  Table table;
  const bool served = serve(options, children, table);
  bool ended_well = served;
  for (const Child& child : children) {
    if (!served) kill(child.pid, SIGKILL);
    int status = 0;
    waitpid(child.pid, &status, 0);
    if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL) {
      std::printf("process %d: %s\n", static_cast<int>(child.pid), strsignal(WTERMSIG(status)));
    }
    ended_well = ended_well && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    close(child.socket);
  }
  if (!served) return 1;
  std::printf("\n");
  for (std::size_t rank = 0; rank < children.size(); ++rank) {
    std::printf("# rank %zu: %s\n", rank, children[rank].description.c_str());
  }
  if (!ended_well) std::printf("a rank crashed after its last result\n");
  const bool carried = transport_carried(options);
  if (carried) std::printf("# NCCL's logs: all %d ranks used network %s\n", options.plan.ranks, options.net.c_str());
  std::printf("# elements compared: %llu, wrong: %llu\n", static_cast<unsigned long long>(table.checked()),
              static_cast<unsigned long long>(table.wrong()));
  if (!ended_well || !carried || table.printed() == 0) return 1;
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
