// softverbs-bench: compares the speed of RDMA WRITEs between two processes with the machine's own copy speed.
//
// The program forks before it opens anything: the parent measures, the child provides its memory and answers
// ping-pongs. The rounds of all copy methods are interleaved and the best of each counts, because other programs may
// use the machine.
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "cli/command_line.h"
#include "cli/table.h"
#include "softverbs-bench/measure.h"

namespace verbatim::bench {
namespace {

using cli::ExitStatus;

struct Options {
  std::vector<std::size_t> sizes{64U << 10, 128U << 10, 1U << 20, 4U << 20};
  unsigned rounds = 24;
  unsigned passes = 1;
  unsigned engines = 1;
  bool no_latency = false;
  std::uint64_t latency_rounds = 500;
};

constexpr std::uint64_t kRateMessages = 8192;  // per round and QP

enum class Command : std::uint32_t { kVerbsPingPong, kMemoryPingPong };

ExitStatus report(const Error& error) {
  cli::print_error(std::string(error.operation) + " failed: " + std::strerror(error.sys_errno));
  return ExitStatus::kFailed;
}

template <typename T>
bool send_to(int socket, const T& value) {
  return send(socket, &value, sizeof(value), MSG_NOSIGNAL) == sizeof(value);
}
template <typename T>
bool receive_from(int socket, T& value) {
  return recv(socket, &value, sizeof(value), 0) == sizeof(value);
}

// Opens one endpoint per engine thread on the area, and connects each with the endpoint of the same index in the other
// process.
Result<std::vector<Endpoint>> connect_endpoints(Area& area, int socket, const Options& options) {
  const auto connection_lost = [] { return Error{ErrorKind::kRemote, errno, "exchanging addresses"}; };
  std::vector<Endpoint> endpoints;
  for (unsigned i = 0; i < options.engines; ++i) {
    auto endpoint = Endpoint::open(reinterpret_cast<std::byte*>(&area), sizeof(area));
    if (!endpoint) return endpoint.error();
    RemoteArea remote;
    if (!send_to(socket, endpoint->local()) || !receive_from(socket, remote)) return connection_lost();
    if (Status status = endpoint->connect(remote); !status) return status.error();
    bool ready = true;
    if (!send_to(socket, ready) || !receive_from(socket, ready)) return connection_lost();
    endpoints.push_back(*std::move(endpoint));
  }
  return endpoints;
}

ExitStatus run_peer(Area& area, int socket, const Options& options) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  auto endpoints = connect_endpoints(area, socket, options);
  if (!endpoints) return report(endpoints.error());
  Command command{};
  while (receive_from(socket, command)) {
    if (command == Command::kMemoryPingPong) {
      memory_ping_pong(area, Side::kPong, options.latency_rounds);
    } else if (auto result = verbs_ping_pong(area, endpoints->front(), Side::kPong, options.latency_rounds); !result) {
      return report(result.error());
    }
    if (!send_to(socket, command)) break;
  }
  return ExitStatus::kOk;
}

std::string size_text(std::size_t bytes) {
  if (bytes % (1U << 20) == 0) return std::to_string(bytes >> 20) + " MiB";
  if (bytes % (1U << 10) == 0) return std::to_string(bytes >> 10) + " KiB";
  return std::to_string(bytes) + " B";
}

cli::Table bandwidth_table() {
  return cli::Table({{"size", 10},
                     {"memcpy", 10, 2},
                     {"vm_writev", 10, 2},
                     {"WRITE", 10, 2},
                     {"WRITE/vm_writev", 15, 2},
                     {"WRITE/memcpy", 12, 2}});
}

// Prints one line. False: a copy was wrong.
Result<bool> compare_bandwidth(Bandwidth& bandwidth, std::size_t size, const Options& options) {
  constexpr std::array kMethods{CopyMethod::kMemcpy, CopyMethod::kProcessVm, CopyMethod::kVerbs};
  for (const CopyMethod method : kMethods) {  // also the first access to pages and mappings
    const auto correct = bandwidth.is_copy_correct(method, size);
    if (!correct) return correct.error();
    if (!*correct) {
      bandwidth_table().print_row(stdout, {size_text(size), "wrong bytes"});
      return false;
    }
  }
  std::array<double, kMethods.size()> best{};
  for (unsigned round = 0; round < options.rounds; ++round) {
    // Short rounds are less likely to be interrupted; in long ones the start has less weight.
    const unsigned passes = options.passes << (round % 4);
    for (std::size_t position = 0; position < kMethods.size(); ++position) {
      // The order rotates, so that no method always runs at the end of a time slice.
      const std::size_t i = (position + round) % kMethods.size();
      const auto rate = bandwidth.measure(kMethods[i], size, passes);
      if (!rate) return rate.error();
      best[i] = std::max(best[i], *rate);
    }
  }
  constexpr double kGiga = 1e9;
  bandwidth_table().print_row(stdout, {size_text(size), best[0] / kGiga, best[1] / kGiga, best[2] / kGiga,
                                       best[2] / best[1], best[2] / best[0]});
  return true;
}

Result<double> best_latency(Area& area, int socket, const Options& options, Command command, Endpoint* endpoint) {
  double best = 0;
  for (unsigned round = 0; round < options.rounds; ++round) {
    area.ping = 0;
    area.pong = 0;
    if (!send_to(socket, command)) return Error{ErrorKind::kRemote, errno, "the other process"};
    Result<double> time = command == Command::kMemoryPingPong
                              ? Result<double>(memory_ping_pong(area, Side::kPing, options.latency_rounds))
                              : verbs_ping_pong(area, *endpoint, Side::kPing, options.latency_rounds);
    Command done{};
    if (!time) return time;
    if (!receive_from(socket, done)) return Error{ErrorKind::kRemote, errno, "the other process"};
    best = round == 0 ? *time : std::min(best, *time);
  }
  return best;
}

ExitStatus measure(Area& area, int socket, pid_t peer, const Options& options) {
  auto endpoints = connect_endpoints(area, socket, options);
  if (!endpoints) return report(endpoints.error());
  Endpoint& first = endpoints->front();
  std::printf(
      "# RDMA WRITE between two processes on %s, %u engine thread%s and as many QPs, best of %u interleaved rounds of "
      "%zu to %zu MiB, GB/s\n",
      first.device_name(), options.engines, options.engines == 1 ? "" : "s", options.rounds,
      options.passes * (Area::kWindowBytes >> 20), std::size_t{8} * options.passes * (Area::kWindowBytes >> 20));
  bandwidth_table().print_titles(stdout);
  Bandwidth bandwidth(area, *endpoints, peer);
  bool good = true;
  for (const std::size_t size : options.sizes) {
    const auto result = compare_bandwidth(bandwidth, size, options);
    if (!result) return report(result.error());
    good = good && *result;
  }
  if (!options.no_latency) {
    const auto memory = best_latency(area, socket, options, Command::kMemoryPingPong, nullptr);
    if (!memory) return report(memory.error());
    const auto verbs = best_latency(area, socket, options, Command::kVerbsPingPong, &first);
    if (!verbs) return report(verbs.error());
    double rate = 0;
    for (unsigned round = 0; round < options.rounds; ++round) {
      const auto measured = message_rate(*endpoints, kRateMessages);
      if (!measured) return report(measured.error());
      rate = std::max(rate, *measured);
    }
    std::printf("# 8-byte one-way latency: shared memory %.2f us, inline WRITE %.2f us\n", *memory / 1e3, *verbs / 1e3);
    std::printf("# 8-byte message rate: shared memory, one at a time, %.2f million/s, inline WRITE %.2f million/s\n",
                1e3 / *memory, rate / 1e6);
  }
  return good ? ExitStatus::kOk : ExitStatus::kWrong;
}

ExitStatus run(const Options& options) {
  void* const pages = mmap(nullptr, sizeof(Area), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return report(system_error("mmap", errno));
  Area& area = *new (pages) Area;
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    return report(system_error("socketpair", errno));
  UniqueFd ours(ends[0]);
  UniqueFd theirs(ends[1]);
  const pid_t peer = fork();  // before a device is open, so that the child inherits no device and no thread
  if (peer < 0) return report(system_error("fork", errno));
  if (peer == 0) {
    ours.reset();
    return run_peer(area, theirs.get(), options);
  }
  theirs.reset();
  const ExitStatus result = measure(area, ours.get(), peer, options);
  ours.reset();
  int status = 0;
  while (waitpid(peer, &status, 0) < 0 && errno == EINTR) {
  }
  const bool peer_good = WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS;
  return peer_good ? result : ExitStatus::kFailed;
}

}  // namespace
}  // namespace verbatim::bench

