// Many connections between two processes need one listening socket and one descriptor for each end, and leave no
// resources; as a benchmark, the time of each phase. For another number of connections:
// meson test -C build -v --benchmark lifecycle-times --test-args="--connections 4000"
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "conformance.h"
#include "process.h"
#include "process_resources.h"
#include "roles.h"
#include "support/benchmark.h"

namespace conformance {
namespace {

constexpr auto kPhaseLimit = 60s;

struct Phases {
  double connect_ms = 0;  // or accept
  double message_ms = 0;
  double close_ms = 0;
  double finalize_ms = 0;
};

// The results of one process.
struct Report {
  Phases phases;
  std::size_t fds_added = 0;  // descriptors that the process did not have after init
  std::size_t listening = 0;  // number of listening sockets
};

class Stopwatch {
 public:
  double lap_ms() {
    const auto now = Clock::now();
    return std::chrono::duration<double, std::milli>(now - std::exchange(start_, now)).count();
  }

 private:
  Clock::time_point start_ = Clock::now();
};

void allow_descriptors(std::size_t count) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = std::max<rlim_t>(limit.rlim_cur, count + 200);
  ASSERT_LE(limit.rlim_cur, limit.rlim_max) << "this machine does not allow that many descriptors";
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

// TCP sockets of this process in state LISTEN.
std::size_t listening_sockets() {
  std::set<std::string> own;
  for (const auto& fd : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;  // the descriptor of the iteration itself can be closed already
    const std::string target = std::filesystem::read_symlink(fd.path(), ignored).string();
    if (target.rfind("socket:[", 0) == 0) own.insert(target.substr(8, target.size() - 9));
  }
  std::size_t count = 0;
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream lines(table);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream fields(line);
      std::string field[10];
      for (std::string& text : field) fields >> text;
      if (field[3] == "0A" && own.contains(field[9])) ++count;
    }
  }
  return count;
}

// The ends of all connections in one process.
class Ends {
 public:
  Ends(netapi::Plugin& net, void* context, std::size_t count, bool sends)
      : net_(net), context_(context), sends_(sends), handles_(count), comms_(count), messages_(count) {
    allow_descriptors(count);
    before_ = ProcessResources::take();
  }

  void listen() {
    listens_.resize(handles_.size());
    for (std::size_t i = 0; i < listens_.size(); ++i) {
      ASSERT_OK(net_.listen(context_, 0, handles_[i].bytes, &listens_[i]));
    }
  }

  void establish() {
    stopwatch_.lap_ms();
    ASSERT_TRUE(all([&](std::size_t i) {
      if (comms_[i] != nullptr) return true;
      EXPECT_OK(sends_ ? net_.connect(context_, 0, handles_[i].bytes, &comms_[i])
                       : net_.accept(listens_[i], &comms_[i]));
      return comms_[i] != nullptr;
    }));
    report_.phases.connect_ms = stopwatch_.lap_ms();
    report_.fds_added = ProcessResources::take().fds - before_.fds;
    report_.listening = listening_sockets();
    for (void* listen : listens_) EXPECT_OK(net_.close_listen(listen));
  }

  // Sends or receives one message on each connection, which has the number of the connection.
  void exchange() {
    std::vector<void*> mhandles(comms_.size());
    for (std::size_t i = 0; i < comms_.size(); ++i) {
      ASSERT_OK(net_.reg_mr(comms_[i], messages_.data(), messages_.size() * sizeof(messages_[0]), nccl::kPtrHost,
                            &mhandles[i]));
      messages_[i] = sends_ ? i + 1 : 0;
    }
    stopwatch_.lap_ms();
    std::vector<void*> requests(comms_.size());
    std::vector<int> done(comms_.size());
    ASSERT_TRUE(all([&](std::size_t i) {
      if (done[i] != 0) return true;
      if (requests[i] == nullptr) post(i, mhandles[i], &requests[i]);
      if (requests[i] != nullptr) {
        EXPECT_OK(net_.test(requests[i], &done[i], nullptr));
      }
      return done[i] != 0;
    }));
    report_.phases.message_ms = stopwatch_.lap_ms();
    for (std::size_t i = 0; i < comms_.size(); ++i) {
      EXPECT_EQ(messages_[i], i + 1);
      EXPECT_OK(net_.dereg_mr(comms_[i], mhandles[i]));
    }
  }

  void close() {
    stopwatch_.lap_ms();
    for (void* comm : comms_) EXPECT_OK(sends_ ? net_.close_send(comm) : net_.close_recv(comm));
    report_.phases.close_ms = stopwatch_.lap_ms();
  }

  void finalize() {
    stopwatch_.lap_ms();
    EXPECT_OK(net_.finalize(context_));
    report_.phases.finalize_ms = stopwatch_.lap_ms();
    EXPECT_EQ(verbs_alive(), "");
  }

