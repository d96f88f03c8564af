// softverbs-control: looks at the running softverbs processes of this user, and acts on them, through the memory that
// they share; they take no part in it. tools/softverbs hands its subcommands to this program.
#include <CLI/CLI.hpp>
#include <array>
#include <cstdio>
#include <exception>

#include "softverbs-control/process_directory.h"
#include "softverbs-control/subcommand.h"

namespace verbatim::control {
namespace {

constexpr std::array kSubcommands{
    Subcommand{"fault", "makes something go wrong in the running processes", declare_fault},
    Subcommand{"hold", "stops the virtual clock of the ports with a rate", declare_hold},
    Subcommand{"release", "starts it again", declare_release},
    Subcommand{"stats", "what the running processes have asked of their devices", declare_stats},
};

int run(int argc, char** argv) {
  CLI::App arguments(
      "Looks at the running softverbs processes of this user, and acts on them. SOFTVERBS_NAMESPACE says which.",
      "tools/softverbs");
  arguments.require_subcommand(1);
  Action action;
  for (const Subcommand& subcommand : kSubcommands) {
    CLI::App* own = arguments.add_subcommand(subcommand.name, subcommand.help);
    own->callback([&action, declared = subcommand.declare(*own)] { action = declared; });
  }
  CLI11_PARSE(arguments, argc, argv);
  ProcessDirectory directory;
  return action(directory);
}

}  // namespace
}  // namespace verbatim::control

int main(int argc, char** argv) {
  try {
    return verbatim::control::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "softverbs: %s\n", error.what());
    return 1;
  }
}
