#include "ranks.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "netapi/log.h"
#include "support/crash.h"
#include "support/wait.h"

namespace rma_test {

netapi::RmaPlugin& plugin(int version) {
  static std::map<int, std::unique_ptr<netapi::RmaPlugin>>& opened =
      *new std::map<int, std::unique_ptr<netapi::RmaPlugin>>;  // loaded until the process ends
  std::unique_ptr<netapi::RmaPlugin>& plugin = opened[version];
  if (plugin != nullptr) return *plugin;
  netapi::OpenedRma loaded = netapi::open_rma_plugin(std::getenv("PLUGIN"), version);
  if (loaded.plugin == nullptr) {
    std::fprintf(stderr, "%s\n", loaded.error.c_str());
    std::abort();
  }
  plugin = std::move(loaded.plugin);
  return *plugin;
}

Ranks::Ranks(int count, int version)
    : count_(count),
      plugin_(plugin(version)),
      shared_(static_cast<Shared*>(
          ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}

void Ranks::Unmap::operator()(Shared* shared) const {
  ::munmap(shared, sizeof *shared);
}

void Ranks::barrier() {
  const std::uint32_t round = shared_->rounds.load();
  if (shared_->arrived.fetch_add(1) + 1 == static_cast<std::uint32_t>(count_)) {
    shared_->arrived.store(0);
    shared_->rounds.fetch_add(1);
    return;
  }
  while (shared_->rounds.load() == round) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

std::vector<int> Ranks::run_processes(const std::function<void(Rank&)>& body) {
  for (int i = 0; i < count_; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      shared_->pids[i] = ::getpid();
      Rank rank(*this, i);
      body(rank);
      std::fflush(nullptr);
      ::_exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    shared_->pids[i] = child;
  }
  std::vector<int> statuses(static_cast<std::size_t>(count_));
  for (int i = 0; i < count_; ++i) {
    int& status = statuses[static_cast<std::size_t>(i)];
    EXPECT_EQ(::waitpid(shared_->pids[i], &status, 0), shared_->pids[i]);
    verbatim::test::report_crash(status);
  }
  return statuses;
}

void Ranks::run(const std::function<void(Rank&)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count_; ++i) {
    threads.emplace_back([this, i, &body] {
      Rank rank(*this, i);
      body(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void Ranks::run_connected(const netapi::RmaConfig& config, const std::function<void(Rank&)>& body) {
  run([&](Rank& rank) {
    rank.connect();
    if (rank.coll == nullptr) return;
    rank.create(config);
    if (rank.contexts != nullptr) body(rank);
    rank.close();
  });
}

netapi::RmaPlugin& Rank::net() const {
  return all_.plugin_;
}

void Rank::barrier() {
  all_.barrier();
}

std::uint32_t Rank::next(int distance) const {
  return static_cast<std::uint32_t>((number_ + distance) % all_.count());
}

void* Rank::handle(int rank) const {
  return all_.shared_->handles[rank];
}

void Rank::start() {
  int devices = 0;
  EXPECT_OK(net().init(4711, &instance));
  EXPECT_OK(net().devices(&devices));
  EXPECT_OK(net().listen(instance, number_ % std::max(devices, 1), handle(number_), &listen));
  barrier();
}

void Rank::connect() {
  if (listen == nullptr) start();
  std::vector<void*> handles;
  for (int i = 0; i < all_.count(); ++i) handles.push_back(handle(i));
  // NCCL passes a context that may be another plugin's.
  int foreign = 0;
  EXPECT_OK(net().connect(&foreign, handles.data(), all_.count(), number_, listen, &coll));
  EXPECT_OK(net().close_listen(listen));
}

void Rank::create(const netapi::RmaConfig& config) {
  EXPECT_OK(net().create_context(coll, config, &contexts));
}

void Rank::close() {
  barrier();
  if (contexts != nullptr) {
    EXPECT_OK(net().destroy_context(contexts));
  }
  if (coll != nullptr) {
    EXPECT_OK(net().close_coll(coll));
  }
  EXPECT_OK(net().finalize(instance));
}

void* Rank::register_memory(void* data, std::size_t bytes, std::uint64_t flags) {
  void* mhandle = nullptr;
  EXPECT_OK(net().reg_mr(coll, data, bytes, nccl::kPtrHost, flags, &mhandle));
  return mhandle;
}

void* Rank::put(int context, const RmaPart& source, std::size_t bytes, const RmaPart& target, std::uint32_t rank) {
  void* request = nullptr;
  EXPECT_OK(net().iput(contexts, context, source, bytes, target, rank, &request));
  EXPECT_NE(request, nullptr);
  return request;
}

void* Rank::put_signal(int context, const RmaPart& source, std::size_t bytes, const RmaPart& target, std::uint32_t rank,
                       const RmaSignal& signal) {
  void* request = nullptr;
  EXPECT_OK(net().iput_signal(contexts, context, source, bytes, target, rank, signal, &request));
  EXPECT_NE(request, nullptr);
  return request;
}

void* Rank::get(int context, const RmaPart& remote, std::size_t bytes, const RmaPart& local, std::uint32_t rank) {
  void* request = nullptr;
  EXPECT_OK(net().iget(contexts, context, remote, bytes, local, rank, &request));
  EXPECT_NE(request, nullptr);
  return request;
}

nccl::Result Rank::wait(void* request) {
  verbatim::test::Wait patience(verbatim::test::kPatience);
  int done = 0;
  while (!patience.is_over()) {
    const nccl::Result tested = net().test(coll, request, &done);
    if (tested != nccl::Result::kSuccess || done != 0) return tested;
    patience.rest();
  }
  ADD_FAILURE() << "a request of rank " << number_ << " is not done " << patience.report();
  return nccl::Result::kTimeout;
}

bool Rank::makes_progress() {
  const nccl::Result result = net().progress(contexts);
  EXPECT_OK(result) << "rank " << number_;
  return result == nccl::Result::kSuccess;
}

bool Rank::wait_for(const std::uint64_t& word, std::uint64_t value) {
  const bool is_reached = eventually([&] { return __atomic_load_n(&word, __ATOMIC_ACQUIRE) == value; });
  EXPECT_TRUE(is_reached) << "a word of rank " << number_ << " is not " << value;
  return is_reached;
}

bool Rank::eventually(const std::function<bool()>& condition) {
  verbatim::test::Wait patience(verbatim::test::kPatience);
  while (!condition()) {
    // The inline engine makes progress in calls only.
    if (contexts != nullptr && !makes_progress()) return false;
    if (patience.is_over()) {
      ADD_FAILURE() << "rank " << number_ << " " << patience.report();
      return false;
    }
    patience.rest();
  }
  return true;
}

void Ranks::add_line(char* text, const std::string& line) {
  static std::mutex mutex;  // threads of the plugin log at a time
  const std::scoped_lock lock(mutex);
  const std::size_t used = std::strlen(text);
  std::snprintf(text + used, kTextBytes - used, "%s\n", line.c_str());
}

void Rank::keep_warnings() {
  char* const text = all_.text(number_);
  netapi::set_log_callback([text](const netapi::LogLine& line) {
    if (line.level != nccl::DebugLogLevel::kWarn) return;
    Ranks::add_line(text, line.text);
  });
}

bool Rank::has_error() {
  bool error = false;
  EXPECT_OK(net().query_last_error(contexts, &error));
  return error;
}

Words::Words(std::size_t count, std::uint64_t value)
    : count_(count),
      words_(
          static_cast<std::uint64_t*>(std::aligned_alloc(4096, (count * sizeof(std::uint64_t) + 4095) / 4096 * 4096))) {
  std::fill_n(words_.get(), count, value);
}

void Words::Free::operator()(std::uint64_t* words) const {
  std::free(words);
}

}  // namespace rma_test
