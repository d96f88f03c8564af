#include "net/diagnose/failure.h"

namespace verbatim {

std::string peer_text(const Failure& failure) {
  return failure.diagnosis.why.empty() ? failure.what : failure.what + ": " + failure.diagnosis.why;
}

std::string log_line(const Failure& failure) {
  std::string line = peer_text(failure);
  if (!failure.diagnosis.next.empty()) line.append(kNextStep).append(failure.diagnosis.next);
  if (!failure.path) return line;
  line.append(". Path: ").append(describe_path(*failure.path)).append(describe_path_history(*failure.path));
  if (!failure.path->counters.empty()) line.append("; since then ").append(failure.path->counters);
  return line;
}

}  // namespace verbatim
