// softverbs hold, softverbs release: the clock of the ports that have a rate.
#include "softverbs-control/subcommand.h"
#include "softverbs/fabric/virtual_clock.h"

namespace verbatim::control {

Action declare_hold(CLI::App& arguments) {
  arguments.footer("Stops the virtual clock of all ports with a rate (SOFTVERBS_LINK_GBPS). What is posted waits.");
  return [](ProcessDirectory& directory) {
    softverbs::hold_clock(directory.registry());
    return 0;
  };
}

Action declare_release(CLI::App& arguments) {
  arguments.footer("Starts it again: all that waits is sent in an order that depends on nothing but what was posted.");
  return [](ProcessDirectory& directory) {
    softverbs::release_clock(directory.registry());
    return 0;
  };
}

}  // namespace verbatim::control
