//: program verbatim_perf_test link=perf,gtest
//: test verbatim-perf protocol=gtest

// Command-line options of verbatim-perf: values, defaults, sizes, and the exit status for invalid options.
#include "verbatim-perf/options.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace verbatim::perf {
namespace {

std::variant<Options, EarlyExit> parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "verbatim-perf");
  return parse_options(static_cast<int>(arguments.size()), arguments.data());
}

Options parsed(const std::vector<const char*>& arguments) {
  const auto result = parse(arguments);
  const auto* const early_exit = std::get_if<EarlyExit>(&result);
  EXPECT_EQ(nullptr, early_exit) << early_exit->text;
  return early_exit == nullptr ? std::get<Options>(result) : Options{};
}

ExitStatus status_of_invalid(const std::vector<const char*>& arguments) {
  const auto result = parse(arguments);
  const auto* const early_exit = std::get_if<EarlyExit>(&result);
  if (early_exit == nullptr) return ExitStatus::kOk;
  EXPECT_FALSE(early_exit->text.empty());
  return early_exit->status;
}

std::string text_of_invalid(const std::vector<const char*>& arguments) {
  const auto result = parse(arguments);
  const auto* const early_exit = std::get_if<EarlyExit>(&result);
  return early_exit == nullptr ? "" : early_exit->text;
}

