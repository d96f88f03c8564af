// A soak test: pairs of processes exchange random messages while random faults occur on one side: lost packets and
// acknowledgements, delays, link flaps, failing requests and devices, killed peers. Every byte of every completed
// receive is checked. Each process must end with success or with an error and a warning, and without leaked verbs
// objects. The seed (--seed), which the report prints, determines everything. --seconds is the duration;
// --wrong-expected 1 means that the plugin corrupts data, which the test must find.
#include "soak.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "conformance.h"
#include "lifecycle/process_resources.h"
#include "netapi/log.h"
#include "process.h"

namespace fault {
namespace {

using conformance::Clock;
using conformance::eventually;
using nccl::Result;

constexpr std::size_t kGroups = 60;
constexpr std::size_t kOutstanding = 6;
constexpr std::size_t kMaxMessageBytes = 150'000;
constexpr auto kProgressTimeout = std::chrono::seconds(60);

struct Report {
  std::uint64_t bytes = 0;  // bytes checked
  std::uint64_t wrong = 0;
  std::uint64_t groups = 0;  // completed groups
  std::int32_t result = 0;   // result of the first call that failed
  std::uint32_t hung = 0;
  std::uint32_t warnings = 0;
  std::uint32_t leaked = 0;  // whether verbs objects exist at the end
};

// The message sizes of each group; both processes derive them from the seed.
std::vector<std::vector<std::size_t>> plan(unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::vector<std::size_t>> groups(kGroups);
  for (std::vector<std::size_t>& group : groups) {
    group.resize(1 + random() % 4);
    for (std::size_t& bytes : group) bytes = random() % 5 == 0 ? random() % kMaxMessageBytes : random() % 3000;
  }
  return groups;
}

unsigned char content(unsigned seed, std::size_t group, std::size_t member, std::size_t at) {
  return static_cast<unsigned char>((at * 31 + at / 253 + group * 17 + member * 101 + seed) * 0x9e3779b9U >> 13);
}

class ConnectionEnd {
 public:
  ConnectionEnd(netapi::Plugin& net, void* context, bool sends, unsigned seed)
      : net_(net), context_(context), sends_(sends), seed_(seed), plan_(plan(seed)) {}

  Report run() {
    const bool connected = connect();
    // The sender may be killed from now on. If it were killed earlier, the receiver would wait for a connection
    // forever.
    if (sends_ && ::write(STDOUT_FILENO, "", 1) != 1) return report_;
    if (connected && add_buffers()) exchange();
    for (Slot& slot : slots_) {
      if (slot.mhandle != nullptr) succeeded(net_.dereg_mr(comm_, slot.mhandle));
    }
    if (comm_ != nullptr) succeeded(sends_ ? net_.close_send(comm_) : net_.close_recv(comm_));
    return report_;
  }

 private:
  struct Slot {
    std::vector<unsigned char> buffer;
    void* mhandle = nullptr;
    std::size_t group = 0;
    std::size_t posted = 0;  // posted sends of the group, or 1 when the receive is posted
    std::vector<void*> requests;
    bool in_use = false;
  };

  bool succeeded(Result result) {
    if (result != Result::kSuccess && report_.result == 0) report_.result = static_cast<int>(result);
    return result == Result::kSuccess;
  }

  bool connect() {
    conformance::Handle handle;
    bool ok = true;
    void* listen_comm = nullptr;
    if (sends_) {
      if (::read(STDIN_FILENO, handle.bytes, sizeof handle.bytes) != sizeof handle.bytes) return false;
    } else {
      ok = succeeded(net_.listen(context_, 0, handle.bytes, &listen_comm));
      if (::write(STDOUT_FILENO, handle.bytes, sizeof handle.bytes) != sizeof handle.bytes || !ok) return false;
    }
    const bool settled = eventually(
        [&] {
          ok = succeeded(sends_ ? net_.connect(context_, 0, handle.bytes, &comm_) : net_.accept(listen_comm, &comm_));
          return !ok || comm_ != nullptr;
        },
        kProgressTimeout);
    report_.hung = settled ? 0 : 1;
    if (listen_comm != nullptr) succeeded(net_.close_listen(listen_comm));
    return comm_ != nullptr;
  }

