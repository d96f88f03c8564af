// Measures how one family affects the other: LF's latencies with an idle and with a busy KV, and KV's throughput with
// LF's connection established and with it killed. Runs in rounds and prints the medians.
#pragma once

#include "verbatim-kv/options.h"

namespace verbatim::kv {

// Runs this program with the arguments `argv` three times in each round. Returns kWrong when killing LF changes what KV
// carries. The rates are printed but not judged.
ExitStatus run_isolation(const Options& options, int argc, char** argv);

}  // namespace verbatim::kv
