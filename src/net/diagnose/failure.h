// The failure of a connection as data, and its two renderings: the line of the local log, which stands alone, and the
// text that the peer is sent. No code reads these texts.
#pragma once

#include <optional>
#include <string>

#include "base/result.h"
#include "net/diagnose/diagnosis.h"
#include "net/diagnose/path_facts.h"

namespace verbatim {

struct Failure {
  std::string what;  // what failed
  Diagnosis diagnosis = {};
  std::optional<PathFacts> path = std::nullopt;
  ErrorKind kind = ErrorKind::kInternal;
  const char* operation = "";  // static name, as in Error
};

// Begins the advice in a log line; the lines of the monitor use it too.
inline constexpr const char* kNextStep = ". Next: ";

// "what: why. Next: next. Path: ...". The most important first, because NCCL cuts long lines.
std::string log_line(const Failure& failure);

// "what: why": advice and path are for the operator of this host.
std::string peer_text(const Failure& failure);

}  // namespace verbatim
