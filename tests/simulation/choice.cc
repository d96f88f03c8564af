#include "simulation/choice.h"

#include <algorithm>
#include <charconv>
#include <sstream>
#include <system_error>

namespace simulation {
namespace {

constexpr std::string_view kPuts = "puts";

template <typename Number>
bool parse_number(std::string_view text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

bool parse_parts(std::string_view list, std::set<std::size_t>& parts) {
  while (true) {
    const std::size_t comma = list.find(',');
    const std::string_view name = list.substr(0, comma);
    std::size_t number = kPutsPart;
    if (name != kPuts && !parse_number(name, number)) return false;
    parts.insert(number);
    if (comma == std::string_view::npos) return true;
    list.remove_prefix(comma + 1);
  }
}

}  // namespace

bool Choice::set(std::string_view option, std::string_view value) {
  if (option == "seed") return parse_number(value, seed);
  if (option == "faults") return (faults = parse_faults(value)).has_value();
  if (option == "processes") return parse_number(value, processes) && processes != 0;
  if (option == "parts") return parse_parts(value, parts.emplace());
  if (option == "operations") return parse_number(value, operations) && operations != 0;
  if (option == "order") return parse_number(value, order);
  if (option == "devices") return std::find(kDevices.begin(), kDevices.end(), devices.emplace(value)) != kDevices.end();
  has_optional = value == "yes";
  return option == "optional" && (*has_optional || value == "no");
}

std::optional<Choice> parse_choice(std::string_view text) {
  Choice choice;
  std::istringstream words{std::string(text)};
  for (std::string option, value; words >> option;) {
    if (!option.starts_with("--") || !(words >> value) || !choice.set(option.substr(2), value)) return std::nullopt;
  }
  return choice;
}

std::string describe(const Choice& choice) {
  std::string text = "--seed " + std::to_string(choice.seed);
  if (choice.faults) text += " --faults " + describe(*choice.faults);
  if (choice.processes != SIZE_MAX) text += " --processes " + std::to_string(choice.processes);
  if (choice.parts) {
    const char* separator = " --parts ";
    for (const std::size_t part : *choice.parts) {
      text.append(separator).append(part == kPutsPart ? kPuts : std::to_string(part));
      separator = ",";
    }
  }
  if (choice.operations != SIZE_MAX) text += " --operations " + std::to_string(choice.operations);
  if (choice.order != 0) text += " --order " + std::to_string(choice.order);
  if (choice.has_optional) text += *choice.has_optional ? " --optional yes" : " --optional no";
  if (choice.devices) text += " --devices " + *choice.devices;
  return text;
}

}  // namespace simulation
