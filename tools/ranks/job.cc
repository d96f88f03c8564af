#include "ranks/job.h"

#include <new>
#include <optional>
#include <thread>

#include "ranks/coordinator.h"
#include "ranks/launcher.h"
#include "ranks/plugin_log.h"

namespace verbatim::ranks {
namespace {

// With --root: the coordinator in a thread of rank 0. Rank 0 learns the end of the job through its
// CoordinatorConnection.
class CoordinatorThread {
 public:
  explicit CoordinatorThread(const Job& job)
      : coordinator_(listen_for_ranks(port_of(job.root)), job.nranks, job.token, job.timeout_s),
        thread_([this] { coordinator_.serve([] { return std::nullopt; }); }) {}
  ~CoordinatorThread() { thread_.join(); }
  CoordinatorThread(const CoordinatorThread&) = delete;
  CoordinatorThread& operator=(const CoordinatorThread&) = delete;

 private:
  Coordinator coordinator_;
  std::thread thread_;
};

ExitStatus run_rank(const Job& job, const MakeRank& make) {
  std::optional<CoordinatorThread> coordinator_thread;
  if (job.rank == 0 && !job.child) coordinator_thread.emplace(job);
  const Hello hello{job.token, static_cast<std::uint32_t>(job.rank), static_cast<std::uint32_t>(job.nranks)};
  CoordinatorConnection connection(job.root, hello, job.timeout_s);
  std::unique_ptr<Rank> rank;  // declared here so that it is still alive in the catch blocks
  try {
    rank = make(connection);
    const ExitStatus status = rank->run();
    rank.reset();
    connection.finish();
    return status;
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
