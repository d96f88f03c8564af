//: program verbatim_kv_test link=kv,gtest
//: test verbatim-kv protocol=gtest

// The parts of verbatim-kv that run without other ranks.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstdio>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../support/scratch_directory.h"
#include "ranks/statistics.h"
#include "verbatim-kv/cache.h"
#include "verbatim-kv/channel.h"
#include "verbatim-kv/inject.h"
#include "verbatim-kv/options.h"
#include "verbatim-kv/plugin_counters.h"
#include "verbatim-kv/report.h"
#include "verbatim-kv/request_batches.h"
#include "verbatim-kv/stats.h"

namespace verbatim::kv {
namespace {

Options parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), {"verbatim-kv", "--plugin", "p.so"});
  const auto parsed = parse_options(static_cast<int>(arguments.size()), arguments.data());
  if (const auto* const early_exit = std::get_if<cli::EarlyExit>(&parsed))
    throw std::invalid_argument(early_exit->text);
  return std::get<Options>(parsed);
}

TEST(KvOptions, DeepSeekPreset_HasSecondFamily) {
  EXPECT_EQ(2U, parse({}).geometries.size());
  EXPECT_EQ(1U, parse({"--preset", "llama-70b-tp1"}).geometries.size());
  EXPECT_EQ(2U, parse({"--preset", "llama-70b-tp1", "--lf", "indexer"}).geometries.size());
  EXPECT_EQ(1U, parse({"--lf", "none"}).geometries.size());
  EXPECT_EQ("lf", parse({"--lf-first"}).geometries.front().name);
}

TEST(KvOptions, PrefillAndDecode_AddUpToRanks) {
  const Options options = parse({"--prefill", "3", "--decode", "8", "--tp-ratio", "4"});
  EXPECT_EQ(11, options.job.procs);
  EXPECT_EQ(2, options.engines());
}

TEST(KvOptions, NcclMode_NeedsNoPlugin) {
  const char* const direct[] = {"verbatim-kv"};
  EXPECT_TRUE(std::holds_alternative<cli::EarlyExit>(parse_options(1, direct)));
  const char* const nccl[] = {"verbatim-kv", "--mode", "nccl"};
  EXPECT_TRUE(std::holds_alternative<Options>(parse_options(3, nccl)));
  EXPECT_THROW(parse({"--mode", "nccl", "--allocations", "layer"}), std::invalid_argument);
  EXPECT_THROW(parse({"--mode", "nccl", "--inject", "kill"}), std::invalid_argument);
}

TEST(FaultOption, InvalidListWithoutSide_IsTwoFaults) {
  const auto both = parse_fault("unregistered,request=7");
  ASSERT_EQ(2U, both.size());
  EXPECT_FALSE(both[0].in_flight);
  EXPECT_TRUE(both[1].in_flight);
  EXPECT_EQ(7U, *both[0].request);
  EXPECT_EQ(8U, *both[1].request);
  ASSERT_EQ(1U, parse_fault("unregistered,at=peer").size());
  EXPECT_TRUE(parse_fault("unregistered,at=peer")[0].in_flight);
  EXPECT_EQ(1U, parse_fault("kill,family=lf,times=2").size());
}

TEST(FaultOption, MalformedFault_IsRejected) {
  for (const char* const text : {"", "unknown", "kill,", "kill,family=xy", "kill,times=", "kill,times=-1",
                                 "kill,at=peer", "kill,request=12345678901"}) {
    EXPECT_THROW(parse_fault(text), std::invalid_argument) << text;
  }
}

TEST(FaultOption, SeveralFaults_GetDistinctSuitableRequests) {
  std::vector<Request> requests = generate_requests({.count = 20, .median_tokens = 64, .max_tokens = 64});
  for (std::uint32_t id : {3U, 9U, 15U}) requests[id].tokens = 200;
  std::vector<Fault> faults = parse_fault("unregistered");
  faults.push_back({.kind = FaultKind::kKill});
  assign_requests(faults, requests, 64, 64);
  std::set<std::uint32_t> ids;
  for (const Fault& fault : faults) EXPECT_TRUE(ids.insert(*fault.request).second);
  EXPECT_LT(64U, requests[*faults[0].request].tokens) << "an invalid list needs a request of at least two blocks";
  EXPECT_LT(64U, requests[*faults[1].request].tokens);
  std::vector<Fault> many(3, {.kind = FaultKind::kInvalidList, .code = RejectionCode::kUnregistered});
  many.resize(4, many[0]);
  EXPECT_THROW(assign_requests(many, requests, 64, 64), std::invalid_argument);
}