TEST(Sizes, UnitInAnyCase_IsAccepted) {
  for (const auto& [text, bytes] : std::vector<std::pair<const char*, std::size_t>>{{"0", 0},
                                                                                    {"8", 8},
                                                                                    {"8B", 8},
                                                                                    {"64K", 65'536},
                                                                                    {"64k", 65'536},
                                                                                    {"64KiB", 65'536},
                                                                                    {"64KB", 65'536},
                                                                                    {"5G", std::size_t{5} << 30}}) {
    EXPECT_EQ(bytes, parsed({"stream", "--plugin", "p.so", "-b", text, "-e", "5G"}).min_bytes) << text;
  }
}

TEST(Sizes, MalformedSize_IsRejected) {
  for (const char* text : {"", "K", "-1", "8Q", "1e99", "0.3", "1.0001K", "nan", "inf", "8KK", "99999999G"}) {
    EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"stream", "--plugin", "p.so", "-e", text})) << text;
  }
}

TEST(Errors, UnknownOption_IsNamedWithTheNearestOne) {
  EXPECT_EQ("verbatim-perf: unknown argument '--gruop'. Next: is --group meant? See verbatim-perf --help\n",
            text_of_invalid({"stream", "--plugin", "p.so", "--gruop", "3"}));
  EXPECT_EQ("verbatim-perf: unknown argument '--minbyte=8'. Next: is --minbytes meant? See verbatim-perf --help\n",
            text_of_invalid({"stream", "--minbyte=8"}));
  EXPECT_EQ("verbatim-perf: unknown argument '--nothing-like-it'. See verbatim-perf --help\n",
            text_of_invalid({"stream", "--plugin", "p.so", "--nothing-like-it"}));
}

TEST(Errors, BadValue_NamesTheOptionAndHelp) {
  for (const std::vector<const char*>& arguments :
       {std::vector<const char*>{"stream", "--plugin", "p.so", "--memory", "gpu"},
        {"stream", "--plugin", "p.so", "--depth", "99"},
        {"stream", "--plugin", "p.so", "--depth"},
        {"straem", "--plugin", "p.so"},
        {"stream"}}) {
    const std::string text = text_of_invalid(arguments);
    EXPECT_TRUE(text.starts_with("verbatim-perf: ")) << text;
    EXPECT_TRUE(text.ends_with(". See verbatim-perf --help\n")) << text;
    EXPECT_EQ(1, std::count(text.begin(), text.end(), '\n')) << text;
  }
}

TEST(MessageSizes, Factor_MultipliesUpToMaximum) {
  Options options;
  options.min_bytes = 8;
  options.max_bytes = 100;
  options.factor = 3;
  EXPECT_EQ((std::vector<std::size_t>{8, 24, 72}), message_sizes(options));
}

TEST(MessageSizes, FactorOne_AddsOneByte) {
  Options options;
  options.min_bytes = 0;
  options.max_bytes = 4;
  options.factor = 1;
  options.step_bytes = 0;
  EXPECT_EQ((std::vector<std::size_t>{0, 1, 2, 3, 4}), message_sizes(options));
}

TEST(MessageSizes, Step_AddsUpToMaximum) {
  Options options;
  options.min_bytes = 10;
  options.max_bytes = 31;
  options.step_bytes = 10;
  EXPECT_EQ((std::vector<std::size_t>{10, 20, 30}), message_sizes(options));
}

TEST(ParseOptions, NcclTestsOptions_AreAccepted) {
  const Options options = parsed({"alltoall", "--plugin", "p.so", "-b", "1K", "-e", "1M", "-f", "4", "-n", "7", "-w",
                                  "3", "-c", "2", "-d", "float", "--procs", "5"});
  EXPECT_EQ(OperationKind::kAllToAll, options.operation);
  EXPECT_EQ("p.so", options.plugin);
  EXPECT_EQ(1024U, options.min_bytes);
  EXPECT_EQ(std::size_t{1} << 20, options.max_bytes);
  EXPECT_EQ(4.0, options.factor);
  EXPECT_EQ(7, options.iterations);
  EXPECT_EQ(3, options.warmup_iterations);
  EXPECT_EQ(2, options.check_iterations);
  EXPECT_EQ(std::vector{workload::ElementType::kFloat}, options.types);
  EXPECT_EQ(5, options.job.procs);
}

// What `all_reduce_perf` alone does.
TEST(ParseOptions, Defaults_AreThoseOfNcclTests) {
  const Options options = parsed({"all_reduce", "--plugin", "p.so"});
  EXPECT_EQ(std::vector<std::size_t>{std::size_t{32} << 20}, message_sizes(options));
  EXPECT_EQ(std::size_t{1} << 20, options.step_bytes);
  EXPECT_EQ(20, options.iterations);
  EXPECT_EQ(1, options.warmup_iterations);
  EXPECT_EQ(1, options.check_iterations);
  EXPECT_EQ(std::vector{workload::ElementType::kFloat}, options.types);
  EXPECT_EQ(std::vector{workload::ReductionKind::kSum}, options.reductions);
  EXPECT_EQ(std::vector{-1}, options.roots);
  EXPECT_EQ(1, options.cycles);
  EXPECT_EQ(Average::kMean, options.average);
}

TEST(ParseOptions, FactorAndStep_FactorCounts) {
  const Options options = parsed({"all_reduce", "--plugin", "p.so", "-b", "1M", "-e", "4M", "-f", "2", "-i", "1"});
  EXPECT_EQ(3U, message_sizes(options).size());
  EXPECT_EQ(4U, message_sizes(parsed({"all_reduce", "--plugin", "p.so", "-b", "1M", "-e", "4M"})).size());
}

TEST(ParseOptions, ThreadsAndGpus_AreRanks) {
  EXPECT_EQ(8, parsed({"all_reduce", "--plugin", "p.so", "-g", "8"}).job.procs);
  EXPECT_EQ(6, parsed({"all_reduce", "--plugin", "p.so", "-t", "3", "-g", "2"}).job.procs);
  EXPECT_EQ(1, parsed({"all_reduce", "--plugin", "p.so", "-g", "1"}).job.procs);
  const auto with = [](const char* gpus) {
    return std::vector<const char*>{"all_reduce", "--plugin", "p.so", "--root", "h:1", "--rank",
                                    "0",          "--nranks", "2",    "-g",     gpus};
  };
  EXPECT_EQ(2, parsed(with("1")).job.size());
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid(with("2")));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"all_reduce", "--plugin", "p.so", "-g", "2", "--procs", "2"}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"all_reduce", "--plugin", "p.so", "-t", "32", "-g", "32"}));
}