  bool add_buffers() {
    slots_.resize(kOutstanding);
    return std::all_of(slots_.begin(), slots_.end(), [&](Slot& slot) {
      slot.buffer.resize(4 * kMaxMessageBytes);
      return succeeded(net_.reg_mr(comm_, slot.buffer.data(), slot.buffer.size(), nccl::kPtrHost, &slot.mhandle));
    });
  }

  void exchange() {
    std::size_t next = 0;
    auto last_progress = Clock::now();
    while (report_.groups < plan_.size()) {
      bool progressed = false;
      // Groups are posted in order, so a group that is not completely posted blocks later groups.
      for (; next < plan_.size(); ++next) {
        Slot& slot = slots_[next % kOutstanding];
        if (slot.in_use && slot.group != next) break;
        if (!slot.in_use) begin(slot, next);
        const std::size_t before = slot.posted;
        if (!(sends_ ? send(slot) : receive(slot))) return;
        progressed = progressed || slot.posted != before;
        if (slot.posted < (sends_ ? plan_[next].size() : 1)) break;
      }
      for (Slot& slot : slots_) {
        if (!slot.in_use) continue;
        const std::uint64_t before = report_.groups;
        if (!test(slot)) return;
        progressed = progressed || report_.groups != before;
      }
      if (progressed) last_progress = Clock::now();
      if (Clock::now() - last_progress > kProgressTimeout) {
        report_.hung = 1;
        return;
      }
      if (!progressed) conformance::rest();
    }
  }

  void begin(Slot& slot, std::size_t group) {
    slot.group = group;
    slot.in_use = true;
    slot.posted = 0;
    slot.requests.clear();
    for (std::size_t i = 0; i < plan_[group].size(); ++i) {
      unsigned char* const data = slot.buffer.data() + i * kMaxMessageBytes;
      for (std::size_t at = 0; at < plan_[group][i]; ++at) data[at] = sends_ ? content(seed_, group, i, at) : 0xee;
    }
  }

  bool send(Slot& slot) {
    const std::vector<std::size_t>& sizes = plan_[slot.group];
    while (slot.posted < sizes.size()) {
      void* request = nullptr;
      if (!succeeded(net_.isend(comm_, slot.buffer.data() + slot.posted * kMaxMessageBytes, sizes[slot.posted],
                                static_cast<int>(slot.posted), slot.mhandle, &request))) {
        return false;
      }
      if (request == nullptr) return true;
      slot.requests.push_back(request);
      ++slot.posted;
    }
    return true;
  }

  bool receive(Slot& slot) {
    const std::size_t count = plan_[slot.group].size();
    std::array<void*, 4> data{};
    std::array<std::size_t, 4> capacities{};
    std::array<int, 4> tags{};
    std::array<void*, 4> mhandles{};
    for (std::size_t i = 0; i < count; ++i) {
      data[i] = slot.buffer.data() + i * kMaxMessageBytes;
      capacities[i] = kMaxMessageBytes;
      tags[i] = static_cast<int>(i);
      mhandles[i] = slot.mhandle;
    }
    void* request = nullptr;
    if (!succeeded(net_.irecv(comm_, static_cast<int>(count), data.data(), capacities.data(), tags.data(),
                              mhandles.data(), &request))) {
      return false;
    }
    if (request != nullptr) {
      slot.requests.push_back(request);
      slot.posted = 1;
    }
    return true;
  }

  bool test(Slot& slot) {
    std::array<int, netapi::kMaxGroup> sizes{};
    for (void*& request : slot.requests) {
      if (request == nullptr) continue;
      int done = 0;
      if (!succeeded(net_.test(request, &done, sizes.data()))) return false;
      if (done == 0) return true;
      request = nullptr;
    }
    if (slot.posted < (sends_ ? plan_[slot.group].size() : 1)) return true;
    slot.in_use = false;
    ++report_.groups;
    if (!sends_) check(slot, sizes);
    return true;
  }

