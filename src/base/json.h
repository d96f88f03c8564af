// Writes JSON strings and fields, for the state socket and the statistics file.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace verbatim {

inline std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= ' ') out += c;
  }
  return out + '"';
}

inline std::string json_field(const char* name, std::uint64_t value) {
  return json_text(name) + ":" + std::to_string(value);
}
inline std::string json_field(const char* name, std::string_view text) {
  return json_text(name) + ":" + json_text(text);
}
inline std::string json_flag(const char* name, bool value) {
  return json_text(name) + (value ? ":true" : ":false");
}

// `fields` as json_field returns them.
inline std::string json_object(std::initializer_list<std::string> fields) {
  std::string out;
  for (const std::string& field : fields) out += (out.empty() ? "{" : ",") + field;
  return out + "}";
}

}  // namespace verbatim
