// Options and roles of `soak`; see soak.cc.
#pragma once

#include <string>

namespace fault {

struct SoakOptions {
  unsigned seconds = 10;
  unsigned seed = 1;
  bool wrong_expected = false;
};
SoakOptions& soak_options();

// Runs the role "send-SEED" or "recv-SEED": one end of a connection.
int soak_role(const std::string& role, int api);

}  // namespace fault
