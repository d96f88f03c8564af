// The failure sweep of a connection's lifetime, for each table of the net plugin: an error is one log line at the end
// that fails, and at most one at the other end.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <algorithm>
#include <array>
#include <cerrno>
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
#include "failure_sweep.h"
#include "lifecycle/process_resources.h"
#include "plugin_lifetime.h"
#include "support/fail_nth.h"
#include "support/log_lines.h"
#include "support/scratch_directory.h"
#include "system_calls.h"

namespace fault {
namespace {

using conformance::is_restored;
using conformance::ProcessResources;
using conformance::verbs_alive;
using verbatim::test::FailNth;

// Memory that the C library may keep for names, streams and threads.
constexpr std::size_t kHeapSlack = 64 << 10;

// Whether the line is from the end that did not fail itself but reports the failure of its peer. Both ends are in this
// process.
bool is_of_other_end(const std::string& line, const std::string& failed) {
  for (const char* text : {"closed the connection first", "the peer failed first", "ended without closing",
                           "aborted the connection", "the peer refused the connection", " reported: "}) {
    if (line.find(text) != std::string::npos) return true;
  }
  // The accepting end failed and does not listen any more, and the connecting end connects again.
  return failed.starts_with("accept") &&
         line.find("connect: Connection refused: its process has ended") != std::string::npos;
}

// An error is logged in one line that names the call, and in at most one line at the other end. When the only effect
// was a lost message, both ends report their peer.
void expect_one_line(const LifetimeResult& outcome, const Call& call, const std::string& log) {
  const auto from_peer = std::count_if(outcome.warnings.begin(), outcome.warnings.end(),
                                       [&](const std::string& line) { return is_of_other_end(line, outcome.failed); });
  const auto own = static_cast<std::ptrdiff_t>(outcome.warnings.size()) - from_peer;
  if (outcome.failed.empty()) {
    EXPECT_LE(outcome.warnings.size(), 1U) << log;
    return;
  }
  const bool is_message = call.named != nullptr && call.named == std::string_view("the peer");
  EXPECT_TRUE(own == 1 || (own == 0 && is_message)) << log;
  EXPECT_LE(from_peer, own == 1 ? 1 : 2) << log;
  EXPECT_TRUE(names(outcome.warnings, call)) << log;
}

class FailureSweep : public Sweep, public ::testing::WithParamInterface<int> {
 protected:
  LifetimeResult run(const Hooks& hooks) override { return run_lifetime(GetParam(), hooks); }
  void expect_lines(const LifetimeResult& outcome, const Call& call, const std::string& log) override {
    expect_one_line(outcome, call, log);
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
                                         {"ibv_close_device", {EBUSY}},
                                     });
}

TEST_P(FailureSweep, EachDataVerbFails_NothingLeaks) {
  sweep(conformance::failing_verb(),
        {{"ibv_post_send", {ENOMEM}}, {"ibv_post_recv", {ENOMEM}}, {"ibv_poll_cq", {EIO}}});
}

TEST_P(FailureSweep, EachSystemCallFails_NothingLeaks) {
  sweep(failing_system_call(), {
                                   {"socket", {EMFILE}},
                                   {"bind", {EADDRINUSE}},
                                   {"listen", {EADDRINUSE}},
                                   {"connect", {ECONNREFUSED, ENETUNREACH}},
                                   {"connect", {EINTR}, "the peer"},  // the connection is never established
                                   {"accept4", {EMFILE, EINTR, ECONNABORTED, EBADF}, "accept"},
                                   {"getsockname", {ENOBUFS}},
                                   {"getpeername", {ENOTCONN}},
                                   {"getsockopt", {ENOBUFS}},
                                   {"setsockopt", {ENOPROTOOPT}},
                                   {"poll", {ENOMEM, EINTR}},
                                   {"recv", {ECONNRESET, EINTR}, "the peer"},
                                   {"send", {EPIPE, EINTR}, "the peer"},
                                   {"epoll_create1", {EMFILE}},
                                   {"epoll_ctl", {ENOSPC, ENOMEM}},
                                   {"epoll_wait", {EINTR}},
                                   {"timerfd_create", {EMFILE}},
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
                                   {"mkdir", {EROFS}},
                                   {"unlink", {EPERM}},
                                   {"pthread_create", {EAGAIN}},
                               });
}

// The same with all optional output files, and with the counter files of a kernel driver.
class FailureSweepWithFiles : public FailureSweep {
 protected:
  void SetUp() override {
    for (const auto& [variable, file] : kFiles) setenv(variable, (scratch_.path() / file).c_str(), 1);
    const std::filesystem::path counters = scratch_.path() / "ports/1/hw_counters";
    std::filesystem::create_directories(counters);
    std::ofstream(counters / "out_of_sequence") << "7\n";
    set_device_directory(scratch_.path());
    expect_each_call_ = true;
  }
  void TearDown() override {
    for (const auto& [variable, file] : kFiles) unsetenv(variable);
    set_device_directory("");
  }
  std::string files_left(const Call& call) override {
    std::string remaining;
    for (const auto& entry : std::filesystem::directory_iterator(scratch_.path())) {
      const std::string name = entry.path().filename();
      const bool is_socket = name == "state" && call.name != std::string_view("unlink");
      if (is_socket || (name != "state" && name != "stats" && name != "qps" && name != "ports"))
        remaining += name + " ";
    }
    return remaining;
  }

