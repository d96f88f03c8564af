// What a family notices of the other: LF's latencies beside an idle and beside a busy KV, and what KV carries while
// LF's connection stands and while it is killed. Turn by turn, and the medians.
#pragma once

#include "verbatim-kv/options.h"

namespace verbatim::kv {

// Runs this program with the arguments `argv` three times each turn. Wrong when a killed LF changes what KV carries;
// how fast it does is for the reader to judge.
ExitStatus run_isolation(const Options& options, int argc, char** argv);

}  // namespace verbatim::kv
