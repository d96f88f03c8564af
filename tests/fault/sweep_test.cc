// Nothing leaks, whatever fails: for every call that the plugin makes in one life, of verbs, of the system and for
// memory, one life in which exactly that call fails. Each ends with success or with an error that one line explains,
// and without a trace; then another life works.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "conformance.h"
#include "lifecycle/process_resources.h"
#include "plugin_lifetime.h"
#include "support/fail_nth.h"
#include "support/scratch_directory.h"
#include "system_calls.h"

namespace fault {
namespace {

using conformance::is_restored;
using conformance::ProcessResources;
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

// Told at the end that only heard of it. Both ends are in this process.
bool is_of_other_end(const std::string& line) {
  for (const char* heard : {"closed the connection first", "the peer failed first", "ended without closing",
                            "aborted the connection", "the peer refused the connection", " reported: "}) {
    if (line.find(heard) != std::string::npos) return true;
  }
  return false;
}

// An error is told in one line that names the call, and in one where the other end hears of it. When a lost message is
// all that there was, each end has but heard of it.
void expect_one_line(const LifetimeResult& outcome, const Call& call, const std::string& said) {
  const auto heard = std::count_if(outcome.warnings.begin(), outcome.warnings.end(), is_of_other_end);
  const auto own = static_cast<std::ptrdiff_t>(outcome.warnings.size()) - heard;
  if (outcome.failed.empty()) {
    EXPECT_LE(outcome.warnings.size(), 1U) << said;
    return;
  }
  const bool is_message = call.named != nullptr && call.named == std::string_view("the peer");
  EXPECT_TRUE(own == 1 || (own == 0 && is_message)) << said;
  EXPECT_LE(heard, own == 1 ? 1 : 2) << said;
  EXPECT_TRUE(names(outcome.warnings, call)) << said;
}

bool signals_are_blocked() {
  sigset_t now;
  pthread_sigmask(SIG_SETMASK, nullptr, &now);
  return sigismember(&now, SIGTERM) == 1;
}

class FailureSweep : public ::testing::TestWithParam<int> {
 protected:
  void sweep(FailNth& fail, const std::vector<Call>& calls) {
    const LifetimeResult first = run_lifetime(GetParam());
    ASSERT_EQ(first.failed + first.violation, "") << join(first.warnings);
    ASSERT_EQ(verbs_alive(), "");
    run_lifetime(GetParam());
    const ProcessResources before = ProcessResources::take();
    long all = 0;
    long errors = 0;
    for (const Call& call : calls) {
      for (const int error : call.errors) {
        long runs = 0;
        long failed = 0;
        while (one(fail, call, error, runs + 1, failed)) ASSERT_LT(++runs, kEndless) << call.name;
        std::printf("%s with %s: %ld runs, %ld with an error\n", call.name, strerrorname_np(error), runs, failed);
        EXPECT_TRUE(runs > 0 || !each_is_made_) << call.name;
        all += runs;
        errors += failed;
      }
    }
    std::printf("v%d: %ld calls failed, one a run: %ld runs answered with an error, %ld went on\n", GetParam(), all,
                errors, all - errors);
    EXPECT_GT(all, 0);
    EXPECT_TRUE(is_restored(before, kHeapSlack));
  }
  // What lies about after a life in which this call failed, and should not.
  virtual std::string files_left(const Call&) { return ""; }

  bool each_is_made_ = false;  // every call that is listed is made in a life

