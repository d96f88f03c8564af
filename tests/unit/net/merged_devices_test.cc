//: in unit_net_failure

// Devices of several ports: which can be merged, and that failures, stalls and dumps name the port that they concern.
// Connections run in child processes, because a process reads its faults once.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <regex>
#include <string>
#include <vector>

#include "child_lines.h"
#include "connected_comms.h"
#include "net/context/net_devices.h"
#include "support/log_lines.h"
#include "unit/support/log_capture.h"

namespace verbatim {
namespace {

std::vector<Port> ports_named(const std::vector<std::string>& names) {
  std::vector<Port> ports;
  for (const std::string& name : names) {
    Port& port = ports.emplace_back();
    port.name = name + ":1";
    port.nccl_name = std::string(kNcclNamePrefix) + name;
    port.link_layer = IBV_LINK_LAYER_ETHERNET;
  }
  return ports;
}

TEST(NetDevices, MixedLinkLayers_AreRefused) {
  std::vector<Port> ports = ports_named({"mlx5_0", "mlx5_1", "mlx5_2"});
  ports[2].link_layer = IBV_LINK_LAYER_INFINIBAND;
  NetDevices devices(ports);
  const LogCapture log;
  const Result<std::size_t> merged = devices.merge(std::array{1, 2});
  ASSERT_FALSE(merged);
  EXPECT_EQ(merged.error().kind, ErrorKind::kUsage);
  EXPECT_TRUE(merged.error().logged);
  test::expect_log_lines(log.warnings());
  EXPECT_EQ(devices.count(), 3U);
}

// A comm would have two lanes on one port, and events of the port name one of them.
TEST(NetDevices, PortWithAndWithoutDataDirect_AreNotMerged) {
  std::vector<Port> ports = ports_named({"mlx5_0", "mlx5_0", "mlx5_1"});
  ports[1].nccl_name += "_dma";
  ports[1].data_direct = true;
  NetDevices devices(ports);
  const LogCapture log;
  EXPECT_FALSE(devices.merge(std::array{0, 2, 1}));
  EXPECT_EQ(log.only_warning().rfind("devices are not merged: device 1 (mlx5_0:1) is named twice. Next: ", 0), 0U)
      << log.only_warning();
  const Result<std::size_t> merged = devices.merge(std::array{1, 2});
  ASSERT_TRUE(merged);
  EXPECT_EQ(virtual_device_name(*devices.ports(*merged), *merged), "verbatim_mlx5_0_dma+mlx5_1");
}

TEST(NetDevices, LongNames_FitIntoNcclsTopology) {
  std::vector<std::string> names;
  for (char letter = 'a'; letter < 'i'; ++letter) names.emplace_back(60, letter);
  const std::vector<Port> ports = ports_named(names);
  NetDevices devices(ports);
  const auto name_of = [&](std::size_t device) { return virtual_device_name(*devices.ports(device), device); };
  const Result<std::size_t> two = devices.merge(std::array{0, 1});
  const Result<std::size_t> eight = devices.merge(std::array{0, 1, 2, 3, 4, 5, 6, 7});
  const Result<std::size_t> seven = devices.merge(std::array{0, 1, 2, 3, 4, 5, 6});
  ASSERT_TRUE(two && eight && seven);
  EXPECT_EQ(name_of(*two), "verbatim_" + names[0] + "+" + names[1]);
  EXPECT_LE(name_of(*eight).size(), kMaxDeviceName);
  EXPECT_LE(name_of(*seven).size(), kMaxDeviceName);
  EXPECT_NE(name_of(*eight), name_of(*seven));
}

TEST(NetDevices, RestoredWithTheSamePorts_HasTheSameIndices) {
  const std::vector<Port> ports = ports_named({"mlx5_0", "mlx5_1", "mlx5_2"});
  NetDevices devices(ports);
  ASSERT_TRUE(devices.merge(std::array{2, 1}));
  ASSERT_TRUE(devices.merge(std::array{0, 2}));
  ASSERT_TRUE(devices.merge(std::array{1, 2, 0}));
  NetDevices again(ports);
  again.restore(devices.table());
  EXPECT_EQ(again.count(), 6U);
  EXPECT_EQ(again.members(5), (std::vector<int>{1, 2, 0}));
  EXPECT_EQ(*again.merge(std::array{2, 0}), 4U);
}

// NCCL 2.30 loads the plugin anew for the next communicator and counts its devices, where the library's state remains.
TEST(NetDevices, RestoredAndUnused_CanBeRemovedOnce) {
  const std::vector<Port> ports = ports_named({"mlx5_0", "mlx5_1", "mlx5_2"});
  NetDevices devices(ports);
  ASSERT_TRUE(devices.merge(std::array{0, 1}));
  EXPECT_FALSE(devices.remove_unused());
  NetDevices again(ports);
  again.restore(devices.table());
  EXPECT_TRUE(again.remove_unused());
  EXPECT_EQ(again.count(), 3U);
  EXPECT_FALSE(again.remove_unused());
  EXPECT_EQ(*again.merge(std::array{0, 2}), 3U);
  EXPECT_FALSE(again.remove_unused());
  NetDevices used(ports);
  used.restore(devices.table());
  ASSERT_TRUE(used.ports(0));
  EXPECT_FALSE(used.remove_unused());
  EXPECT_EQ(used.count(), 4U);
}

// The indices that NCCL knows would mean other devices.
TEST(NetDevices, RestoredWithOtherPorts_MakesNoVirtualDevice) {
  const std::vector<Port> before = ports_named({"mlx5_0", "mlx5_1", "mlx5_2"});
  NetDevices devices(before);
  ASSERT_TRUE(devices.merge(std::array{2, 1}));
  for (const std::vector<std::string>& names : {std::vector<std::string>{"mlx5_1", "mlx5_2"},
                                                std::vector<std::string>{"mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"}}) {
    const std::vector<Port> after = ports_named(names);
    NetDevices other(after);
    const LogCapture log;
    other.restore(devices.table());
    EXPECT_EQ(other.count(), names.size());
    EXPECT_NE(log.only_warning().find("verbatim_mlx5_0, verbatim_mlx5_1, verbatim_mlx5_2 then. Next: "),
              std::string::npos)
        << log.only_warning();
  }
}

// A connection of a merged device of softverbs0 and softverbs1 with itself.
struct MergedEnds {
  explicit MergedEnds(MemoryType target_type = MemoryType::kHost) {
    const std::array members{0, 1};
    const Result<std::size_t> device = merge_devices(members.data(), 2, 8);
    EXPECT_TRUE(device);
    if (!device) return;
    link.connect(*device, *device);
    source_memory = link.reg(link.send(), source);
    target_memory = link.reg(link.recv(), target, target_type);
  }