// Every option of nccl-tests 2.19.6 (src/common.cu, longopts), by both names, that does not change what runs here.
TEST(ParseOptions, OptionsWithoutEffect_AreNotedOnlyIfNotTheDefault) {
  for (const auto& [short_name, name, default_value] :
       std::vector<std::array<const char*, 3>>{{"-m", "--agg_iters", "1"},
                                               {"-p", "--parallel_init", "0"},
                                               {"-z", "--blocking", "0"},
                                               {"-y", "--stream_null", "0"},
                                               {"-G", "--cudagraph", "0"},
                                               {"-C", "--report_cputime", "0"},
                                               {"-R", "--local_register", "0"},
                                               {"-x", "--cta_policy", "-1"},
                                               {"-D", "--device_implementation", "0"},
                                               {"-V", "--device_cta_count", "16"},
                                               {"-M", "--memory", "0"}}) {
    for (const char* option : {short_name, name}) {
      EXPECT_TRUE(parsed({"all_reduce", "--plugin", "p.so", option, default_value}).notes.empty()) << option;
      const std::vector<std::string> notes = parsed({"all_reduce", "--plugin", "p.so", option, "2"}).notes;
      ASSERT_EQ(1U, notes.size()) << option;
      EXPECT_TRUE(notes[0].starts_with(std::string(short_name) + "," + name)) << notes[0];
      EXPECT_NE(std::string::npos, notes[0].find(" 2 has no effect: ")) << notes[0];
      EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"all_reduce", "--plugin", "p.so", option, "x"})) << option;
    }
  }
  EXPECT_EQ(1U, parsed({"all_reduce", "--plugin", "p.so", "-r", "1"}).notes.size());
  EXPECT_EQ(1U, parsed({"all_gather", "--plugin", "p.so", "-o", "max"}).notes.size());
}

TEST(ParseOptions, TypesReductionsAndRoots_AreOneOrAll) {
  const Options one = parsed({"reduce", "--plugin", "p.so", "-d", "bfloat16", "-o", "mulsum", "--root", "1"});
  EXPECT_EQ(std::vector{workload::ElementType::kBfloat16}, one.types);
  EXPECT_EQ(std::vector{workload::ReductionKind::kMulSum}, one.reductions);
  EXPECT_EQ(std::vector{1}, one.roots);
  const Options all = parsed({"reduce", "--plugin", "p.so", "-d", "all", "-o", "all", "--root=-1", "-g", "3"});
  EXPECT_EQ(workload::kElementTypes, all.types.size());
  EXPECT_EQ(workload::kReductionKinds, all.reductions.size());
  EXPECT_EQ((std::vector{0, 1, 2}), all.roots);
  // Not exact: sums of more ranks in few bits.
  const Options many = parsed({"reduce", "--plugin", "p.so", "-d", "all", "-g", "16"});
  EXPECT_EQ(workload::kElementTypes - 1, many.types.size());
  EXPECT_EQ(1U, many.notes.size());
  EXPECT_EQ(workload::kElementTypes, parsed({"gather", "--plugin", "p.so", "-d", "all", "-g", "16"}).types.size());
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"reduce", "--plugin", "p.so", "-d", "f8e4m3", "-g", "17"}));
  EXPECT_EQ(1U, parsed({"reduce", "--plugin", "p.so", "-d", "f8e4m3", "-g", "17", "-o", "max"}).types.size());
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"reduce", "--plugin", "p.so", "-r", "2"}));
}

