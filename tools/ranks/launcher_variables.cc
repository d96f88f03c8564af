#include "ranks/launcher_variables.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>

#include "ranks/failure.h"
#include "ranks/token.h"

namespace verbatim::ranks {
namespace {

// Ports for jobs whose launcher names a host but no port: below the ephemeral range, so that the kernel gives them to
// no other connection.
constexpr std::uint64_t kFirstPort = 20'000;
constexpr std::uint64_t kPorts = 12'000;
constexpr int kMaxPort = 65'535;

class Variables {
 public:
  explicit Variables(const Lookup& lookup) : lookup_(lookup) {}

  bool has(const char* name) const { return !text(name).empty(); }
  bool has(const char* one, const char* other) const { return has(one) && has(other); }
  std::string text(const char* name) const {
    const char* const value = lookup_(name);
    return value == nullptr ? "" : value;
  }
  std::optional<int> number(const char* name) const {
    const std::string digits = text(name);
    if (digits.empty()) return std::nullopt;
    int value = 0;
    const char* const end = digits.data() + digits.size();
    if (std::from_chars(digits.data(), end, value).ptr != end || value < 0) {
      throw Failure(std::string(name) + " is not a number: '" + digits + "'", ExitStatus::kUsage);
    }
    return value;
  }

 private:
  const Lookup& lookup_;
};

// `ranks_here` is the launcher's number of ranks on this host, `rank_here` this rank's number among them.
bool on_one_host(const LaunchedRank& launched, std::optional<int> ranks_here, std::optional<int> rank_here) {
  if (ranks_here) return *ranks_here == launched.ranks;
  // Where all ranks are on one host, both numbers of a rank are equal. Where they are not, they are equal on the first.
  return !rank_here || *rank_here == launched.rank;
}

// The first host of a list of Slurm: "node[01-04,07],gpu1" begins with node01.
std::string first_host(const std::string& list) {
  std::string host;
  for (std::size_t at = 0; at < list.size() && list[at] != ','; ++at) {
    if (list[at] != '[') {
      host += list[at];
      continue;
    }
    const std::size_t end = std::min(list.find(']', at), list.size());
    host += list.substr(at + 1, std::min(list.find_first_of("-,]", at), end) - at - 1);
    at = end;
  }
  return host;
}

LaunchedRank of(const Variables& from, const char* launcher, const char* rank, const char* ranks) {
  LaunchedRank launched{.launcher = launcher, .rank = *from.number(rank), .ranks = *from.number(ranks)};
  if (launched.rank >= launched.ranks) {
    throw Failure(std::string(rank) + " is " + from.text(rank) + ", but " + ranks + " is " + from.text(ranks),
                  ExitStatus::kUsage);
  }
  return launched;
}

LaunchedRank of_torchrun(const Variables& from, const char* launcher) {
  LaunchedRank launched = of(from, launcher, "RANK", "WORLD_SIZE");
  launched.one_host = from.has("LOCAL_WORLD_SIZE") && on_one_host(launched, from.number("LOCAL_WORLD_SIZE"), {});
  launched.id =
      from.text("TORCHELASTIC_RUN_ID") + " " + from.text("MASTER_PORT") + " " + from.text("TORCHELASTIC_RESTART_COUNT");
  return launched;
}

LaunchedRank of_open_mpi(const Variables& from) {
  LaunchedRank launched = of(from, "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  launched.one_host =
      on_one_host(launched, from.number("OMPI_COMM_WORLD_LOCAL_SIZE"), from.number("OMPI_COMM_WORLD_LOCAL_RANK"));
  launched.id = from.text("PMIX_NAMESPACE");
  return launched;
}

LaunchedRank of_slurm(const Variables& from) {
  const bool has_step_size = from.has("SLURM_STEP_NUM_TASKS");
  LaunchedRank launched = of(from, "Slurm", "SLURM_PROCID", has_step_size ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS");
  const std::string hosts = from.text("SLURM_STEP_NODELIST");
  const auto nodes = from.number("SLURM_STEP_NUM_NODES");
  launched.one_host = nodes ? *nodes == 1 : hosts.find_first_of(",[") == std::string::npos;
  launched.host = first_host(hosts);
  launched.id = from.text("SLURM_JOB_ID") + "." + from.text("SLURM_STEP_ID");
  return launched;
}

LaunchedRank of_pmi(const Variables& from) {
  LaunchedRank launched = of(from, "PMI", "PMI_RANK", "PMI_SIZE");
  const char* const ranks_here = from.has("MPI_LOCALNRANKS") ? "MPI_LOCALNRANKS" : "PMI_LOCAL_SIZE";
  const char* const rank_here = from.has("MPI_LOCALRANKID") ? "MPI_LOCALRANKID" : "PMI_LOCAL_RANK";
  launched.one_host = on_one_host(launched, from.number(ranks_here), from.number(rank_here));
  launched.id = from.text("PMI_JOBID");
  return launched;
}

// A Slurm step. A batch script and the shell of an allocation have SLURM_PROCID and SLURM_NTASKS too.
bool in_slurm_step(const Variables& from) {
  return from.has("SLURM_PROCID") && (from.has("SLURM_STEP_NUM_TASKS") || from.has("SLURM_NTASKS")) &&
         from.has("SLURM_STEP_NODELIST");
}

// Slurm's own PMI. Under another mpirun the Slurm variables are those of its daemons, one on each host.
bool slurm_has_same_ranks(const Variables& from) {
  return in_slurm_step(from) && from.text("PMI_RANK") == from.text("SLURM_PROCID") &&
         from.text("PMI_SIZE") == from.text(from.has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS");
}

std::optional<LaunchedRank> innermost(const Variables& from) {
  const bool has_torch = from.has("RANK", "WORLD_SIZE");
  if (has_torch && from.has("TORCHELASTIC_RUN_ID")) return of_torchrun(from, "torchrun");
  if (from.has("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")) return of_open_mpi(from);
  if (from.has("PMI_RANK", "PMI_SIZE") && !slurm_has_same_ranks(from)) return of_pmi(from);
  if (in_slurm_step(from)) return of_slurm(from);
  if (has_torch && from.has("MASTER_ADDR", "MASTER_PORT")) return of_torchrun(from, "torch.distributed");
  return std::nullopt;
}

}  // namespace

std::optional<LaunchedRank> launched_rank(const Lookup& lookup) {
  const Variables from(lookup);
  auto launched = innermost(from);
  if (!launched || launched->ranks == 1) return std::nullopt;
  if (from.has("MASTER_ADDR")) {
    launched->host = from.text("MASTER_ADDR");
    // The agent of torchrun listens at MASTER_PORT itself.
    const bool in_use = from.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
    launched->port = in_use ? 0 : from.number("MASTER_PORT").value_or(0);
    if (launched->port > kMaxPort) {
      throw Failure("MASTER_PORT is not a port: " + from.text("MASTER_PORT"), ExitStatus::kUsage);
    }
  }
  return launched;
}

std::string start_of(const LaunchedRank& launched) {
  return launched.launcher + launched.id;
}

std::string meeting_point(const LaunchedRank& launched) {
  if (launched.one_host) {
    // Without an ID of the job the parent tells jobs apart: the launcher, or its daemon on this host.
    const std::string id = launched.id.empty() ? "process " + std::to_string(::getppid()) : launched.id;
    char name[64];
    std::snprintf(name, sizeof name, "unix:verbatim-%u-%016llx", ::geteuid(),
                  static_cast<unsigned long long>(hash_of(launched.launcher + id)));
    return name;
  }
  if (launched.host.empty()) {
    throw Failure(launched.launcher + " has started " + std::to_string(launched.ranks) +
                      " ranks on several hosts, and gives them no address of rank 0. Next: give all of them --root "
                      "HOST:PORT, an address of the host of rank 0 and a free port there (or MASTER_ADDR and "
                      "MASTER_PORT)",
                  ExitStatus::kUsage);
  }
  const std::uint64_t derived = kFirstPort + hash_of(start_of(launched)) % kPorts;
  const bool is_ipv6 = launched.host.find(':') != std::string::npos;
  return (is_ipv6 ? "[" + launched.host + "]:" : launched.host + ":") +
         std::to_string(launched.port > 0 ? static_cast<std::uint64_t>(launched.port) : derived);
}

}  // namespace verbatim::ranks
