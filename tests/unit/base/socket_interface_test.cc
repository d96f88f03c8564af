#include "base/socket_interface.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>

#include "base/socket.h"
#include "unit/support/log_capture.h"

namespace verbatim {
namespace {

SocketInterface ipv4(const std::string& name, const char* text) {
  SocketInterface one{.name = name};
  auto& address = reinterpret_cast<sockaddr_in&>(one.address);
  address.sin_family = AF_INET;
  inet_pton(AF_INET, text, &address.sin_addr);
  return one;
}

SocketInterface ipv6(const std::string& name, const char* text, std::uint32_t scope = 0) {
  SocketInterface one{.name = name};
  auto& address = reinterpret_cast<sockaddr_in6&>(one.address);
  address.sin6_family = AF_INET6;
  address.sin6_scope_id = scope;
  inet_pton(AF_INET6, text, &address.sin6_addr);
  return one;
}

const std::vector<SocketInterface>& host() {
  static const std::vector<SocketInterface> interfaces = {
      ipv4("lo", "127.0.0.1"),    ipv4("docker0", "172.17.0.1"), ipv4("virbr0", "192.168.122.1"),
      ipv6("eth0", "fe80::2", 2), ipv6("eth0", "2001:db8::2"),   ipv4("eth0", "10.0.0.2"),
      ipv4("eth1", "10.1.0.2"),   ipv4("eth10", "10.10.0.2"),    ipv6("bond0", "fe80::7", 7),
      ipv6("lo", "::1"),
  };
  return interfaces;
}

std::string chosen(const std::vector<SocketInterface>& interfaces, std::string_view list, int family = AF_UNSPEC) {
  const auto found = choose_socket_interface(interfaces, list, family);
  return found ? to_string(*found) : "none";
}

TEST(SocketInterface, Prefix_SelectsFirstMatch) {
  EXPECT_EQ(chosen(host(), "eth1"), "eth1 10.1.0.2");
  EXPECT_EQ(chosen(host(), "eth10"), "eth10 10.10.0.2");
  EXPECT_EQ(chosen(host(), "wlan,eth"), "eth0 10.0.0.2");
  EXPECT_EQ(chosen(host(), "wlan"), "none");
}

TEST(SocketInterface, ExactName_SelectsOnlyThatInterface) {
  EXPECT_EQ(chosen(host(), "=eth1"), "eth1 10.1.0.2");
  EXPECT_EQ(chosen(host(), "=eth"), "none");
  EXPECT_EQ(chosen(host(), "=wlan0,eth10"), "eth10 10.10.0.2");
}

TEST(SocketInterface, ExclusionList_SelectsOtherInterface) {
  EXPECT_EQ(chosen(host(), "^lo,docker,virbr,eth0"), "eth1 10.1.0.2");
  EXPECT_EQ(chosen(host(), "^=lo,docker0,virbr0,eth0,eth1"), "eth10 10.10.0.2");
  EXPECT_EQ(chosen(host(), "^lo,docker,virbr,eth,bond"), "none");
}

TEST(SocketInterface, WithoutList_LoopbackAndBridgesComeLast) {
  EXPECT_EQ(chosen(host(), ""), "eth0 10.0.0.2");
  EXPECT_EQ(chosen({ipv4("lo", "127.0.0.1"), ipv4("docker0", "172.17.0.1")}, ""), "docker0 172.17.0.1");
  EXPECT_EQ(chosen({ipv4("lo", "127.0.0.1")}, ""), "lo 127.0.0.1");
  EXPECT_EQ(chosen({ipv4("eth0", "10.0.0.1"), ipv4("ib0", "10.9.0.1")}, ""), "ib0 10.9.0.1");
  EXPECT_EQ(chosen({}, ""), "none");
}

std::string all(std::string_view list, int family = AF_UNSPEC) {
  std::string names;
  for (const SocketInterface& one : all_socket_interfaces(host(), list, family)) {
    names += (names.empty() ? "" : ", ") + to_string(one);
  }
  return names;
}

TEST(SocketInterface, All_OneAddressOfEachSelectedInterface) {
  EXPECT_EQ(all(""), "eth0 10.0.0.2, eth1 10.1.0.2, eth10 10.10.0.2");  // bond0 has a link-local address only
  EXPECT_EQ(all("eth1"), "eth1 10.1.0.2, eth10 10.10.0.2");
  EXPECT_EQ(all("=eth1"), "eth1 10.1.0.2");
  EXPECT_EQ(all("=eth1,eth0,lo"), "lo 127.0.0.1, eth0 10.0.0.2, eth1 10.1.0.2")
      << "lo comes first in the kernel's order";
  EXPECT_EQ(all("lo,eth0", AF_INET6), "eth0 2001:db8::2, lo ::1");
  EXPECT_EQ(all("lo"), "lo 127.0.0.1");
  EXPECT_EQ(all("wlan"), "");
}

void set_netmask(SocketInterface& one, const char* text) {
  const bool v4 = one.address.ss_family == AF_INET;
  void* const mask = v4 ? static_cast<void*>(&reinterpret_cast<sockaddr_in&>(one.netmask).sin_addr)
                        : &reinterpret_cast<sockaddr_in6&>(one.netmask).sin6_addr;
  inet_pton(one.address.ss_family, text, mask);
}

TEST(SocketInterface, AddressInSubnet_IsFoundByNetmask) {
  std::vector<SocketInterface> own = {ipv4("eth0", "10.0.0.2"), ipv4("eth1", "10.1.0.2"), ipv6("eth2", "2001:db8::2"),
                                      ipv4("tun0", "10.2.0.2")};
  set_netmask(own[0], "255.255.0.0");
  set_netmask(own[1], "255.255.255.0");
  set_netmask(own[2], "ffff:ffff::");
  const auto found = [&](const SocketInterface& remote, const SocketInterface& except) {
    const auto address = address_in_subnet_of(remote.address, own, except.address);
    return address ? host_to_string(*address) : "none";
  };
  const SocketInterface none;
  EXPECT_EQ(found(ipv4("", "10.0.7.9"), none), "10.0.0.2");
  EXPECT_EQ(found(ipv4("", "10.1.0.9"), none), "10.1.0.2");
  EXPECT_EQ(found(ipv4("", "10.1.1.9"), none), "none");
  EXPECT_EQ(found(ipv4("", "10.1.0.9"), own[1]), "none");
  EXPECT_EQ(found(ipv6("", "2001:db8:7::9"), none), "2001:db8::2");
  EXPECT_EQ(found(ipv6("", "2001:db9::9"), none), "none");
  EXPECT_EQ(found(ipv4("", "10.2.0.2"), none), "none") << "without a netmask";
}

TEST(SocketInterface, AddressFamily_SelectsAmongAddresses) {
  EXPECT_EQ(chosen(host(), "eth0", AF_INET6), "eth0 2001:db8::2");
  EXPECT_EQ(chosen(host(), "eth0", AF_INET), "eth0 10.0.0.2");
  EXPECT_EQ(chosen(host(), "eth1", AF_INET6), "none");
}

TEST(SocketInterface, LinkLocalAddress_KeepsScope) {
  const auto found = choose_socket_interface(host(), "bond0", AF_UNSPEC);
  ASSERT_TRUE(found);
  EXPECT_EQ(to_string(*found), "bond0 fe80::7%7");
  EXPECT_EQ(reinterpret_cast<const sockaddr_in6&>(found->address).sin6_scope_id, 7U);
}

TEST(SocketInterface, LoopbackOfThisHost_IsFound) {
  Config config;
  config.socket_ifname = {"=lo", "VERBATIM_SOCKET_IFNAME"};
  config.socket_family = AF_INET;
  const Result<SocketInterface> found = choose_socket_interface(config);
  ASSERT_TRUE(found);
  EXPECT_EQ(to_string(*found), "lo 127.0.0.1");
}

TEST(SocketInterface, ListWithoutMatch_IsRejectedWithVariableName) {
  const LogCapture log;
  Config config;
  config.socket_ifname = {"=nosuch0", "NCCL_SOCKET_IFNAME"};
  const Result<SocketInterface> found = choose_socket_interface(config);
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().kind, ErrorKind::kUsage);
  EXPECT_NE(log.only_warning().find("under NCCL_SOCKET_IFNAME==nosuch0; running interfaces: "), std::string::npos)
      << log.only_warning();
}

}  // namespace
}  // namespace verbatim
