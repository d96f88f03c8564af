// A soak: for so many seconds pairs of processes send each other random messages while random faults happen to either:
// lost packets and acknowledgements, delays, flapping links, failing requests and devices, killed peers. Every byte of
// every receive that is done is checked; each process ends with what it was told and with nothing left. All follows
// from the seed (--seed), which the report names; --seconds says for how long, --wrong-expected 1 that a plugin spoils
// what it delivers, which must be found.
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
constexpr auto kLongestStill = std::chrono::seconds(60);

struct Report {
  std::uint64_t bytes = 0;  // checked
  std::uint64_t wrong = 0;
  std::uint64_t groups = 0;  // done
  std::int32_t result = 0;   // of the first call that failed
  std::uint32_t hung = 0;
  std::uint32_t warnings = 0;
  std::uint32_t left = 0;  // verbs objects
};

// What both processes derive from the seed.
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

class End {
 public:
  End(netapi::Plugin& net, void* context, bool sends, unsigned seed)
      : net_(net), context_(context), sends_(sends), seed_(seed), plan_(plan(seed)) {}

  Report run() {
    const bool connected = connect();
    // Only now may the sender be killed: a receiver to whom nobody came waits on, rightly.
    if (sends_ && ::write(STDOUT_FILENO, "", 1) != 1) return report_;
    if (connected && add_buffers()) exchange();
    for (Slot& slot : slots_) {
      if (slot.mhandle != nullptr) good(net_.dereg_mr(comm_, slot.mhandle));
    }
    if (comm_ != nullptr) good(sends_ ? net_.close_send(comm_) : net_.close_recv(comm_));
    return report_;
  }

 private:
  struct Slot {
    std::vector<unsigned char> buffer;
    void* mhandle = nullptr;
    std::size_t group = 0;
    std::size_t posted = 0;  // members of a send, or 1 for the whole receive
    std::vector<void*> requests;
    bool taken = false;
  };

  bool good(Result result) {
    if (result != Result::kSuccess && report_.result == 0) report_.result = static_cast<int>(result);
    return result == Result::kSuccess;
  }

  bool connect() {
    conformance::Handle handle;
    bool sound = true;
    void* listen_comm = nullptr;
    if (sends_) {
      if (::read(STDIN_FILENO, handle.bytes, sizeof handle.bytes) != sizeof handle.bytes) return false;
    } else {
      sound = good(net_.listen(context_, 0, handle.bytes, &listen_comm));
      if (::write(STDOUT_FILENO, handle.bytes, sizeof handle.bytes) != sizeof handle.bytes || !sound) return false;
    }
    const bool settled = eventually(
        [&] {
          sound = good(sends_ ? net_.connect(context_, 0, handle.bytes, &comm_) : net_.accept(listen_comm, &comm_));
          return !sound || comm_ != nullptr;
        },
        kLongestStill);
    report_.hung = settled ? 0 : 1;
    if (listen_comm != nullptr) good(net_.close_listen(listen_comm));
    return comm_ != nullptr;
  }

  bool add_buffers() {
    slots_.resize(kOutstanding);
    return std::all_of(slots_.begin(), slots_.end(), [&](Slot& slot) {
      slot.buffer.resize(4 * kMaxMessageBytes);
      return good(net_.reg_mr(comm_, slot.buffer.data(), slot.buffer.size(), nccl::kPtrHost, &slot.mhandle));
    });
  }

  void exchange() {
    std::size_t next = 0;
    auto moved = Clock::now();
    while (report_.groups < plan_.size()) {
      bool moves = false;
      // Posted in order: the first group that is not complete holds up those behind it.
      for (; next < plan_.size(); ++next) {
        Slot& slot = slots_[next % kOutstanding];
        if (slot.taken && slot.group != next) break;
        if (!slot.taken) begin(slot, next);
        const std::size_t before = slot.posted;
        if (!(sends_ ? send(slot) : receive(slot))) return;
        moves = moves || slot.posted != before;
        if (slot.posted < (sends_ ? plan_[next].size() : 1)) break;
      }
      for (Slot& slot : slots_) {
        if (!slot.taken) continue;
        const std::uint64_t before = report_.groups;
        if (!test(slot)) return;
        moves = moves || report_.groups != before;
      }
      if (moves) moved = Clock::now();
      if (Clock::now() - moved > kLongestStill) {
        report_.hung = 1;
        return;
      }
      if (!moves) conformance::rest();
    }
  }

