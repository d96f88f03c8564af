// Events for NCCL's profiler, and latencies.
//: program profiler_test link=gtest,libdl
//: test profiler-events threads protocol=gtest PROFILED_PLUGIN={plugin} VERBATIM_PROFILER=1 VERBATIM_LATENCY=1
//:   + VERBATIM_QPS_PER_CONNECTION=12

// The events that a net plugin reports to NCCL's profiler, through tables v10 to v12. A program of its own: the context
// of v10 keeps the callback of the first init. Run with VERBATIM_PROFILER=1 and with more QPs to a connection than a
// message may have events.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "nccl/net_v10.h"
#include "nccl/net_v11.h"
#include "nccl/net_v12.h"
#include "nccl/profiler_net_ib.h"

namespace {

constexpr std::size_t kMaxEvents = 8;     // that NCCL's example profiler keeps of a step
constexpr std::size_t kLarge = 4U << 20;  // is striped over all QPs
constexpr std::size_t kSmall = 1000;

// What the callback has seen.
struct Events {
  std::map<void*, std::size_t> started;  // by profiler handle
  std::map<void*, std::size_t> bytes;    // likewise
  std::set<void*> open;
  std::size_t stopped = 0;
  std::size_t wrong = 0;  // calls that NCCL's callback cannot process
  bool wanted = true;     // the profiler wants such events
  std::uintptr_t made = 0;
} g_events;

nccl::Result record(void** event, int type, void* handle, std::int64_t plugin, void* data) {
  if (event == nullptr) {
    ++g_events.wrong;
  } else if (type == nccl::kProfilerStart) {
    const auto& described = *static_cast<const nccl::NetIbEvent*>(data);
    if (handle == nullptr || plugin != nccl::kProfilerNetIbV1 || described.type != nccl::kProfilerQpEvent ||
        described.qp.qp_num == 0) {
      ++g_events.wrong;
      return nccl::Result::kSuccess;
    }
    ++g_events.started[handle];
    g_events.bytes[handle] += described.qp.length;
    if (!g_events.wanted) return nccl::Result::kSuccess;
    *event = reinterpret_cast<void*>(++g_events.made);
    g_events.open.insert(*event);
  } else if (type == nccl::kProfilerStop && *event != nullptr && g_events.open.erase(*event) == 1) {
    ++g_events.stopped;
  } else {
    ++g_events.wrong;
  }
  return nccl::Result::kSuccess;
}

// The sum of the counts in the last list of buckets with this name, which must be in order.
long counted(const std::string& text, const std::string& name) {
  const std::size_t at = text.rfind("\"" + name + "\":[[");
  if (at == std::string::npos) return -1;
  std::istringstream buckets(text.substr(at + name.size() + 4, text.find("]]", at) - at));
  long sum = 0;
  long last_ns = 0;
  for (std::string bucket; std::getline(buckets, bucket, '[');) {
    long below_ns = 0;
    long count = 0;
    char comma = 0;
    if (!(std::istringstream(bucket) >> below_ns >> comma >> count)) continue;
    EXPECT_LT(last_ns, below_ns) << name;
    last_ns = below_ns;
    sum += count;
  }
  return sum;
}

void log_nothing(nccl::DebugLogLevel, unsigned long, const char*, int, const char*, ...) {}

template <typename Step>
bool eventually(Step step) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!step()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
  }
  return true;
}

template <typename Net>
struct TableOf;
template <>
struct TableOf<nccl::v10::Net> {
  static constexpr const char* kSymbol = "ncclNetPlugin_v10";
  using Config = nccl::v10::NetCommConfig;
};
template <>
struct TableOf<nccl::v11::Net> {
  static constexpr const char* kSymbol = "ncclNetPlugin_v11";
  using Config = nccl::v11::NetCommConfig;
};
template <>
struct TableOf<nccl::v12::Net> {
  static constexpr const char* kSymbol = "ncclNetPlugin_v12";
  using Config = nccl::v12::NetCommConfig;
};

// A connection with itself.
template <typename Net>
class ProfilerEvents : public testing::Test {
 protected:
  static constexpr bool kContexts = requires(Net net) { net.finalize; };

  void SetUp() override {
    g_events = {};
    void* library = dlopen(std::getenv("PROFILED_PLUGIN"), RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library, nullptr) << dlerror();
    net_ = static_cast<const Net*>(dlsym(library, TableOf<Net>::kSymbol));
    ASSERT_NE(net_, nullptr);
  }

