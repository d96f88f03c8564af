// softverbs stats: what the running processes have asked of their devices.
#include <cstdio>
#include <memory>

#include "softverbs-control/subcommand.h"

namespace verbatim::control {
namespace {

struct Options {
  std::vector<pid_t> pids;
};

int show(Host& host, const Options& options) {
  for (const Target& target : host.processes(options.pids)) {
    std::printf("%8d  %s\n", target.pid(), target.program().c_str());
  }
  return 0;
}

}  // namespace

Action declare_stats(CLI::App& arguments) {
  auto options = std::make_shared<Options>();
  arguments.add_option("pid", options->pids, "only these processes");
  return [options](Host& host) { return show(host, *options); };
}

}  // namespace verbatim::control
