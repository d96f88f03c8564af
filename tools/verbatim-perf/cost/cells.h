// The names of the measured parts and of callgrind's dumps, and the instruction counts that are read from the dumps.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

namespace verbatim::perf::cost {

using Json = nlohmann::ordered_json;

// The parts of a measurement. Each part runs in a process of its own.
constexpr const char* kInstructionsPart = "instructions";  // under callgrind
constexpr const char* kVerbsPart = "verbs";
constexpr const char* kPutInstructionsPart = "put-instructions";
constexpr const char* kPutsPart = "puts";
constexpr const char* kMemoryPart = "memory";  // with the library that counts allocations preloaded

// Labels of callgrind's dumps. A label is followed by the bytes and the group for a cell, and by the divisor.
constexpr const char* kWholeCell = "whole";
constexpr const char* kTestIncomplete = "test_incomplete";
constexpr const char* kSendWithoutReceive = "send_without_receive";
constexpr const char* kConnect = "connect";
// Of puts, followed by the bytes.
constexpr const char* kPut = "put";
constexpr const char* kPutSignal = "put_signal";
constexpr const char* kPutBurst = "put_burst";
constexpr const char* kPutKinds[] = {kPut, kPutSignal, kPutBurst};

// Instruction counts after the division.
struct Instructions {
  double plugin = 0;  // of the plugin's own object
  double libc = 0;    // of the C library and its callees, when called from the plugin
  double verbs = 0;   // of softverbs' own object
};

// Reads the dumps `prefix`.1, `prefix`.2, ... Returns the sums by label without the divisor. `plugin_object` is the
// plugin's path as the dynamic loader reports it. Throws Failure when a file is not in callgrind's format.
std::map<std::string, Instructions> read_dumps(const std::string& prefix, const std::string& plugin_object);

}  // namespace verbatim::perf::cost
