// softverbs-control: the subcommands of tools/softverbs. Reads and changes the state of this user's running softverbs
// processes through their shared memory.
#include <CLI/CLI.hpp>
#include <array>
#include <cerrno>

#include "cli/command_line.h"
#include "softverbs-control/process_directory.h"
#include "softverbs-control/subcommand.h"

namespace verbatim::control {
namespace {

constexpr std::array kSubcommands{
    Subcommand{"fault", "causes faults in the running processes", declare_fault},
    Subcommand{"hold", "stops the virtual clock of the ports with a rate", declare_hold},
    Subcommand{"release", "starts the virtual clock again", declare_release},
    Subcommand{"stats", "prints the counters of the running processes", declare_stats},
};

int run(int argc, char** argv) {
  CLI::App arguments(
      "Reads or changes the state of this user's running softverbs processes with the same SOFTVERBS_NAMESPACE.",
      "softverbs");
  arguments.require_subcommand(1);
  Action action;
  for (const Subcommand& subcommand : kSubcommands) {
    CLI::App* own = arguments.add_subcommand(subcommand.name, subcommand.help);
    own->callback([&action, declared = subcommand.declare(*own)] { action = declared; });
  }
  if (const auto early = cli::parse(arguments, argc, argv)) return cli::leave(*early);
  return cli::run_or_report([&action] {
    ProcessDirectory directory;
    return action(directory);
  });
}

}  // namespace
}  // namespace verbatim::control

int main(int argc, char** argv) {
  static char typed[] = "softverbs";  // what a user has called: tools/softverbs
  program_invocation_short_name = typed;
  return verbatim::control::run(argc, argv);
}
