// The system calls and library functions that the plugin makes, each of which can be told to fail. This program defines
// them itself, so that the plugin finds these before the C library's; what others call goes straight through.
#pragma once

#include <span>
#include <string>

#include "support/fail_nth.h"

namespace fault {

verbatim::test::FailNth& failing_system_call();

// From now on calls out of the loaded library of this path count.
void watch_library(const std::string& path);
void watch_nothing();

}  // namespace fault
