//: program netapi_test link=netapi,gtest
//: test netapi suite=unit protocol=gtest SOCKET_PLUGIN={socket_plugin} LD_LIBRARY_PATH={socket_plugin_dir}

// netapi::Table on tables of every version that record their calls, and opening of plugins by path and version.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "nccl/net_v6.h"
#include "netapi/log.h"
#include "netapi/plugin.h"
#include "netapi/table.h"

namespace netapi {
namespace {

// The arguments of the calls of a recording table.
struct Calls {
  int inits = 0;
  int finalizes = 0;
  int traffic_class = 0;
  std::uint64_t comm_id = 0;
  void* context = nullptr;
  std::size_t size = 0;
  std::vector<std::size_t> sizes;
  void* request_on_entry = nullptr;
  bool offload_given = false;
  int regs = 0;
};
Calls calls;
int some_object;

template <int kVersion>
typename Abi<kVersion>::Net recording_table() {
  using Net = typename Abi<kVersion>::Net;
  using Properties = typename Abi<kVersion>::Properties;
  Net net{};
  net.name = "Recording";
  if constexpr (kVersion >= 11) {
    net.init = [](void** context, std::uint64_t comm_id, typename Abi<kVersion>::Config* config, nccl::DebugLogger log,
                  nccl::ProfilerCallback) {
      ++calls.inits;
      calls.comm_id = comm_id;
      calls.traffic_class = config->trafficClass;
      log(nccl::DebugLogLevel::kWarn, nccl::kLogNet, "file.cc", 7, "hello %d", 42);
      *context = &some_object;
      return nccl::Result::kSuccess;
    };
    net.finalize = [](void* context) {
      ++calls.finalizes;
      calls.context = context;
      return nccl::Result::kSuccess;
    };
    net.listen = [](void* context, int, void*, void**) {
      calls.context = context;
      return nccl::Result::kSuccess;
    };
    net.connect = [](void* context, int, void*, void**, nccl::NetDeviceHandle** offload) {
      calls.context = context;
      calls.offload_given = offload != nullptr && *offload == nullptr;
      return nccl::Result::kRemoteError;
    };
    net.setNetAttr = [](void*, typename Abi<kVersion>::Attr* attributes) {
      calls.size = attributes->op;
      return nccl::Result::kSuccess;
    };
  } else {
    const auto log_hello = [](nccl::DebugLogger log) {
      ++calls.inits;
      log(nccl::DebugLogLevel::kWarn, nccl::kLogNet, "file.cc", 7, "hello %d", 42);
      return nccl::Result::kSuccess;
    };
    if constexpr (kVersion == 10) {
      net.init = [](nccl::DebugLogger log, nccl::ProfilerCallback) { return decltype(log_hello){}(log); };
      net.connect = [](int, typename Abi<kVersion>::Config* config, void*, void**, nccl::NetDeviceHandle** offload) {
        calls.traffic_class = config->trafficClass;
        calls.offload_given = offload != nullptr && *offload == nullptr;
        return nccl::Result::kRemoteError;
      };
    } else {
      net.init = log_hello;
      if constexpr (kVersion >= 7) {
        net.connect = [](int, void*, void**, nccl::NetDeviceHandle** offload) {
          calls.offload_given = offload != nullptr && *offload == nullptr;
          return nccl::Result::kRemoteError;
        };
      } else {
        net.connect = [](int, void*, void**) { return nccl::Result::kRemoteError; };
      }
    }
  }
  net.getProperties = [](int, Properties* out) {
    *out = {};
    static char name[] = "dev";
    out->name = name;
    out->guid = 1;
    out->ptrSupport = 3;
    out->speed = 4;
    out->port = 5;
    out->latency = 6;
    out->maxComms = 7;
    out->maxRecvs = 8;
    if constexpr (kVersion >= 7) out->netDeviceVersion = 9;
    if constexpr (kVersion >= 8) out->regIsGlobal = 1;
    if constexpr (kVersion >= 9) {
      out->forceFlush = 1;
      out->vProps = {2, {4, 6}};
      out->maxP2pBytes = 10;
      out->maxCollBytes = 11;
    }
    if constexpr (kVersion >= 11) out->maxMultiRequestSize = 12;
    if constexpr (kVersion >= 12) {
      out->railId = 13;
      out->planeId = 14;
    }
    return nccl::Result::kSuccess;
  };
  const auto record_size = [](std::size_t size) {
    calls.size = size;
    return nccl::Result::kSuccess;
  };
  if constexpr (kVersion >= 8) {
    net.regMr = [](void*, void*, std::size_t size, int, void**) { return decltype(record_size){}(size); };
  } else {
    net.regMr = [](void*, void*, int size, int, void**) {
      return decltype(record_size){}(static_cast<std::size_t>(size));
    };
  }
  if constexpr (kVersion >= 10) {
    net.isend = [](void*, void*, std::size_t size, int, void*, void*, void**) { return decltype(record_size){}(size); };
    net.irecv = [](void*, int n, void**, std::size_t* sizes, int*, void**, void**, void** request) {
      calls.sizes.assign(sizes, sizes + n);
      calls.request_on_entry = *request;
      return nccl::Result::kSuccess;
    };
  } else if constexpr (kVersion == 9) {
    net.isend = [](void*, void*, std::size_t size, int, void*, void**) { return decltype(record_size){}(size); };
    net.irecv = [](void*, int n, void**, std::size_t* sizes, int*, void**, void** request) {
      calls.sizes.assign(sizes, sizes + n);
      calls.request_on_entry = *request;
      return nccl::Result::kSuccess;
    };
  } else {
    net.isend = [](void*, void*, int size, int, void*, void**) {
      return decltype(record_size){}(static_cast<std::size_t>(size));
    };
    net.irecv = [](void*, int n, void**, int* sizes, int*, void**, void** request) {
      calls.sizes.assign(sizes, sizes + n);
      calls.request_on_entry = *request;
      return nccl::Result::kSuccess;
    };
  }
  return net;
}

template <typename Version>
class EveryVersion : public testing::Test {
 protected:
  static constexpr int kTested = Version::value;

