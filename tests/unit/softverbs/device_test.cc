// Queries of devices, ports, GIDs and P_Keys.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <set>
#include <thread>

#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

class DeviceQuery : public testing::Test {
 protected:
  Device device = open_device();
  ibv_context* context = device.context.get();
};

TEST(DeviceList, NamesAndGuids_AreUnique) {
  int count = -1;
  ibv_device** const list = verbs().get_device_list(&count);
  ASSERT_NE(list, nullptr);
  ASSERT_GE(count, 2);
  EXPECT_EQ(list[count], nullptr);
  std::set<std::string> names;
  std::set<std::uint64_t> guids;
  for (int i = 0; i < count; ++i) {
    ASSERT_NE(list[i], nullptr);
    EXPECT_STRNE(verbs().get_device_name(list[i]), "");
    EXPECT_EQ(list[i]->node_type, IBV_NODE_CA);
    EXPECT_EQ(list[i]->transport_type, IBV_TRANSPORT_IB);
    EXPECT_NE(verbs().get_device_guid(list[i]), 0U);
    names.insert(verbs().get_device_name(list[i]));
    guids.insert(verbs().get_device_guid(list[i]));
  }
  EXPECT_EQ(names.size(), static_cast<std::size_t>(count));
  EXPECT_EQ(guids.size(), static_cast<std::size_t>(count));
  verbs().free_device_list(list);
}

TEST(DeviceList, CountIsOptional_AndListsAreIndependent) {
  ibv_device** const first = verbs().get_device_list(nullptr);
  ibv_device** const second = verbs().get_device_list(nullptr);
  ASSERT_NE(first, nullptr);
  ASSERT_NE(second, nullptr);
  const std::string name = verbs().get_device_name(second[0]);
  verbs().free_device_list(first);
  EXPECT_EQ(name, verbs().get_device_name(second[0]));
  verbs().free_device_list(second);
}

TEST(DeviceList, OpenDevice_OutlivesTheList) {
  ibv_device** const list = verbs().get_device_list(nullptr);
  ASSERT_NE(list, nullptr);
  const std::string name = verbs().get_device_name(list[0]);
  ibv_context* const context = verbs().open_device(list[0]);
  verbs().free_device_list(list);
  ASSERT_NE(context, nullptr);
  EXPECT_EQ(name, verbs().get_device_name(context->device));
  EXPECT_EQ(verbs().close_device(context), 0);
}

TEST(DeviceList, OneDevice_OpensTwice) {
  const Device first = open_device();
  const Device second = open_device();
  EXPECT_NE(first.context, second.context);
  EXPECT_EQ(first.attr.node_guid, second.attr.node_guid);
}

TEST(VerbsLibrary, StatusAndEventNames_AreDistinct) {
  std::set<std::string> names;
  for (int status = IBV_WC_SUCCESS; status <= IBV_WC_GENERAL_ERR; ++status) {
    const char* const name = verbs().wc_status_str(static_cast<ibv_wc_status>(status));
    ASSERT_NE(name, nullptr);
    names.insert(name);
  }
  EXPECT_EQ(names.size(), IBV_WC_GENERAL_ERR + 1U);
  EXPECT_NE(verbs().wc_status_str(static_cast<ibv_wc_status>(31)), nullptr);
  EXPECT_STRNE(verbs().event_type_str(IBV_EVENT_QP_ACCESS_ERR), verbs().event_type_str(IBV_EVENT_CQ_ERR));
  EXPECT_STRNE(verbs().port_state_str(IBV_PORT_ACTIVE), verbs().port_state_str(IBV_PORT_DOWN));
  EXPECT_STRNE(verbs().node_type_str(IBV_NODE_CA), verbs().node_type_str(IBV_NODE_SWITCH));
}

