// Reads, lists and resolves the files of the devices with the functions of libc that take a path, as programs do.
// files_probe calls DEVICE    prints the functions whose answer is wrong
// files_probe threads DEVICE  reads a file in several threads while others fork children that read it too
#include <dirent.h>
#include <fcntl.h>
#include <glob.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

std::atomic<bool> wrong{false};

#define EXPECT(condition)                                 \
  do {                                                    \
    if (!(condition)) {                                   \
      printf("line %d: %s (%m)\n", __LINE__, #condition); \
      wrong = true;                                       \
    }                                                     \
  } while (0)

constexpr const char* kState = "4: ACTIVE\n";

bool has_state(int fd) {
  char text[32] = "";
  const ssize_t length = read(fd, text, sizeof text - 1);
  if (fd >= 0) close(fd);
  return length > 0 && strcmp(text, kState) == 0;
}

bool file_has_state(FILE* file) {
  char text[32] = "";
  if (file == nullptr) return false;
  const bool found = fgets(text, sizeof text, file) != nullptr && strcmp(text, kState) == 0;
  fclose(file);
  return found;
}

bool is_node(const struct stat& info, unsigned number) {
  return S_ISCHR(info.st_mode) && major(info.st_rdev) == 231 && minor(info.st_rdev) == 192 + number;
}

bool lists(DIR* directory, const char* name) {
  bool found = false;
  if (directory == nullptr) return false;
  while (const dirent* entry = readdir(directory)) found = found || strcmp(entry->d_name, name) == 0;
  closedir(directory);
  return found;
}

void check_calls(unsigned number) {
  char name[32];
  char device[64];
  char port[128];
  char state[160];
  char node[64];
  char text[PATH_MAX];
  char other[PATH_MAX];
  struct stat info {};
  snprintf(name, sizeof name, "softverbs%u", number);
  snprintf(device, sizeof device, "/sys/class/infiniband/%s", name);
  snprintf(port, sizeof port, "%s/ports/1", device);
  snprintf(state, sizeof state, "%s/state", port);
  snprintf(node, sizeof node, "/dev/infiniband/uverbs%u", number);

  EXPECT(has_state(open(state, O_RDONLY)));
  EXPECT(has_state(open64(state, O_RDONLY | O_CLOEXEC)));
  EXPECT(has_state(openat(AT_FDCWD, state, O_RDONLY)));
  EXPECT(has_state(openat64(AT_FDCWD, state, O_RDONLY)));
  EXPECT(file_has_state(fopen(state, "r")));
  EXPECT(file_has_state(fopen64(state, "re")));
  snprintf(text, sizeof text, "//sys/./class//infiniband/%s/ports/1/../1/state", name);
  EXPECT(has_state(open(text, O_RDONLY)));
  EXPECT(open(state, O_RDWR) == -1 && errno == EACCES);
  EXPECT(fopen(state, "w") == nullptr && errno == EACCES);
  EXPECT(open(state, O_RDONLY | O_DIRECTORY) == -1 && errno == ENOTDIR);
  EXPECT(open(node, O_RDWR | O_DIRECTORY) == -1 && errno == ENOTDIR);
  EXPECT(open(state, O_RDONLY | O_CREAT | O_EXCL, 0600) == -1 && errno == EEXIST);
  EXPECT(has_state(open(state, O_RDONLY | O_CREAT, 0600)));
  snprintf(text, sizeof text, "%s/node_type", device);
  close(open(text, O_RDONLY | O_TRUNC));
  EXPECT(stat(text, &info) == 0 && info.st_size > 0);
  EXPECT(file_has_state(freopen(state, "r", fopen("/dev/null", "r"))));
  EXPECT(file_has_state(freopen64(state, "r", fopen("/dev/null", "r"))));
  snprintf(text, sizeof text, "%s/none", port);
  EXPECT(open(text, O_RDONLY) == -1 && errno == ENOENT);
  EXPECT(open(text, O_RDWR) == -1 && errno == ENOENT);
  EXPECT(open(text, O_RDWR | O_CREAT, 0600) == -1 && errno == EACCES);
  EXPECT(fopen(text, "r+") == nullptr && errno == ENOENT);
  snprintf(text, sizeof text, "%s/gid_attrs/types/7", port);
  EXPECT(open(text, O_RDONLY) == -1 && errno == EINVAL);

  const int fd = open(port, O_RDONLY | O_DIRECTORY);
  EXPECT(fd >= 0);
  EXPECT(has_state(openat(fd, "state", O_RDONLY)));
  EXPECT(fstatat(fd, "state", &info, 0) == 0 && S_ISREG(info.st_mode));
  EXPECT(faccessat(fd, "state", R_OK, 0) == 0);
  EXPECT(lists(fdopendir(fd), "gid_attrs"));

  EXPECT(stat(state, &info) == 0 && S_ISREG(info.st_mode));
  EXPECT(stat(device, &info) == 0 && S_ISDIR(info.st_mode));
  EXPECT(lstat(device, &info) == 0 && S_ISLNK(info.st_mode));
  EXPECT(stat(node, &info) == 0 && is_node(info, number));
  EXPECT(lstat(node, &info) == 0 && is_node(info, number));
  EXPECT(fstatat(AT_FDCWD, node, &info, AT_SYMLINK_NOFOLLOW) == 0 && is_node(info, number));
  struct stat64 info64 {};
  EXPECT(stat64(node, &info64) == 0 && S_ISCHR(info64.st_mode));
  EXPECT(lstat64(node, &info64) == 0 && S_ISCHR(info64.st_mode));
  EXPECT(fstatat64(AT_FDCWD, node, &info64, 0) == 0 && S_ISCHR(info64.st_mode));
  struct statx extended {};
  EXPECT(statx(AT_FDCWD, node, AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, &extended) == 0 && S_ISCHR(extended.stx_mode) &&
         extended.stx_rdev_minor == 192 + number);
  EXPECT(stat("/dev/infiniband/uverbs77", &info) == -1 && errno == ENOENT);

  EXPECT(access(node, R_OK | W_OK) == 0);
  EXPECT(euidaccess(node, R_OK | W_OK) == 0);
  EXPECT(eaccess(state, R_OK) == 0);
  EXPECT(faccessat(AT_FDCWD, device, F_OK, 0) == 0);
  const int opened = open(node, O_RDWR | O_CLOEXEC);
  EXPECT(opened >= 0 && fstat(opened, &info) == 0 && S_ISCHR(info.st_mode));
  close(opened);

  ssize_t length = readlink(device, text, sizeof text);
  EXPECT(length > 0 && strncmp(text, "../../devices/pci", 17) == 0);
  EXPECT(readlinkat(AT_FDCWD, device, text, sizeof text) == length);
  const int here = open(device, O_RDONLY | O_DIRECTORY);
  snprintf(other, sizeof other, "/proc/self/fd/%d", here);
  length = readlink(other, text, sizeof text);
  EXPECT(length > 17 && strncmp(text, "/sys/devices/pci", 16) == 0);
  EXPECT(readlink(other, text, static_cast<size_t>(length)) == length);
  EXPECT(readlink(other, text, 16) == 16 && strncmp(text, "/sys/devices/pci", 16) == 0);
  close(here);
  EXPECT(readlink(node, text, sizeof text) == -1 && errno == EINVAL);
  EXPECT(realpath(node, text) == text && strcmp(text, node) == 0);
  snprintf(other, sizeof other, "%s/device", device);
  EXPECT(realpath(other, text) == text && strncmp(text, "/sys/devices/pci", 16) == 0);
  char* resolved = canonicalize_file_name(other);
  EXPECT(resolved != nullptr && strcmp(resolved, text) == 0);
  free(resolved);
  resolved = realpath(other, nullptr);
  EXPECT(resolved != nullptr && strcmp(resolved, text) == 0);
  free(resolved);
  EXPECT(realpath("/dev/infiniband/uverbs77", text) == nullptr && errno == ENOENT);

  EXPECT(lists(opendir("/sys/class/infiniband"), name));
  EXPECT(lists(opendir("/sys/class/infiniband_verbs/"), strrchr(node, '/') + 1));
  EXPECT(lists(opendir("/dev/infiniband"), strrchr(node, '/') + 1));
  EXPECT(opendir("/sys/class/infiniband/none") == nullptr && errno == ENOENT);
  dirent** names = nullptr;
  int count = scandir("/sys/class/infiniband", &names, nullptr, alphasort);
  EXPECT(count > 2);
  while (count > 0) free(names[--count]);
  count = scandir("/dev/infiniband", &names, nullptr, alphasort);
  EXPECT(count > 2 && names[count - 1]->d_type == DT_CHR);
  while (count > 0) free(names[--count]);
  glob_t found{};
  snprintf(text, sizeof text, "/sys/class/infiniband/*%u/ports/?/sta*e", number);
  EXPECT(glob(text, 0, nullptr, &found) == 0 && found.gl_pathc == 1 && strcmp(found.gl_pathv[0], state) == 0);
  globfree(&found);

  EXPECT(getcwd(other, sizeof other) != nullptr);
  EXPECT(chdir(port) == 0);
  EXPECT(has_state(open("state", O_RDONLY)));
  EXPECT(getcwd(text, sizeof text) != nullptr && strncmp(text, "/sys/devices/pci", 16) == 0);
  resolved = get_current_dir_name();
  EXPECT(resolved != nullptr && strncmp(resolved, "/sys/", 5) == 0);
  free(resolved);
  EXPECT(getcwd(text, strlen(text) + 1) == text);
  EXPECT(getcwd(text, strlen(text)) == nullptr && errno == ERANGE);
  resolved = getcwd(nullptr, 0);
  EXPECT(resolved != nullptr && strncmp(resolved, "/sys/devices/pci", 16) == 0);
  free(resolved);
  EXPECT(has_state(open("../1/state", O_RDONLY)));
  // A child of vfork() has a working directory of its own.
  EXPECT(chdir("/dev/infiniband") == 0);
  const pid_t child = vfork();
  if (child == 0) _exit(chdir("/") == 0 ? 0 : 1);
  EXPECT(child > 0 && waitpid(child, nullptr, 0) == child);
  EXPECT(stat(strrchr(node, '/') + 1, &info) == 0 && is_node(info, number));
  EXPECT(chdir(other) == 0);
  EXPECT(open("state", O_RDONLY) == -1);

  // From a directory outside of the tree, and out of the tree.
  const int top = open("/", O_RDONLY | O_DIRECTORY);
  EXPECT(has_state(openat(top, state + 1, O_RDONLY)));
  EXPECT(fstatat(top, node + 1, &info, AT_SYMLINK_NOFOLLOW) == 0 && is_node(info, number));
  close(top);
  EXPECT(chdir("/sys/class/net") == 0);
  EXPECT(lists(opendir("../infiniband"), name));
  EXPECT(chdir("/sys/class") == 0);
  EXPECT(lists(opendir("infiniband"), name));
  EXPECT(chdir("infiniband") == 0 && chdir("..") == 0);
  EXPECT(stat("net", &info) == 0 && S_ISDIR(info.st_mode));
  EXPECT(stat("/sys/class/infiniband/../net", &info) == 0 && S_ISDIR(info.st_mode));
  EXPECT(stat("/sys/class/infiniband/../infiniband/../../bus/pci", &info) == stat("/sys/bus/pci", &info));
  EXPECT(stat("/dev/infiniband/../null", &info) == 0 && S_ISCHR(info.st_mode));
  EXPECT(stat("/dev/infiniband/../infiniband/none", &info) == -1 && errno == ENOENT);
  EXPECT(chdir(other) == 0);

  /* Other files are those of the system. */
  EXPECT(stat("/sys/class", &info) == 0);
  EXPECT(stat("/sys/class/infiniband_none", &info) == -1 && errno == ENOENT);
  EXPECT(realpath("/dev/null", text) == text && strcmp(text, "/dev/null") == 0);
  const int temporary = open("/tmp", O_TMPFILE | O_RDWR, 0640);
  EXPECT(temporary < 0 || (fstat(temporary, &info) == 0 && (info.st_mode & 0640) == 0640));
}

constexpr int kThreads = 4;
constexpr int kRounds = 50;

void read_often(const std::string& path) {
  for (int round = 0; round < kRounds; ++round) {
    if (!has_state(open(path.c_str(), O_RDONLY))) wrong = true;
  }
}

void fork_often(const std::string& path) {
  for (int round = 0; round < kRounds / 5; ++round) {
    const pid_t child = fork();
    if (child == 0) _exit(has_state(open(path.c_str(), O_RDONLY)) ? 0 : 1);
    int status = 1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) wrong = true;
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) return 2;
  const auto number = static_cast<unsigned>(std::atoi(arguments[2]));
  if (strcmp(arguments[1], "calls") == 0) {
    check_calls(number);
  } else {
    const std::string path = "/sys/class/infiniband/softverbs" + std::to_string(number) + "/ports/1/state";
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back(read_often, path);
      threads.emplace_back(fork_often, path);
    }
    for (std::thread& thread : threads) thread.join();
  }
  std::puts(wrong ? "wrong" : "right");
  return wrong ? 1 : 0;
}
