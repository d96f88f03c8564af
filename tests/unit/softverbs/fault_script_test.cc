// What the fault grammar takes, and that what it does not take is named.
#include "softverbs/fault_script.h"

#include <gtest/gtest.h>

namespace verbatim::softverbs {
namespace {

FaultScript accepted(std::string_view text) {
  std::variant<FaultScript, std::string> parsed = parse_faults(text);
  if (const auto* refused = std::get_if<std::string>(&parsed)) ADD_FAILURE() << *refused;
  return parsed.index() == 0 ? std::get<FaultScript>(parsed) : FaultScript{};
}

FaultClause clause(std::string_view text) {
  const FaultScript script = accepted(text);
  EXPECT_EQ(script.size(), 1U) << text;
  return script.empty() ? FaultClause{} : script.front();
}

// Refused in one line that names `culprit` and says `expected`.
void expect_refused(std::string_view text, std::string_view culprit, std::string_view expected) {
  SCOPED_TRACE(text);
  const std::variant<FaultScript, std::string> parsed = parse_faults(text);
  ASSERT_EQ(parsed.index(), 1U);
  const std::string& line = std::get<std::string>(parsed);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  EXPECT_TRUE(line.starts_with("\"" + std::string(culprit) + "\": ")) << line;
  EXPECT_NE(line.find(expected), std::string::npos) << line;
}

TEST(FaultScript, ClausesCommentsAndBlanks) {
  EXPECT_TRUE(accepted("").empty());
  EXPECT_TRUE(accepted(" \n\t;; \n# nothing\n").empty());
  const FaultScript script = accepted("drop-ack nth=2 ;drop-request  op=send # why\n\n loss rate=0.5\r\n#drop-ack");
  ASSERT_EQ(script.size(), 3U);
  EXPECT_EQ(script[0].kind, FaultKind::kDropAck);
  EXPECT_EQ(script[0].text, "drop-ack nth=2");
  EXPECT_EQ(script[1].kind, FaultKind::kDropRequest);
  EXPECT_EQ(script[2].kind, FaultKind::kLoss);
}

TEST(FaultScript, ByDefaultTheFirstMessageOfAnyKindOnce) {
  const FaultClause plain = clause("drop-ack");
  EXPECT_EQ(plain.opcodes, ~0U);
  EXPECT_EQ(plain.qp_choice, QpChoice::kAny);
  EXPECT_EQ(plain.device, kAnyDevice);
  EXPECT_FALSE(plain.only_last);
  EXPECT_EQ(plain.nth, 1U);
  EXPECT_EQ(plain.count, 1U);
  EXPECT_EQ(plain.times, 1U);
  EXPECT_EQ(plain.rate, 0);
}

TEST(FaultScript, WhichMessages) {
  EXPECT_EQ(clause("drop-ack op=write_imm,fetch_add").opcodes,
            1U << IBV_WR_RDMA_WRITE_WITH_IMM | 1U << IBV_WR_ATOMIC_FETCH_AND_ADD);
  EXPECT_EQ(clause("drop-ack qp=each").qp_choice, QpChoice::kEach);
  EXPECT_EQ(clause("drop-ack qp=3").qp_choice, QpChoice::kOrdinal);
  EXPECT_EQ(clause("drop-ack qp=3").qp, 3U);
  EXPECT_EQ(clause("drop-ack qpn=0x1a2").qp_choice, QpChoice::kNumber);
  EXPECT_EQ(clause("drop-ack qpn=0x1a2").qp, 0x1a2U);
  EXPECT_EQ(clause("drop-ack device=1").device, 1U);
  EXPECT_TRUE(clause("drop-ack last").only_last);
  EXPECT_EQ(clause("drop-ack nth=7 count=all").nth, 7U);
  EXPECT_EQ(clause("drop-ack nth=7 count=all").count, kWithoutEnd);
  EXPECT_EQ(clause("drop-ack times=4").times, 4U);
}

TEST(FaultScript, ARateIsOfAllMessagesUnlessCounted) {
  EXPECT_EQ(clause("loss rate=0.25").rate, 0.25);
  EXPECT_EQ(clause("loss rate=0.25").count, kWithoutEnd);
  EXPECT_EQ(clause("loss rate=1 count=3").count, 3U);
  EXPECT_EQ(clause("loss count=3 rate=1").count, 3U);
}

TEST(FaultScript, Seed) {
  EXPECT_EQ(clause("seed=42").kind, FaultKind::kSeed);
  EXPECT_EQ(clause("seed=42").seed, 42U);
}

TEST(FaultScript, WhatIsMalformedIsNamed) {
  expect_refused("drop-ack; explode; loss rate=1", "explode", "drop-ack");
  expect_refused("drop-ack colour=red", "drop-ack colour=red", "not colour");
  expect_refused("drop-ack nth=0", "drop-ack nth=0", "nth takes a number from 1");
  expect_refused("drop-ack nth=", "drop-ack nth=", "nth takes");
  expect_refused("drop-ack nth", "drop-ack nth", "nth takes");
  expect_refused("drop-ack nth=2x", "drop-ack nth=2x", "nth takes");
  expect_refused("drop-ack nth=-1", "drop-ack nth=-1", "nth takes");
  expect_refused("drop-ack count=some", "drop-ack count=some", "or all");
  expect_refused("drop-ack op=", "drop-ack op=", "write_imm");
  expect_refused("drop-ack op=send,fly", "drop-ack op=send,fly", "write_imm");
  expect_refused("drop-ack qp=0", "drop-ack qp=0", "each");
  expect_refused("drop-ack last=1", "drop-ack last=1", "no value");
  expect_refused("loss", "loss", "rate");
  for (const char* rate : {"0", "1.5", "-0.5", "half", "nan", "0.5x"}) {
    const std::string text = std::string("loss rate=") + rate;
    expect_refused(text, text, "probability");
  }
  expect_refused("seed=one", "seed=one", "a number");
}

}  // namespace
}  // namespace verbatim::softverbs