  void begin(Slot& slot, std::size_t group) {
    slot.group = group;
    slot.taken = true;
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
      if (!good(net_.isend(comm_, slot.buffer.data() + slot.posted * kMaxMessageBytes, sizes[slot.posted],
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
    std::array<std::size_t, 4> room{};
    std::array<int, 4> tags{};
    std::array<void*, 4> mhandles{};
    for (std::size_t i = 0; i < count; ++i) {
      data[i] = slot.buffer.data() + i * kMaxMessageBytes;
      room[i] = kMaxMessageBytes;
      tags[i] = static_cast<int>(i);
      mhandles[i] = slot.mhandle;
    }
    void* request = nullptr;
    if (!good(net_.irecv(comm_, static_cast<int>(count), data.data(), room.data(), tags.data(), mhandles.data(),
                         &request))) {
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
      if (!good(net_.test(request, &done, sizes.data()))) return false;
      if (done == 0) return true;
      request = nullptr;
    }
    if (slot.posted < (sends_ ? plan_[slot.group].size() : 1)) return true;
    slot.taken = false;
    ++report_.groups;
    if (!sends_) check(slot, sizes);
    return true;
  }

  void check(const Slot& slot, const std::array<int, netapi::kMaxGroup>& sizes) {
    const std::vector<std::size_t>& wanted = plan_[slot.group];
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (sizes[i] < 0 || static_cast<std::size_t>(sizes[i]) != wanted[i]) ++report_.wrong;
      const unsigned char* const data = slot.buffer.data() + i * kMaxMessageBytes;
      for (std::size_t at = 0; at < wanted[i]; ++at) {
        if (data[at] != content(seed_, slot.group, i, at)) ++report_.wrong;
      }
      report_.bytes += wanted[i];
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
  bool survivable;               // the transport must not fail
  const char* text;              // %u: a random number
  unsigned device_warnings = 0;  // of the device or its link, beside the connection's one
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

std::string written(const Fault& fault, unsigned number) {
  char text[128];
  // The format is one of the table's.
  std::snprintf(text, sizeof text, fault.text, number);
  return text;
}

struct Tally {
  int tried = 0;
  int failed = 0;  // pairs of which an end answered with an error
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
    report = End(*opened.plugin, context, sends, seed).run();
    if (opened.plugin->finalize(context) != Result::kSuccess) return 3;
  }
  report.warnings = warnings;
  report.left = conformance::verbs_alive().empty() ? 0 : 1;
  return ::write(STDOUT_FILENO, &report, sizeof report) == sizeof report ? 0 : 4;
}

namespace {

TEST(Soak, RandomFaults_NoWrongByteAndNothingLeft) {
  const SoakOptions& options = soak_options();
  std::mt19937 engine(options.seed);
  const auto random = [&] { return static_cast<unsigned>(engine()); };
  std::map<std::string, Tally> tallies;
  std::uint64_t bytes = 0;
  std::uint64_t wrong = 0;
  std::uint64_t left = 0;
  int rounds = 0;
  const auto end = Clock::now() + std::chrono::seconds(options.seconds);
  while ((Clock::now() < end || rounds < 3) && !HasFailure()) {
    ++rounds;
    const unsigned seed = random() % 1'000'000;
    const Fault& fault = options.wrong_expected ? kFaults[0] : kFaults[random() % std::size(kFaults)];
    const bool kills = std::strcmp(fault.name, "killed") == 0;
    const bool hits_sender = random() % 2 == 0;
    const std::string text = written(fault, 1 + random() % 60);
    const char* const completion = random() % 3 == 0 ? "atomic" : "imm";
    const char* const qps = random() % 3 == 0 ? "2" : "1";
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + fault.name + " \"" + text + "\" at the " +
                 (hits_sender ? "sender" : "receiver") + ", " + completion + ", " + qps + " QPs");
    const auto environment = [&](bool hit) {
      return std::vector<std::pair<std::string, std::string>>{{"SOFTVERBS_FAULTS", hit ? text : ""},
                                                              {"VERBATIM_COMPLETION", completion},
                                                              {"VERBATIM_QPS_PER_CONNECTION", qps}};
    };
    conformance::Process receiver("recv-" + std::to_string(seed), 12, environment(!hits_sender));
    conformance::Process sender("send-" + std::to_string(seed), 12, environment(hits_sender));
    conformance::Handle handle;
    ASSERT_TRUE(receiver.read(handle.bytes, sizeof handle.bytes));
    ASSERT_TRUE(sender.write(handle.bytes, sizeof handle.bytes));
    const auto kill = [&](conformance::Process& one) {
      ::usleep(random() % 60'000);
      one.kill();
    };
    char begun = 0;
    if (kills && !hits_sender) kill(receiver);
    ASSERT_TRUE(sender.read(&begun, 1));
    if (kills && hits_sender) kill(sender);
    Tally& tally = tallies[fault.name];
    ++tally.tried;
    bool failed = false;
    for (conformance::Process* one : {&sender, &receiver}) {
      const bool sends = one == &sender;
      const bool killed = kills && sends == hits_sender;
      const conformance::Exit exit = one->wait(2 * kLongestStill);
      if (killed) {
        failed = true;
        continue;
      }
      ASSERT_EQ(exit.status, 0) << (sends ? "sender" : "receiver");
      ASSERT_EQ(exit.output.size(), sizeof(Report));
      Report report;
      std::memcpy(&report, exit.output.data(), sizeof report);
      EXPECT_EQ(report.hung, 0U) << (sends ? "sender" : "receiver") << ": nothing moved, and no error";
      EXPECT_EQ(report.left, 0U) << "verbs objects";
      EXPECT_LE(report.warnings, 1 + fault.device_warnings);
      EXPECT_TRUE(report.result == 0 || report.warnings > 0) << "an error without a warning";
      EXPECT_TRUE(report.result != 0 || report.groups == kGroups) << report.groups << " groups, and no error";
      if (fault.survivable) {
        EXPECT_EQ(report.result, 0) << (sends ? "sender" : "receiver");
      }
      failed = failed || report.result != 0;
      bytes += report.bytes;
      wrong += report.wrong;
      left += report.left;
    }
    tally.failed += failed ? 1 : 0;
    if (!options.wrong_expected) {
      EXPECT_EQ(wrong, 0U);
    }
  }
  std::printf("seed %u: %d pairs of processes, %llu bytes checked, %llu wrong, %llu with verbs objects left\n",
              options.seed, rounds, static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(wrong),
              static_cast<unsigned long long>(left));
  for (const auto& [name, tally] : tallies) {
    std::printf("  %-24s tried %4d, survived %4d, with an error %4d\n", name.c_str(), tally.tried,
                tally.tried - tally.failed, tally.failed);
  }
  if (options.wrong_expected) {
    EXPECT_GT(wrong, 0U) << "what the plugin spoiled was not found";
  }
}

}  // namespace
}  // namespace fault
