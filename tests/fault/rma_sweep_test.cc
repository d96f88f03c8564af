// The failure sweep of an RMA communicator's lifetime, with both tables. A call may fail at either rank; both ranks
// fail then, and each says so in one line, or both succeed.
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "conformance.h"
#include "failure_sweep.h"
#include "lifecycle/process_resources.h"
#include "rma_lifetime.h"
#include "support/wait.h"
#include "system_calls.h"

namespace fault {
namespace {

// Calls that are repeated until something has arrived: how many of them depends on the machine.
constexpr long kRepeated = 60;
constexpr std::size_t kRmaRanks = 2;
// At most a quarter of VERBATIM_CONNECT_TIMEOUT_S, which every step of the ranks has. After a longer pause of the
// machine the line of that timeout may be the only one, and the lifetime is repeated.
constexpr std::chrono::milliseconds kLongestPause{500};
constexpr int kMaxTries = 5;

// The longest pause of this process during the life of the object.
class PauseWatch {
 public:
  PauseWatch()
      : thread_([this](const std::stop_token& end) {
          while (!end.stop_requested()) {
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
            pauses_.look();
          }
        }) {}
  // Ends the watch.
  std::chrono::nanoseconds longest() {
    thread_ = {};
    return pauses_.longest();
  }

 private:
  verbatim::test::Pauses pauses_;
  std::jthread thread_;
};

class RmaSweep : public Sweep, public ::testing::WithParamInterface<int> {
 protected:
  RmaSweep() { step_ = conformance::options().shorten; }

  LifetimeResult run(const Hooks& hooks) override {
    for (int tries = 1;; ++tries) {
      PauseWatch watch;
      LifetimeResult outcome = run_rma_lifetime(GetParam(), hooks);
      if (watch.longest() < kLongestPause || tries == kMaxTries) return outcome;
      std::printf("repeated after a pause of the machine\n");
    }
  }
  void expect_lines(const LifetimeResult& outcome, const Call& call, const std::string& log) override {
    EXPECT_LE(outcome.warnings.size(), kRmaRanks) << log;
    if (outcome.failed.empty()) return;
    // Of the rank to which it has happened: another one may name it, too.
    std::vector<std::string> own = outcome.warnings;
    std::erase_if(own, [](const std::string& line) { return line.find("because it failed at") != std::string::npos; });
    EXPECT_TRUE(names(own, call)) << log;
  }
};
INSTANTIATE_TEST_SUITE_P(Rma, RmaSweep, ::testing::Values(13, 14), conformance::version_name);

TEST_P(RmaSweep, EachVerbFails_BothRanksFailOrNone) {
  sweep(conformance::failing_verb(), {
                                         {"ibv_get_device_list", {ENOSYS}, "list devices"},
                                         {"ibv_open_device", {ENODEV}},
                                         {"ibv_query_device", {EIO}},
                                         {"ibv_query_port", {EIO}},
                                         {"ibv_query_gid_ex", {EIO}, "GID"},
                                         {"ibv_query_pkey", {EIO}},
                                         {"ibv_alloc_pd", {ENOMEM}},
                                         {"ibv_dealloc_pd", {EBUSY}},
                                         {"ibv_reg_mr", {ENOMEM}},
                                         {"ibv_reg_mr_iova2", {ENOMEM}},
                                         {"ibv_reg_dmabuf_mr", {EOPNOTSUPP, EINVAL}},
                                         {"ibv_dereg_mr", {EBUSY}},
                                         {"ibv_create_cq", {ENOMEM}},
                                         {"ibv_destroy_cq", {EBUSY}},
                                         {"ibv_create_qp", {ENOMEM}},
                                         {"ibv_modify_qp", {EINVAL, ETIMEDOUT}},
                                         {"ibv_query_qp", {EIO}},
                                         {"ibv_destroy_qp", {EBUSY}},
                                         {"ibv_query_ece", {EIO, EOPNOTSUPP}},
                                         {"ibv_set_ece", {EINVAL, EOPNOTSUPP}},
                                         {"ibv_get_async_event", {EIO}},
                                         {"ibv_post_send", {ENOMEM}},
                                         {"ibv_poll_cq", {EIO}, nullptr, kRepeated},
                                         {"ibv_close_device", {EBUSY}},
                                     });
}

TEST_P(RmaSweep, EachSystemCallFails_BothRanksFailOrNone) {
  sweep(failing_system_call(), {
                                   {"socket", {EMFILE}},
                                   {"bind", {EADDRINUSE}},
                                   {"listen", {EADDRINUSE}},
                                   {"connect", {ECONNREFUSED, ENETUNREACH}},
                                   {"accept4", {EMFILE, EINTR, EBADF}, "accept", kRepeated},
                                   {"getsockname", {ENOBUFS}},
                                   {"getsockopt", {ENOBUFS}},
                                   {"setsockopt", {ENOPROTOOPT}},
                                   {"poll", {ENOMEM, EINTR}, nullptr, kRepeated},
                                   {"recv", {ECONNRESET, EINTR}, "rank ", kRepeated},
                                   {"send", {EPIPE, EINTR}, "rank ", kRepeated},
                                   {"epoll_create1", {EMFILE}},
                                   {"epoll_ctl", {ENOSPC}},
                                   {"epoll_wait", {EINTR}, nullptr, kRepeated},
                                   {"timerfd_create", {EMFILE}},
                                   {"eventfd", {EMFILE}},
                                   {"getifaddrs", {EMFILE}, "network interfaces"},
                                   {"gethostname", {EFAULT}},
                                   {"getrandom", {ENOSYS, EINTR}},
                                   {"fcntl64", {EBADF}, "fcntl"},
                                   {"pthread_create", {EAGAIN}},
                                   {"mmap64", {ENOMEM}, "mmap"},
                               });
}

TEST_P(RmaSweep, EachAllocationFails_BothRanksFailOrNone) {
  sweep(failing_system_call(), {{"malloc", {ENOMEM}, "memory"}, {"aligned_alloc", {ENOMEM}, "memory"}});
}

}  // namespace
}  // namespace fault
