// Writes JSON strings, fields, objects and lists: for the state sockets, the files of statistics and of QPs, and
// softverbs' statistics.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

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

// A field whose value is an object or a list.
inline std::string json_nested(const char* name, const std::string& json) {
  return json_text(name) + ":" + json;
}

template <typename Texts>
std::string json_joined(const Texts& texts) {
  std::string out;
  for (const std::string& text : texts) out += (out.empty() ? "" : ",") + text;
  return out;
}

// `fields` as the functions above return them.
inline std::string json_object(std::initializer_list<std::string> fields) {
  return "{" + json_joined(fields) + "}";
}
inline std::string json_object(const std::vector<std::string>& fields) {
  return "{" + json_joined(fields) + "}";
}
inline std::string json_list(const std::vector<std::string>& values) {
  return "[" + json_joined(values) + "]";
}

}  // namespace verbatim
