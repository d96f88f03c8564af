// The failure of a connection as data, and the two texts that are made of it: the line in the local log, which can be
// understood without any other line, and the text that is sent to the peer. No code makes a decision from these texts.
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

// The text between the failure and the advice in a log line. The stall reports of the monitor use the same text.
inline constexpr const char* kNextStep = ". Next: ";

// "what: why. Next: next. Path: ...". The most important part is first, because NCCL cuts long lines. A part that is
// empty is left out.
std::string log_line(const Failure& failure);

// "what: why". Advice and path are not sent, because they are for the operator of this host.
std::string peer_text(const Failure& failure);

}  // namespace verbatim