int main(int argc, char** argv) {
  namespace cli = verbatim::cli;
  using verbatim::bench::Area;
  verbatim::bench::Options options;
  CLI::App app(
      "Compares RDMA WRITEs between two processes with process_vm_writev and memcpy over the same memory.\n"
      "Uses the first device of the library that VERBATIM_VERBS_LIBRARY names.",
      "softverbs-bench");
  cli::add_sizes_option(app, "--size", options.sizes, "bytes of a WRITE; may be repeated, default 64K,128K,1M,4M")
      ->check([](const std::string& text) {
        const std::size_t size = std::strtoull(text.c_str(), nullptr, 10);
        return size >= 4096 && Area::kWindowBytes % size == 0 ? "" : "the size must be a power of two from 4K to 8M";
      });
  app.add_option("--rounds", options.rounds, "rounds of each copy method; the best one counts")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--passes", options.passes,
                 "copies of the 8 MiB window in the shortest round; the longest round has eight times as many")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--engines", options.engines, "device threads, and QPs that are used in turn")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_flag("--no-latency", options.no_latency, "do not measure 8-byte messages");
  if (const auto early = cli::parse(app, argc, argv)) return cli::leave(*early);
  if (options.engines != 1) setenv("SOFTVERBS_ENGINES", std::to_string(options.engines).c_str(), 1);
  return cli::run_or_report([&] { return verbatim::bench::run(options); });
}