  void check(const Slot& slot, const std::array<int, netapi::kMaxGroup>& sizes) {
    const std::vector<std::size_t>& expected = plan_[slot.group];
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (sizes[i] < 0 || static_cast<std::size_t>(sizes[i]) != expected[i]) ++report_.wrong;
      const unsigned char* const data = slot.buffer.data() + i * kMaxMessageBytes;
      for (std::size_t at = 0; at < expected[i]; ++at) {
        if (data[at] != content(seed_, slot.group, i, at)) ++report_.wrong;
      }
      report_.bytes += expected[i];
    }
  }

  netapi::Plugin& net_;
  void* const context_;
  const bool sends_;
  const unsigned seed_;
  const std::vector<std::vector<std::size_t>> plan_;
  void* comm_ = nullptr;
  std::vector<Slot> slots_;
  Report report_;
};

struct Fault {
  const char* name;
  bool survivable;               // no comm may fail
  const char* text;              // clause of SOFTVERBS_FAULTS; %u: a random number
  unsigned device_warnings = 0;  // warnings about the device or its link, in addition to one about the comm
};
constexpr Fault kFaults[] = {
    {"none", true, ""},
    {"a lost acknowledgement", true, "drop-ack nth=%u times=2"},
    {"a lost message", true, "drop-request nth=%u times=2"},
    {"lossy network", true, "loss rate=0.005; seed=%u"},
    {"slow network", true, "delay by=50us jitter=%uus"},
    {"receiver not ready", true, "rnr nth=%u times=3"},
    {"link flap", true, "link-down for=100ms after=%u", 2},
    {"link down", false, "link-down after=%u", 1},
    {"failed request", false, "complete nth=%u status=REM_ACCESS_ERR"},
    {"dead device", false, "device-fatal after=%u", 1},
    {"killed", false, ""},
};

std::string format_fault(const Fault& fault, unsigned number) {
  char text[128];
  // The format string is from kFaults.
  std::snprintf(text, sizeof text, fault.text, number);
  return text;
}

struct Tally {
  int tried = 0;
  int failed = 0;  // pairs in which a comm failed or a process was killed
};

}  // namespace

SoakOptions& soak_options() {
  static SoakOptions only;
  return only;
}

int soak_role(const std::string& role, int api) {
  const bool sends = role.starts_with("send-");
  Report report;
  std::uint32_t warnings = 0;
  netapi::set_log_callback([&](const netapi::LogLine& line) {
    if (line.level != nccl::DebugLogLevel::kWarn) return;
    ++warnings;
    std::fprintf(stderr, "%s: %s\n", role.c_str(), line.text.c_str());
  });
  {
    netapi::Opened opened = netapi::open_plugin(conformance::options().plugin, api);
    void* context = nullptr;
    if (opened.plugin == nullptr || opened.plugin->init(1, {}, &context) != Result::kSuccess) return 2;
    const auto seed = static_cast<unsigned>(std::stoul(role.substr(role.find('-') + 1)));
    report = ConnectionEnd(*opened.plugin, context, sends, seed).run();
    if (opened.plugin->finalize(context) != Result::kSuccess) return 3;
  }
  report.warnings = warnings;
  report.leaked = conformance::verbs_alive().empty() ? 0 : 1;
  return ::write(STDOUT_FILENO, &report, sizeof report) == sizeof report ? 0 : 4;
}