  std::vector<Handle>& handles() { return handles_; }
  const Report& report() const { return report_; }

 private:
  // Calls `step` for each connection. True when all calls return true.
  static bool all_pass(std::size_t count, const std::function<bool(std::size_t)>& step) {
    bool all = true;
    for (std::size_t i = 0; i < count && !::testing::Test::HasFailure(); ++i) all = step(i) && all;
    return all;
  }
  bool all(const std::function<bool(std::size_t)>& step) {
    return eventually([&] { return ::testing::Test::HasFailure() || all_pass(comms_.size(), step); }, kPhaseLimit) &&
           !::testing::Test::HasFailure();
  }

  void post(std::size_t i, void* mhandle, void** request) {
    void* data = &messages_[i];
    std::size_t size = sizeof messages_[i];
    int tag = 0;
    EXPECT_OK(sends_ ? net_.isend(comms_[i], data, size, tag, mhandle, request)
                     : net_.irecv(comms_[i], 1, &data, &size, &tag, &mhandle, request));
  }

  netapi::Plugin& net_;
  void* const context_;
  const bool sends_;
  std::vector<Handle> handles_;
  std::vector<void*> listens_;
  std::vector<void*> comms_;
  std::vector<std::size_t> messages_;
  ProcessResources before_;
  Stopwatch stopwatch_;
  Report report_;
};

class Scale : public Conformance {
 protected:
  // Sets up, uses and closes them all. The reports of the sender and of the receiver; none after a failure.
  std::vector<Report> run_many(std::size_t count) {
    Process peer("receivers-" + std::to_string(count), version());
    finalize(context());  // the verbs library keeps descriptors of its first use
    const ProcessResources before = ProcessResources::take();
    Ends ends(net(), new_context(), count, true);
    for (Handle& handle : ends.handles()) {
      EXPECT_TRUE(peer.read(handle.bytes, sizeof handle.bytes));
    }
    if (!HasFailure()) ends.establish();
    if (!HasFailure()) ends.exchange();
    if (HasFailure()) return {};
    // The peer closes at about the same time, when it has all messages.
    ends.close();
    ends.finalize();
    forget_contexts();
    Report receiver;
    EXPECT_TRUE(peer.read(&receiver, sizeof receiver));
    const Exit end = peer.wait();
    EXPECT_EQ(end.status, 0) << end.output;
    EXPECT_TRUE(is_restored(before, 4 << 20));
    return {ends.report(), receiver};
  }
};
ONE_VERSION(Scale, 12);

TEST_P(Scale, ManyConnections_UseOneDescriptorEach) {
  const std::size_t count = connections();
  for (const Report& report : run_many(count)) {
    EXPECT_EQ(report.fds_added, count + 1) << "one listening socket, and one socket for each connection";
    EXPECT_EQ(report.listening, 1U);
  }
}

class ScaleBenchmark : public Scale {};
ONE_VERSION(ScaleBenchmark, 12);

TEST_P(ScaleBenchmark, Phases) {
  constexpr std::pair<const char*, double Phases::*> kPhases[] = {{"connect and accept", &Phases::connect_ms},
                                                                  {"first message", &Phases::message_ms},
                                                                  {"close", &Phases::close_ms},
                                                                  {"finalize", &Phases::finalize_ms}};
  const std::size_t count = connections();
  std::vector<std::vector<Report>> rounds;
  for (int round = 0; round < 5 && !HasFailure(); ++round) rounds.push_back(run_many(count));
  for (const auto& [what, phase] : kPhases) {
    std::vector<double> ms;  // of the slower end
    for (const std::vector<Report>& reports : rounds) {
      if (reports.size() == 2) ms.push_back(std::max(reports[0].phases.*phase, reports[1].phases.*phase));
    }
    verbatim::test::print_benchmark(std::to_string(count) + " connections of two processes, " + what, "ms", ms);
  }
}

}  // namespace

int receive_many(netapi::Plugin& net, void* context, std::size_t count) {
  const ProcessResources before = ProcessResources::take();
  Report report;
  {
    Ends ends(net, context, count, false);
    ends.listen();
    for (Handle& handle : ends.handles()) {
      EXPECT_EQ(write(STDOUT_FILENO, handle.bytes, sizeof handle.bytes), static_cast<ssize_t>(sizeof handle.bytes));
    }
    ends.establish();
    ends.exchange();
    ends.close();
    ends.finalize();
    report = ends.report();
  }
  EXPECT_LT(ProcessResources::take().fds, before.fds) << "finalize must close the descriptors of init too";
  if (write(STDOUT_FILENO, &report, sizeof report) != static_cast<ssize_t>(sizeof report)) return 1;
  return ::testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed() ? 1 : 0;
}

}  // namespace conformance
