#include "ranks/job.h"

#include <new>
#include <optional>
#include <thread>

#include "ranks/coordinator.h"
#include "ranks/launcher.h"
#include "ranks/meeting_point.h"
#include "ranks/plugin_log.h"
#include "ranks/token.h"

namespace verbatim::ranks {
namespace {

// For ranks that were started separately: the coordinator in a thread of rank 0. Rank 0 learns the end of the job
// through its CoordinatorConnection.
class CoordinatorThread {
 public:
  CoordinatorThread(const Job& job, std::uint64_t token)
      : coordinator_(listen_at(job.root), job.nranks, token, job.timeout_s),
        thread_([this] { status_ = coordinator_.serve([] { return std::nullopt; }); }) {}
  ~CoordinatorThread() {
    if (thread_.joinable()) thread_.join();
  }
  CoordinatorThread(const CoordinatorThread&) = delete;
  CoordinatorThread& operator=(const CoordinatorThread&) = delete;

  // Waits for the end of the job.
  ExitStatus finish() {
    thread_.join();
    return status_;
  }

 private:
  Coordinator coordinator_;
  ExitStatus status_ = ExitStatus::kOk;
  std::thread thread_;  // last member: the thread uses the others
};

ExitStatus run_rank(const Job& job, const MakeRank& make) {
  const bool needs_token = !is_local(job.root);
  const std::optional<std::uint64_t> given = needs_token ? take_token(job.start) : std::nullopt;
  if (needs_token && !given) {
    throw Failure("ranks that meet at " + job.root +
                      " need a secret, so that no other process joins them. Next: export " + kTokenVariable +
                      "=$(cat /proc/sys/kernel/random/uuid), the same for all ranks (srun passes it on; mpirun -x " +
                      kTokenVariable + ")",
                  ExitStatus::kUsage);
  }
  const bool coordinates = job.rank == 0 && !job.child;
  const std::uint64_t token = given ? *given : coordinates ? random_number() : 0;
  std::optional<CoordinatorThread> coordinator_thread;
  if (coordinates) coordinator_thread.emplace(job, token);
  const Hello hello{token, static_cast<std::uint32_t>(job.rank), static_cast<std::uint32_t>(job.nranks)};
  const Reports reports = job.child || job.rank == 0 ? Reports::kCoordinator : Reports::kItself;
  std::optional<CoordinatorConnection> joined;
  try {
    joined.emplace(job.root, hello, job.timeout_s, reports);
  } catch (const Failure& failure) {
    throw Failure("rank " + std::to_string(job.rank) + ": " + failure.what(), failure.status);
  }
  CoordinatorConnection& connection = *joined;
  std::unique_ptr<Rank> rank;  // declared here so that it is still alive in the catch blocks
  try {
    rank = make(connection);
    const ExitStatus status = rank->run();
    rank.reset();
    if (const std::string warnings = unprinted_plugin_warnings(); !warnings.empty()) {
      print_error("rank " + std::to_string(job.rank) + ": the plugin has warned:" + warnings);
    }
    connection.finish();
    joined.reset();
    const ExitStatus others = coordinator_thread ? coordinator_thread->finish() : ExitStatus::kOk;
    return others == ExitStatus::kOk ? status : others;
  } catch (const Failure& failure) {
    connection.fail(failure.status, failure.what() + plugin_warnings());
  } catch (const std::bad_alloc&) {
    connection.fail(ExitStatus::kFailed, "not enough memory");
  } catch (const std::exception& failure) {
    connection.fail(ExitStatus::kFailed, failure.what() + plugin_warnings());
  }
}

}  // namespace

ExitStatus run_job(const Job& job, int argc, char** argv, const MakeRank& make) {
  return job.root.empty() ? launch(job, argc, argv) : run_rank(job, make);
}

}  // namespace verbatim::ranks