TEST(FaultOption, EveryCorruptedList_IsRejectedWithItsCode) {
  Family family{.geometry = find_model("deepseek-mla-bf16").kv, .num_blocks = 10, .block_len = 73'728};
  IntervalSet memory;
  for (std::uint64_t layer = 0; layer < 61; ++layer) family.bases.push_back(0x1000 + layer * family.layer_bytes());
  memory.add(family.bases[0], family.bytes());
  for (int code = 1; code <= kRejectionCodes; ++code) {
    BlockList list = make_list(family, {4, 2, 7});
    corrupt_block(list, static_cast<RejectionCode>(code), family.num_blocks);
    auto rejection = validate_list({family, memory}, list, 3);
    if (!rejection) rejection = BlockReservations(10).reserve(1, list.blocks);
    ASSERT_TRUE(rejection) << code;
    EXPECT_STREQ(rejection_name(static_cast<RejectionCode>(code)), rejection_name(rejection->code)) << rejection->text;
  }
}

TEST(CacheMemory, EveryAllocationKind_HasValidLayout) {
  const auto allocate = [](Allocations how) {
    std::vector<Family> families{
        {.geometry = scaled(find_model("deepseek-mla-bf16").kv, 20), .num_blocks = 3, .block_len = 73'728},
        {.geometry = scaled(indexer_geometry(), 30), .num_blocks = 5, .block_len = 8'448}};
    const auto host_memory = memory::make_host_memory();
    const CacheMemory memory(*host_memory, families, how);
    std::size_t layers = 0;
    for (const Family& family : families) {
      EXPECT_EQ(family.geometry.layers, family.bases.size());
      EXPECT_FALSE(validate_family({family, memory.intervals()}));
      layers += family.bases.size();
    }
    EXPECT_EQ(memory.allocations(), memory.intervals().all().size());
    EXPECT_EQ(0U, memory.damage());
    return std::pair(memory.allocations(), layers);
  };
  EXPECT_EQ(1U, allocate(Allocations::kSlab).first);
  EXPECT_EQ(2U, allocate(Allocations::kFamily).first);
  const auto [allocations, layers] = allocate(Allocations::kLayer);
  EXPECT_EQ(layers, allocations);
}

class BlockContentsTest : public testing::Test {
 protected:
  std::vector<Family> families_{
      {.geometry = shared_by(scaled(find_model("llama-70b-tp4").kv, 40), 2), .num_blocks = 6, .block_len = 4'096}};
  const std::unique_ptr<memory::Memory> host_memory_ = memory::make_host_memory();
  CacheMemory memory_{*host_memory_, families_, Allocations::kSlab};
  const Family& family_ = families_[0];
  const Contents contents_{*host_memory_, family_};
  const std::vector<std::uint32_t> all_{0, 1, 2, 3, 4, 5};
  const std::vector<std::uint32_t> blocks_{4, 1};
  std::string where_;

  std::byte& byte(std::uint32_t layer, std::uint32_t entry, std::uint32_t block, std::size_t offset) {
    return reinterpret_cast<std::byte*>(family_.address(layer, entry, block))[offset];
  }
};

TEST_F(BlockContentsTest, OneFlippedBit_IsFound) {
  const BlockShare share{7, 2, 4'096, blocks_};
  contents_.fill(share);
  EXPECT_EQ(0U, contents_.check(share, where_));
  byte(1, 1, 4, 4'095) ^= std::byte{1};
  EXPECT_EQ(1U, contents_.check(share, where_));
  EXPECT_NE(std::string::npos,
            where_.find("request 7: family kv, layer 1, entry 1, block 4: 1 wrong bytes, first at byte 4095"))
      << where_;
}

TEST_F(BlockContentsTest, OtherRequestPositionOrPart_Differs) {
  contents_.fill({7, 2, 0, blocks_});
  const std::size_t bytes = blocks_.size() * family_.geometry.layers * family_.geometry.entries * 4'096;
  const auto wrong = [&](const BlockShare& share) { return contents_.check(share, where_); };
  const std::vector<std::uint32_t> swapped{1, 4};
  EXPECT_EQ(0U, wrong({7, 2, 0, blocks_}));
  EXPECT_LT(bytes * 9 / 10, wrong({8, 2, 0, blocks_}));
  EXPECT_LT(bytes * 9 / 10, wrong({7, 3, 0, blocks_}));
  EXPECT_LT(bytes * 9 / 10, wrong({7, 2, 4'096, blocks_}));
  EXPECT_LT(bytes * 9 / 10, wrong({7, 2, 0, swapped}));
  contents_.poison({7, 2, 0, blocks_});
  EXPECT_EQ(bytes, wrong({7, 2, 0, blocks_})) << "poison changes every byte";
}

TEST_F(BlockContentsTest, OneFlippedCanaryBit_IsFound) {
  contents_.set_canaries(all_);
  EXPECT_EQ(0U, contents_.check_canaries(all_, where_));
  byte(0, 0, 5, 0) ^= std::byte{128};
  EXPECT_EQ(1U, contents_.check_canaries(all_, where_));
  EXPECT_NE(std::string::npos, where_.find("block 5")) << where_;
}

TEST(Channel, ListAndFamilyDescription_RoundTrip) {
  Family family{.geometry = shared_by(find_model("llama-70b-tp1").kv, 4), .num_blocks = 9, .block_len = 8'192};
  family.bases.assign(80, 0x1234);
  IntervalSet memory;
  memory.add(0x1000, 0x2000);
  memory.add(0x9000, 0x100);
  Writer writer;
  put_family(writer, family, memory);
  writer.put_list(make_list(family, {1, 2}));
  Reader reader(writer.bytes());
  const FamilyDescription description = get_family(reader);
  EXPECT_EQ(family.geometry, description.family.geometry);
  EXPECT_EQ(family.num_blocks, description.family.num_blocks);
  EXPECT_EQ(family.bases, description.family.bases);
  EXPECT_EQ(memory.all(), description.memory.all());
  const BlockList list = reader.get_list();
  EXPECT_EQ((std::vector<std::uint32_t>{1, 2}), list.blocks);
  EXPECT_EQ(8'192U, list.block_len);
  EXPECT_TRUE(reader.rest().empty());
}

TEST(Channel, TruncatedBytes_AreRejected) {
  Writer writer;
  writer.put_list(make_list({.geometry = find_model("llama-70b-tp1").kv}, {1, 2}));
  const std::string& whole = writer.bytes();
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    Reader reader(std::string_view(whole).substr(0, bytes));
    EXPECT_THROW(reader.get_list(), ranks::Failure) << bytes;
  }
  const std::string huge(8, '\xff');  // a length beyond any message
  EXPECT_THROW(Reader(huge).get_text(), ranks::Failure);
}

TEST(Channel, PeerClosed_FailsAfterLastMessage) {
  int ends[2];
  ASSERT_EQ(0, ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends));
  Channel channel{UniqueFd(ends[0])};
  {
    const Channel other{UniqueFd(ends[1])};
    other.send(MessageKind::kDone, "abc");
  }
  channel.receive();
  const auto message = channel.next();
  ASSERT_TRUE(message);
  EXPECT_EQ(MessageKind::kDone, message->kind);
  EXPECT_EQ("abc", message->payload);
  EXPECT_THROW(channel.next(), ranks::Failure);
}

TEST(FamilyStats, JsonRoundTrip_PreservesSums) {
  FamilyStats one;
  one.sent_messages = 3;
  one.elapsed_ns = 10;
  one.check_ns = 4;
  one.groups = {{8, 2}};
  one.fallbacks[static_cast<int>(FallbackStage::kStaged)] = 4;
  one.latencies_ns = {5};
  FamilyStats two = one;
  two.elapsed_ns = 7;
  two.check_ns = 6;
  two.groups = {{8, 1}, {1, 1}};
  two.rejected.push_back({9, "decode", RejectionCode::kUnregistered, "why"});
  two.lost.push_back({4, 2, {7, 8}});
  FamilyStats sum = from_json(to_json(one));
  sum.add(from_json(to_json(two)));
  EXPECT_EQ(6U, sum.sent_messages);
  EXPECT_EQ(10U, sum.elapsed_ns);
  EXPECT_EQ(6U, sum.check_ns);
  EXPECT_EQ(8U, sum.fallbacks[static_cast<int>(FallbackStage::kStaged)]);
  EXPECT_EQ((std::map<std::uint64_t, std::uint64_t>{{1, 1}, {8, 3}}), sum.groups);
  ASSERT_EQ(1U, sum.rejected.size());
  EXPECT_EQ(RejectionCode::kUnregistered, sum.rejected[0].code);
  ASSERT_EQ(1U, sum.lost.size());
  EXPECT_EQ((std::vector<std::uint32_t>{7, 8}), sum.lost[0].blocks);
  EXPECT_EQ(2U, sum.latencies_ns.size());
}

TEST(FamilyStats, Percentiles_AreNearestRank) {
  std::vector<std::uint64_t> values;
  for (std::uint64_t value = 1; value <= 200; ++value) values.push_back(value);
  EXPECT_EQ(100U, ranks::percentile(values, 0.5));
  EXPECT_EQ(198U, ranks::percentile(values, 0.99));
  EXPECT_EQ(200U, ranks::percentile(values, 1));
  EXPECT_EQ(0U, ranks::percentile(std::vector<std::uint64_t>(), 0.5));
}

std::string printed(const Report& report) {
  std::vector<char> text(1U << 16);
  std::FILE* const file = fmemopen(text.data(), text.size(), "w");
  print(file, report);
  std::fclose(file);
  return text.data();
}

// A column that has no explanation says nothing to a reader of the table.
TEST(KvReport, Legend_ExplainsEachColumn) {
  const Options options = parse({});
  Report report{.options = options};
  report.families.resize(1);
  const std::string text = printed(report);
  const std::size_t titles = text.find("\n# family");
  ASSERT_NE(std::string::npos, titles) << text;
  std::istringstream columns(text.substr(titles + 2, text.find('\n', titles + 1) - titles - 2));
  for (std::string column; columns >> column;) {
    const std::string name = column.substr(0, column.find('('));
    if (name == "family") continue;
    EXPECT_LT(text.find(name), titles) << name;
  }
}

TEST(KvReport, ChecksThatTakeMostOfTheTime_AreNamed) {
  const Options options = parse({});
  Report report{.options = options};
  report.families.resize(1);
  report.families[0].geometry.name = "kv";
  report.families[0].stats.elapsed_ns = 1000;
  report.families[0].stats.check_ns = 499;
  EXPECT_EQ(std::string::npos, printed(report).find("--no-check"));
  report.families[0].stats.check_ns = 930;
  EXPECT_NE(std::string::npos, printed(report).find("# kv: filling and comparing bytes took 93 % of the time"));
}

TEST(KvReport, SeveralOutcomes_ExitStatusIsTheWorst) {
  const Options options = parse({});
  Report report{.options = options};
  report.families.resize(2);
  EXPECT_EQ(ExitStatus::kOk, report.status());
  report.families[1].stats.rejected.push_back({1, "decode", RejectionCode::kUnregistered, ""});
  EXPECT_EQ(ExitStatus::kRejected, report.status());
  report.families[0].stats.lost.push_back({1, 0, {1}});
  EXPECT_EQ(ExitStatus::kRecompute, report.status());
  report.ranks.push_back({.damage = 1});
  EXPECT_EQ(ExitStatus::kWrong, report.status());
}

TEST(PluginCounters, BothDirections_AreCompared) {
  const std::string text = R"({"totals": {"send": {"bytes": 10}, "recv": {"bytes": 20}}})";
  EXPECT_EQ("absent", compare_plugin_counters(std::nullopt, 1, 2));
  EXPECT_EQ("equal", compare_plugin_counters(text, 10, 20));
  EXPECT_EQ("send: the plugin counted 10 bytes, this rank 11", compare_plugin_counters(text, 11, 20));
  EXPECT_EQ("recv: the plugin counted 20 bytes, this rank 0", compare_plugin_counters(text, 10, 0));
  EXPECT_NE("equal", compare_plugin_counters("{", 10, 20));
}

TEST(PluginCounters, PutBytes_AreCompared) {
  const std::string text = R"({"totals": {"rma": {"puts": 3, "put_bytes": 10}}})";
  EXPECT_EQ("absent", compare_put_counters(std::nullopt, 1));
  EXPECT_EQ("equal", compare_put_counters(text, 10));
  EXPECT_EQ("put: the plugin counted 10 bytes, this rank 11", compare_put_counters(text, 11));
  EXPECT_NE("equal", compare_put_counters("{}", 10));
}

TEST(RequestBatches, AllRequests_AreInOrderAndWithinCapacity) {
  const Options options =
      parse({"--requests", "100", "--prefill", "2", "--decode", "4", "--tp-ratio", "2", "--concurrency", "3"});
  const std::vector<Request> requests = make_requests(options);
  const Layout layout = lay_out(options, requests, true);
  std::uint32_t next = 0;
  for (const RequestBatch& batch : make_batches(options, requests, layout)) {
    EXPECT_GE(6U, batch.size());
    std::size_t blocks[2] = {};
    for (const Request* const request : batch) {
      EXPECT_EQ(next++, request->id);
      blocks[request->prefill] += request->blocks(64);
    }
    EXPECT_GE(layout.reports[0].blocks[0], std::max(blocks[0], blocks[1]));
  }
  EXPECT_EQ(100U, next);
}

}  // namespace
}  // namespace verbatim::kv