  void connect(nccl::ProfilerCallback callback) {
    alignas(8) char handle[nccl::kNetHandleMaxBytes] = {};
    if constexpr (kContexts) {
      ASSERT_EQ(net_->init(&context_, 1, &config_, log_nothing, callback), nccl::Result::kSuccess);
      ASSERT_EQ(net_->listen(context_, 0, handle, &listen_), nccl::Result::kSuccess);
    } else {
      ASSERT_EQ(net_->init(log_nothing, callback), nccl::Result::kSuccess);
      ASSERT_EQ(net_->listen(0, handle, &listen_), nccl::Result::kSuccess);
    }
    ASSERT_TRUE(eventually([&] {
      if (send_ == nullptr) {
        if constexpr (kContexts) {
          EXPECT_EQ(net_->connect(context_, 0, handle, &send_, nullptr), nccl::Result::kSuccess);
        } else {
          EXPECT_EQ(net_->connect(0, &config_, handle, &send_, nullptr), nccl::Result::kSuccess);
        }
      }
      if (recv_ == nullptr) {
        EXPECT_EQ(net_->accept(listen_, &recv_, nullptr), nccl::Result::kSuccess);
      }
      return send_ != nullptr && recv_ != nullptr;
    }));
    ASSERT_EQ(net_->regMr(send_, source_.data(), source_.size(), nccl::kPtrHost, &source_mr_), nccl::Result::kSuccess);
    ASSERT_EQ(net_->regMr(recv_, target_.data(), target_.size(), nccl::kPtrHost, &target_mr_), nccl::Result::kSuccess);
  }

  // One group of `members` messages of `bytes`; `parents`: of the sends, then of the receives.
  void transfer(int members, std::size_t bytes, std::vector<void*> parents) {
    std::vector<void*> data(static_cast<std::size_t>(members));
    std::vector<std::size_t> sizes(data.size(), bytes);
    std::vector<int> tags(data.size());
    std::vector<void*> mrs(data.size(), target_mr_);
    for (std::size_t i = 0; i < data.size(); ++i) {
      data[i] = target_.data() + i * bytes;
      tags[i] = static_cast<int>(i);
    }
    std::vector<void*> requests(data.size() + 1);
    ASSERT_TRUE(eventually([&] {
      EXPECT_EQ(net_->irecv(recv_, members, data.data(), sizes.data(), tags.data(), mrs.data(),
                            parents.data() + data.size(), &requests.back()),
                nccl::Result::kSuccess);
      return requests.back() != nullptr;
    }));
    for (std::size_t i = 0; i < data.size(); ++i) {
      ASSERT_TRUE(eventually([&] {
        EXPECT_EQ(net_->isend(send_, source_.data() + i * bytes, bytes, tags[i], source_mr_, parents[i], &requests[i]),
                  nccl::Result::kSuccess);
        return requests[i] != nullptr;
      }));
    }
    std::set<void*> open(requests.begin(), requests.end());
    ASSERT_TRUE(eventually([&] {
      for (auto request = open.begin(); request != open.end();) {
        int done = 0;
        EXPECT_EQ(net_->test(*request, &done, nullptr), nccl::Result::kSuccess);
        request = done != 0 ? open.erase(request) : std::next(request);
      }
      return open.empty();
    }));
  }

  void close() {
    EXPECT_EQ(net_->deregMr(send_, source_mr_), nccl::Result::kSuccess);
    EXPECT_EQ(net_->deregMr(recv_, target_mr_), nccl::Result::kSuccess);
    EXPECT_EQ(net_->closeSend(send_), nccl::Result::kSuccess);
    EXPECT_EQ(net_->closeRecv(recv_), nccl::Result::kSuccess);
    EXPECT_EQ(net_->closeListen(listen_), nccl::Result::kSuccess);
    if constexpr (kContexts) {
      EXPECT_EQ(net_->finalize(context_), nccl::Result::kSuccess);
    }
  }

  void expect_stopped() {
    std::size_t started = 0;
    for (const auto& [handle, events] : g_events.started) {
      started += events;
      EXPECT_LE(events, kMaxEvents);
    }
    EXPECT_EQ(g_events.stopped, g_events.wanted ? started : 0);
    EXPECT_TRUE(g_events.open.empty());
    EXPECT_EQ(g_events.wrong, 0U);
  }

