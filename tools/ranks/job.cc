#include "ranks/job.h"

#include <new>
#include <optional>
#include <thread>

#include "ranks/coordinator.h"
#include "ranks/launcher.h"
#include "ranks/plugin_log.h"

namespace verbatim::ranks {
namespace {

// Between hosts: the hub of rank 0, in a thread. The job's end is heard through the link.
class CoordinatorThread {
 public:
  explicit CoordinatorThread(const Job& job)
      : hub_(listen_for_ranks(port_of(job.root)), job.nranks, job.token, job.timeout_s),
        thread_([this] { hub_.serve([] { return std::nullopt; }); }) {}
  ~CoordinatorThread() { thread_.join(); }
  CoordinatorThread(const CoordinatorThread&) = delete;
  CoordinatorThread& operator=(const CoordinatorThread&) = delete;

 private:
  Coordinator hub_;
  std::thread thread_;
};

ExitStatus run_rank(const Job& job, const MakeRank& make) {
  std::optional<CoordinatorThread> hub;
  if (job.rank == 0 && !job.child) hub.emplace(job);
  const Hello hello{job.token, static_cast<std::uint32_t>(job.rank), static_cast<std::uint32_t>(job.nranks)};
  CoordinatorConnection link(job.root, hello, job.timeout_s);
  std::unique_ptr<Rank> rank;  // outlives the handlers
  try {
    rank = make(link);
    const ExitStatus status = rank->run();
    rank.reset();
    link.finish();
    return status;
  } catch (const Failure& failure) {
    link.fail(failure.status, failure.what() + plugin_warnings());
  } catch (const std::bad_alloc&) {
    link.fail(ExitStatus::kFailed, "not enough memory");
  } catch (const std::exception& failure) {
    link.fail(ExitStatus::kFailed, failure.what() + plugin_warnings());
  }
}

}  // namespace

ExitStatus run_job(const Job& job, int argc, char** argv, const MakeRank& make) {
  return job.root.empty() ? launch(job, argc, argv) : run_rank(job, make);
}

}  // namespace verbatim::ranks
