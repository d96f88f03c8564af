//: in isolated

// The files that settings name: what lies at their paths is not followed and not waited for, and must be this user's.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "support/child.h"
#include "support/scratch_directory.h"
#include "table_pair.h"

namespace conformance {
namespace {

class WrittenFiles : public ::testing::Test {
 protected:
  void SetUp() override { std::ofstream(victim_) << "precious"; }

  static std::string read(const std::string& path) {
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }
  static mode_t mode_of(const std::string& path) {
    struct stat status {};
    EXPECT_EQ(::lstat(path.c_str(), &status), 0) << path;
    return status.st_mode;
  }
  // A connection with a message, whose process ends it.
  static void connect_once() {
    std::vector<std::uint8_t> source(64);
    std::vector<std::uint8_t> target(64);
    TablePair pair(0);
    ASSERT_TRUE(pair);
    void* const send_handle = pair.reg(pair.send_comm, source);
    EXPECT_TRUE(pair.exchange(source, send_handle, target, pair.reg(pair.recv_comm, target)));
  }

  // Devices are opened, whether or not that succeeds.
  static std::string init(const verbatim::test::Variables& variables, nccl::Result expected) {
    return verbatim::test::check_in_child(variables, [expected] {
      ::alarm(20);  // ends a process that waits for a file
      netapi::set_log_callback([](const netapi::LogLine& line) { std::fprintf(stderr, "%s\n", line.text.c_str()); });
      const netapi::Opened opened = netapi::open_plugin(std::getenv("CONFORMANCE_PLUGIN"), 12);
      ASSERT_NE(opened.plugin, nullptr) << opened.error;
      void* context = nullptr;
      EXPECT_EQ(opened.plugin->init(1, {}, &context), expected);
      if (context != nullptr) opened.plugin->finalize(context);
    });
  }

  const verbatim::ScratchDirectory directory_;
  const std::string path_ = (directory_.path() / "file").string();
  const std::string victim_ = (directory_.path() / "victim").string();
};

TEST_F(WrittenFiles, UnfinishedStatisticsAreALink_ItIsNotFollowed) {
  verbatim::test::check_in_child({{"VERBATIM_STATS", path_}}, [this] {
    ASSERT_EQ(::symlink(victim_.c_str(), (path_ + "." + std::to_string(::getpid()) + ".new").c_str()), 0);
    connect_once();
  });
  EXPECT_EQ(read(victim_), "precious");
  EXPECT_NE(read(path_).find("\"messages\""), std::string::npos);
  EXPECT_EQ(mode_of(path_), S_IFREG | S_IRUSR | S_IWUSR);
}

TEST_F(WrittenFiles, QpDumpIsALink_ItIsNotFollowed) {
  ASSERT_EQ(::symlink(victim_.c_str(), path_.c_str()), 0);
  const std::string output = verbatim::test::check_in_child({{"VERBATIM_QP_DUMP", path_}}, connect_once);
  EXPECT_EQ(read(victim_), "precious");
  const std::string warning = "VERBATIM_QP_DUMP: writing " + path_ + " failed";
  EXPECT_NE(output.find(warning), std::string::npos) << output;
  EXPECT_EQ(output.find(warning), output.rfind(warning)) << "a warning for each end:\n" << output;
}

TEST_F(WrittenFiles, QpDumpIsNew_OnlyItsUserReadsIt) {
  verbatim::test::check_in_child({{"VERBATIM_QP_DUMP", path_}}, connect_once);
  EXPECT_EQ(mode_of(path_), S_IFREG | S_IRUSR | S_IWUSR);
}

// A FIFO that nobody reads.
TEST_F(WrittenFiles, QpDumpIsAFifo_ConnectDoesNotWait) {
  ASSERT_EQ(::mkfifo(path_.c_str(), S_IRUSR | S_IWUSR), 0);
  const std::string output = verbatim::test::check_in_child({{"VERBATIM_QP_DUMP", path_}}, [] {
    ::alarm(20);
    connect_once();
  });
  EXPECT_NE(output.find("VERBATIM_QP_DUMP: writing " + path_ + " failed"), std::string::npos) << output;
}

// Somebody else's file, or this user's under a name that somebody else has made.
TEST_F(WrittenFiles, QpDumpHasAnotherName_NothingIsAppended) {
  ASSERT_EQ(::link(victim_.c_str(), path_.c_str()), 0);
  const std::string output = verbatim::test::check_in_child({{"VERBATIM_QP_DUMP", path_}}, connect_once);
  EXPECT_EQ(read(victim_), "precious");
  EXPECT_NE(output.find(path_ + " failed: it is not a file of this user with one name"), std::string::npos) << output;
}

TEST_F(WrittenFiles, QpDumpIsAFifoWithAReader_NothingIsWritten) {
  ASSERT_EQ(::mkfifo(path_.c_str(), S_IRUSR | S_IWUSR), 0);
  const verbatim::UniqueFd reader(::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  verbatim::test::check_in_child({{"VERBATIM_QP_DUMP", path_}}, connect_once);
  char byte = 0;
  EXPECT_EQ(::read(reader.get(), &byte, 1), 0);
}

TEST_F(WrittenFiles, DeviceStatisticsAreALink_ItIsNotFollowed) {
  ASSERT_EQ(::symlink(victim_.c_str(), path_.c_str()), 0);
  const std::string output = init({{"SOFTVERBS_STATS", path_}}, nccl::Result::kSuccess);
  EXPECT_EQ(read(victim_), "precious");
  EXPECT_NE(output.find("SOFTVERBS_STATS=" + path_ + " cannot be written"), std::string::npos) << output;
}

TEST_F(WrittenFiles, DeviceStatisticsAreNew_OnlyTheirUserReadsThem) {
  init({{"SOFTVERBS_STATS", path_}}, nccl::Result::kSuccess);
  EXPECT_EQ(mode_of(path_), S_IFREG | S_IRUSR | S_IWUSR);
}

// FIFOs that nobody reads.
TEST_F(WrittenFiles, DeviceFilesAreFifos_ProcessDoesNotWait) {
  ASSERT_EQ(::mkfifo(path_.c_str(), S_IRUSR | S_IWUSR), 0);
  init({{"SOFTVERBS_STATS", path_}}, nccl::Result::kSuccess);
  init({{"SOFTVERBS_TRACE", path_}, {"SOFTVERBS_LINK_GBPS", "100"}}, nccl::Result::kInvalidUsage);
}

TEST_F(WrittenFiles, TraceIsALink_ItIsNotFollowed) {
  ASSERT_EQ(::symlink(victim_.c_str(), path_.c_str()), 0);
  const std::string output =
      init({{"SOFTVERBS_TRACE", path_}, {"SOFTVERBS_LINK_GBPS", "100"}}, nccl::Result::kInvalidUsage);
  EXPECT_EQ(read(victim_), "precious");
  EXPECT_NE(output.find("SOFTVERBS_TRACE=" + path_ + " cannot be written"), std::string::npos) << output;
}

}  // namespace
}  // namespace conformance