  void irecv() {
    const RecvBuffer buffer{target.data(), target.size(), 0, target_memory.get()};
    ASSERT_NE(link.posted([&] { return link.irecv({&buffer, 1}); }), nullptr);
  }
  void isend() {
    ASSERT_NE(link.posted([&] { return link.isend(source.data(), source.size(), 0, *source_memory); }), nullptr);
  }
  // The first message goes over softverbs0, the second over softverbs1.
  void send_two() {
    for (int i = 0; i < 2; ++i) irecv();
    for (int i = 0; i < 2; ++i) isend();
  }
  bool flushed(Request& request) {
    int done = 0;
    RecvComm::test_flush(request, &done);
    return done == 1;
  }

  ConnectedComms link;
  std::vector<std::uint8_t> source = pattern(64, 1);
  std::vector<std::uint8_t> target = std::vector<std::uint8_t>(64);
  std::unique_ptr<MemoryHandle> source_memory;
  std::unique_ptr<MemoryHandle> target_memory;
};

std::string merged_child(const std::string& faults, const std::function<void()>& body,
                         const test::Variables& more = {}) {
  test::Variables variables = with_faults(faults);
  variables.insert(variables.end(), more.begin(), more.end());
  return test::check_in_child(variables, body);
}

void expect_failure_of_second_port(const Comm& comm) {
  const Failure* const failure = comm.failure();
  ASSERT_NE(failure, nullptr);
  ASSERT_TRUE(failure->path && failure->path->remote);
  EXPECT_EQ(failure->path->local.device, "softverbs1") << log_line(*failure);
  EXPECT_EQ(failure->path->remote->device, "softverbs1") << log_line(*failure);
}

TEST(MergedDevices, MessageLost_FailureNamesItsPort) {
  merged_child("drop-request op=write_imm device=1 count=all times=all",
               [] {
                 MergedEnds ends;
                 ends.send_two();
                 EXPECT_TRUE(ConnectedComms::fails(ends.link.send()));
                 expect_failure_of_second_port(ends.link.send());
               },
               {{"VERBATIM_FAILOVER", "0"}});
}

TEST(MergedDevices, FlushFails_FailureNamesItsPort) {
  merged_child("complete op=read device=1 nth=1 status=REM_ACCESS_ERR", [] {
    MergedEnds ends(MemoryType::kCuda);
    ASSERT_NE(ends.link.recv().iflush(ends.target.data(), *ends.target_memory), nullptr);
    EXPECT_TRUE(ConnectedComms::fails(ends.link.recv()));
    expect_failure_of_second_port(ends.link.recv());
  });
}

TEST(MergedDevices, FlushQpNotCreated_FailureNamesItsPort) {
  // Both ends have a QP on each device. The third of softverbs1 is that of the flushes.
  merged_child("fail verb=create_qp device=1 nth=3 errno=ENOMEM", [] {
    MergedEnds ends(MemoryType::kCuda);
    EXPECT_EQ(ends.link.recv().iflush(ends.target.data(), *ends.target_memory), nullptr);
    ASSERT_NE(ends.link.recv().failure(), nullptr);
    ASSERT_TRUE(ends.link.recv().failure()->path);
    EXPECT_EQ(ends.link.recv().failure()->path->local.device, "softverbs1");
  });
}

// The data may have arrived through either port.
TEST(MergedDevices, Flush_EndsWhenEveryPortIsFlushed) {
  for (const char* device : {"0", "1"}) {
    merged_child(std::string("drop-completion op=read nth=1 device=") + device, [] {
      MergedEnds ends(MemoryType::kCuda);
      Request* const flush = ends.link.recv().iflush(ends.target.data(), *ends.target_memory);
      ASSERT_NE(flush, nullptr);
      for (int i = 0; i < 1000; ++i) ASSERT_FALSE(ends.flushed(*flush));
    });
  }
  merged_child("seed=1", [] {
    MergedEnds ends(MemoryType::kCuda);
    Request* const flush = ends.link.recv().iflush(ends.target.data(), *ends.target_memory);
    ASSERT_NE(flush, nullptr);
    EXPECT_TRUE(ConnectedComms::eventually([&] { return ends.flushed(*flush); }));
  });
}

TEST(MergedDevices, MessageNotAcknowledged_BusiestQpIsItsOwn) {
  merged_child("drop-request op=write_imm device=1 count=all times=all",
               [] {
                 MergedEnds ends;
                 EXPECT_FALSE(ends.link.send().busiest_qp());
                 ends.send_two();
                 EXPECT_TRUE(ConnectedComms::eventually([&] {
                   ends.link.progress();
                   return ends.link.send().busiest_qp() == 1;
                 }));
                 EXPECT_NE(ends.link.send().describe_path(1).find("softverbs1:1"), std::string::npos);
               },
               {{"VERBATIM_TIMEOUT", "20"}});
}

TEST(MergedDevices, AtomicsOfOneDeviceOnly_ImmediatesAreUsed) {
  const Lines lines = warnings_of(
      merged_child("seed=1",
                   [] {
                     MergedEnds ends;
                     EXPECT_FALSE(ends.link.recv().stats().atomic);
                     EXPECT_STREQ(ends.link.recv().atomics_refused(), "atomics of different devices are not coherent");
                     ends.send_two();
                     EXPECT_TRUE(ConnectedComms::eventually([&] {
                       ends.link.progress();
                       return ends.link.send().all_done() && !ends.link.recv().waits_for_peer();
                     }));
                     EXPECT_EQ(ends.target, ends.source) << "wrong bytes";
                   },
                   {{"VERBATIM_COMPLETION", "atomic"}}));
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_TRUE(
      lines[0].starts_with("VERBATIM_COMPLETION=atomic is not used between softverbs0:1+softverbs1:1 and host HOST: "))
      << lines[0];
}

TEST(MergedDevices, CoherentAtomics_AreUsed) {
  merged_child("seed=1",
               [] {
                 MergedEnds ends;
                 EXPECT_TRUE(ends.link.recv().stats().atomic);
                 EXPECT_EQ(ends.link.recv().stats().device, "softverbs0:1+softverbs1:1");
               },
               {{"VERBATIM_COMPLETION", "atomic"}, {"SOFTVERBS_ATOMICS", "glob"}});
}

// With lanes a message alone is sent by the code of groups.
TEST(MergedDevices, ShortMessage_WritesNoSizeUnlessItsSignalCannotCarryIt) {
  merged_child(
      "seed=1",
      [] {
        MergedEnds ends;
        ConnectedComms& link = ends.link;
        constexpr std::size_t kBytes = 20'000;
        constexpr std::size_t kFourMiB = std::size_t{4} << 20;
        constexpr std::uint64_t kUntouched = 0xfeed;
        Buffers<> buffers(link, pattern(kFourMiB, 1));
        auto& record = *reinterpret_cast<wire::CompletionRecord*>(link.send().endpoint().remote().control_address);
        std::size_t index = 0;
        for (const std::size_t capacity : {std::size_t{65'536}, kFourMiB}) {
          record.size[index] = kUntouched;
          Request* const receive = link.posted([&] { return buffers.irecv(capacity); });
          Request* const send = link.posted([&] { return buffers.isend(kBytes); });
          ASSERT_TRUE(link.wait(send));
          ASSERT_TRUE(link.wait(receive));
          EXPECT_EQ(link.is_completed(receive)[0], static_cast<int>(kBytes));
          EXPECT_EQ(record.size[index], capacity == kFourMiB ? kBytes : kUntouched);
          ++index;
        }
        EXPECT_TRUE(std::equal(buffers.source.begin(), buffers.source.begin() + kBytes, buffers.target.begin()))
            << "wrong bytes";
      },
      {{"VERBATIM_ADAPTIVE_ROUTING", "1"}, {"VERBATIM_SPLIT_DATA_ON_QPS", "0"}});
}

TEST(MergedDevices, QpDump_NamesThePortOfEachQp) {
  const std::string file = testing::TempDir() + "merged-qps-" + std::to_string(::getpid());
  merged_child("seed=1", [] { const MergedEnds ends; },
               {{"VERBATIM_QP_DUMP", file}, {"VERBATIM_QPS_PER_CONNECTION", "2"}});
  std::ifstream in(file);
  std::vector<std::string> devices;
  static const std::regex fields(R"re("device":"([^"]*)".*"side":"([^"]*)".*"index":([0-9]+))re");
  for (std::string line; std::getline(in, line);) {
    std::smatch found;
    ASSERT_TRUE(std::regex_search(line, found, fields)) << line;
    if (found[2] == "send") devices.push_back(found[3].str() + " " + found[1].str());
  }
  ::unlink(file.c_str());
  EXPECT_EQ(devices,
            (std::vector<std::string>{"0 softverbs0:1", "1 softverbs1:1", "2 softverbs0:1", "3 softverbs1:1"}));
}

}  // namespace
}  // namespace verbatim
