//: in softverbs_parts_test

// Files in /dev/shm belong to one user: files that other users may have created or can access are refused.
#include "softverbs/host/shm_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace verbatim::softverbs {
namespace {

class ShmFile : public testing::Test {
 protected:
  ~ShmFile() override { ::unlink(path.c_str()); }

  const std::string path = "/dev/shm/verbatim-shm-file-test-" + std::to_string(::getpid());
};

TEST_F(ShmFile, NewFile_IsAccessibleToItsOwnerOnly) {
  const mode_t before = ::umask(0);
  const Result<UniqueFd> fd = open_shm(path, OpenMode::kCreateNew);
  ::umask(before);
  ASSERT_TRUE(fd);
  struct stat info {};
  ASSERT_EQ(::fstat(fd->get(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777U, 0600U);
  EXPECT_EQ(info.st_uid, ::geteuid());
  EXPECT_TRUE(open_shm(path, OpenMode::kExisting));
  EXPECT_TRUE(open_shm(path, OpenMode::kCreateOrOpen));
  EXPECT_FALSE(open_shm(path, OpenMode::kCreateNew));
}

TEST_F(ShmFile, FileOpenToOthers_IsRefused) {
  for (const mode_t mode : {0640U, 0620U, 0604U, 0602U, 0666U}) {
    { ASSERT_TRUE(open_shm(path, OpenMode::kCreateOrOpen)); }
    ASSERT_EQ(::chmod(path.c_str(), mode), 0);
    const Result<UniqueFd> fd = open_shm(path, OpenMode::kExisting);
    ASSERT_FALSE(fd) << mode;
    EXPECT_EQ(fd.error().sys_errno, EACCES);
    EXPECT_FALSE(open_shm(path, OpenMode::kCreateOrOpen));
    ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  }
}

TEST_F(ShmFile, FileOfAnotherUser_IsRefused) {
  { ASSERT_TRUE(open_shm(path, OpenMode::kCreateNew)); }
  constexpr uid_t kOtherUser = 12345;
  if (::chown(path.c_str(), kOtherUser, static_cast<gid_t>(-1)) != 0)
    GTEST_SKIP() << "only root can change the owner of a file";
  const Result<UniqueFd> fd = open_shm(path, OpenMode::kCreateOrOpen);
  ASSERT_FALSE(fd);
  EXPECT_EQ(fd.error().sys_errno, EACCES);
}

TEST_F(ShmFile, SymbolicLink_IsRefused) {
  ASSERT_EQ(::symlink("/etc/hostname", path.c_str()), 0);
  EXPECT_FALSE(open_shm(path, OpenMode::kExisting));
  EXPECT_FALSE(open_shm(path, OpenMode::kCreateOrOpen));
}

}  // namespace
}  // namespace verbatim::softverbs
