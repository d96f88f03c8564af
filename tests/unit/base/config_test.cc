#include "base/config.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "support/log_lines.h"
#include "unit/support/log_capture.h"

namespace verbatim {
namespace {

using Environment = std::map<std::string, std::string>;

Result<Config> read(const Environment& environment) {
  return Config::from([&](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found != environment.end() ? found->second.c_str() : nullptr;
  });
}

Config config_of(const Environment& environment) {
  Result<Config> config = read(environment);
  EXPECT_TRUE(config) << environment.begin()->first << "=" << environment.begin()->second;
  return config ? *config : Config{};
}

// Without the value.
std::string refusal(const std::string& variable, const std::string& value) {
  const LogCapture log;
  const Result<Config> config = read({{variable, value}});
  EXPECT_FALSE(config) << variable << "=" << value;
  EXPECT_TRUE(config || config.error().kind == ErrorKind::kUsage);
  return test::replaced(log.only_warning(), variable + "=" + value + " ", variable + "=VALUE ");
}

TEST(Config, NothingSet_GivesDefaults) {
  const Config config = config_of({});
  EXPECT_EQ(config.max_recvs, 8U);
  EXPECT_EQ(config.gid.for_device("mlx5_0"), std::nullopt);
  EXPECT_EQ(config.gid.flid_index, 1U);
  EXPECT_EQ(config.traffic_class, std::nullopt);
  EXPECT_EQ(config.service_level, std::nullopt);
  EXPECT_EQ(config.pkey_index, 0);
  EXPECT_EQ(config.timeout, 20);
  EXPECT_EQ(config.retry_count, 7);
  EXPECT_EQ(config.relaxed_ordering, Switch::kAuto);
  EXPECT_EQ(config.adaptive_routing, Switch::kAuto);
  EXPECT_EQ(config.adaptive_routing_threshold, 8192U);
  EXPECT_EQ(config.qps_per_connection.min, 1U);
  EXPECT_EQ(config.qps_per_connection.max, 1U);
  EXPECT_EQ(config.qp_order, QpOrder::kStaggered);
  EXPECT_EQ(config.qp_pool.peers, 0U);
  EXPECT_EQ(config.qp_gather_us, 300U);
  EXPECT_EQ(config.split_data_on_qps, Switch::kAuto);
  EXPECT_TRUE(config.ece);
  EXPECT_EQ(config.socket_family, AF_UNSPEC);
  EXPECT_EQ(config.connect_timeout_s, 60U);
  EXPECT_EQ(config.close_timeout_ms, 5000U);
  EXPECT_TRUE(config.verbs_library.empty() && config.mlx5_library.empty());
  EXPECT_TRUE(config.hca.value.empty() && config.socket_ifname.value.empty());
}

TEST(Config, EveryVariable_SetsItsField) {
  const Config config = config_of({{"VERBATIM_VERBS_LIBRARY", "/opt/v.so"},
                                   {"VERBATIM_MLX5_LIBRARY", "/opt/m.so"},
                                   {"VERBATIM_HCA", "^=mlx5_1:2"},
                                   {"VERBATIM_MAX_RECVS", "3"},
                                   {"VERBATIM_GID_INDEX", "5"},
                                   {"VERBATIM_ROUTABLE_FLID_GID_INDEX", "2"},
                                   {"VERBATIM_TC", "106"},
                                   {"VERBATIM_SL", "4"},
                                   {"VERBATIM_PKEY", "2"},
                                   {"VERBATIM_TIMEOUT", "22"},
                                   {"VERBATIM_RETRY_CNT", "6"},
                                   {"VERBATIM_RELAXED_ORDERING", "0"},
                                   {"VERBATIM_ADAPTIVE_ROUTING", "1"},
                                   {"VERBATIM_AR_THRESHOLD", "65536"},
                                   {"VERBATIM_QPS_PER_CONNECTION", "4"},
                                   {"VERBATIM_SPLIT_DATA_ON_QPS", "0"},
                                   {"VERBATIM_ECE", "0"},
                                   {"VERBATIM_SOCKET_IFNAME", "=eth0"},
                                   {"VERBATIM_SOCKET_FAMILY", "AF_INET6"},
                                   {"VERBATIM_CONNECT_TIMEOUT_S", "5"},
                                   {"VERBATIM_CLOSE_TIMEOUT_MS", "7"}});
  EXPECT_EQ(config.verbs_library, "/opt/v.so");
  EXPECT_EQ(config.mlx5_library, "/opt/m.so");
  EXPECT_EQ(config.hca.value, "^=mlx5_1:2");
  EXPECT_STREQ(config.hca.variable, "VERBATIM_HCA");
  EXPECT_EQ(config.max_recvs, 3U);
  EXPECT_EQ(config.gid.for_device("any"), 5U);
  EXPECT_EQ(config.gid.flid_index, 2U);
  EXPECT_EQ(config.traffic_class, 106);
  EXPECT_EQ(config.service_level, 4);
  EXPECT_EQ(config.pkey_index, 2);
  EXPECT_EQ(config.timeout, 22);
  EXPECT_EQ(config.retry_count, 6);
  EXPECT_EQ(config.relaxed_ordering, Switch::kOff);
  EXPECT_EQ(config.adaptive_routing, Switch::kOn);
  EXPECT_EQ(config.adaptive_routing_threshold, 65536U);
  EXPECT_EQ(config.qps_per_connection.min, 4U);
  EXPECT_EQ(config.qps_per_connection.max, 4U);
  EXPECT_EQ(config.split_data_on_qps, Switch::kOff);
  EXPECT_FALSE(config.ece);
  EXPECT_EQ(config.socket_ifname.value, "=eth0");
  EXPECT_EQ(config.socket_family, AF_INET6);
  EXPECT_EQ(config.connect_timeout_s, 5U);
  EXPECT_EQ(config.close_timeout_ms, 7U);
}

TEST(Config, NcclAlias_IsReadWhenOursIsUnset) {
  EXPECT_EQ(config_of({{"NCCL_IB_TC", "106"}}).traffic_class, 106);
  EXPECT_EQ(config_of({{"NCCL_IB_TC", "106"}, {"VERBATIM_TC", "8"}}).traffic_class, 8);
  EXPECT_EQ(config_of({{"NCCL_IB_TC", "106"}, {"VERBATIM_TC", ""}}).traffic_class, 106);
  EXPECT_STREQ(config_of({{"NCCL_IB_HCA", "mlx5"}}).hca.variable, "NCCL_IB_HCA");
}

TEST(Config, QpsPerConnection_AcceptsRangeOrNumber) {
  const QpRange range = config_of({{"VERBATIM_QPS_PER_CONNECTION", "2-16"}}).qps_per_connection;
  EXPECT_EQ(range.min, 2U);
  EXPECT_EQ(range.max, 16U);
  const QpRange fixed = config_of({{"NCCL_IB_QPS_PER_CONNECTION", "4"}}).qps_per_connection;
  EXPECT_EQ(fixed.min, 4U);
  EXPECT_EQ(fixed.max, 4U);
}

TEST(Config, QpOrderVariables_SetTheirFields) {
  const Config config = config_of({{"VERBATIM_QP_ORDER", "native"},
                                   {"VERBATIM_QP_POOL", "31x4"},
                                   {"VERBATIM_QP_GATHER_US", "0"},
                                   {"VERBATIM_QP_DUMP", "/tmp/%p"}});
  EXPECT_EQ(config.qp_order, QpOrder::kNative);
  EXPECT_EQ(config_of({{"VERBATIM_QP_ORDER", "staggered"}}).qp_order, QpOrder::kStaggered);
  EXPECT_EQ(config.qp_pool.peers, 31U);
  EXPECT_EQ(config.qp_pool.qps, 4U);
  EXPECT_EQ(config.qp_gather_us, 0U);
  EXPECT_EQ(config.qp_dump, "/tmp/%p");
}

TEST(Config, MalformedAlias_IsIgnoredWhenOursIsSet) {
  EXPECT_EQ(config_of({{"NCCL_IB_TIMEOUT", "99"}, {"VERBATIM_TIMEOUT", "14"}}).timeout, 14);
}

TEST(Config, NcclValuesForDefault_GiveDefaults) {
  EXPECT_EQ(config_of({{"NCCL_IB_TC", "-1"}}).traffic_class, std::nullopt);
  EXPECT_EQ(config_of({{"NCCL_IB_SL", "-1"}}).service_level, std::nullopt);
  EXPECT_EQ(config_of({{"NCCL_IB_GID_INDEX", "-1"}}).gid.for_device("x"), std::nullopt);
  EXPECT_EQ(config_of({{"NCCL_IB_ADAPTIVE_ROUTING", "-2"}}).adaptive_routing, Switch::kAuto);
  EXPECT_EQ(config_of({{"NCCL_IB_ADAPTIVE_ROUTING", "-1"}}).adaptive_routing, Switch::kAuto);
  EXPECT_EQ(config_of({{"NCCL_IB_AR_THRESHOLD", "-2"}}).adaptive_routing_threshold, 8192U);
  EXPECT_EQ(config_of({{"NCCL_IB_PCI_RELAXED_ORDERING", "1"}}).relaxed_ordering, Switch::kOn);
}

TEST(Config, HexadecimalNumber_IsAccepted) {
  EXPECT_EQ(config_of({{"VERBATIM_TC", "0x6a"}}).traffic_class, 106);
}

TEST(Config, GidIndexList_AppliesPerDevice) {
  const GidSetting setting = config_of({{"VERBATIM_GID_INDEX", "mlx5_0=3,mlx5_1=5,mlx5_2=auto"}}).gid;
  EXPECT_EQ(setting.for_device("mlx5_0"), 3U);
  EXPECT_EQ(setting.for_device("mlx5_1"), 5U);
  EXPECT_EQ(setting.for_device("mlx5_2"), std::nullopt);
  EXPECT_EQ(setting.for_device("mlx5_10"), std::nullopt);
}

TEST(Config, GidPreferences_AreReadFromNcclVariables) {
  const GidSetting setting = config_of({{"NCCL_IB_ROCE_VERSION_NUM", "1"}, {"NCCL_IB_ADDR_FAMILY", "AF_INET6"}}).gid;
  EXPECT_EQ(setting.roce_version, 1U);
  EXPECT_EQ(setting.family, AF_INET6);
  EXPECT_FALSE(setting.range);
  EXPECT_EQ(config_of({{"NCCL_IB_FIFO_TC", "104"}}).cts_traffic_class, 104);
  EXPECT_EQ(config_of({{"NCCL_IB_FIFO_TC", "-1"}}).cts_traffic_class, std::nullopt);
  EXPECT_TRUE(config_of({{"NCCL_GDR_FLUSH_DISABLE", "1"}}).flush_disabled);
  EXPECT_FALSE(config_of({}).flush_disabled);
  EXPECT_FALSE(config_of({{"NCCL_IB_MERGE_NICS", "0"}}).merge_nics);
  EXPECT_TRUE(config_of({{"VERBATIM_MERGE_NICS", "1"}, {"NCCL_IB_MERGE_NICS", "0"}}).merge_nics);
  EXPECT_TRUE(config_of({}).merge_nics);
  EXPECT_EQ(config_of({}).data_direct, DataDirect::kOnly);
  EXPECT_EQ(config_of({{"NCCL_IB_DATA_DIRECT", "0"}}).data_direct, DataDirect::kOff);
  EXPECT_EQ(config_of({{"VERBATIM_DATA_DIRECT", "2"}, {"NCCL_IB_DATA_DIRECT", "0"}}).data_direct, DataDirect::kBoth);
}

TEST(Config, AddressRange_ContainsItsAddresses) {
  struct Case {
    const char* range;
    const char* address;
    bool contained;
  };
  for (const Case& tested : {Case{"10.2.0.0/16", "::ffff:10.2.255.1", true},
                             {"10.2.0.0/16", "::ffff:10.3.0.0", false},
                             {"10.2.0.0/15", "::ffff:10.3.0.0", true},
                             {"10.2.0.1", "::ffff:10.2.0.1", true},
                             {"10.2.0.1", "::ffff:10.2.0.2", false},
                             {"::/0", "fe80::1", true},
                             {"0.0.0.0/0", "fe80::1", false},
                             {"fd00::/8", "fdff::1", true},
                             {"fd00::/8", "fc00::1", false}}) {
    const auto range = config_of({{"NCCL_IB_ADDR_RANGE", tested.range}}).gid.range;
    ASSERT_TRUE(range) << tested.range;
    in6_addr address;
    ASSERT_EQ(inet_pton(AF_INET6, tested.address, &address), 1);
    EXPECT_EQ(range->contains(address), tested.contained) << tested.range << " " << tested.address;
  }
}

TEST(ReadSettings, InvalidValue_LeavesTheDefaultAndTheOthers) {
  const std::map<std::string, std::string> given = {{"VERBATIM_GID_INDEX", "mlx5_0=1,mlx5_1=x"},
                                                    {"VERBATIM_TC", "106"},
                                                    {"NCCL_IB_TC", "1"},
                                                    {"NCCL_IB_SL", "3"},
                                                    {"VERBATIM_HCA", ""}};
  const LogCapture log;
  Config config;
  const std::vector<Setting> settings =
      read_settings([&](const char* name) { return given.contains(name) ? given.at(name).c_str() : nullptr; }, config);
  std::string shown;
  for (const Setting& setting : settings) {
    if (setting.set_by == nullptr) continue;
    shown.append(setting.set_by).append("=").append(setting.value).append(setting.valid ? "" : " invalid");
    shown.append(setting.alias_ignored ? " alias ignored;" : ";");
  }
  EXPECT_EQ(settings.size(), variables().size());
  EXPECT_EQ(shown, "VERBATIM_GID_INDEX=mlx5_0=1,mlx5_1=x invalid;VERBATIM_TC=106 alias ignored;NCCL_IB_SL=3;");
  EXPECT_TRUE(config.gid.per_device.empty());
  EXPECT_EQ(config.traffic_class, 106);
  EXPECT_EQ(config.service_level, 3);
  EXPECT_TRUE(log.warnings().empty());
}

using Lines = std::vector<std::string>;

// The INFO lines, and behind them the warnings.
Lines unused_in(std::vector<const char*> environment) {
  const LogCapture log;
  environment.push_back(nullptr);
  log_unused_variables(environment.data());
  Lines lines = log.infos();
  for (const std::string& line : log.warnings()) lines.push_back("WARN " + line);
  return lines;
}

TEST(UnusedVariables, VariablesOfNcclsTransport_GiveOneLine) {
  test::expect_log_lines(
      unused_in({"NCCL_IB_HCA=mlx5", "NCCL_IB_MERGE_VFS=0", "NCCL_DEBUG=INFO", "NCCL_IB_OOO_RQ=1", "HOME=/"}));
}

// NCCL's core reads NCCL_GIN_ENABLE and NCCL_GIN_TYPE, also with this plugin.
TEST(UnusedVariables, RmaVariablesOfNcclsTransport_AreNamedToo) {
  test::expect_log_lines(unused_in({"NCCL_GIN_ENABLE=1", "NCCL_GIN_TYPE=2", "NCCL_GIN_IB_TC=106",
                                    "NCCL_GIN_GDAKI_QP_DEPTH=64", "NCCL_GIN_ERROR_QUERY_SEC=3"}));
}

TEST(UnusedVariables, DisabledInfiniBand_IsWarnedAbout) {
  test::expect_log_lines(unused_in({"NCCL_IB_DISABLE=1"}));
  for (const char* const set : {"NCCL_IB_DISABLE=2", "NCCL_IB_DISABLE=-1", "NCCL_IB_DISABLE=0x10"}) {
    const Lines lines = unused_in({set});
    ASSERT_EQ(lines.size(), 1U) << set;
    EXPECT_TRUE(lines[0].starts_with("WARN " + std::string(set) + " disables NCCL's own InfiniBand transport only"))
        << set;
  }
  for (const char* const unset : {"NCCL_IB_DISABLE=0", "NCCL_IB_DISABLE=", "NCCL_IB_DISABLE=no"}) {
    EXPECT_EQ(unused_in({unset}), Lines()) << unset;
  }
}

TEST(UnusedVariables, SingleThreadedMlx5_IsWarnedAbout) {
  test::expect_log_lines(unused_in({"MLX5_SINGLE_THREADED=1"}));
  EXPECT_EQ(unused_in({"MLX5_SINGLE_THREADED=0"}), Lines());
}

TEST(UnusedVariables, MisspelledName_IsWarnedAboutWithNearestName) {
  test::expect_log_lines(unused_in({"VERBATIM_HCAS=mlx5", "VERBATIM_HCA=mlx5"}));
}

TEST(UnusedVariables, OnlyKnownVariables_GiveNoLine) {
  EXPECT_EQ(unused_in({"VERBATIM_TC=1", "NCCL_IB_TC=2", "NCCL_SOCKET_IFNAME=eth0", "VERBATIMX=1", "VERBATIM_TOKEN=x"}),
            Lines());
}

TEST(Config, MalformedValue_IsRejectedWithVariableName) {
  const std::pair<const char*, std::vector<const char*>> refused[] = {
      {"NCCL_IB_ROCE_VERSION_NUM", {"3"}},
      {"NCCL_IB_ADDR_FAMILY", {"AF_INET4"}},
      {"NCCL_IB_ADDR_RANGE",
       {"10.0.0.0/33", "fd00::/129", "10.0.0/8", "10/8", "a:b", "10.0.0.0/", "10.0.0.0/-1", "x", "/8"}},
      {"NCCL_GDR_FLUSH_DISABLE", {"2"}},
      {"VERBATIM_MAX_RECVS", {"0", "9", "8x", "99999999999999999999"}},
      {"NCCL_IB_TIMEOUT", {"0"}},
      {"NCCL_IB_TC", {"256", "-2"}},
      {"VERBATIM_SL", {"16"}},
      {"VERBATIM_ROUTABLE_FLID_GID_INDEX", {"256"}},
      {"NCCL_IB_RETRY_CNT", {"8"}},
      {"NCCL_IB_QPS_PER_CONNECTION", {"129", "1-4"}},
      {"VERBATIM_QPS_PER_CONNECTION", {"0", "4-1", "0-4", "1-129", "1-", "-4", "1-2-3", "1-x"}},
      {"VERBATIM_QP_ORDER", {"Staggered", "pool", "gather", "ring"}},
      {"VERBATIM_QP_POOL", {"8", "8x", "x8", "0x4", "8x0", "8x4x2", "8X4", "65537x1", "1x4097"}},
      {"VERBATIM_QP_GATHER_US", {"2001"}},
      {"VERBATIM_ADAPTIVE_ROUTING", {"yes"}},
      {"NCCL_IB_DATA_DIRECT", {"3"}},
      {"NCCL_IB_PCI_RELAXED_ORDERING", {"3"}},
      {"VERBATIM_ECE", {"2"}},
      {"NCCL_SOCKET_FAMILY", {"AF_INET4"}},
      {"VERBATIM_GID_INDEX", {"256", "-2", "x", "mlx5_0=", "=3", "mlx5_0=3,", "mlx5_0=3,4", "mlx5_0=3x"}}};
  Lines lines;
  for (const auto& [variable, values] : refused) {
    lines.push_back(refusal(variable, values[0]));
    for (const char* value : values) EXPECT_EQ(refusal(variable, value), lines.back());
  }
  test::expect_log_lines(lines);
}

TEST(Config, SeveralMalformedValues_GiveOneWarning) {
  const LogCapture log;
  EXPECT_FALSE(read({{"VERBATIM_TC", "x"}, {"VERBATIM_SL", "y"}}));
  EXPECT_EQ(log.warnings().size(), 1U);
}

TEST(Config, Environment_IsRead) {
  setenv("VERBATIM_MAX_RECVS", "2", 1);
  const Result<Config> config = Config::from_environment();
  unsetenv("VERBATIM_MAX_RECVS");
  ASSERT_TRUE(config);
  EXPECT_EQ(config->max_recvs, 2U);
}

TEST(Variables, Names_AreUniqueAndPrefixed) {
  std::set<std::string> names;
  for (const Variable& variable : variables()) {
    EXPECT_TRUE(names.insert(variable.name).second) << variable.name;
    EXPECT_EQ(std::string(variable.name).rfind("VERBATIM_", 0), 0U);
    if (variable.alias != nullptr) {
      EXPECT_TRUE(names.insert(variable.alias).second) << variable.alias;
      EXPECT_EQ(std::string(variable.alias).rfind("NCCL_", 0), 0U);
    }
  }
}

TEST(Variables, EveryRow_IsReadUnderNameAndAlias) {
  std::set<std::string> asked;
  ASSERT_TRUE(Config::from([&](const char* name) -> const char* {
    asked.insert(name);
    return nullptr;
  }));
  for (const Variable& variable : variables()) {
    EXPECT_TRUE(asked.contains(variable.name));
    EXPECT_TRUE(variable.alias == nullptr || asked.contains(variable.alias));
  }
}

#ifdef README  // the path of plugin/README.md
TEST(Variables, PluginReadme_ContainsTheTable) {
  std::ifstream file(README);
  std::stringstream content;
  content << file.rdbuf();
  const std::string readme = content.str();
  const std::string begin = "<!-- variables:begin -->\n";
  const std::size_t from = readme.find(begin);
  const std::size_t to = readme.find("<!-- variables:end -->");
  ASSERT_NE(from, std::string::npos) << "plugin/README.md has no variable list";
  ASSERT_NE(to, std::string::npos);
  EXPECT_EQ(readme.substr(from + begin.size(), to - from - begin.size()), variables_markdown());
}
#endif

}  // namespace
}  // namespace verbatim