TEST(ParseOptions, ProgramOfNcclTests_IsItsOperation) {
  const auto started_as = [](const char* program) {
    const std::vector<const char*> arguments{program, "-b", "8", "-e", "8"};
    return parse_options(static_cast<int>(arguments.size()), arguments.data());
  };
  setenv("NCCL_NET_PLUGIN", "other", 1);
  for (const char* name : {"all_reduce", "all_gather", "broadcast", "reduce_scatter", "reduce", "alltoall", "alltoallv",
                           "scatter", "gather", "sendrecv", "hypercube"}) {
    const auto result = started_as(("/usr/bin/" + std::string(name) + "_perf").c_str());
    ASSERT_TRUE(std::holds_alternative<Options>(result)) << std::get<EarlyExit>(result).text;
    const auto& options = std::get<Options>(result);
    EXPECT_STREQ(name, operation_name(options.operation));
    EXPECT_EQ(Format::kNcclTests, options.format);
    EXPECT_EQ("other", options.plugin);
    EXPECT_EQ(ranks::kNoTimeoutS, options.job.timeout_s);
  }
  setenv("NCCL_NET_PLUGIN", "", 1);
  EXPECT_EQ("verbatim", std::get<Options>(started_as("all_reduce_perf")).plugin);
  unsetenv("NCCL_NET_PLUGIN");
  EXPECT_EQ("verbatim", std::get<Options>(started_as("all_reduce_perf")).plugin);
  EXPECT_TRUE(std::holds_alternative<EarlyExit>(started_as("no_such_perf")));
}

TEST(ParseOptions, ColumnsOfNcclTests_NeedItsTable) {
  const Options options = parsed({"all_reduce", "--plugin", "p.so", "--format", "nccl-tests", "-I", "1", "-K", "3",
                                  "-S", "1", "-N", "0", "-u", "2"});
  EXPECT_TRUE(options.per_iteration && options.timestamps);
  EXPECT_EQ(3, options.per_iteration_skip);
  EXPECT_EQ(0, options.cycles);
  EXPECT_EQ(2, options.unalign);
  for (const auto& extra :
       std::vector<std::vector<const char*>>{{"-I", "1"}, {"-S", "1"}, {"-J", "f.json"}, {"-K", "1"}, {"-I", "2"}}) {
    std::vector<const char*> arguments{"all_reduce", "--plugin", "p.so"};
    arguments.insert(arguments.end(), extra.begin(), extra.end());
    EXPECT_EQ(ExitStatus::kUsage, status_of_invalid(arguments)) << extra[0];
  }
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"all_reduce", "--plugin", "p.so", "--format", "nccl-tests", "-I",
                                                   "1", "-n", "3", "-K", "3"}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"all_reduce", "--plugin", "p.so", "-u", "1", "-d", "all"}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"put", "--plugin", "p.so", "-d", "all"}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"put", "--plugin", "p.so", "-u", "1"}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"put", "--plugin", "p.so", "-N", "2"}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"stream", "--plugin", "p.so", "--format", "nccl-tests"}));
}

TEST(ParseOptions, RequiredBandwidth_IsANumberAndForNcclTestsTable) {
  const std::vector<const char*> arguments{"all_reduce", "--plugin", "p.so", "--format", "nccl-tests"};
  for (const auto& [text, busbw] : std::vector<std::pair<const char*, double>>{{"1.5", 1.5}, {"", -1}}) {
    setenv("NCCL_TESTS_MIN_BW", text, 1);
    EXPECT_EQ(busbw, parsed(arguments).required_busbw) << text;
  }
  for (const char* text : {"fast", "1.5G", "nan"}) {
    setenv("NCCL_TESTS_MIN_BW", text, 1);
    EXPECT_NE(std::string::npos, text_of_invalid(arguments).find("NCCL_TESTS_MIN_BW=")) << text;
    EXPECT_EQ(-1, parsed({"all_reduce", "--plugin", "p.so"}).required_busbw) << text;
  }
  unsetenv("NCCL_TESTS_MIN_BW");
}

TEST(ParseOptions, ResultsThatCannotBeShown_AreRefused) {
  for (const auto& extra :
       std::vector<std::vector<const char*>>{{"-d", "all"}, {"-o", "all"}, {"-r", "-1"}, {"-N", "2"}}) {
    std::vector<const char*> arguments{"reduce", "--compare", "p.so,q.so"};
    EXPECT_EQ(2U, parsed(arguments).compare.size());
    arguments.insert(arguments.end(), extra.begin(), extra.end());
    EXPECT_NE(std::string::npos, text_of_invalid(arguments).find("--compare")) << extra[0];
  }
  for (const char* file : {"--json", "-J"}) {
    EXPECT_NE(std::string::npos,
              text_of_invalid({"reduce", "--plugin", "p.so", "--format", "nccl-tests", file, "f.json", "-N", "0"})
                  .find("-N 0"))
        << file;
  }
  EXPECT_NE(
      std::string::npos,
      text_of_invalid({"reduce", "--compare", "p.so,q.so", "--format", "nccl-tests", "-J", "f.json"}).find("-J "));
}

