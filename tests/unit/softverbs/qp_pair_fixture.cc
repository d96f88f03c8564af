#include "qp_pair_fixture.h"

#include "support/child.h"

namespace verbatim::test {

std::string with_faults(const std::string& faults, const std::function<void()>& body) {
  return check_in_child({{"SOFTVERBS_FAULTS", faults}}, body);
}

}  // namespace verbatim::test
