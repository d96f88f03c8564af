// softverbs hold, softverbs release: the clock of the ports that have a rate.
#include "softverbs-control/subcommand.h"
#include "softverbs/link_clock.h"

namespace verbatim::control {

Action declare_hold(CLI::App& arguments) {
  arguments.footer("Stops the virtual clock of all ports with a rate (SOFTVERBS_LINK_GBPS). What is posted waits.");
  return [](Host& host) {
    softverbs::hold_clock(host.registry());
    return 0;
  };
}

Action declare_release(CLI::App& arguments) {
  arguments.footer("Starts it again: all that waits is sent in an order that depends on nothing but what was posted.");
  return [](Host& host) {
    softverbs::release_clock(host.registry());
    return 0;
  };
}

}  // namespace verbatim::control