TEST(ParseOptions, LongNames_AreAccepted) {
  const Options options = parsed({"stream", "--plugin=p.so", "--minbytes=1", "--maxbytes=2", "--stepbytes=1",
                                  "--iters=9", "--warmup_iters=0", "--check=0", "--api=8", "--channels=4",
                                  "--chunk=128K", "--depth=16", "--json=f.json", "--timeout=5"});
  EXPECT_EQ(OperationKind::kStream, options.operation);
  EXPECT_EQ(0, options.check_iterations);
  EXPECT_EQ(0, options.warmup_iterations);
  EXPECT_EQ(8, options.api_version);
  EXPECT_EQ(4, options.channels);
  EXPECT_EQ(131'072U, options.chunk_bytes);
  EXPECT_EQ(16, options.depth);
  EXPECT_EQ("f.json", options.json);
  EXPECT_EQ(5, options.job.timeout_s);
  EXPECT_EQ(300, parsed({"stream", "--plugin", "p.so"}).job.timeout_s);
  EXPECT_EQ(ranks::kNoTimeoutS, parsed({"stream", "--plugin", "p.so", "-T", "0"}).job.timeout_s);
}

TEST(ParseOptions, EveryOperation_IsAccepted) {
  for (const char* name : {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "alltoall", "alltoallv",
                           "gather", "scatter", "hypercube", "sendrecv", "stream", "pingpong", "grouped", "put",
                           "put_signal", "get", "alltoall_put"}) {
    EXPECT_STREQ(name, operation_name(parsed({name, "--plugin", "p.so"}).operation));
  }
}

TEST(ParseOptions, RootRankAndNranks_AreAccepted) {
  const Options options = parsed({"all_reduce", "--plugin", "p.so", "--root", "h:1", "--rank", "1", "--nranks", "3"});
  EXPECT_EQ("h:1", options.job.root);
  EXPECT_EQ(1, options.job.rank);
  EXPECT_EQ(3, options.job.nranks);
}

TEST(ParseOptions, InvalidOptions_AreRejected) {
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"all_reduce"}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"reduce_all", "--plugin", "p.so"}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"all_reduce", "--plugin", "p.so", "-o", "xor"}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"hypercube", "--plugin", "p.so", "-g", "3"}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"reduce", "--plugin", "p.so", "--memory", "cuda"}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"all_reduce", "--plugin", "p.so", "-b", "x"}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"all_reduce", "--plugin", "p.so", "-b", "9", "-e", "8"}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"all_reduce", "--plugin", "p.so", "-n", "0"}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"all_reduce", "--plugin", "p.so", "-d", "complex"}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"all_reduce", "--plugin", "p.so", "--procs", "0"}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"all_reduce", "--plugin", "p.so", "--rank", "0"}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"all_reduce", "--plugin", "p.so", "--root", "h:1"}));
  EXPECT_EQ(ExitStatus::kUsage,
            status_of_invalid({"all_reduce", "--plugin", "p.so", "--root", "h:1", "--rank", "2", "--nranks", "2"}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"all_reduce", "--plugin", "p.so", "--root", "h:1", "--rank", "0",
                                                   "--nranks", "2", "--procs", "2"}));
  EXPECT_EQ(ExitStatus::kUsage, status_of_invalid({"pingpong", "--plugin", "p.so", "--procs", "3"}));
}

TEST(ParseOptions, Help_IsPrinted) {
  const auto result = parse({"--help"});
  ASSERT_TRUE(std::holds_alternative<EarlyExit>(result));
  EXPECT_EQ(ExitStatus::kOk, std::get<EarlyExit>(result).status);
  EXPECT_NE(std::string::npos, std::get<EarlyExit>(result).text.find("all_reduce"));
}

}  // namespace
}  // namespace verbatim::perf
