#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "support/log_lines.h"
#include "unit/support/fake_verbs.h"
#include "unit/support/log_capture.h"
#include "verbs/dynamic_library.h"
#include "verbs/verbs.h"

namespace verbatim {
namespace {

TEST(VerbsLibrary, NamedLibrary_IsOpened) {
  const LogCapture log;
  const Result<std::unique_ptr<const Verbs>> verbs = Verbs::load(FAKE_VERBS);
  ASSERT_TRUE(verbs);
  EXPECT_EQ((*verbs)->fork_init(), 4711);
  const Result<std::unique_ptr<const Verbs>> again = Verbs::load(FAKE_VERBS);
  ASSERT_TRUE(again);
  EXPECT_EQ((*again)->fork_init, (*verbs)->fork_init);
  EXPECT_TRUE(log.warnings().empty());
}

TEST(VerbsLibrary, OptionalVerbMissing_IsNull) {
  const Result<std::unique_ptr<const Verbs>> verbs = Verbs::load(FAKE_VERBS);
  ASSERT_TRUE(verbs);
  EXPECT_EQ((*verbs)->query_gid_ex, nullptr);
  EXPECT_EQ((*verbs)->reg_mr_iova2, nullptr);
  EXPECT_EQ((*verbs)->reg_dmabuf_mr, nullptr);
  EXPECT_EQ((*verbs)->query_ece, nullptr);
  EXPECT_EQ((*verbs)->set_ece, nullptr);
}

TEST(VerbsLibrary, LibraryMissing_GivesOneWarning) {
  const LogCapture log;
  const Result<std::unique_ptr<const Verbs>> verbs = Verbs::load("/nonexistent/libibverbs.so");
  ASSERT_FALSE(verbs);
  EXPECT_EQ(verbs.error().kind, ErrorKind::kUsage);
  test::expect_log_lines(log.warnings());
}

TEST(VerbsLibrary, RequiredVerbMissing_IsNamed) {
  const LogCapture log;
  ASSERT_FALSE(Verbs::load(FAKE_MLX5_NO));
  test::expect_log_lines({test::replaced(log.only_warning(), FAKE_MLX5_NO, "LIBRARY")});
}

// Opens the rdma-core of this host: each symbol must be bound in its newest version.
TEST(VerbsLibrary, RdmaCore_BindsNewestSymbolVersions) {
  const DynamicLibrary library = DynamicLibrary::open({"libibverbs.so.1"});
  if (!library) GTEST_SKIP() << "rdma-core is not installed";
  const Result<std::unique_ptr<const Verbs>> verbs = Verbs::load("");
  ASSERT_TRUE(verbs);
  void* handle = dlopen("libibverbs.so.1", RTLD_NOW);
  EXPECT_EQ(reinterpret_cast<void*>((*verbs)->get_device_list), dlvsym(handle, "ibv_get_device_list", "IBVERBS_1.1"));
  EXPECT_NE(reinterpret_cast<void*>((*verbs)->get_device_list), dlvsym(handle, "ibv_get_device_list", "IBVERBS_1.0"));
  EXPECT_NE((*verbs)->reg_mr_iova2, nullptr);
  EXPECT_STREQ((*verbs)->wc_status_str(IBV_WC_RETRY_EXC_ERR), "transport retry counter exceeded");
  dlclose(handle);
}

TEST(DynamicLibrary, SeveralNames_FirstThatOpensIsUsed) {
  const DynamicLibrary library = DynamicLibrary::open({"/nonexistent/a.so", FAKE_VERBS});
  ASSERT_TRUE(library);
  EXPECT_EQ(library.name(), FAKE_VERBS);
  EXPECT_TRUE(library.load_error().empty());
}

TEST(DynamicLibrary, NoneOpens_GivesEveryReason) {
  const DynamicLibrary library = DynamicLibrary::open({"/nonexistent/a.so", "/nonexistent/b.so"});
  ASSERT_FALSE(library);
  EXPECT_NE(library.load_error().find("/nonexistent/a.so: cannot open"), std::string::npos);
  EXPECT_NE(library.load_error().find("; /nonexistent/b.so: cannot open"), std::string::npos);
}

TEST(DynamicLibrary, MissingSymbol_LeavesFunctionUnchanged) {
  const DynamicLibrary library = DynamicLibrary::open({FAKE_VERBS});
  ASSERT_TRUE(library);
  int (*function)() = nullptr;
  EXPECT_FALSE(library.bind("no_such_function", "NONE_1.0", function));
  EXPECT_EQ(function, nullptr);
  EXPECT_TRUE(library.bind("verbatim_fake_library", "NONE_1.0", function));
  EXPECT_EQ(function(), 1);
}

class PortAttributes : public testing::TestWithParam<bool> {};

TEST_P(PortAttributes, ExtendedOrOldContext_AttributesAreRead) {
  FakeVerbs fake;
  FakeDevice& device = fake.add_device("mlx5_0");
  device.extended = GetParam();
  FakePort& port = device.add_roce_port();
  port.attributes.port_cap_flags2 = 0x1234;
  ibv_context* context = fake.table.open_device(&device.device);

  const Result<ibv_port_attr> attributes = fake.table.port_attributes(context, 1);
  ASSERT_TRUE(attributes);
  EXPECT_EQ(attributes->state, IBV_PORT_ACTIVE);
  EXPECT_EQ(attributes->link_layer, IBV_LINK_LAYER_ETHERNET);
  EXPECT_EQ(attributes->max_msg_sz, 1U << 30);
  EXPECT_EQ(attributes->port_cap_flags2, GetParam() ? 0x1234 : 0);  // ibv_query_port's old layout has no such field

  EXPECT_EQ(fake.table.port_attributes(context, 2).error().sys_errno, EINVAL);
  fake.table.close_device(context);
}

INSTANTIATE_TEST_SUITE_P(Both, PortAttributes, testing::Bool());

}  // namespace
}  // namespace verbatim
