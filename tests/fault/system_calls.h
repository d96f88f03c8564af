// Makes chosen system calls and library functions of the plugin fail. The test program defines these functions itself,
// so that the plugin finds them before the C library's. Calls from other libraries are passed on unchanged.
#pragma once

#include <span>
#include <string>

#include "support/fail_nth.h"

namespace fault {

verbatim::test::FailNth& failing_system_call();

// From now on the calls from the loaded library with this path are counted, and can fail.
void watch_library(const std::string& path);
void watch_nothing();

}  // namespace fault
