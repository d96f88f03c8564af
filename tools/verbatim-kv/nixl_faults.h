// What a plugin's run and NIXL do with requests whose block lists are invalid.
#pragma once

#include <string>
#include <vector>

#include "ranks/comparison.h"
#include "verbatim-kv/options.h"

namespace verbatim::kv {

// What became of an invalid list in a run over NIXL, as text: `bad` is an entry of the report's `bad_lists`.
std::string describe_bad_list(const ranks::Json& bad);

// The values of --inject for one invalid list of each kind in a family.
std::vector<std::string> bad_list_faults(const std::string& family);

// Runs each variant once with an invalid list of each kind in the second family, and prints a table with the outcomes.
// Returns them. Throws Failure.
ranks::Json compare_bad_lists(const Options& options, std::vector<ranks::Variant> variants, int argc, char** argv);

}  // namespace verbatim::kv
