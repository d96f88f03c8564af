// verbatim-exporter: the processes of this host that use Verbatim, as metrics for Prometheus.
#include <CLI/CLI.hpp>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <string>

#include "cli/command_line.h"
#include "verbatim-exporter/metrics.h"
#include "verbatim-exporter/server.h"

namespace {

using namespace verbatim;

constexpr const char* kDescription =
    "Serves metrics of the processes of this host that use Verbatim, for Prometheus, over HTTP. Root sees the "
    "processes\n"
    "of all users, another user those of its own. It runs until it gets SIGINT or SIGTERM.";
constexpr std::size_t kDefaultMaxProcesses = 256;

struct Options {
  live::Sampler::Options sampler;
  std::string listen = "127.0.0.1:9477";
  std::size_t max_processes = kDefaultMaxProcesses;
};

cli::ExitStatus run(const Options& options) {
  if (options.sampler.directories.empty()) live::default_directories();  // throws where there is none
  exporter::Metrics metrics(options.sampler, options.max_processes);
  exporter::Server server(options.listen, [&] { return metrics.collect(); });
  for (const int signal : {SIGINT, SIGTERM}) server.end_at(signal);
  const std::string address = options.listen.substr(0, options.listen.rfind(':'));
  std::printf("listening at http://%s:%d/metrics\n", address.c_str(), server.port());
  std::fflush(stdout);
  server.run();
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
