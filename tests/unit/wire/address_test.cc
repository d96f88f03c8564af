#include "wire/address.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include <cstring>

namespace verbatim::wire {
namespace {

TEST(Address, BothFamilies_RoundTrip) {
  sockaddr_storage v4{};
  reinterpret_cast<sockaddr_in&>(v4).sin_family = AF_INET;
  reinterpret_cast<sockaddr_in&>(v4).sin_port = htons(4711);
  inet_pton(AF_INET, "10.1.2.3", &reinterpret_cast<sockaddr_in&>(v4).sin_addr);
  const Address mapped{{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 2, 3}, 4711};
  EXPECT_EQ(to_address(v4), mapped);

  sockaddr_storage v6{};
  reinterpret_cast<sockaddr_in6&>(v6).sin6_family = AF_INET6;
  reinterpret_cast<sockaddr_in6&>(v6).sin6_port = htons(4711);
  inet_pton(AF_INET6, "2001:db8::1", &reinterpret_cast<sockaddr_in6&>(v6).sin6_addr);
  for (const sockaddr_storage& address : {v4, v6}) {
    const sockaddr_storage again = to_sockaddr(to_address(address));
    EXPECT_EQ(std::memcmp(&again, &address, sizeof again), 0);
  }
}

}  // namespace
}  // namespace verbatim::wire
