// What verbatim-top shows, as lines of text and as JSON.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "live/rates.h"

namespace verbatim::top {

enum class Sort : std::uint8_t { kBytes, kMessages, kOutstanding, kWaiting, kPid };

struct Line {
  std::string text;
  enum class Style : std::uint8_t { kPlain, kHead, kAlarm } style = Style::kPlain;
};

// Sorts processes and the connections, RMA sets and queues of each, largest first; by their IDs and numbers for kPid.
void sort_view(live::View& view, Sort sort);

// Printable ASCII only. `connections`: with a line for each, and for each RMA queue.
std::vector<Line> to_lines(const live::View& view, bool connections);

// plugin/STATE.md explains the fields.
nlohmann::ordered_json to_json(const live::View& view);

}  // namespace verbatim::top
