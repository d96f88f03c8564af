#include "wire/completion.h"

#include <gtest/gtest.h>

#include <set>

namespace verbatim::wire {
namespace {

TEST(Immediate, EveryFieldSurvives) {
  for (const std::uint32_t entry : {0U, 1U, 255U}) {
    for (const SizeSource sizes :
         {SizeSource::kByteCount, SizeSource::kRecord, SizeSource::kPosted, SizeSource::kElsewhere}) {
      for (const std::uint32_t parts : {1U, 2U, 127U, 128U}) {
        for (const std::uint32_t pass : {0U, 1U, kPassMask}) {
          const Immediate decoded = decode_immediate(encode_immediate({entry, sizes, parts, pass}));
          EXPECT_EQ(decoded.entry, entry);
          EXPECT_EQ(decoded.sizes, sizes);
          EXPECT_EQ(decoded.parts, parts);
          EXPECT_EQ(decoded.pass, pass);
        }
      }
    }
  }
}

TEST(Immediate, AStrayOfThePassBeforeIsTold) {
  EXPECT_EQ(ring_pass(0), ring_pass(255));
  EXPECT_NE(ring_pass(255), ring_pass(256));
  EXPECT_NE(ring_pass(0xffffffff), ring_pass(0));  // also where the member numbers wrap
}

}  // namespace
}  // namespace verbatim::wire
