// VERBATIM_STATE_SOCKET: what a program that connects to the socket reads.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "connected_comms.h"
#include "net/context/stats.h"
#include "support/state_reader.h"
#include "unit/support/log_capture.h"

namespace verbatim {
namespace {

class StateSocketTest : public ::testing::Test {
 protected:
  void TearDown() override { ::unsetenv("VERBATIM_STATE_SOCKET"); }

  const std::string path_ = testing::TempDir() + "state-" + std::to_string(::getpid());
};

// While an object of this class lives, the process gets no new descriptors.
class Shortage {
 public:
  Shortage() {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    const UniqueFd next(::dup(STDERR_FILENO));
    const rlimit none = {static_cast<rlim_t>(next.get()), before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  }
  ~Shortage() { EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before_), 0); }
  Shortage(const Shortage&) = delete;
  Shortage& operator=(const Shortage&) = delete;

 private:
  rlimit before_{};
};

TEST_F(StateSocketTest, ContextOpen_StateIsReadable) {
  const std::string path = testing::TempDir() + "state-%p-%h";
  const std::string begin = testing::TempDir() + "state-" + std::to_string(::getpid()) + "-";
  ::setenv("VERBATIM_STATE_SOCKET", path.c_str(), 1);
  std::string found;
  {
    ConnectedComms link;
    found = expand_path(path, link.context().comm_settings().host_name);
    ASSERT_EQ(found.rfind(begin, 0), 0U);
    struct stat status {};
    ASSERT_EQ(::stat(found.c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0600U);
    EXPECT_NE(read_state(found).find("\"connections\":[\n],\n\"rma\":[]}"), std::string::npos) << read_state(found);
    ASSERT_NO_FATAL_FAILURE(link.connect());
    Buffers buffers(link, 8);
    ASSERT_NE(buffers.irecv(8), nullptr);
    const std::string state = read_state(found);
    std::printf("%s", state.c_str());
    for (const char* part : {"\"schema\":2", "\"direction\":\"send\"", "\"direction\":\"recv\"",
                             "\"messages\":1,\"bytes\":0,\"outstanding\":1", "\"state\":\"open\",\"error\":null",
                             "\"qp_state\":\"RTS\""}) {
      EXPECT_NE(state.find(part), std::string::npos) << part;
    }
    link.recv().abort();
    EXPECT_TRUE(link.fails(link.recv()));
    EXPECT_NE(read_state(found).find("\"state\":\"failed\",\"error\":\"receiving 8 bytes failed"), std::string::npos);
  }
  EXPECT_NE(::access(found.c_str(), F_OK), 0);
}

// A process that was killed leaves its socket file behind.
TEST_F(StateSocketTest, SocketOfDeadProcess_IsReplacedAndOfLiveOneIsKept) {
  const sockaddr_un address = address_of(path_);
  UniqueFd holder(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::bind(holder.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::listen(holder.get(), 1), 0);
  ::setenv("VERBATIM_STATE_SOCKET", path_.c_str(), 1);
  {
    const LogCapture log;
    const ConnectedComms link;
    EXPECT_NE(log.only_warning().find("VERBATIM_STATE_SOCKET"), std::string::npos);
  }
  EXPECT_EQ(::access(path_.c_str(), F_OK), 0);
  holder.reset();
  {
    const ConnectedComms link;
    EXPECT_NE(read_state(path_).find("\"schema\":2"), std::string::npos);
  }
  EXPECT_NE(::access(path_.c_str(), F_OK), 0);
}

TEST_F(StateSocketTest, OutOfDescriptors_RecoversLater) {
  ::setenv("VERBATIM_STATE_SOCKET", path_.c_str(), 1);
  const LogCapture log;
  const ConnectedComms link;
  UniqueFd reader;
  {
    reader = UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const Shortage shortage;
    const sockaddr_un address = address_of(path_);
    ASSERT_EQ(::connect(reader.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    const std::string line =
        "the state cannot be read at " + path_ + " (VERBATIM_STATE_SOCKET) for the moment: Too many open files";
    EXPECT_TRUE(ConnectedComms::eventually([&] {
      const std::vector<std::string> infos = log.infos();
      return std::find(infos.begin(), infos.end(), line) != infos.end();
    }));
  }
  EXPECT_NE(read_all(reader).find("\"schema\":2"), std::string::npos);  // it waited in the listen backlog
  EXPECT_NE(read_state(path_).find("\"schema\":2"), std::string::npos);
  EXPECT_TRUE(log.warnings().empty());
}

}  // namespace
}  // namespace verbatim