namespace {

TEST(Soak, RandomFaults_NoWrongByteAndNoLeak) {
  const SoakOptions& options = soak_options();
  std::mt19937 engine(options.seed);
  const auto random = [&] { return static_cast<unsigned>(engine()); };
  std::map<std::string, Tally> tallies;
  std::uint64_t bytes = 0;
  std::uint64_t wrong = 0;
  std::uint64_t leaked = 0;
  int rounds = 0;
  const auto end = Clock::now() + std::chrono::seconds(options.seconds);
  while ((Clock::now() < end || rounds < 3) && !HasFailure()) {
    ++rounds;
    const unsigned seed = random() % 1'000'000;
    const Fault& fault = options.wrong_expected ? kFaults[0] : kFaults[random() % std::size(kFaults)];
    const bool kills = std::strcmp(fault.name, "killed") == 0;
    const bool is_at_sender = random() % 2 == 0;
    const std::string text = format_fault(fault, 1 + random() % 60);
    const char* const completion = random() % 3 == 0 ? "atomic" : "imm";
    const char* const qps = random() % 3 == 0 ? "2" : "1";
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + fault.name + " \"" + text + "\" at the " +
                 (is_at_sender ? "sender" : "receiver") + ", " + completion + ", " + qps + " QPs");
    const auto environment = [&](bool is_faulty) {
      return std::vector<std::pair<std::string, std::string>>{{"SOFTVERBS_FAULTS", is_faulty ? text : ""},
                                                              {"VERBATIM_COMPLETION", completion},
                                                              {"VERBATIM_QPS_PER_CONNECTION", qps}};
    };
    conformance::Process receiver("recv-" + std::to_string(seed), 12, environment(!is_at_sender));
    conformance::Process sender("send-" + std::to_string(seed), 12, environment(is_at_sender));
    conformance::Handle handle;
    ASSERT_TRUE(receiver.read(handle.bytes, sizeof handle.bytes));
    ASSERT_TRUE(sender.write(handle.bytes, sizeof handle.bytes));
    const auto kill = [&](conformance::Process& process) {
      ::usleep(random() % 60'000);
      process.kill();
    };
    char connected = 0;
    if (kills && !is_at_sender) kill(receiver);
    ASSERT_TRUE(sender.read(&connected, 1));
    if (kills && is_at_sender) kill(sender);
    Tally& tally = tallies[fault.name];
    ++tally.tried;
    bool failed = false;
    for (conformance::Process* process : {&sender, &receiver}) {
      const bool sends = process == &sender;
      const bool killed = kills && sends == is_at_sender;
      const conformance::Exit exit = process->wait(2 * kProgressTimeout);
      if (killed) {
        failed = true;
        continue;
      }
      ASSERT_EQ(exit.status, 0) << (sends ? "sender" : "receiver");
      ASSERT_EQ(exit.output.size(), sizeof(Report));
      Report report;
      std::memcpy(&report, exit.output.data(), sizeof report);
      EXPECT_EQ(report.hung, 0U) << (sends ? "sender" : "receiver") << ": no progress and no error";
      EXPECT_EQ(report.leaked, 0U) << "verbs objects were leaked";
      EXPECT_LE(report.warnings, 1 + fault.device_warnings);
      EXPECT_TRUE(report.result == 0 || report.warnings > 0) << "a call failed without a warning";
      EXPECT_TRUE(report.result != 0 || report.groups == kGroups) << report.groups << " groups and no error";
      if (fault.survivable) {
        EXPECT_EQ(report.result, 0) << (sends ? "sender" : "receiver");
      }
      failed = failed || report.result != 0;
      bytes += report.bytes;
      wrong += report.wrong;
      leaked += report.leaked;
    }
    tally.failed += failed ? 1 : 0;
    if (!options.wrong_expected) {
      EXPECT_EQ(wrong, 0U);
    }
  }
  std::printf("seed %u: %d pairs of processes, %llu bytes checked, %llu wrong, %llu processes leaked verbs objects\n",
              options.seed, rounds, static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(wrong),
              static_cast<unsigned long long>(leaked));
  for (const auto& [name, tally] : tallies) {
    std::printf("  %-24s tried %4d, survived %4d, with an error %4d\n", name.c_str(), tally.tried,
                tally.tried - tally.failed, tally.failed);
  }
  if (options.wrong_expected) {
    EXPECT_GT(wrong, 0U) << "the byte that the plugin corrupted was not found";
  }
}

}  // namespace
}  // namespace fault
