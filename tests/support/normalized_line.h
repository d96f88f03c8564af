// Log lines of the plugin in a form that can be compared.
#pragma once

#include <unistd.h>

#include <climits>
#include <regex>
#include <string>
#include <utility>

namespace verbatim {

// Replaces what differs from run to run.
inline std::string normalized(std::string line) {
  char host[HOST_NAME_MAX + 1] = {};
  ::gethostname(host, sizeof host - 1);
  for (const auto& [varying, word] : {std::pair<std::string, std::string>(host, "HOST"),
                                      {"QP [0-9]+", "QP #"},
                                      {"0x[0-9a-f]+", "0x#"},
                                      {"registration of [0-9]+ bytes", "registration of # bytes"},
                                      {"pid [0-9]+", "pid #"},
                                      {"127\\.0\\.0\\.1:[0-9]+", "127.0.0.1:#"},
                                      {"[0-9.e+-]+ (s|ms) old", "T old"},
                                      {"(stalled|no progress) for [0-9.]+ s", "$1 for T"},
                                      {"worked for [0-9.e+-]+ (s|ms)", "worked for T"},
                                      {", for [0-9.e+-]+ (s|ms) now", ""}}) {
    line = std::regex_replace(line, std::regex(varying), word);
  }
  return line;
}

}  // namespace verbatim
