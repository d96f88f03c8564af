// makeVDevice, from table v9 on: what it makes, what it refuses, and that connections use every port of both ends.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <numeric>
#include <regex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "conformance.h"
#include "netapi/table.h"

namespace conformance {
namespace {

// The test has the physical devices first, and needs at least three.
class Merge : public Conformance {
 protected:
  void SetUp() override {
    Conformance::SetUp();
    if (HasFatalFailure()) return;
    physical_ = device_count();
    if (physical_ < 3) GTEST_SKIP() << "too few devices";
  }
  void TearDown() override {
    Conformance::TearDown();
    for (const char* name : {"NCCL_IB_MERGE_NICS", "VERBATIM_MERGE_NICS", "VERBATIM_HCA"}) unsetenv(name);
  }

  // Ends the first context, so that the next one reads the environment. Up to v10 the process has only one.
  bool set_before_init(const char* name, const char* value) {
    finalize(context());
    setenv(name, value, 1);
    return version() >= 11;
  }

  int max_members() const { return version() >= 12 ? 8 : 4; }
  int physical() const { return physical_; }

  int made(const std::vector<int>& members) {
    context();
    int device = -1;
    EXPECT_OK(net().make_vdevice(members, &device));
    return device;
  }

  // Refused as an invalid usage, in one line that has `text` and names the next step.
  void expect_refused(const std::vector<int>& members, const std::string& text) {
    const int count = device_count();
    int device = -1;
    EXPECT_EQ(net().make_vdevice(members, &device), nccl::Result::kInvalidUsage) << text;
    EXPECT_EQ(device, -1);
    const std::vector<std::string> warnings = take_warnings();
    ASSERT_EQ(warnings.size(), 1U) << text;
    EXPECT_NE(warnings.front().find(text), std::string::npos) << warnings.front();
    EXPECT_NE(warnings.front().find("Next: "), std::string::npos) << warnings.front();
    EXPECT_EQ(device_count(), count);
  }

