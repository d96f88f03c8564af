// What a communicator of RMA has failed with: the first failure only, and its text for the other ranks.
#include "rma/failures.h"

#include <gtest/gtest.h>

#include <atomic>
#include <new>
#include <string>
#include <thread>

namespace verbatim::rma {
namespace {

// An application may close the communicator while another thread of it still describes the failure.
TEST(RmaFailures, ThreadThatSeesTheFailure_WaitsForItsText) {
  std::string logged;
  Failures failures([&](const std::string& text) { logged = text; });
  std::atomic<bool> asks = false;
  std::string seen;
  std::thread closes([&] {
    while (!failures.has_failed()) std::this_thread::yield();
    asks = true;
    seen = failures.described();
  });
  failures.fail(ErrorKind::kRemote, Failures::Origin::kHere, [&] {
    while (!asks) std::this_thread::yield();
    EXPECT_EQ(failures.text(), "");
    return Failure{"rank 0: rank 2 has ended", {"it was killed", "look at rank 2 first"}};
  });
  closes.join();
  EXPECT_EQ(failures.kind(), ErrorKind::kRemote);
  EXPECT_EQ(seen, "rank 0: rank 2 has ended: it was killed");
  EXPECT_EQ(logged, seen);
}

TEST(RmaFailures, OnlyTheFirstCounts) {
  Failures failures([](const std::string&) { FAIL() << "another rank has found it out"; });
  failures.fail(ErrorKind::kRemote, Failures::Origin::kOtherRank, [] { return Failure{"the first"}; });
  failures.fail(ErrorKind::kSystem, Failures::Origin::kHere, [] { return Failure{"the second"}; });
  EXPECT_EQ(failures.kind(), ErrorKind::kRemote);
  EXPECT_EQ(failures.described(), "the first");
}

TEST(RmaFailures, WithoutMemory_HasAText) {
  Failures failures([](const std::string&) {});
  failures.fail(ErrorKind::kSystem, Failures::Origin::kHere, []() -> Failure { throw std::bad_alloc(); });
  EXPECT_TRUE(failures.has_failed());
  EXPECT_EQ(failures.described(), "out of memory");
}

TEST(RmaFailures, WithoutMemoryToTellOthers_KeepsItsText) {
  Failures failures([](const std::string&) { throw std::bad_alloc(); });
  failures.fail(ErrorKind::kSystem, Failures::Origin::kHere, [] { return Failure{"no memory left"}; });
  EXPECT_EQ(failures.described(), "no memory left");
}

}  // namespace
}  // namespace verbatim::rma