TEST_F(DeviceQuery, Attributes_AreUsable) {
  const ibv_device_attr& attr = device.attr;
  EXPECT_EQ(attr.node_guid, verbs().get_device_guid(context->device));
  EXPECT_NE(attr.sys_image_guid, 0U);
  EXPECT_NE(std::memchr(attr.fw_ver, 0, sizeof(attr.fw_ver)), nullptr);
  EXPECT_GE(attr.phys_port_cnt, 1);
  EXPECT_GE(attr.max_qp, 1);
  EXPECT_GE(attr.max_qp_wr, 1);
  EXPECT_GE(attr.max_sge, 1);
  EXPECT_GE(attr.max_cq, 1);
  EXPECT_GE(attr.max_cqe, 1);
  EXPECT_GE(attr.max_mr, 1);
  EXPECT_GE(attr.max_mr_size, 1ULL << 30);
  EXPECT_NE(attr.page_size_cap & 4096, 0U);
  EXPECT_GE(attr.max_pd, 1);
  EXPECT_GE(attr.max_qp_rd_atom, 1);
  EXPECT_GE(attr.max_qp_init_rd_atom, 1);
  EXPECT_GE(attr.max_srq, 1);
  EXPECT_GE(attr.max_srq_wr, 1);
  EXPECT_GE(attr.max_srq_sge, 1);
  EXPECT_GE(attr.max_pkeys, 1);
  EXPECT_GE(context->num_comp_vectors, 1);
  EXPECT_GE(context->async_fd, 0);
  EXPECT_NE(attr.vendor_id, 0U);
}

