// What is chosen of a run by hand; its seed draws the rest.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "simulation/faults.h"

namespace simulation {

// A connection of the job by its number, or the puts.
constexpr std::size_t kPutsPart = SIZE_MAX;

struct Choice {
  std::uint64_t seed = 1;
  std::optional<ChosenFaults> faults = {};
  std::size_t processes = SIZE_MAX;                 // of the job at most so many, the first ones
  std::optional<std::set<std::size_t>> parts = {};  // of the job only these
  std::size_t operations = SIZE_MAX;                // only so many, the first ones of each thread
  std::uint64_t order = 0;                          // with another number the threads have another order
  // Whether some connections have receives with optional completion. Without a value the seed chooses, but with chosen
  // faults there are none.
  std::optional<bool> has_optional = {};
  // One of kDevices. Without a value the seed chooses, but with chosen faults they are the first.
  std::optional<std::string> devices = {};

  // Of an option without its dashes. False: it is not known, or cannot have this value.
  bool set(std::string_view option, std::string_view value);
};

constexpr const char* kChoiceOptions[] = {"seed",       "faults", "processes", "parts",
                                          "operations", "order",  "optional",  "devices"};

// Profiles of softverbs, and its devices with another link layer.
constexpr std::array<std::string_view, 5> kDevices = {"standard", "mlx5", "bnxt_re", "irdma", "ib"};

// Options and values, separated by blanks: "--seed 7 --faults port/2 --parts 1,puts".
std::optional<Choice> parse_choice(std::string_view text);
std::string describe(const Choice& choice);

}  // namespace simulation
