// The job finds what it must find: each of these plugins passes on what another one delivers, and changes one message.
#include "simulation/job.h"

#include <cstdlib>
#include <stdexcept>

#include "simulation/captured_run.h"

namespace simulation {
namespace {

struct Mutation {
  const char* mode;
  const char* finding;
};

void PrintTo(const Mutation& mutation, std::ostream* stream) {
  *stream << mutation.mode;
}

Job draw_mutated(std::uint64_t seed, const char* mode) {
  ::setenv("MUTATE_MODE", mode, 1);
  const char* const plugin = std::getenv("MUTATE");
  if (plugin == nullptr) throw std::runtime_error("MUTATE is not set");
  return draw_job(seed, plugin);
}

// With one process, with two and with three.
class MutatedJob : public testing::TestWithParam<Mutation> {
 public:
  static CapturedRun run_mutated(const char* mode, std::size_t processes) {
    std::uint64_t seed = 1;
    Job job = draw_mutated(seed, mode);
    while (job.processes != processes) job = draw_job(++seed, job.plugin);
    return captured_run({.seed = seed}, processes, [&](std::size_t process) { return run_job(job, process); });
  }
};

TEST_P(MutatedJob, MessageThatIsChanged_IsFound) {
  for (std::size_t processes = 1; processes <= 3; ++processes) {
    const CapturedRun captured = run_mutated(GetParam().mode, processes);
    EXPECT_FALSE(captured.result.passed);
    EXPECT_NE(captured.text.find(GetParam().finding), std::string::npos) << captured.text;
  }
}

INSTANTIATE_TEST_SUITE_P(Simulation, MutatedJob,
                         testing::Values(Mutation{"flip-byte", "wrong bytes: 1 in group"},
                                         Mutation{"skip-tail", "wrong bytes: 3 in group"},
                                         Mutation{"overrun", "wrong bytes: 1 behind messages"},
                                         Mutation{"wrong-size", " bytes reports "}));

TEST(SimulatedJob, NothingIsChanged_Passes) {
  for (std::size_t processes = 1; processes <= 3; ++processes) {
    const CapturedRun captured = MutatedJob::run_mutated("none", processes);
    EXPECT_TRUE(captured.result.passed) << captured.text;
  }
}

TEST(SimulatedJob, ConnectionWithoutSender_ReachesTheLimit) {
  Job job = draw_mutated(1, "none");
  job.connections.front().sender = job.processes;
  const CapturedRun captured =
      captured_run({.limit = kJobLimit}, job.processes, [&](std::size_t process) { return run_job(job, process); });
  EXPECT_FALSE(captured.result.passed);
  EXPECT_NE(captured.text.find("limit of virtual time"), std::string::npos) << captured.text;
}

}  // namespace
}  // namespace simulation
