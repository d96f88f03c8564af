//: in softverbs_parts_test

// The parser of fault scripts: accepted clauses and their values, and the error lines for malformed clauses.
#include "softverbs/host/fault_script.h"

#include <gtest/gtest.h>

#include <cerrno>

namespace verbatim::softverbs {
namespace {

FaultScript accepted(std::string_view text) {
  std::variant<FaultScript, std::string> parsed = parse_faults(text);
  if (const auto* error = std::get_if<std::string>(&parsed)) ADD_FAILURE() << *error;
  return parsed.index() == 0 ? std::get<FaultScript>(parsed) : FaultScript{};
}

FaultClause clause(std::string_view text) {
  const FaultScript script = accepted(text);
  EXPECT_EQ(script.size(), 1U) << text;
  return script.empty() ? FaultClause{} : script.front();
}

// The error is one line that starts with `bad_clause` and contains `expected`.
void expect_refused(std::string_view text, std::string_view bad_clause, std::string_view expected) {
  SCOPED_TRACE(text);
  const std::variant<FaultScript, std::string> parsed = parse_faults(text);
  ASSERT_EQ(parsed.index(), 1U);
  const std::string& line = std::get<std::string>(parsed);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  EXPECT_TRUE(line.starts_with("\"" + std::string(bad_clause) + "\": ")) << line;
  EXPECT_NE(line.find(expected), std::string::npos) << line;
}

TEST(FaultScript, CommentsAndBlanks_AreSkipped) {
  EXPECT_TRUE(accepted("").empty());
  EXPECT_TRUE(accepted(" \n\t;; \n# nothing\n").empty());
  const FaultScript script = accepted("drop-ack nth=2 ;drop-request  op=send # why\n\n loss rate=0.5\r\n#drop-ack");
  ASSERT_EQ(script.size(), 3U);
  EXPECT_EQ(script[0].kind, FaultKind::kDropAck);
  EXPECT_EQ(script[1].kind, FaultKind::kDropRequest);
  EXPECT_EQ(script[2].kind, FaultKind::kLoss);
}

TEST(FaultScript, ClauseWithoutKeys_SelectsFirstMessageOnce) {
  const FaultClause plain = clause("drop-ack");
  EXPECT_EQ(plain.opcodes, ~kReceiveBit);
  EXPECT_EQ(plain.qp_choice, QpChoice::kAny);
  EXPECT_EQ(plain.device, kAnyDevice);
  EXPECT_FALSE(plain.only_last);
  EXPECT_EQ(plain.nth, 1U);
  EXPECT_EQ(plain.count, 1U);
  EXPECT_EQ(plain.times, 1U);
  EXPECT_EQ(plain.rate, 0);
}

TEST(FaultScript, SelectionKeys_AreParsed) {
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

TEST(FaultScript, RateWithoutCount_AppliesToAllMessages) {
  EXPECT_EQ(clause("loss rate=0.25").rate, 0.25);
  EXPECT_EQ(clause("loss rate=0.25").count, kWithoutEnd);
  EXPECT_EQ(clause("loss rate=1 count=3").count, 3U);
  EXPECT_EQ(clause("loss count=3 rate=1").count, 3U);
}

TEST(FaultScript, MessageFaults_AreParsed) {
  EXPECT_EQ(clause("delay by=30ms jitter=5us").delay_ns, 30'000'000U);
  EXPECT_EQ(clause("delay by=30ms jitter=5us").jitter_ns, 5000U);
  EXPECT_EQ(clause("delay by=2s").count, kWithoutEnd);  // delay applies to all messages by default
  EXPECT_EQ(clause("rnr times=all").times, kWithoutEnd);
  EXPECT_EQ(clause("complete status=REM_ACCESS_ERR vendor=0x51").status, IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(clause("complete status=REM_ACCESS_ERR vendor=0x51").vendor_error, 0x51U);
  EXPECT_EQ(clause("complete status=LOC_LEN_ERR op=recv").opcodes, kReceiveBit);
  EXPECT_EQ(clause("complete status=LOC_LEN_ERR").opcodes & kReceiveBit, 0U);
  EXPECT_EQ(clause("drop-completion op=recv").opcodes, kReceiveBit);
  EXPECT_EQ(clause("drop-completion nth=3").opcodes & kReceiveBit, 0U);
}

TEST(FaultScript, PortFaults_AreParsed) {
  const FaultClause down = clause("link-down device=1 at=2s for=500ms");
  EXPECT_EQ(down.device, 1U);
  EXPECT_EQ(down.at_ns, 2'000'000'000U);
  EXPECT_EQ(down.for_ns, 500'000'000U);
  EXPECT_EQ(clause("link-down").for_ns, kWithoutEnd);
  EXPECT_EQ(clause("device-fatal after=10 op=send").after, 10U);
  EXPECT_EQ(clause("unreachable device=0 peer=1").peer_device, 1U);
  EXPECT_EQ(clause("unreachable pids=17,18").pids, (std::array<std::uint32_t, 2>{17, 18}));
  const FaultClause gid = clause("gid device=0 index=4 address=10.0.0.9 type=rocev1");
  EXPECT_EQ(gid.gid_index, 4U);
  EXPECT_TRUE(gid.gid_valid);
  EXPECT_EQ(gid.gid.raw[10], 0xff);
  EXPECT_EQ(gid.gid.raw[15], 9);
  EXPECT_EQ(gid.gid_type, std::uint32_t{IBV_GID_TYPE_ROCE_V1});
  EXPECT_EQ(clause("gid address=fe80::7").gid.raw[15], 7);
  EXPECT_FALSE(clause("gid address=none").gid_valid);
}

TEST(FaultScript, CallFaults_AreParsed) {
  EXPECT_EQ(clause("fail verb=modify_qp errno=EINVAL").calls, call_bit(Verb::kModifyQp));
  EXPECT_EQ(clause("fail verb=modify_qp errno=EINVAL").error, EINVAL);
  EXPECT_EQ(clause("fail verb=ibv_reg_mr errno=12").error, 12);
  EXPECT_EQ(clause("fail verb=ibv_reg_mr").calls,
            call_bit(Verb::kRegMr) | call_bit(Verb::kRegMrIova) | call_bit(Verb::kRegMrIova2));
  EXPECT_EQ(clause("fail verb=create_cq").calls, call_bit(Verb::kCreateCq) | call_bit(Verb::kCreateCqEx));
  EXPECT_EQ(clause("fail verb=post_send").calls, kPostSendCall);
  EXPECT_EQ(clause("slow by=400us").calls, kControlCalls);
  EXPECT_EQ(clause("slow by=400us").calls & (kPostSendCall | kPostRecvCall | kPostSrqRecvCall | kPollCqCall), 0U);
  EXPECT_EQ(clause("slow by=400us verb=poll_cq").calls, kPollCqCall);
  EXPECT_EQ(clause("slow by=400us").delay_ns, 400'000U);
  EXPECT_EQ(clause("slow by=400us").count, kWithoutEnd);
  EXPECT_EQ(clause("registration max-bytes=64K").max_bytes, 65536U);
  EXPECT_EQ(clause("registration max-locked=2G").max_locked, std::uint64_t{2} << 30);
  EXPECT_EQ(clause("registration max-regions=0").max_regions, 0U);
}

TEST(FaultScript, Seed_IsParsed) {
  EXPECT_EQ(clause("seed=42").kind, FaultKind::kSeed);
  EXPECT_EQ(clause("seed=42").seed, 42U);
}

TEST(FaultScript, MalformedClause_IsNamedInOneLine) {
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
  expect_refused("delay", "delay", "by= is needed");
  expect_refused("delay by=30", "delay by=30", "500ms");
  expect_refused("delay by=ms", "delay by=ms", "500ms");
  expect_refused("delay by=99999999999999s", "delay by=99999999999999s", "500ms");
  expect_refused("complete", "complete", "status= is needed");
  expect_refused("complete status=SUCCESS", "complete status=SUCCESS", "an error");
  expect_refused("complete status=GENERAL_ERR op=recv,send", "complete status=GENERAL_ERR op=recv,send",
                 "recv, or any");
  expect_refused("drop-ack op=recv", "drop-ack op=recv", "write_imm");
  expect_refused("drop-completion times=2", "drop-completion times=2", "not times");
  expect_refused("link-down nth=2", "link-down nth=2", "link-down takes");
  expect_refused("unreachable pids=1", "unreachable pids=1", "two process numbers");
  expect_refused("gid address=10.0.0", "gid address=10.0.0", "IPv4");
  expect_refused("gid address=none type=v3", "gid address=none type=v3", "rocev2");
  expect_refused("fail", "fail", "verb= is needed");
  expect_refused("slow verb=create_qp", "slow verb=create_qp", "by= is needed");
  expect_refused("fail verb=", "fail verb=", "modify_qp");
  expect_refused("fail verb=reg", "fail verb=reg", "modify_qp");
  expect_refused("fail verb=ack_cq_events", "fail verb=ack_cq_events", "modify_qp");  // this verb returns no value
  expect_refused("fail verb=reg_mr errno=EWHAT", "fail verb=reg_mr errno=EWHAT", "ENOMEM");
  expect_refused("registration max-bytes=1T", "registration max-bytes=1T", "K, M or G");
  expect_refused("clear all", "clear all", "clear takes nothing");
}

}  // namespace
}  // namespace verbatim::softverbs