TEST_F(DeviceQuery, CommandDescriptor_IsOpenUntilClose) {
  int fd = -1;
  {
    const Device other = open_device();
    fd = other.context->cmd_fd;
    ASSERT_GE(fd, 0);
    EXPECT_NE(fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
    EXPECT_NE(fd, context->cmd_fd);
    EXPECT_NE(fd, other.context->async_fd);
    const int copy = dup(fd);
    EXPECT_GE(copy, 0);
    close(copy);
  }
  EXPECT_EQ(fcntl(fd, F_GETFD), -1);
  EXPECT_EQ(errno, EBADF);
}

TEST_F(DeviceQuery, Port_IsActive) {
  const ibv_port_attr& port = device.port;
  EXPECT_EQ(port.state, IBV_PORT_ACTIVE);
  EXPECT_EQ(port.phys_state, 5);  // LinkUp
  EXPECT_GE(port.max_mtu, port.active_mtu);
  EXPECT_GE(port.active_mtu, IBV_MTU_256);
  EXPECT_LE(port.max_mtu, IBV_MTU_4096);
  EXPECT_GE(port.gid_tbl_len, 1);
  EXPECT_GE(port.pkey_tbl_len, 1);
  EXPECT_GE(port.max_msg_sz, 4096U);
  EXPECT_LE(port.max_msg_sz, 1U << 31);
  EXPECT_NE(port.active_width, 0);
  EXPECT_NE(port.active_speed, 0);
  if (device.is_roce()) {
    EXPECT_EQ(port.lid, 0);  // Ethernet has no local identifiers
  } else {
    EXPECT_NE(port.lid, 0);
    EXPECT_LT(port.lid, 0xC000);  // unicast
    EXPECT_NE(port.sm_lid, 0);
  }
}

TEST_F(DeviceQuery, PortSpeed_AgreesWithWidthAndSpeed) {
  if (verbs().query_port_speed == nullptr) GTEST_SKIP() << "the library is of rdma-core 44 or older";
  std::uint64_t speed = 0;
  ASSERT_EQ(verbs().query_port_speed(context, device.port_num, &speed), 0);
  ASSERT_EQ(device.port.active_width, 2);   // 4 lanes
  ASSERT_EQ(device.port.active_speed, 32);  // EDR: 25 Gbit/s
  EXPECT_EQ(speed, 1000U);                  // in units of 100 Mbit/s
  EXPECT_EQ(verbs().query_port_speed(context, device.attr.phys_port_cnt + 1U, &speed), EINVAL);
}

TEST_F(DeviceQuery, UnknownPort_IsRefused) {
  ibv_port_attr port{};
  EXPECT_EQ(query_port(context, 0, &port), EINVAL);
  EXPECT_EQ(query_port(context, device.attr.phys_port_cnt + 1U, &port), EINVAL);
}

TEST_F(DeviceQuery, ExtendedQueryPort_WritesOnlyTheCallersSize) {
  verbs_context* const extended = verbs_get_ctx_op(context, query_port);
  ASSERT_NE(extended, nullptr);
  ibv_port_attr port;
  std::memset(&port, 0xA5, sizeof(port));
  constexpr std::size_t kShort = offsetof(ibv_port_attr, port_cap_flags2);  // size of the struct in an older header
  ASSERT_EQ(extended->query_port(context, device.port_num, &port, kShort), 0);
  EXPECT_EQ(port.gid_tbl_len, device.port.gid_tbl_len);
  EXPECT_EQ(port.port_cap_flags2, 0xA5A5);
}

TEST_F(DeviceQuery, OldQueryPort_ReturnsTheSame) {
  struct {
    ibv_port_attr attr;
    std::byte guard[64];
  } old;
  std::memset(&old, 0xA5, sizeof(old));
  ASSERT_EQ(verbs().query_port(context, device.port_num, reinterpret_cast<_compat_ibv_port_attr*>(&old.attr)), 0);
  EXPECT_EQ(old.attr.state, device.port.state);
  EXPECT_EQ(old.attr.lid, device.port.lid);
  EXPECT_EQ(old.attr.link_layer, device.port.link_layer);
  EXPECT_EQ(old.attr.port_cap_flags2, 0xA5A5);  // the old struct ends before it
  for (const std::byte byte : old.guard) EXPECT_EQ(byte, std::byte{0xA5});
}

TEST_F(DeviceQuery, GidQueries_AgreeWithEachOther) {
  std::vector<ibv_gid_entry> entries(1024);
  const ssize_t count = verbs().query_gid_table(context, entries.data(), entries.size(), 0, sizeof(ibv_gid_entry));
  ASSERT_GE(count, 1);
  entries.resize(static_cast<std::size_t>(count));
  std::erase_if(entries, [this](const ibv_gid_entry& entry) { return entry.port_num != device.port_num; });
  std::size_t filled = 0;
  for (int index = 0; index < device.port.gid_tbl_len; ++index) {
    ibv_gid_entry entry{};
    const int result =
        verbs().query_gid_ex(context, device.port_num, static_cast<std::uint32_t>(index), &entry, 0, sizeof(entry));
    if (result == ENODATA) continue;
    ASSERT_EQ(result, 0) << "index " << index;
    EXPECT_EQ(entry.gid_index, static_cast<std::uint32_t>(index));
    EXPECT_EQ(entry.port_num, device.port_num);
    ibv_gid gid{};
    ASSERT_EQ(verbs().query_gid(context, device.port_num, index, &gid), 0);
    EXPECT_EQ(std::memcmp(&gid, &entry.gid, sizeof(gid)), 0);
    ASSERT_LT(filled, entries.size());
    EXPECT_EQ(std::memcmp(&entries[filled], &entry, sizeof(entry)), 0) << "index " << index;
    ++filled;
    if (device.is_roce()) {
      EXPECT_TRUE(entry.gid_type == IBV_GID_TYPE_ROCE_V1 || entry.gid_type == IBV_GID_TYPE_ROCE_V2);
    } else {
      EXPECT_EQ(entry.gid_type, static_cast<std::uint32_t>(IBV_GID_TYPE_IB));
    }
  }
  EXPECT_EQ(filled, entries.size());
}

TEST_F(DeviceQuery, GidIndexOutOfRange_IsRefused) {
  ibv_gid_entry entry{};
  ibv_gid gid{};
  const auto beyond = static_cast<std::uint32_t>(device.port.gid_tbl_len);
  EXPECT_EQ(verbs().query_gid_ex(context, device.port_num, beyond, &entry, 0, sizeof(entry)), EINVAL);
  EXPECT_EQ(verbs().query_gid_ex(context, 99, 0, &entry, 0, sizeof(entry)), EINVAL);
  EXPECT_NE(verbs().query_gid_ex(context, device.port_num, 0, &entry, 1, sizeof(entry)), 0);  // no flags exist yet
  EXPECT_EQ(verbs().query_gid(context, device.port_num, device.port.gid_tbl_len, &gid), -1);
  EXPECT_EQ(verbs().query_gid(context, 99, 0, &gid), -1);
  ibv_gid_entry none[1];
  EXPECT_LT(verbs().query_gid_table(context, none, 0, 0, sizeof(entry)), 0);  // the array is too small
}

TEST_F(DeviceQuery, InfiniBandGidZero_IsSubnetPrefixAndPortGuid) {
  if (device.is_roce()) GTEST_SKIP() << "a RoCE port";
  ibv_gid gid{};
  ASSERT_EQ(verbs().query_gid(context, device.port_num, 0, &gid), 0);
  EXPECT_EQ(gid.global.subnet_prefix, htobe64(0xFE80000000000000));
  EXPECT_NE(gid.global.interface_id, 0U);
}

TEST_F(DeviceQuery, RocePort_HasAnIpv4RoceV2Gid) {
  if (!device.is_roce()) GTEST_SKIP() << "an InfiniBand port";
  std::vector<ibv_gid_entry> entries(1024);
  const ssize_t count = verbs().query_gid_table(context, entries.data(), entries.size(), 0, sizeof(ibv_gid_entry));
  ASSERT_GE(count, 1);
  bool found = false;
  for (const ibv_gid_entry& entry : std::span(entries).first(static_cast<std::size_t>(count))) {
    const auto* const address = reinterpret_cast<const in6_addr*>(entry.gid.raw);
    found = found || (entry.gid_type == IBV_GID_TYPE_ROCE_V2 && IN6_IS_ADDR_V4MAPPED(address));
  }
  EXPECT_TRUE(found);
}

TEST_F(DeviceQuery, Devices_HaveDistinctAddresses) {
  const Device second = open_device(1);
  EXPECT_NE(std::memcmp(&device.gid, &second.gid, sizeof(ibv_gid)), 0);
  if (!device.is_roce()) {
    EXPECT_NE(device.port.lid, second.port.lid);
  }
}

TEST_F(DeviceQuery, PkeyTable_StartsWithTheDefaultPartition) {
  __be16 pkey = 0;
  ASSERT_EQ(verbs().query_pkey(context, device.port_num, 0, &pkey), 0);
  EXPECT_EQ(pkey, 0xFFFF);
  EXPECT_EQ(verbs().get_pkey_index(context, device.port_num, pkey), 0);
  EXPECT_EQ(verbs().get_pkey_index(context, device.port_num, htons(0x8123)), -1);
  EXPECT_EQ(verbs().query_pkey(context, device.port_num, device.port.pkey_tbl_len, &pkey), -1);
  EXPECT_EQ(verbs().query_pkey(context, 99, 0, &pkey), -1);
}

TEST_F(DeviceQuery, NewContext_HasNoEvent) {
  EXPECT_FALSE(readable(context->async_fd, Milliseconds{0}));
}

// The threads of a device sleep while there is no work.
TEST(Device, Idle_UsesNoProcessorTime) {
  const Device device = open_device();
  Endpoint a(device);
  Endpoint b(device);
  connect(a, b);
  const Region region(device.pd.get(), 64);
  ASSERT_EQ(
      post(a.qp(), IBV_WR_RDMA_WRITE, {region.sge(0, 8)}, {.remote_addr = region.address(32), .rkey = region.mr->rkey}),
      0);
  ASSERT_EQ(poll_one(a.send_cq()).status, IBV_WC_SUCCESS);
  const auto used = [] {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
  };
  std::this_thread::sleep_for(20ms);  // a thread polls for more work before it sleeps
  const auto before = used();
  std::this_thread::sleep_for(300ms);
  EXPECT_LT(used() - before, 10ms);
}

}  // namespace
}  // namespace verbatim::test
