#include "verbs/hca_filter.h"

#include <algorithm>
#include <cerrno>
#include <charconv>

namespace verbatim {
namespace {

constexpr int kMaxPort = 255;           // port numbers of verbs are uint8_t
constexpr int kMaxRailOrPlane = 32767;  // railId and planeId of NCCL's v12 properties are int16_t

std::string_view take_until(std::string_view& text, char separator) {
  const std::size_t end = std::min(text.find(separator), text.size());
  const std::string_view front = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return front;
}

// An empty field leaves `number` unchanged.
bool parse_field(std::string_view field, int low, int high, int& number) {
  if (field.empty()) return true;
  int value = 0;
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
  if (error != std::errc{} || end != field.data() + field.size() || value < low || value > high) return false;
  number = value;
  return true;
}

}  // namespace

Result<HcaFilter> HcaFilter::parse(std::string_view text) {
  HcaFilter filter;
  if (text.starts_with('^')) {
    filter.exclude_ = true;
    text.remove_prefix(1);
  }
  if (text.starts_with('=')) {
    filter.exact_ = true;
    text.remove_prefix(1);
  }
  const Error malformed{ErrorKind::kUsage, EINVAL, "HCA filter"};
  while (!text.empty()) {
    std::string_view item = take_until(text, ',');
    if (item.empty()) continue;
    Entry entry;
    entry.name = take_until(item, ':');
    const bool numbers = parse_field(take_until(item, ':'), 1, kMaxPort, entry.port) &&
                         parse_field(take_until(item, ':'), 0, kMaxRailOrPlane, entry.rail_id) &&
                         parse_field(take_until(item, ':'), 0, kMaxRailOrPlane, entry.plane_id);
    if (entry.name.empty() || !numbers || !item.empty()) return malformed;
    filter.entries_.push_back(std::move(entry));
  }
  if (filter.entries_.empty() && (filter.exclude_ || filter.exact_)) return malformed;
  return filter;
}

bool HcaFilter::names(const Entry& entry, std::string_view device) const {
  return exact_ ? device == entry.name : device.starts_with(entry.name);
}

bool HcaFilter::may_select(std::string_view device) const {
  if (entries_.empty()) return true;
  const auto decides = [&](const Entry& entry) { return names(entry, device) && (!exclude_ || entry.port == -1); };
  return std::any_of(entries_.begin(), entries_.end(), decides) != exclude_;
}

HcaMatch HcaFilter::match(std::string_view device, std::uint8_t port_num) const {
  if (entries_.empty()) return {.selected = true};
  for (const Entry& entry : entries_) {
    if (!names(entry, device) || (entry.port != -1 && entry.port != port_num)) continue;
    if (exclude_) return {.selected = false};
    return {.selected = true, .rail_id = entry.rail_id, .plane_id = entry.plane_id};
  }
  return {.selected = exclude_};
}

}  // namespace verbatim