  EveryVersion() {
    calls = {};
    set_log_callback([this](const LogLine& line) { lines_.push_back(line); });
  }
  ~EveryVersion() override { set_log_callback({}); }

  const typename Abi<kTested>::Net net_ = recording_table<kTested>();
  Table<kTested> plugin_{nullptr, &net_};
  std::vector<LogLine> lines_;
};

template <int kVersion>
using V = std::integral_constant<int, kVersion>;
using Versions = testing::Types<V<6>, V<7>, V<8>, V<9>, V<10>, V<11>, V<12>>;

struct VersionNames {
  template <typename Version>
  static std::string GetName(int /*index*/) {
    return "v" + std::to_string(Version::value);
  }
};
TYPED_TEST_SUITE(EveryVersion, Versions, VersionNames);

TYPED_TEST(EveryVersion, Init_IsCalledOnceUpToV10AndEachTimeFromV11) {
  constexpr bool kContexts = TestFixture::kTested >= 11;
  void* context = &context;
  ASSERT_EQ(nccl::Result::kSuccess, this->plugin_.init(77, {3}, &context));
  ASSERT_EQ(nccl::Result::kSuccess, this->plugin_.init(77, {3}, &context));
  EXPECT_EQ(kContexts ? 2 : 1, calls.inits);
  EXPECT_EQ(kContexts ? &some_object : nullptr, context);
  EXPECT_EQ(kContexts ? 77U : 0U, calls.comm_id);
  EXPECT_EQ(kContexts ? 3 : 0, calls.traffic_class);
  ASSERT_EQ(nccl::Result::kSuccess, this->plugin_.finalize(context));
  ASSERT_EQ(nccl::Result::kSuccess, this->plugin_.finalize(context));
  EXPECT_EQ(kContexts ? 2 : 0, calls.finalizes);
  EXPECT_EQ(context, calls.context);
  // After the last finalize, init calls the plugin again.
  ASSERT_EQ(nccl::Result::kSuccess, this->plugin_.init(77, {3}, &context));
  EXPECT_EQ(kContexts ? 3 : 2, calls.inits);
}

TYPED_TEST(EveryVersion, LogLine_ReachesCallback) {
  void* context = nullptr;
  ASSERT_EQ(nccl::Result::kSuccess, this->plugin_.init(1, {}, &context));
  ASSERT_EQ(1U, this->lines_.size());
  EXPECT_EQ("hello 42", this->lines_[0].text);
  EXPECT_EQ("file.cc", this->lines_[0].file);
  EXPECT_EQ(7, this->lines_[0].line);
  EXPECT_EQ(nccl::DebugLogLevel::kWarn, this->lines_[0].level);
}

TYPED_TEST(EveryVersion, LogLineWithoutFormatting_IsTheFormat) {
  set_line_formatting(false);
  void* context = nullptr;
  EXPECT_EQ(nccl::Result::kSuccess, this->plugin_.init(1, {}, &context));
  set_line_formatting(true);
  ASSERT_EQ(1U, this->lines_.size());
  EXPECT_EQ("hello %d", this->lines_[0].text);
}

TYPED_TEST(EveryVersion, MissingProperties_AreFilledAsNcclDoes) {
  constexpr int kVersion = TestFixture::kTested;
  Properties got;
  ASSERT_EQ(nccl::Result::kSuccess, this->plugin_.properties(2, &got));
  EXPECT_EQ("dev", got.name);
  EXPECT_EQ("", got.pci_path);
  EXPECT_EQ(1U, got.guid);
  EXPECT_EQ(3, got.ptr_support);
  EXPECT_EQ(4, got.speed);
  EXPECT_EQ(5, got.port);
  EXPECT_EQ(6.0F, got.latency);
  EXPECT_EQ(7, got.max_comms);
  EXPECT_EQ(8, got.max_recvs);
  EXPECT_EQ(kVersion >= 7 ? 9 : 0, got.device_version);
  EXPECT_EQ(kVersion >= 8 ? 1 : 0, got.reg_is_global);
  EXPECT_EQ(kVersion >= 9 ? 1 : 0, got.force_flush);
  EXPECT_EQ(kVersion >= 9 ? (std::vector<int>{4, 6}) : std::vector<int>{2}, got.members);
  EXPECT_EQ(kVersion >= 9 ? 10U : kMaxBytesBeforeV9, got.max_p2p_bytes);
  EXPECT_EQ(kVersion >= 9 ? 11U : kMaxCollBytesBeforeV9, got.max_coll_bytes);
  EXPECT_EQ(kVersion >= 11 ? 12 : 1, got.max_multi_request_size);
  EXPECT_EQ(kVersion >= 12 ? 13 : -1, got.rail_id);
  EXPECT_EQ(kVersion >= 12 ? 14 : -1, got.plane_id);
}

TYPED_TEST(EveryVersion, Connect_PassesConfigurationAndOffloadHandle) {
  constexpr int kVersion = TestFixture::kTested;
  char handle[nccl::kNetHandleMaxBytes];
  void* comm = nullptr;
  EXPECT_EQ(nccl::Result::kRemoteError, this->plugin_.connect(&some_object, 0, handle, &comm, {9}));
  EXPECT_EQ(kVersion == 10 ? 9 : 0, calls.traffic_class);
  EXPECT_EQ(kVersion >= 11 ? &some_object : nullptr, calls.context);
  EXPECT_EQ(kVersion >= 7, calls.offload_given);
}

TYPED_TEST(EveryVersion, SizeBeyondTable_IsRejected) {
  constexpr int kVersion = TestFixture::kTested;
  const std::size_t too_large = kMaxBytesBeforeV9 + 1;
  void* request = nullptr;
  EXPECT_EQ(nccl::Result::kSuccess, this->plugin_.isend(nullptr, nullptr, kMaxBytesBeforeV9, 0, nullptr, &request));
  EXPECT_EQ(kMaxBytesBeforeV9, calls.size);
  const nccl::Result expected = kVersion >= 9 ? nccl::Result::kSuccess : nccl::Result::kInvalidArgument;
  EXPECT_EQ(expected, this->plugin_.isend(nullptr, nullptr, too_large, 0, nullptr, &request));
  EXPECT_EQ(kVersion >= 9 ? too_large : kMaxBytesBeforeV9, calls.size);

  std::size_t sizes[2] = {1, too_large};
  EXPECT_EQ(expected, this->plugin_.irecv(nullptr, 2, nullptr, sizes, nullptr, nullptr, &request));
  EXPECT_EQ(kVersion >= 9 ? 2U : 0U, calls.sizes.size());

  void* mhandle = nullptr;
  const std::size_t beyond_int = std::size_t{1} << 31;
  EXPECT_EQ(nccl::Result::kSuccess, this->plugin_.reg_mr(nullptr, nullptr, beyond_int - 1, 1, &mhandle));
  EXPECT_EQ(beyond_int - 1, calls.size);
  EXPECT_EQ(kVersion >= 8 ? nccl::Result::kSuccess : nccl::Result::kInvalidArgument,
            this->plugin_.reg_mr(nullptr, nullptr, beyond_int, 1, &mhandle));
}

TYPED_TEST(EveryVersion, Irecv_PassesGroupAndRequestOnEntry) {
  std::size_t sizes[3] = {3, 0, 5};
  void* const optional = reinterpret_cast<void*>(nccl::kNetOptionalRecvCompletion);
  void* request = optional;
  ASSERT_EQ(nccl::Result::kSuccess, this->plugin_.irecv(nullptr, 3, nullptr, sizes, nullptr, nullptr, &request));
  EXPECT_EQ((std::vector<std::size_t>{3, 0, 5}), calls.sizes);
  EXPECT_EQ(optional, calls.request_on_entry);
}

TYPED_TEST(EveryVersion, EmptySlot_ReturnsInvalidUsage) {
  int device = 0;
  void* mhandle = nullptr;
  EXPECT_FALSE(this->plugin_.has_reg_mr_dmabuf());
  EXPECT_EQ(nccl::Result::kInvalidUsage, this->plugin_.reg_mr_dmabuf(nullptr, nullptr, 1, 1, 0, -1, &mhandle));
  EXPECT_EQ(nccl::Result::kInvalidUsage, this->plugin_.make_vdevice({0}, &device));
}

TYPED_TEST(EveryVersion, NetAttributes_ArePassedFromV11) {
  NetAttr attributes{};
  attributes.op = 5;
  const bool has = TestFixture::kTested >= 11;
  EXPECT_EQ(has, this->plugin_.has_set_net_attr());
  EXPECT_EQ(has ? nccl::Result::kSuccess : nccl::Result::kInvalidUsage,
            this->plugin_.set_net_attr(nullptr, attributes));
  EXPECT_EQ(has ? 5U : 0U, calls.size);
}

TEST(OpenPlugin, NoVersionGiven_OpensNewestTable) {
  const char* const path = std::getenv("SOCKET_PLUGIN");
  ASSERT_NE(nullptr, path);
  const Opened newest = open_plugin(path);
  ASSERT_NE(nullptr, newest.plugin) << newest.error;
  EXPECT_EQ(12, newest.plugin->api_version());
  EXPECT_STREQ("Socket-Test", newest.plugin->name());
  const Opened oldest = open_plugin(path, 6);
  ASSERT_NE(nullptr, oldest.plugin) << oldest.error;
  EXPECT_EQ(6, oldest.plugin->api_version());
}

// Meson puts the directory of the plugin into LD_LIBRARY_PATH.
TEST(OpenPlugin, NameOfAPlugin_IsFoundAsNcclFindsIt) {
  const Opened opened = open_plugin("socket-test");
  ASSERT_NE(nullptr, opened.plugin) << opened.error;
  EXPECT_STREQ("Socket-Test", opened.plugin->name());
  EXPECT_TRUE(opened.path.ends_with("/libnccl-net-socket-test.so")) << opened.path;
  EXPECT_EQ(std::getenv("SOCKET_PLUGIN"), open_plugin(std::getenv("SOCKET_PLUGIN")).path);
  const Opened missing = open_plugin("no-such");
  EXPECT_EQ(nullptr, missing.plugin);
  EXPECT_NE(std::string::npos, missing.error.find("libnccl-net-no-such.so")) << missing.error;
}

TEST(OpenPlugin, MissingFileOrTable_IsNamed) {
  const Opened no_table = open_plugin(std::getenv("SOCKET_PLUGIN"), 9);
  EXPECT_EQ(nullptr, no_table.plugin);
  EXPECT_NE(std::string::npos, no_table.error.find("ncclNetPlugin_v9")) << no_table.error;
  EXPECT_NE(std::string::npos, open_plugin("/does/not/exist.so").error.find("/does/not/exist.so"));
  EXPECT_NE(std::string::npos, open_plugin("libdl.so.2").error.find("any of"));
  EXPECT_EQ(nullptr, open_plugin("libdl.so.2", 13).plugin);
}

TEST(VerbsName, PrefixAndPortSuffixOfVerbatim_AreRemoved) {
  const auto name = [](const char* given, int port) {
    Properties properties;
    properties.name = given;
    properties.port = port;
    return verbs_name(properties);
  };
  EXPECT_EQ("mlx5_0", name("verbatim_mlx5_0", 1));
  EXPECT_EQ("mlx5_0", name("verbatim_mlx5_0_p2", 2));
  EXPECT_EQ("odd_p1", name("verbatim_odd_p1", 1));
  EXPECT_EQ("mlx5_0", name("mlx5_0", 1));
  EXPECT_EQ("other_p2", name("other_p2", 2));
}

}  // namespace
}  // namespace netapi
