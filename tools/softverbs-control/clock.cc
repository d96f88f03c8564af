// softverbs hold, softverbs release: stop and start the clock of the ports with a rate.
#include "softverbs-control/subcommand.h"
#include "softverbs/fabric/virtual_clock.h"

namespace verbatim::control {

Action declare_hold(CLI::App& arguments) {
  arguments.footer(
      "Stops the virtual clock of all ports with a rate (SOFTVERBS_LINK_GBPS). Requests posted from now on wait for "
      "release.");
  return [](ProcessDirectory& directory) {
    softverbs::hold_clock(directory.registry());
    return ExitStatus::kOk;
  };
}

Action declare_release(CLI::App& arguments) {
  arguments.footer(
      "Starts the virtual clock again. The waiting requests are sent in an order that depends on nothing but what was "
      "posted.");
  return [](ProcessDirectory& directory) {
    softverbs::release_clock(directory.registry());
    return ExitStatus::kOk;
  };
}

}  // namespace verbatim::control
