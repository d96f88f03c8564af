// verbatim-exporter: the processes of this host that use Verbatim, as metrics for Prometheus.
#include <prometheus/exposer.h>
#include <pthread.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "cli/command_line.h"
#include "verbatim-exporter/metrics.h"

namespace {

using namespace verbatim;

constexpr const char* kDescription =
    "Serves metrics of the processes of this host that use Verbatim, for Prometheus, over HTTP. Root sees the "
    "processes\n"
    "of all users, another user those of its own. It runs until it gets SIGINT or SIGTERM.";
constexpr std::size_t kDefaultMaxProcesses = 256;
// A client occupies a thread until its request is complete, or until this time has passed.
constexpr const char* kHttpThreads = "8";
constexpr const char* kHttpTimeoutMs = "2000";

// Before any thread is made: all threads inherit the mask, and only wait_for_end() gets the signals.
sigset_t block_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return signals;
}

void wait_for_end(const sigset_t& signals) {
  int signal = 0;
  while (sigwait(&signals, &signal) != 0) continue;
}

struct Options {
  live::Sampler::Options sampler;
  std::string listen = "127.0.0.1:9477";
  std::size_t max_processes = kDefaultMaxProcesses;
};

cli::ExitStatus run(const Options& options) {
  const sigset_t signals = block_signals();
  if (options.sampler.directories.empty()) live::default_directories();  // throws where there is none
  const auto metrics = std::make_shared<exporter::Metrics>(options.sampler, options.max_processes);
  std::unique_ptr<prometheus::Exposer> exposer;
  try {
    exposer = std::make_unique<prometheus::Exposer>(std::vector<std::string>{
        "listening_ports", options.listen, "num_threads", kHttpThreads, "request_timeout_ms", kHttpTimeoutMs});
  } catch (const std::exception& error) {
    throw cli::Failure("listening at " + options.listen + ": " + error.what());
  }
  exposer->RegisterCollectable(metrics);
  std::printf("listening at %s, port %d: /metrics\n", options.listen.c_str(), exposer->GetListeningPorts().at(0));
  std::fflush(stdout);
  wait_for_end(signals);
  return cli::ExitStatus::kOk;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app(kDescription, "verbatim-exporter");
  app.add_option("--listen", options.listen,
                 "address and port: only programs of this host reach the default one; 0.0.0.0:PORT "
                 "is every address, and port 0 any free one, which is printed")
      ->capture_default_str()
      ->type_name("ADDRESS:PORT");
  app.add_option("--max-processes", options.max_processes, "how many processes have series of their own")
      ->check(CLI::Range(std::size_t{1}, std::size_t{4096}))
      ->capture_default_str()
      ->type_name("N");
  app.add_option("--dir", options.sampler.directories,
                 "directories of state sockets, instead of VERBATIM_STATE_DIR or the default one")
      ->type_name("DIR");
  if (const auto early = cli::parse(app, argc, argv)) return cli::leave(*early);
  return cli::run_or_report([&] { return run(options); });
}