 private:
  static constexpr std::array kFiles = {std::pair("VERBATIM_STATE_SOCKET", "state"),
                                        std::pair("VERBATIM_STATS", "stats"), std::pair("VERBATIM_QP_DUMP", "qps")};

  // softverbs has no counter files. Its device list is in this process, so the test can change the path of the device.
  static void set_device_directory(const std::filesystem::path& directory) {
    void* const library =
        dlopen(getenv("VERBATIM_VERBS_LIBRARY"), RTLD_NOW | RTLD_LOCAL);  // never closed: the counters must stay
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
                                   {"write", {EINTR, ENOSPC}},
                                   {"fopen64", {EMFILE}},
                                   {"rename", {EXDEV}},
                                   {"opendir", {EMFILE}},
                                   {"readdir64", {EBADF}},
                               });
}

// An object whose destroy verb fails twice leaks, together with the objects that it uses. Each leaked object is named
// once, all other objects are destroyed, and the next lifetime works.
class DestroyFails : public ::testing::TestWithParam<int> {};
ONE_VERSION(DestroyFails, 12);

TEST_P(DestroyFails, EachObject_IsNamedOnce) {
  struct DestroyCase {
    const char* call;
    std::vector<std::string> leaks;  // kinds of the leaked objects, as in kVerbsObjectNames
  };
  const std::vector<DestroyCase> all = {{"ibv_destroy_qp", {"qp", "cq", "pd"}},
                                        {"ibv_destroy_cq", {"cq"}},
                                        {"ibv_dereg_mr", {"mr", "pd"}},
                                        {"ibv_dealloc_pd", {"pd"}},
                                        {"ibv_close_device", {"context"}}};
  FailNth& fail = conformance::failing_verb();
  const LifetimeResult first = run_lifetime(GetParam());
  ASSERT_EQ(first.failed + first.violation + join(first.warnings), "");
  for (const DestroyCase& tested : all) {
    long leaked = 0;
    for (; leaked < kMaxCalls; ++leaked) {
      SCOPED_TRACE(std::string(tested.call) + " number " + std::to_string(leaked + 1) + " and the next");
      std::map<std::string, long> alive;
      for (const char* kind : {"context", "pd", "mr", "cq", "qp"}) alive[kind] = verbs_alive(kind);
      const ProcessResources before = ProcessResources::take();
      const LifetimeResult outcome = run_lifetime(
          GetParam(),
          {.loaded = [&] { fail.arm(tested.call, leaked + 1, EBUSY, 2); }, .unloaded = [&] { fail.disarm(); }});
      if (!fail.has_failed()) break;
      EXPECT_EQ(outcome.failed + outcome.violation, "");
      verbatim::test::expect_log_lines(outcome.warnings, tested.call);
      for (const std::string& kind : tested.leaks) ++alive[kind];
      for (const auto& [kind, count] : alive) EXPECT_EQ(verbs_alive(kind), count) << kind;
      if (tested.leaks.front() != "context") {
        EXPECT_TRUE(is_restored(before, kHeapSlack));
      }
      const LifetimeResult after = run_lifetime(GetParam());
      EXPECT_EQ(after.failed + after.violation + join(after.warnings), "") << "in the next lifetime";
    }
    std::printf("%s: %ld\n", tested.call, leaked);
    EXPECT_GT(leaked, 0);
  }
}

TEST_P(FailureSweep, EachAllocationFails_NothingLeaks) {
  sweep(failing_system_call(), {{"malloc", {ENOMEM}, "memory"}, {"aligned_alloc", {ENOMEM}, "memory"}});
}

}  // namespace
}  // namespace fault
