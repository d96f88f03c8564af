#include "base/result.h"

#include <cstring>

namespace verbatim {

std::string to_string(const Error& error) {
  std::string text = error.operation;
  if (error.sys_errno != 0) text.append(": ").append(std::strerror(error.sys_errno));
  return text;
}

}  // namespace verbatim