  // Profiler handles of one transfer: distinct addresses.
  std::vector<void*> parents(std::size_t members) {
    std::vector<void*> made;
    for (std::size_t i = 0; i < 2 * members; ++i) made.push_back(&handles_[i]);
    return made;
  }

 private:
  const Net* net_ = nullptr;
  typename TableOf<Net>::Config config_{nccl::kNetTrafficClassUndefined};
  void* context_ = nullptr;
  void* listen_ = nullptr;
  void* send_ = nullptr;
  void* recv_ = nullptr;
  void* source_mr_ = nullptr;
  void* target_mr_ = nullptr;
  std::vector<char> source_ = std::vector<char>(kLarge);
  std::vector<char> target_ = std::vector<char>(kLarge);
  char handles_[16] = {};
};

using Tables = testing::Types<nccl::v10::Net, nccl::v11::Net, nccl::v12::Net>;
TYPED_TEST_SUITE(ProfilerEvents, Tables);

TYPED_TEST(ProfilerEvents, EveryTransfer_EventsStartAndStop) {
  this->connect(record);
  const std::vector<void*> pair = this->parents(1);
  this->transfer(1, kSmall, pair);
  EXPECT_EQ(g_events.started, (std::map<void*, std::size_t>{{pair[0], 1}, {pair[1], 1}}));
  EXPECT_EQ(g_events.bytes, (std::map<void*, std::size_t>{{pair[0], kSmall}, {pair[1], kSmall}}));
  this->expect_stopped();

  g_events = {};
  this->transfer(1, kLarge, pair);
  EXPECT_EQ(g_events.started, (std::map<void*, std::size_t>{{pair[0], kMaxEvents}, {pair[1], 1}}));
  EXPECT_LT(g_events.bytes[pair[0]], kLarge) << "more than kMaxEvents QPs have a part";
  this->expect_stopped();

  g_events = {};
  const std::vector<void*> group = this->parents(8);
  this->transfer(8, kSmall, group);
  EXPECT_EQ(g_events.started.size(), group.size());
  for (void* handle : group) EXPECT_EQ(g_events.bytes[handle], kSmall);
  this->expect_stopped();

  g_events = {};
  this->transfer(8, kLarge / 8, group);
  EXPECT_EQ(g_events.started.size(), group.size());
  this->expect_stopped();
  this->close();
}

TYPED_TEST(ProfilerEvents, NoHandle_HasNoEvents) {
  this->connect(record);
  this->transfer(1, kSmall, {nullptr, nullptr});
  this->transfer(1, kLarge, {nullptr, nullptr});
  EXPECT_TRUE(g_events.started.empty());
  this->expect_stopped();
  this->close();
}

TYPED_TEST(ProfilerEvents, UnwantedEvent_IsNotStopped) {
  this->connect(record);
  g_events.wanted = false;
  this->transfer(1, kLarge, this->parents(1));
  EXPECT_FALSE(g_events.started.empty());
  this->expect_stopped();
  this->close();
}

// When each end has carried 20 groups of 2 and its context ends / expect the statistics to have their latencies.
TYPED_TEST(ProfilerEvents, EveryTransfer_IsMeasured) {
  if (!this->kContexts) GTEST_SKIP() << "the context of v10 ends with the process";
  const std::string path = testing::TempDir() + "latency-" + std::to_string(::getpid()) + ".json";
  ::setenv("VERBATIM_STATS", path.c_str(), 1);
  this->connect(record);
  for (int i = 0; i < 20; ++i) this->transfer(2, kSmall, this->parents(2));
  this->close();
  ::unsetenv("VERBATIM_STATS");
  std::ifstream file(path);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  ::unlink(path.c_str());
  EXPECT_EQ(counted(text, "isend_to_completion"), 40) << text;
  EXPECT_EQ(counted(text, "irecv_to_arrival"), 20) << text;
  EXPECT_EQ(counted(text, "cts_to_data"), 20) << text;
}

// The context of v10 has the callback of the first init.
TYPED_TEST(ProfilerEvents, NoCallback_TransfersWork) {
  this->connect(nullptr);
  this->transfer(1, kLarge, this->parents(1));
  this->expect_stopped();
  this->close();
}

}  // namespace