 private:
  // The life in which the `nth` of these calls fails: false when there are not as many.
  bool one(FailNth& fail, const Call& call, int error, long nth, long& failed) {
    SCOPED_TRACE(std::string(call.name) + " number " + std::to_string(nth) + " with " + strerrorname_np(error));
    const ProcessResources before = ProcessResources::take();
    const LifetimeResult outcome = run_lifetime(GetParam(), {.loaded =
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
    EXPECT_EQ(outcome.violation, "") << said;
    EXPECT_EQ(verbs_alive(), "") << said;
    EXPECT_EQ(files_left(call), "") << said;
    EXPECT_TRUE(is_restored(before, std::size_t{1} << 30)) << said;
    EXPECT_FALSE(signals_are_blocked());
    expect_one_line(outcome, call, said);
    if (!fail.has_failed()) {
      EXPECT_EQ(said, "") << "though nothing failed";
      return false;
    }
    if (!outcome.failed.empty()) ++failed;
    const LifetimeResult after = run_lifetime(GetParam());
    EXPECT_EQ(after.failed + after.violation + join(after.warnings), "") << "in the life after: " << said;
    return true;
  }
};
INSTANTIATE_TEST_SUITE_P(Net, FailureSweep, ::testing::Range(6, 13), conformance::version_name);

TEST_P(FailureSweep, EachVerbFails_NothingLeaks) {
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
                                         {"ibv_reg_dmabuf_mr", {EOPNOTSUPP, EINVAL, ENOMEM}},
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

TEST_P(FailureSweep, EachSystemCallFails_NothingLeaks) {
  sweep(failing_system_call(), {
                                   {"socket", {EMFILE}},
                                   {"bind", {EADDRINUSE}},
                                   {"listen", {EADDRINUSE}},
                                   {"connect", {ECONNREFUSED, ENETUNREACH}},
                                   {"connect", {EINTR}, "the peer"},  // and never connects
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
                                   {"fstat64", {EBADF}, "fstat"},
                                   {"opendir", {EMFILE}},
                                   {"mmap64", {ENOMEM}, "mmap"},
                                   {"munmap", {EINVAL}},
                                   {"ioctl", {ENOTTY}},
                                   {"pthread_create", {EAGAIN}},
                               });
}

// With all that is written for those who ask for it, and with the counters that a kernel's driver keeps.
class FailureSweepWithFiles : public FailureSweep {
 protected:
  void SetUp() override {
    for (const auto& [variable, file] : kFiles) setenv(variable, (scratch_.path() / file).c_str(), 1);
    const std::filesystem::path counters = scratch_.path() / "ports/1/hw_counters";
    std::filesystem::create_directories(counters);
    std::ofstream(counters / "out_of_sequence") << "7\n";
    name_directory_of_device(scratch_.path());
    each_is_made_ = true;
  }
  void TearDown() override {
    for (const auto& [variable, file] : kFiles) unsetenv(variable);
    name_directory_of_device("");
  }
  std::string files_left(const Call& call) override {
    std::string left;
    for (const auto& entry : std::filesystem::directory_iterator(scratch_.path())) {
      const std::string name = entry.path().filename();
      const bool is_socket = name == "state" && call.name != std::string_view("unlink");
      if (is_socket || (name != "state" && name != "stats" && name != "qps" && name != "ports")) left += name + " ";
    }
    return left;
  }

 private:
  static constexpr std::array kFiles = {std::pair("VERBATIM_STATE_SOCKET", "state"),
                                        std::pair("VERBATIM_STATS", "stats"), std::pair("VERBATIM_QP_DUMP", "qps")};

  // softverbs has no such files, and its list of devices is this process's to change.
  static void name_directory_of_device(const std::filesystem::path& directory) {
    void* const library = dlopen(getenv("VERBATIM_VERBS_LIBRARY"), RTLD_NOW | RTLD_LOCAL);  // never closed, see census
    ASSERT_NE(library, nullptr);
    const auto get_list = reinterpret_cast<ibv_device** (*)(int*)>(dlsym(library, "ibv_get_device_list"));
    const auto free_list = reinterpret_cast<void (*)(ibv_device**)>(dlsym(library, "ibv_free_device_list"));
    ASSERT_TRUE(get_list != nullptr && free_list != nullptr);
    int count = 0;
    ibv_device** const list = get_list(&count);
    ASSERT_GT(count, 0);
    std::snprintf(list[0]->ibdev_path, sizeof list[0]->ibdev_path, "%s", directory.c_str());
    free_list(list);
  }

  const verbatim::ScratchDirectory scratch_;
};
ONE_VERSION(FailureSweepWithFiles, 12);

TEST_P(FailureSweepWithFiles, EachSystemCallFails_NothingLeaks) {
  EXPECT_NE(run_lifetime(GetParam()).state.find("\"connections\""), std::string::npos);
  sweep(failing_system_call(), {
                                   {"socket", {EMFILE}},
                                   {"fchmod", {EPERM}},
                                   {"lstat64", {EACCES}},
                                   {"bind", {EADDRINUSE}},
                                   {"listen", {EADDRINUSE}},
                                   {"accept4", {EMFILE, EINTR, ECONNABORTED, EBADF}, "accept"},
                                   {"epoll_ctl", {ENOSPC, ENOMEM}},
                                   {"send", {EPIPE, EINTR}, "the peer"},
                                   {"unlink", {EPERM}},
                                   {"open64", {EMFILE, ENOSPC}},
                                   {"write", {EINTR}},
                                   {"fopen64", {EMFILE}},
                                   {"fwrite", {ENOSPC}},
                                   {"rename", {EXDEV}},
                                   {"opendir", {EMFILE}},
                                   {"readdir64", {EBADF}},
                               });
}

// What cannot be destroyed, nor a moment later, leaks, and with it what it uses: each is named once, all else goes, and
// the next life is like any.
class DestroyFails : public ::testing::TestWithParam<int> {};
ONE_VERSION(DestroyFails, 12);

TEST_P(DestroyFails, EachObject_IsNamedOnce) {
  struct Destroyed {
    const char* call;
    std::vector<std::string> leaks;  // as the verbs library's counters name it, and as the warning does
    std::vector<std::string> names;
  };
  const std::string pd = "protection domain";
  const std::string cq = "completion queue";
  const std::vector<Destroyed> all = {{"ibv_destroy_qp", {"qp", "cq", "pd"}, {"queue pair", cq, pd}},
                                      {"ibv_destroy_cq", {"cq"}, {cq}},
                                      {"ibv_dereg_mr", {"mr", "pd"}, {"memory region", pd}},
                                      {"ibv_dealloc_pd", {"pd"}, {pd}},
                                      {"ibv_close_device", {"context"}, {"context"}}};
  FailNth& fail = conformance::failing_verb();
  const LifetimeResult first = run_lifetime(GetParam());
  ASSERT_EQ(first.failed + first.violation + join(first.warnings), "");
  for (const Destroyed& destroyed : all) {
    std::vector<std::string> expected;
    for (const std::string& name : destroyed.names) {
      expected.push_back("NET/Verbatim : cannot destroy a " + name +
                         " of softverbs0, it leaks: Device or resource busy");
    }
    long leaked = 0;
    for (; leaked < kEndless; ++leaked) {
      SCOPED_TRACE(std::string(destroyed.call) + " number " + std::to_string(leaked + 1) + " and the next");
      std::map<std::string, long> alive;
      for (const char* kind : {"context", "pd", "mr", "cq", "qp"}) alive[kind] = verbs_alive(kind);
      const ProcessResources before = ProcessResources::take();
      const LifetimeResult outcome = run_lifetime(
          GetParam(),
          {.loaded = [&] { fail.arm(destroyed.call, leaked + 1, EBUSY, 2); }, .unloaded = [&] { fail.disarm(); }});
      if (!fail.has_failed()) break;
      EXPECT_EQ(outcome.failed + outcome.violation, "");
      EXPECT_EQ(outcome.warnings, expected);
      for (const std::string& kind : destroyed.leaks) ++alive[kind];
      for (const auto& [kind, count] : alive) EXPECT_EQ(verbs_alive(kind), count) << kind;
      if (destroyed.leaks.front() != "context") {
        EXPECT_TRUE(is_restored(before, kHeapSlack));
      }
      const LifetimeResult after = run_lifetime(GetParam());
      EXPECT_EQ(after.failed + after.violation + join(after.warnings), "") << "in the life after";
    }
    std::printf("%s: %ld\n", destroyed.call, leaked);
    EXPECT_GT(leaked, 0);
  }
}

TEST_P(FailureSweep, EachAllocationFails_NothingLeaks) {
  sweep(failing_system_call(), {{"malloc", {ENOMEM}, "memory"}, {"aligned_alloc", {ENOMEM}, "memory"}});
}

}  // namespace
}  // namespace fault
