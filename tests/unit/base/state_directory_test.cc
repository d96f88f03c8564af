// VERBATIM_STATE_DIR: which directories are used, and which sockets are removed.
#include "base/state_directory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <ctime>
#include <filesystem>
#include <string>

#include "base/unique_fd.h"
#include "support/scratch_directory.h"
#include "unit/support/log_capture.h"

namespace verbatim {
namespace {

class StateDirectory : public ::testing::Test {
 protected:
  // The warning after which the directory is not used.
  std::string refusal() {
    const LogCapture log;
    EXPECT_FALSE(make_state_directory(path_));
    return log.only_warning();
  }

  const ScratchDirectory scratch_;
  const std::string path_ = (scratch_.path() / "state").string();
};

UniqueFd listen_at(const std::string& path) {
  UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  EXPECT_EQ(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(::listen(listener.get(), 1), 0);
  return listener;
}

void make_old(const std::string& path) {
  const timespec times[2] = {{0, 0}, {0, 0}};
  EXPECT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

// The ID of a process that has ended.
pid_t ended_process() {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
  return child;
}

TEST_F(StateDirectory, Missing_IsMadeForItsUserOnly) {
  EXPECT_EQ(make_state_directory(path_), path_);
  struct stat made {};
  ASSERT_EQ(::stat(path_.c_str(), &made), 0);
  EXPECT_EQ(made.st_mode & 0777U, 0700U);
  EXPECT_EQ(make_state_directory(path_), path_);
}

TEST_F(StateDirectory, None_IsNoDirectory) {
  const LogCapture log;
  EXPECT_FALSE(make_state_directory(kNoStateDirectory));
  EXPECT_TRUE(log.warnings().empty());
}

TEST_F(StateDirectory, OthersHaveAccess_IsRefused) {
  for (const mode_t mode : {0710U, 0701U, 0755U, 01777U}) {
    std::filesystem::create_directory(path_);
    ASSERT_EQ(::chmod(path_.c_str(), mode), 0);
    EXPECT_NE(refusal().find("other users may access it"), std::string::npos);
  }
}

TEST_F(StateDirectory, SymbolicLinkOrFile_IsRefused) {
  const std::string real = (scratch_.path() / "real").string();
  ASSERT_EQ(make_state_directory(real), real);
  std::filesystem::create_directory_symlink(real, path_);
  EXPECT_NE(refusal().find("it is a symbolic link"), std::string::npos);
  std::filesystem::remove(path_);
  const UniqueFd socket = listen_at(path_);
  EXPECT_NE(refusal().find("it is not a directory"), std::string::npos);
}

TEST_F(StateDirectory, OfAnotherUser_IsRefused) {
  ASSERT_EQ(make_state_directory(path_), path_);
  EXPECT_NE(why_not_private(path_, ::geteuid() + 1).value_or("").find("it belongs to the user"), std::string::npos);
  if (::chown(path_.c_str(), 1, 1) != 0) GTEST_SKIP() << "only root can give a directory to another user";
  EXPECT_NE(refusal().find("it belongs to the user 1"), std::string::npos);
}

TEST_F(StateDirectory, CannotBeMade_IsNamed) {
  const LogCapture log;
  EXPECT_FALSE(make_state_directory(path_ + "/none/below"));
  EXPECT_NE(log.only_warning().find("mkdir: No such file or directory"), std::string::npos);
}

TEST_F(StateDirectory, SocketNames_AreOfTheProcess) {
  const std::optional<std::string> first = new_state_socket("d");
  const std::optional<std::string> second = new_state_socket("d");
  ASSERT_TRUE(first && second);
  EXPECT_NE(*first, *second);
  EXPECT_TRUE(first->starts_with("d/" + std::to_string(::getpid()) + "-"));
  EXPECT_TRUE(is_state_socket_name(first->substr(2)));
  for (const char* other : {"", "-00000000", "12", "12-0000000", "12-000000000", "12-0000000G", "x12-00000000", ".x"}) {
    EXPECT_FALSE(is_state_socket_name(other)) << other;
  }
}

// Only the old socket of a process that has ended is removed: a new one may be of a process that does not listen yet.
TEST_F(StateDirectory, DeadSockets_AreRemovedAndOthersStay) {
  ASSERT_EQ(make_state_directory(path_), path_);
  const std::string ended = path_ + "/" + std::to_string(ended_process());
  const std::string own = path_ + "/" + std::to_string(::getpid());
  const std::array all = {ended + "-00000000", ended + "-00000001", ended + "-00000002", own + "-00000000",
                          path_ + "/another-file"};
  const UniqueFd listens = listen_at(all[2]);  // as of a process in another PID namespace
  for (const std::size_t dead : {0U, 1U, 3U, 4U}) listen_at(all.at(dead));
  for (const std::size_t old : {0U, 2U, 3U, 4U}) make_old(all.at(old));
  EXPECT_TRUE(is_dead_socket(all[0]) && is_dead_socket(all[3]));
  EXPECT_FALSE(is_dead_socket(all[2]));
  remove_dead_sockets(path_);
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(std::filesystem::exists(all.at(i)), i != 0) << all.at(i);
}

}  // namespace
}  // namespace verbatim