 private:
  int physical_ = 0;
};
INSTANTIATE_TEST_SUITE_P(Net, Merge, ::testing::Range(9, 13), version_name);

TEST_P(Merge, Devices_AreTheNextOne) {
  const int merged = made({0, 1});
  EXPECT_EQ(merged, physical());
  EXPECT_EQ(device_count(), physical() + 1);
  EXPECT_EQ(made({1, 2}), physical() + 1);
  EXPECT_EQ(device_count(), physical() + 2);
  std::set<std::string> names;
  for (int device = 0; device < device_count(); ++device) {
    EXPECT_TRUE(names.insert(properties(device).name).second) << properties(device).name << " twice";
  }
}

TEST_P(Merge, Properties_AreThoseOfAllMembers) {
  const netapi::Properties first = properties(1);
  const netapi::Properties second = properties(2);
  const netapi::Properties merged = properties(made({1, 2}));
  EXPECT_EQ(merged.name, first.name + "+" + second.name.substr(std::string("verbatim_").size()));
  EXPECT_EQ(merged.members, (std::vector<int>{1, 2}));
  EXPECT_EQ(merged.speed, first.speed + second.speed);
  EXPECT_EQ(merged.pci_path, first.pci_path);
  EXPECT_EQ(merged.guid, first.guid);
  EXPECT_EQ(merged.port, first.port);
  EXPECT_EQ(merged.ptr_support, first.ptr_support & second.ptr_support);
  EXPECT_EQ(merged.max_comms, std::min(first.max_comms, second.max_comms));
  EXPECT_EQ(merged.max_recvs, first.max_recvs);
  EXPECT_EQ(merged.reg_is_global, 1);
  EXPECT_EQ(properties(1).members, std::vector<int>{1});
}

TEST_P(Merge, RailsAndPlanes_AreThoseThatAllMembersHave) {
  const std::string hca = "=" + netapi::verbs_name(properties(0)) + ":1:7:0," + netapi::verbs_name(properties(1)) +
                          ":1:7:1," + netapi::verbs_name(properties(2)) + ":1:8:0";
  if (!set_before_init("VERBATIM_HCA", hca.c_str())) GTEST_SKIP() << "one context for the process";
  const netapi::Properties one_rail = properties(made({0, 1}));
  const netapi::Properties one_plane = properties(made({0, 2}));
  if (version() < 12) return;
  EXPECT_EQ(one_rail.rail_id, 7);
  EXPECT_EQ(one_rail.plane_id, nccl::kNetIdUndefined);
  EXPECT_EQ(one_plane.rail_id, nccl::kNetIdUndefined);
  EXPECT_EQ(one_plane.plane_id, 0);
}

TEST_P(Merge, SameMembers_AreTheSameDevice) {
  const int merged = made({0, 1});
  EXPECT_EQ(made({0, 1}), merged);
  EXPECT_EQ(made({1, 0}), merged);
  EXPECT_EQ(properties(merged).members, (std::vector<int>{0, 1}));
  EXPECT_EQ(made({0, 1, 2}), merged + 1);
  EXPECT_EQ(device_count(), physical() + 2);
}

TEST_P(Merge, OneMember_IsTheDeviceItself) {
  EXPECT_EQ(made({1}), 1);
  EXPECT_EQ(device_count(), physical());
}

TEST_P(Merge, AsManyAsTheTableAllows_AreMerged) {
  std::vector<int> members(static_cast<std::size_t>(std::min(max_members(), physical())));
  std::iota(members.begin(), members.end(), 0);
  const int merged = made(members);
  EXPECT_EQ(properties(merged).members, members);
  EXPECT_EQ(properties(merged).speed, properties(0).speed * static_cast<int>(members.size()));
}

TEST_P(Merge, ImpossibleMembers_AreRefused) {
  const std::string last = std::to_string(physical() - 1);
  expect_refused({}, "0 devices cannot be merged: 1 to " + std::to_string(max_members()));
  expect_refused({0, physical()}, "no device " + std::to_string(physical()) + ", only 0 to " + last);
  expect_refused({-1, 0}, "no device -1, only 0 to " + last);
  expect_refused({0, 1 << 30}, "only 0 to " + last);
  expect_refused({0, 1, 0}, "device 0 (softverbs0:1) is named twice");
  const int merged = made({0, 1});
  expect_refused({2, merged}, "device " + std::to_string(merged) + " is a merged one itself");
  expect_refused({merged}, "device " + std::to_string(merged) + " is a merged one itself");
}

// The count alone: an array that is longer than the table's must not be read.
template <int kVersion>
nccl::Result merge_count(const void* table, int count, int* device) {
  typename netapi::Abi<kVersion>::VDevice properties{};
  properties.ndevs = count;
  return static_cast<const typename netapi::Abi<kVersion>::Net*>(table)->makeVDevice(device, &properties);
}

TEST_P(Merge, MoreThanTheTableAllows_AreRefused) {
  const auto refused = [&](int count) {
    int device = -1;
    const void* const table = net().table();
    const auto merge = version() == 9    ? merge_count<9>
                       : version() == 10 ? merge_count<10>
                       : version() == 11 ? merge_count<11>
                                         : merge_count<12>;
    const nccl::Result result = merge(table, count, &device);
    EXPECT_EQ(result, nccl::Result::kInvalidUsage) << count;
    EXPECT_EQ(device, -1);
    EXPECT_EQ(take_warnings().size(), 1U) << count;
  };
  refused(max_members() + 1);
  refused(1 << 30);
  refused(-1);
  EXPECT_EQ(device_count(), physical());
}

TEST_P(Merge, MergingSwitchedOff_IsRefusedWithoutWarning) {
  for (const char* name : {"NCCL_IB_MERGE_NICS", "VERBATIM_MERGE_NICS"}) {
    if (!set_before_init(name, "0")) GTEST_SKIP() << "one context for the process";
    context();
    int device = -1;
    EXPECT_EQ(net().make_vdevice({0, 1}, &device), nccl::Result::kInvalidUsage);
    EXPECT_EQ(device, -1);
    EXPECT_EQ(made({1}), 1);
    EXPECT_EQ(device_count(), physical());
    unsetenv(name);
  }
}

// NCCL makes virtual devices once for as long as it keeps the plugin loaded (NCCL_NET_PLUGIN_REF_COUNT=1). After init
// it asks for the properties of device 0 then.
TEST_P(Merge, AllContextsEnd_DevicesStay) {
  const int pair = made({0, 1});
  const int three = made({2, 0, 1});
  const std::string name = properties(three).name;
  finalize(context());
  properties(0);
  EXPECT_EQ(device_count(), physical() + 2);
  EXPECT_EQ(properties(three).name, name);
  EXPECT_EQ(properties(three).members, (std::vector<int>{2, 0, 1}));
  EXPECT_EQ(made({1, 0}), pair);
  TestConnection link = this->link({context(), three}, {context(), pair});
  exchange_one(link, 600'000);
}

// An NCCL that loads the plugin again asks for the number of devices directly after init, and takes all for physical.
TEST_P(Merge, AllContextsEnd_CountedAnew_OnlyPhysicalDevicesStay) {
  if (version() < 11) GTEST_SKIP() << "one context for the process";
  made({0, 1});
  finalize(context());
  EXPECT_EQ(device_count(), physical());
  const int merged = made({1, 2});
  EXPECT_EQ(merged, physical());
  finalize(context());
  properties(0);
  EXPECT_EQ(properties(merged).members, (std::vector<int>{1, 2}));
}

TEST_P(Merge, DeviceOfOneContext_IsKnownToOthers) {
  void* const first = context();
  void* const second = new_context();
  const int merged = made({0, 1});
  TestConnection link = this->link({first, merged}, {second, merged});
  exchange(link, {{{{1, 1, 0}}, {}}, {{{1'000'000, 1'000'000, 1}}, {}}});
}

TEST_P(Merge, ThreadsAtOnce_GetTheSameDevice) {
  std::vector<int> devices(8, -1);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    threads.emplace_back([&, i] {
      const std::vector<int> members = i % 2 == 0 ? std::vector<int>{0, 2} : std::vector<int>{2, 0};
      EXPECT_OK(net().make_vdevice(members, &devices[i]));
      netapi::Properties properties;
      EXPECT_OK(net().properties(devices[i], &properties));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(devices, std::vector<int>(devices.size(), physical()));
  EXPECT_EQ(device_count(), physical() + 1);
}

// Before v9 NCCL cannot merge devices.
class MergeBefore : public Conformance {};
INSTANTIATE_TEST_SUITE_P(Net, MergeBefore, ::testing::Range(6, 9), version_name);

TEST_P(MergeBefore, Table_HasNoVirtualDevices) {
  context();
  EXPECT_FALSE(net().has_make_vdevice());
  int device = -1;
  EXPECT_EQ(net().make_vdevice({0}, &device), nccl::Result::kInvalidUsage);
}

// Bytes that this process has sent since the last call, by the index of the sending and of the receiving device.
class CarriedBytes {
 public:
  struct Bytes {
    std::map<int, std::uint64_t> sent;
    std::map<int, std::uint64_t> received;
  };

  // Empty: softverbs' control program cannot be run.
  Bytes since_last() {
    const std::string json = control("stats --json " + std::to_string(getpid()));
    struct Qp {
      int device;
      std::string dest;
      std::uint64_t bytes;
    };
    std::map<std::string, Qp> qps;  // by number
    static const std::regex number(R"re("qpn": *"?(\w+)"?)re");
    for (std::sregex_iterator at(json.begin(), json.end(), number), end; at != end; ++at) {
      const auto begin = json.begin() + at->position();
      const auto next = std::next(at) == end ? json.end() : json.begin() + std::next(at)->position();
      const std::string qp(begin, next);
      qps[(*at)[1]] = {std::stoi(field(qp, "device")), field(qp, "dest_qpn"), std::stoull(field(qp, "bytes"))};
    }
    Bytes bytes;
    for (const auto& [number_text, qp] : qps) {
      const std::uint64_t sent = qp.bytes - std::exchange(before_[number_text], qp.bytes);
      if (sent == 0 || !qps.contains(qp.dest)) continue;
      bytes.sent[qp.device] += sent;
      bytes.received[qps[qp.dest].device] += sent;
    }
    return bytes;
  }

 private:
  static std::string control(const std::string& arguments) {
    const char* const program = std::getenv("SOFTVERBS_CONTROL");
    std::FILE* const output = popen((std::string(program) + " " + arguments).c_str(), "r");
    std::string text;
    if (output == nullptr) return text;
    char part[4096];
    while (const std::size_t read = std::fread(part, 1, sizeof part, output)) text.append(part, read);
    EXPECT_EQ(pclose(output), 0) << text;
    return text;
  }
  static std::string field(const std::string& json, const std::string& name) {
    std::smatch found;
    return std::regex_search(json, found, std::regex("\"" + name + "\": *\"?(\\w+)")) ? found[1].str() : "0";
  }

  std::map<std::string, std::uint64_t> before_;
};

// Which ports have carried at least `least` bytes.
std::set<int> users(const std::map<int, std::uint64_t>& carried, std::uint64_t least) {
  std::set<int> devices;
  for (const auto& [device, bytes] : carried) {
    if (bytes >= least) devices.insert(device);
  }
  return devices;
}

class MergedData : public Merge {
 protected:
  void SetUp() override {
    Merge::SetUp();
    if (!IsSkipped() && std::getenv("SOFTVERBS_CONTROL") == nullptr) GTEST_SKIP() << "no control program of softverbs";
  }
};
INSTANTIATE_TEST_SUITE_P(Net, MergedData, ::testing::Range(9, 13), version_name);

// A large message is striped over all ports, small ones go over them in turn.
TEST_P(MergedData, EveryPort_CarriesItsShare) {
  const std::pair<std::vector<int>, std::vector<int>> ends[] = {
      {{0, 1}, {0, 1}}, {{0, 1}, {2, 3}}, {{0, 1}, {2}},          {{0}, {2, 1}},
      {{0, 1, 2}, {2}}, {{0}, {0, 1, 2}}, {{3, 0, 1, 2}, {1, 3}}, {{2, 1}, {0, 1, 2, 3}},
  };
  for (const auto& [sender, receiver] : ends) {
    if (physical() < 4 &&
        (std::count(sender.begin(), sender.end(), 3) != 0 || std::count(receiver.begin(), receiver.end(), 3) != 0)) {
      continue;
    }
    SCOPED_TRACE(::testing::PrintToString(sender) + " to " + ::testing::PrintToString(receiver));
    TestConnection link = this->link({context(), made(sender)}, {context(), made(receiver)});
    ASSERT_TRUE(link);
    const std::set<int> senders(sender.begin(), sender.end());
    const std::set<int> receivers(receiver.begin(), receiver.end());
    const std::size_t parts = std::max(sender.size(), receiver.size());
    CarriedBytes carried;
    carried.since_last();

    constexpr std::size_t kLarge = 4 << 20;
    exchange_one(link, kLarge);
    const CarriedBytes::Bytes large = carried.since_last();
    EXPECT_EQ(users(large.sent, kLarge / parts - 4096), senders);
    EXPECT_EQ(users(large.received, kLarge / parts - 4096), receivers);

    constexpr std::size_t kSmall = 10'000;
    constexpr std::size_t kMessages = 24;
    exchange(link, std::vector<Group>(kMessages, {{{kSmall, kSmall, 0}}, {}}));
    const CarriedBytes::Bytes small = carried.since_last();
    EXPECT_EQ(users(small.sent, kSmall * kMessages / parts), senders);
    EXPECT_EQ(users(small.received, kSmall * kMessages / parts), receivers);
  }
}

}  // namespace
}  // namespace conformance
