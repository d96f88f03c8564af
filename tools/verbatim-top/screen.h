// The screen of verbatim-top on a terminal.
#pragma once

#include "live/rates.h"
#include "verbatim-top/render.h"

namespace verbatim::top {

// Shows samples, one each `interval_ms`, until the user presses q. Throws std::runtime_error where there is no
// terminal.
void run_screen(live::Sampler& sampler, int interval_ms, Sort sort);

}  // namespace verbatim::top
