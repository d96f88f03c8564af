// The measuring processes of `verbatim-perf cost`, and what is done with their results.
#pragma once

#include <string>
#include <vector>

#include "ranks/scratch_directory.h"
#include "verbatim-perf/cost/cells.h"
#include "verbatim-perf/cost/options.h"

namespace verbatim::perf::cost {

// What is measured, and where the files of it are.
struct PartSubject {
  const CostOptions& options;
  const std::string& plugin;
  const ranks::Scratch& scratch;
};

// Runs a measuring process of part `part` over softverbs' inline engine, with `variables` ("NAME=value") added to its
// environment, as the arguments of `wrapper` if there are any. Returns the process's result. Throws Failure.
Json run_part(const PartSubject& subject, const std::string& part, std::vector<std::string> variables,
              const std::vector<std::string>& wrapper = {});

// The wrapper that counts instructions; read_dumps() reads what it writes.
std::vector<std::string> callgrind(const std::string& dumps_prefix);

// The counts of a cell, or of a call, for one message of `count`.
Json divided(const Json& counted, double count);

Json json_of(const Instructions& instructions);

double number(const Json& object, const char* key);

}  // namespace verbatim::perf::cost
