// Nothing leaks, whatever fails: for every call that the plugin makes in one life, of verbs, of the system and for
// memory, one life in which exactly that call fails. Each ends with success or with a clear error, at most one warning
// at each end, and without a trace; then another life works.
#include <gtest/gtest.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <vector>

#include "conformance.h"
#include "life.h"
#include "lifecycle/census.h"
#include "support/fail_nth.h"
#include "system_calls.h"

namespace fault {
namespace {

using conformance::Census;
using conformance::is_back;
using conformance::verbs_alive;
using verbatim::test::FailNth;

// More calls of one function than a life makes: a sweep that comes here counts something else.
constexpr long kEndless = 20'000;
// For what the C library keeps of names, streams and threads.
constexpr std::size_t kHeapSlack = 64 << 10;

struct Call {
  const char* name;
  std::vector<int> errors;
  // What a warning may say instead of its name.
  const char* named = nullptr;
};

bool names(const std::vector<std::string>& warnings, const Call& call) {
  for (const std::string& line : warnings) {
    if (line.find(call.name) != std::string::npos) return true;
    if (call.named != nullptr && line.find(call.named) != std::string::npos) return true;
  }
  return false;
}

std::string join(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text.append("\n  ").append(line);
  return text;
}

bool signals_are_blocked() {
  sigset_t now;
  pthread_sigmask(SIG_SETMASK, nullptr, &now);
  return sigismember(&now, SIGTERM) == 1;
}

class Sweep : public ::testing::TestWithParam<int> {
 protected:
  void sweep(FailNth& fail, const std::vector<Call>& calls) {
    const Outcome first = live(GetParam());
    ASSERT_EQ(first.failed + first.broken, "") << join(first.warnings);
    ASSERT_EQ(verbs_alive(), "");
    live(GetParam());
    const Census before = Census::take();
    long all = 0;
    long errors = 0;
    for (const Call& call : calls) {
      for (const int error : call.errors) {
        long runs = 0;
        long failed = 0;
        while (one(fail, call, error, runs + 1, failed)) ASSERT_LT(++runs, kEndless) << call.name;
        std::printf("%s with %s: %ld runs, %ld with an error\n", call.name, strerrorname_np(error), runs, failed);
        all += runs;
        errors += failed;
      }
    }
    std::printf("v%d: %ld calls failed, one a run: %ld runs answered with an error, %ld went on\n", GetParam(), all,
                errors, all - errors);
    EXPECT_GT(all, 0);
    EXPECT_TRUE(is_back(before, kHeapSlack));
  }

 private:
  // The life in which the `nth` of these calls fails: false when there are not as many.
  bool one(FailNth& fail, const Call& call, int error, long nth, long& failed) {
    SCOPED_TRACE(std::string(call.name) + " number " + std::to_string(nth) + " with " + strerrorname_np(error));
    const Census before = Census::take();
    const Outcome outcome = live(GetParam(), {.loaded =
                                                  [&] {
                                                    watch_library(conformance::options().plugin);
                                                    fail.arm(call.name, nth, error);
                                                  },
                                              .unloaded =
                                                  [&] {
                                                    fail.disarm();
                                                    watch_nothing();
                                                  }});
    const std::string said = outcome.failed + join(outcome.warnings);
    EXPECT_EQ(outcome.broken, "") << said;
    EXPECT_EQ(verbs_alive(), "") << said;
    EXPECT_TRUE(is_back(before, std::size_t{1} << 30)) << said;
    EXPECT_FALSE(signals_are_blocked());
    EXPECT_LE(outcome.warnings.size(), 2U) << said;
    if (!fail.has_failed()) {
      EXPECT_EQ(said, "") << "though nothing failed";
      return false;
    }
    if (!outcome.failed.empty()) {
      ++failed;
      EXPECT_TRUE(names(outcome.warnings, call)) << said;
    }
    const Outcome after = live(GetParam());
    EXPECT_EQ(after.failed + after.broken + join(after.warnings), "") << "in the life after: " << said;
    return true;
  }
};
INSTANTIATE_TEST_SUITE_P(Net, Sweep, ::testing::Range(6, 13), conformance::version_name);

TEST_P(Sweep, Verbs) {
  sweep(conformance::failing_verb(), {
                                         {"ibv_get_device_list", {ENOSYS}, "list devices"},
                                         {"ibv_open_device", {ENODEV}},
                                         {"ibv_fork_init", {EINVAL}},
                                         {"ibv_query_device", {EIO}},
                                         {"ibv_query_port", {EIO}},
                                         {"ibv_query_gid", {EIO}, "GID"},
                                         {"ibv_query_gid_ex", {EIO, ENODATA}, "GID"},
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
                                         {"ibv_post_recv", {ENOMEM}},
                                         {"ibv_poll_cq", {EIO}},
                                         {"ibv_close_device", {EBUSY}},
                                     });
}

TEST_P(Sweep, SystemCalls) {
  sweep(failing_system_call(), {
                                   {"socket", {EMFILE}},
                                   {"bind", {EADDRINUSE}},
                                   {"listen", {EADDRINUSE}},
                                   {"connect", {ECONNREFUSED, EINTR, ENETUNREACH}},
                                   {"accept4", {EMFILE, EINTR, ECONNABORTED, EBADF}, "accept"},
                                   {"getsockname", {ENOBUFS}},
                                   {"getpeername", {ENOTCONN}},
                                   {"getsockopt", {ENOBUFS}},
                                   {"setsockopt", {ENOPROTOOPT}},
                                   {"poll", {ENOMEM, EINTR}},
                                   {"recv", {ECONNRESET, EINTR}, "the peer"},
                                   {"send", {EPIPE, EINTR}, "the peer"},
                                   {"read", {EINTR, EIO}},
                                   {"write", {EINTR}},
                                   {"epoll_create1", {EMFILE}},
                                   {"epoll_ctl", {ENOSPC, ENOMEM}},
                                   {"epoll_wait", {EINTR}},
                                   {"eventfd", {EMFILE}},
                                   {"getifaddrs", {EMFILE}, "network interfaces"},
                                   {"gethostname", {EFAULT}},
                                   {"getrandom", {ENOSYS, EINTR}},
                                   {"realpath", {ENOENT}},
                                   {"access", {EACCES}},
                                   {"fopen64", {EMFILE}},
                                   {"open", {EMFILE}},
                                   {"open64", {EMFILE}},
                                   {"fcntl64", {EBADF}, "fcntl"},
                                   {"mmap64", {ENOMEM}, "mmap"},
                                   {"munmap", {EINVAL}},
                                   {"ioctl", {ENOTTY}},
                                   {"pthread_create", {EAGAIN}},
                               });
}

TEST_P(Sweep, Memory) {
  sweep(failing_system_call(), {{"malloc", {ENOMEM}, "memory"}, {"aligned_alloc", {ENOMEM}, "memory"}});
}

}  // namespace
}  // namespace fault
