#include "fault_fixture.h"

#include <cstdio>
#include <cstdlib>

#include "support/child.h"

namespace verbatim::test {

std::string with_faults(const std::string& faults, const std::function<void()>& body) {
  const ChildEnd end = run_in_child({{"SOFTVERBS_FAULTS", faults}}, [&]() -> int {
    try {
      body();
    } catch (const std::exception& failure) {
      ADD_FAILURE() << failure.what();
    }
    std::fflush(nullptr);
    std::exit(testing::Test::HasFailure() ? EXIT_FAILURE : EXIT_SUCCESS);  // in good order, as a program ends
  });
  EXPECT_EQ(end.status, EXIT_SUCCESS) << "under " << faults << "\n" << end.told;
  return end.told;
}

}  // namespace verbatim::test
