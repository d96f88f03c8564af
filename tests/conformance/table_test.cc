// The table itself and the properties of its devices, most of them before a connection exists.
#include "netapi/table.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <set>
#include <type_traits>

#include "conformance.h"
#include "merged_plugin.h"
#include "verbs_names.h"

namespace conformance {
namespace {

class Tables : public Conformance {};
EVERY_VERSION(Tables);

unsigned long setting(const char* name, unsigned long otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : std::strtoul(value, nullptr, 10);
}

TEST_P(Tables, Name_IsVerbatim) {
  EXPECT_STREQ(net().name(), "Verbatim");
}

// Calls `check` with the table in the type of its version.
template <typename Check>
void with_table(const netapi::Plugin& plugin, const Check& check) {
  const void* const table = plugin.table();
  switch (plugin.api_version()) {
    case 6:
      return check(*static_cast<const nccl::v6::Net*>(table));
    case 7:
      return check(*static_cast<const nccl::v7::Net*>(table));
    case 8:
      return check(*static_cast<const nccl::v8::Net*>(table));
    case 9:
      return check(*static_cast<const nccl::v9::Net*>(table));
    case 10:
      return check(*static_cast<const nccl::v10::Net*>(table));
    case 11:
      return check(*static_cast<const nccl::v11::Net*>(table));
    case 12:
      return check(*static_cast<const nccl::v12::Net*>(table));
    default:
      FAIL() << "version " << plugin.api_version();
  }
}

TEST_P(Tables, RequiredSlots_AreFilled) {
  with_table(net(), [](const auto& table) {
    EXPECT_NE(table.init, nullptr);
    EXPECT_NE(table.devices, nullptr);
    EXPECT_NE(table.getProperties, nullptr);
    EXPECT_NE(table.listen, nullptr);
    EXPECT_NE(table.connect, nullptr);
    EXPECT_NE(table.accept, nullptr);
    EXPECT_NE(table.regMr, nullptr);
    EXPECT_NE(table.deregMr, nullptr);
    EXPECT_NE(table.isend, nullptr);
    EXPECT_NE(table.irecv, nullptr);
    EXPECT_NE(table.iflush, nullptr);
    EXPECT_NE(table.test, nullptr);
    EXPECT_NE(table.closeSend, nullptr);
    EXPECT_NE(table.closeRecv, nullptr);
    EXPECT_NE(table.closeListen, nullptr);
    if constexpr (requires { table.finalize; }) {
      EXPECT_NE(table.finalize, nullptr);
    }
    if constexpr (requires { table.makeVDevice; }) {
      EXPECT_NE(table.makeVDevice, nullptr);
    }
  });
}

TEST_P(Tables, Devices_MatchVerbsDevices) {
  const std::vector<std::string> verbs = verbs_device_names();
  ASSERT_FALSE(verbs.empty());
  EXPECT_EQ(static_cast<std::size_t>(device_count()), verbs.size() / static_cast<std::size_t>(physical_per_device()));
  EXPECT_EQ(device_count(), device_count());
  std::set<std::string> names;
  for (int device = 0; device < device_count(); ++device) {
    const std::string name = properties(device).name;
    EXPECT_EQ(name.rfind("verbatim_", 0), 0U) << name;
    EXPECT_TRUE(names.insert(name).second) << name << " twice";
    // NCCL identifies NICs by name, and its own transport uses the names of verbs.
    EXPECT_EQ(std::count(verbs.begin(), verbs.end(), name), 0) << name;
  }
}

TEST_P(Tables, Properties_AreInRange) {
  for (int device = 0; device < device_count(); ++device) {
    const netapi::Properties is = properties(device);
    SCOPED_TRACE(is.name);
    EXPECT_TRUE((is.ptr_support & nccl::kPtrHost) != 0);
    EXPECT_EQ(is.ptr_support & ~(nccl::kPtrHost | nccl::kPtrCuda | nccl::kPtrDmaBuf), 0);
    EXPECT_TRUE(is.pci_path.empty() || is.pci_path.rfind("/sys/", 0) == 0) << is.pci_path;
    EXPECT_NE(is.guid, 0U);
    EXPECT_GT(is.speed, 0);
    EXPECT_GE(is.port, 1);
    EXPECT_GE(is.latency, 0.0F);
    EXPECT_GT(is.max_comms, 0);
    EXPECT_EQ(static_cast<unsigned long>(is.max_recvs), setting("VERBATIM_MAX_RECVS", 8));
    EXPECT_EQ(is.device_type, nccl::NetDeviceType::kHost);
    EXPECT_EQ(is.device_version, nccl::kNetDeviceInvalidVersion);
    // With CONFORMANCE_MERGE=2:2 two ends may have the same members, in the order of the first that was made.
    std::vector<int> members;
    for (int i = 0; i < merged_members(); ++i) members.push_back(device * merged_members() + i);
    EXPECT_TRUE(std::is_permutation(is.members.begin(), is.members.end(), members.begin(), members.end()));
    EXPECT_GT(is.max_p2p_bytes, 0U);
    EXPECT_LE(is.max_p2p_bytes, nccl::kMaxNetSizeBytes);
    EXPECT_LE(is.max_coll_bytes, nccl::kMaxNetSizeBytes);
    EXPECT_GE(is.max_multi_request_size, 1);
    EXPECT_GE(is.rail_id, nccl::kNetIdUndefined);
    EXPECT_GE(is.plane_id, nccl::kNetIdUndefined);
  }
}

TEST_P(Tables, PropertiesAfterConnect_AreUnchanged) {
  std::vector<std::string> before;
  for (int device = 0; device < device_count(); ++device) before.push_back(properties(device).name);
  const TestConnection link = this->link();
  for (int device = 0; device < device_count(); ++device) {
    EXPECT_EQ(properties(device).name, before[static_cast<std::size_t>(device)]);
    EXPECT_EQ(properties(device).guid, properties(device).guid);
  }
}

TEST_P(Tables, UnknownDevice_IsRejected) {
  netapi::Properties unused;
  for (const int device : {-1, device_count(), 1 << 30}) {
    EXPECT_NE(net().properties(device, &unused), nccl::Result::kSuccess) << device;
    Handle handle;
    void* comm = nullptr;
    EXPECT_NE(net().listen(context(), device, handle.bytes, &comm), nccl::Result::kSuccess) << device;
    EXPECT_EQ(comm, nullptr);
  }
  take_warnings();  // the plugin may log a warning
}

// At the start of an event, NCCL's profiler callback dereferences its handle without a check. NCCL passes a null handle
// for the connections of its bootstrap.
class Profiler : public Conformance {};
INSTANTIATE_TEST_SUITE_P(Net, Profiler, ::testing::Range(10, 13), version_name);

std::atomic<int> profiler_calls_without_handle{0};

nccl::Result profiler(void** event, int type, void* handle, std::int64_t /*plugin*/, void* /*extra*/) {
  constexpr int kStart = 0;
  if ((type == kStart && handle == nullptr) || event == nullptr) ++profiler_calls_without_handle;
  return nccl::Result::kSuccess;
}

nccl::v10::NetCommConfig config_for(const nccl::v10::Net& /*table*/) {
  return {nccl::kNetTrafficClassUndefined};
}
nccl::v11::NetCommConfig config_for(const nccl::v11::Net& /*table*/) {
  return {nccl::kNetTrafficClassUndefined};
}
nccl::v12::NetCommConfig config_for(const nccl::v12::Net& /*table*/) {
  return {nccl::kNetTrafficClassUndefined};
}

template <typename Net>
void run_with_profiler(const Net& table) {
  constexpr bool kContexts = requires {
    table.finalize;
  };
  auto config = config_for(table);
  void* context = nullptr;
  if constexpr (kContexts) {
    ASSERT_OK(table.init(&context, 1, &config, &netapi::log_line_of_plugin, &profiler));
  } else {
    ASSERT_OK(table.init(&netapi::log_line_of_plugin, &profiler));
  }
  Handle handle;
  void* listen_comm = nullptr;
  if constexpr (kContexts) {
    ASSERT_OK(table.listen(context, 0, handle.bytes, &listen_comm));
  } else {
    ASSERT_OK(table.listen(0, handle.bytes, &listen_comm));
  }
  void* send_comm = nullptr;
  void* recv_comm = nullptr;
  ASSERT_TRUE(eventually([&] {
    // NCCL passes a null pointer for the device handle in some calls.
    if (send_comm == nullptr) {
      if constexpr (kContexts) {
        EXPECT_OK(table.connect(context, 0, handle.bytes, &send_comm, nullptr));
      } else {
        EXPECT_OK(table.connect(0, &config, handle.bytes, &send_comm, nullptr));
      }
    }
    if (recv_comm == nullptr) {
      EXPECT_OK(table.accept(listen_comm, &recv_comm, nullptr));
    }
    return ::testing::Test::HasFailure() || (send_comm != nullptr && recv_comm != nullptr);
  }));
  ASSERT_TRUE(send_comm != nullptr && recv_comm != nullptr);
  Memory source(2000);
  Memory target(2000);
  source.write(0, 2000, 1);
  target.expect(0, 2000, 1);
  void* source_mr = nullptr;
  void* target_mr = nullptr;
  ASSERT_OK(table.regMr(send_comm, source.data(), source.size(), nccl::kPtrHost, &source_mr));
  ASSERT_OK(table.regMr(recv_comm, target.data(), target.size(), nccl::kPtrHost, &target_mr));
  for (int round = 0; round < 2; ++round) {
    const std::size_t at = round == 0 ? 0 : 1000;
    void* data = target.data() + at;
    std::size_t size = 1000;
    int tag = 0;
    void* no_handle = nullptr;
    void* recv = nullptr;
    void* send = nullptr;
    // First without an array of handles, then with a null handle in the array.
    ASSERT_TRUE(eventually([&] {
      EXPECT_OK(table.irecv(recv_comm, 1, &data, &size, &tag, &target_mr, round == 0 ? nullptr : &no_handle, &recv));
      return recv != nullptr;
    }));
    ASSERT_TRUE(eventually([&] {
      EXPECT_OK(table.isend(send_comm, source.data() + at, 1000, 0, source_mr, nullptr, &send));
      if (send != nullptr) return true;
      int done = 0;
      EXPECT_OK(
          table.test(recv, &done, nullptr));  // the engine `inline` of softverbs works only inside calls of both ends
      EXPECT_EQ(done, 0);
      return false;
    }));
    for (void* const request : {send, recv}) {
      int done = 0;
      ASSERT_TRUE(eventually([&] {
        EXPECT_OK(table.test(request, &done, nullptr));
        return done != 0;
      }));
    }
  }
  EXPECT_TRUE(target.intact());
  EXPECT_OK(table.deregMr(send_comm, source_mr));
  EXPECT_OK(table.deregMr(recv_comm, target_mr));
  EXPECT_OK(table.closeSend(send_comm));
  EXPECT_OK(table.closeRecv(recv_comm));
  EXPECT_OK(table.closeListen(listen_comm));
  if constexpr (kContexts) {
    EXPECT_OK(table.finalize(context));
  }
}

TEST_P(Profiler, NullHandle_CallbackIsNotCalled) {
  profiler_calls_without_handle = 0;
  with_table(net(), [](const auto& table) {
    using Net = std::remove_cvref_t<decltype(table)>;
    if constexpr (
        requires { typename std::enable_if_t<std::is_same_v<Net, nccl::v10::Net>>; } || requires { table.finalize; }) {
      run_with_profiler(table);
    } else {
      FAIL() << "no profiler in this version";
    }
  });
  EXPECT_EQ(profiler_calls_without_handle, 0);
}

// NCCL passes 64 sizes that are 0 and adds up all of them, so test may write only those of the members.
TEST_P(Tables, TestWithFullSizesArray_WritesOnlyMembers) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  Memory source(10);
  Memory target(10);
  const Registration source_mr(*this, link.send_comm, source.data(), source.size());
  const Registration target_mr(*this, link.recv_comm, target.data(), target.size());
  Traffic traffic(net());
  traffic.send(link.send_comm, {source.data(), 10, 3, source_mr.get()});
  void* data = target.data();
  std::size_t size = 10;
  int tag = 3;
  void* mhandle = target_mr.get();
  void* request = nullptr;
  ASSERT_TRUE(eventually([&] {
    EXPECT_OK(net().irecv(link.recv_comm, 1, &data, &size, &tag, &mhandle, &request));
    return request != nullptr;
  }));
  std::array<int, netapi::kMaxGroup> sizes{};
  int done = 0;
  ASSERT_TRUE(eventually([&] {
    EXPECT_OK(net().test(request, &done, sizes.data()));
    return !traffic.step() || done != 0;
  }));
  EXPECT_EQ(done, 1);
  EXPECT_EQ(sizes[0], 10);
  EXPECT_EQ(std::count(sizes.begin() + 1, sizes.end(), 0), netapi::kMaxGroup - 1);
  ASSERT_TRUE(traffic.run());
}

// Up to v8 sizes are int and can be negative: then the call must fail without a request.
class OldTables : public Conformance {};
INSTANTIATE_TEST_SUITE_P(Net, OldTables, ::testing::Range(6, 9), version_name);

template <typename Net>
void refuse_negative_sizes(const Net& table, const TestConnection& link, Memory& memory, void* send_mr, void* recv_mr) {
  if constexpr (!requires { table.makeVDevice; }) {
    void* request = nullptr;
    EXPECT_NE(table.isend(link.send_comm, memory.data(), -1, 0, send_mr, &request), nccl::Result::kSuccess);
    EXPECT_EQ(request, nullptr);
    void* data = memory.data();
    int size = -1;
    int tag = 0;
    EXPECT_NE(table.irecv(link.recv_comm, 1, &data, &size, &tag, &recv_mr, &request), nccl::Result::kSuccess);
    EXPECT_EQ(request, nullptr);
    if constexpr (std::is_same_v<decltype(Net::regMr), decltype(nccl::v6::Net::regMr)>) {
      void* mhandle = nullptr;
      EXPECT_NE(table.regMr(link.send_comm, memory.data(), -1, nccl::kPtrHost, &mhandle), nccl::Result::kSuccess);
      EXPECT_EQ(mhandle, nullptr);
    }
  } else {
    FAIL() << "sizes are unsigned in this version";
  }
}

TEST_P(OldTables, NegativeSize_IsRejected) {
  TestConnection link = this->link();
  ASSERT_TRUE(link);
  Memory memory(100);
  const Registration send_mr(*this, link.send_comm, memory.data(), memory.size());
  const Registration recv_mr(*this, link.recv_comm, memory.data(), memory.size());
  with_table(net(),
             [&](const auto& table) { refuse_negative_sizes(table, link, memory, send_mr.get(), recv_mr.get()); });
  EXPECT_TRUE(memory.intact());
  take_warnings();  // the plugin may log a warning
}

}  // namespace
}  // namespace conformance
