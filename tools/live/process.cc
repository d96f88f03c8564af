#include "live/process.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <utility>

#include "base/clock.h"
#include "base/state_directory.h"
#include "base/unique_fd.h"

namespace verbatim::live {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kSchema = 2;
constexpr std::size_t kMaxOwnStateBytes = std::size_t{64} << 20;
constexpr std::size_t kMaxDirectories = 256;
constexpr std::size_t kMaxEntries = 4096;  // of a directory
constexpr std::size_t kMaxSockets = 256;   // of a directory, which is of one user
constexpr int kMaxDepth = 16;              // more than a state of the plugin has
constexpr std::size_t kMaxReasonBytes = 256;
// Root reads what other users have written, so what they can cost is limited: the sockets of all of them, the bytes of
// their states, and the time of the CPU in which these are parsed. A state has about 1,400 bytes for each connection,
// and up to 6,000 with latencies.
constexpr std::size_t kMaxOtherSockets = 4096;
constexpr std::size_t kMaxStateBytes = std::size_t{4} << 20;
constexpr std::size_t kMaxUserBytes = std::size_t{32} << 20;
constexpr std::size_t kMaxOtherBytes = std::size_t{64} << 20;
constexpr std::uint64_t kMaxUserParseNs = 2 * kNanosecondsPerSecond;
constexpr std::uint64_t kMaxOtherParseNs = 4 * kNanosecondsPerSecond;

// One state that is being read.
struct Reader {
  std::string directory;
  std::string name;
  uid_t user = 0;
  std::uint64_t made_ns = 0;  // its socket
  UniqueFd socket = {};
  std::string text = {};
  std::string error = {};  // empty: none
  bool done = false;
  bool dropped = false;                  // its user or all users have too much
  std::size_t bytes_of_user_so_far = 0;  // with older processes and this one; 0 for this user

  bool is_own() const { return user == ::geteuid(); }
  std::string path() const { return directory + "/" + name; }
  void end(const std::string& why) {
    error = why;
    done = true;
    socket.reset();
    text = {};
  }
};

std::uint64_t nanoseconds_of(const timespec& time) {
  return static_cast<std::uint64_t>(time.tv_sec) * kNanosecondsPerSecond + static_cast<std::uint64_t>(time.tv_nsec);
}

std::uint64_t thread_cpu_ns() {
  timespec spent{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &spent);
  return nanoseconds_of(spent);
}

// For the sockets of several users: the default of 1,024 descriptors is low so that select() works, which is not used.
void allow_many_descriptors() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

std::string error_text(const char* operation, int number) {
  return std::string(operation) + ": " + std::strerror(number);
}

// The user of a directory "/tmp/verbatim-1000".
std::optional<uid_t> user_of_default(const std::string& name) {
  constexpr std::string_view kPrefix = "verbatim-";
  uid_t user = 0;
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const char* const end = name.data() + name.size();
  const auto [parsed, error] = std::from_chars(name.data() + kPrefix.size(), end, user);
  return error == std::errc() && parsed == end ? std::optional(user) : std::nullopt;
}

// nullopt: the process of the socket has ended.
std::optional<Reader> connect_to(const std::string& directory, const std::string& name, uid_t user) {
  Reader reader{directory, name, user};
  const std::string path = reader.path();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    reader.end("its path is too long");
    return reader;
  }
  path.copy(address.sun_path, path.size());
  reader.socket = UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!reader.socket) {
    reader.end(error_text("socket", errno));
    return reader;
  }
  if (::connect(reader.socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    if (errno == ENOENT || errno == ECONNREFUSED) return std::nullopt;
    reader.end(error_text("connect", errno));
    return reader;
  }
  // Whoever may write to the directory can put a link to another socket there.
  ucred peer{};
  socklen_t bytes = sizeof peer;
  if (::getsockopt(reader.socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0 || peer.uid != user) {
    reader.end("the process behind it is of another user");
  }
  return reader;
}

// Reads what has come.
void advance(Reader& reader) {
  const std::size_t most = reader.is_own() ? kMaxOwnStateBytes : kMaxStateBytes;
  char some[65536];
  while (true) {
    const ssize_t count = ::read(reader.socket.get(), some, sizeof some);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return;
    if (count < 0) return reader.end(error_text("read", errno));
    if (count == 0) {
      reader.done = true;
      return;
    }
    reader.text.append(some, static_cast<std::size_t>(count));
    if (reader.text.size() > most) {
      return reader.end("its state is larger than " + std::to_string(most >> 20) + " MiB");
    }
  }
}

// What has been read of other users.
class Received {
 public:
  void count(uid_t user, std::size_t before, std::size_t now) {
    bytes_[user] += now - before;
    all_ += now - before;
  }
  // While it is too much, the newest process of the user who has most is dropped. So a user loses nothing of an equal
  // share of kMaxOtherBytes, and what it keeps does not depend on the order in which processes answer. `readers` are in
  // the order of their age.
  void limit(std::vector<Reader>& readers) {
    while (true) {
      const auto most = std::max_element(bytes_.begin(), bytes_.end(),
                                         [](const auto& a, const auto& b) { return a.second < b.second; });
      if (most == bytes_.end() || (most->second <= kMaxUserBytes && all_ <= kMaxOtherBytes)) return;
      const auto newest = std::find_if(readers.rbegin(), readers.rend(), [&](const Reader& reader) {
        return reader.user == most->first && !reader.dropped;
      });
      count(most->first, newest->text.size(), 0);
      newest->end("");
      newest->dropped = true;
    }
  }

 private:
  std::map<uid_t, std::size_t> bytes_;
  std::size_t all_ = 0;
};

void read_all(std::vector<Reader>& readers, int timeout_ms) {
  const std::uint64_t deadline = monotonic_ns() + static_cast<std::uint64_t>(timeout_ms) * kNanosecondsPerMillisecond;
  Received received;
  while (true) {
    std::vector<pollfd> polled;
    std::vector<Reader*> open;
    for (Reader& reader : readers) {
      if (reader.done) continue;
      polled.push_back({reader.socket.get(), POLLIN, 0});
      open.push_back(&reader);
    }
    const std::uint64_t now = monotonic_ns();
    if (open.empty()) return;
    if (now >= deadline) break;
    const int left_ms = static_cast<int>((deadline - now) / kNanosecondsPerMillisecond) + 1;
    if (::poll(polled.data(), polled.size(), left_ms) < 0 && errno != EINTR) break;
    for (std::size_t i = 0; i < open.size(); ++i) {
      Reader& reader = *open[i];
      if (polled[i].revents == 0 || reader.done) continue;
      const std::size_t before = reader.text.size();
      advance(reader);
      if (reader.is_own()) continue;
      received.count(reader.user, before, reader.text.size());
      received.limit(readers);
    }
  }
  for (Reader& reader : readers) {
    if (!reader.done) reader.end("it does not answer: the process is stopped, or its monitor thread waits");
  }
}

void open_directory(const std::string& directory, std::size_t max_sockets, std::vector<Reader>& readers,
                    Listing& listing) {
  struct stat found {};
  if (::lstat(directory.c_str(), &found) != 0) {
    if (errno != ENOENT) listing.problems.push_back({directory, error_text("lstat", errno)});
    return;  // no process of the user has run yet
  }
  // Root reads the directories of other users.
  const uid_t user = ::geteuid() == 0 ? found.st_uid : ::geteuid();
  if (const std::optional<std::string> why = why_not_private(directory, user)) {
    listing.problems.push_back({directory, *why});
    return;
  }
  const std::unique_ptr<DIR, int (*)(DIR*)> list(::opendir(directory.c_str()), ::closedir);
  if (list == nullptr) {
    listing.problems.push_back({directory, error_text("opendir", errno)});
    return;
  }
  if (user == ::geteuid()) {
    remove_dead_sockets(directory);
    max_sockets = kMaxSockets;
  }
  std::size_t entries = 0;
  std::vector<std::pair<std::uint64_t, std::string>> sockets;  // by when they were made
  while (const dirent* entry = ::readdir(list.get())) {
    if (++entries > kMaxEntries) {
      listing.problems.push_back({directory, "it has more than " + std::to_string(kMaxEntries) + " files"});
      return;
    }
    if (!is_state_socket_name(entry->d_name)) continue;
    if (::fstatat(::dirfd(list.get()), entry->d_name, &found, AT_SYMLINK_NOFOLLOW) != 0) continue;  // it has ended
    sockets.emplace_back(nanoseconds_of(found.st_mtim), entry->d_name);
  }
  std::sort(sockets.begin(), sockets.end());
  std::size_t count = 0;
  for (const auto& [made_ns, name] : sockets) {
    std::optional<Reader> reader = connect_to(directory, name, user);
    if (!reader) continue;
    if (++count > max_sockets) {
      listing.problems.push_back(
          {directory, "it has more than " + std::to_string(max_sockets) + " processes; the newest are not read"});
      return;
    }
    reader->made_ns = made_ns;
    readers.push_back(std::move(*reader));
  }
}

// The order in which states are parsed: own ones, and then as many bytes of each user as of the others. In the order of
// their age so far.
void sort_by_share(std::vector<Reader>& readers) {
  std::map<uid_t, std::size_t> so_far;
  for (Reader& reader : readers) {
    if (!reader.is_own()) reader.bytes_of_user_so_far = so_far[reader.user] += reader.text.size();
  }
  std::stable_sort(readers.begin(), readers.end(),
                   [](const Reader& a, const Reader& b) { return a.bytes_of_user_so_far < b.bytes_of_user_so_far; });
}

// One for all users of whom processes were dropped. nullopt: of none.
std::optional<Problem> problem_of_dropped(const std::vector<Reader>& readers) {
  std::map<uid_t, std::string> users;  // and their directories
  for (const Reader& reader : readers) {
    if (reader.dropped) users.emplace(reader.user, reader.directory);
  }
  if (users.empty()) return std::nullopt;
  std::string why =
      "the newest processes of some users are not read, because their states are too long (at most 32 MiB and 2 s of a "
      "user, 64 MiB and 4 s of all): ";
  for (const auto& [user, directory] : users) {
    why += (user == users.begin()->first ? "user " : ", user ") + std::to_string(user);
  }
  return Problem{users.begin()->second, why};
}

// Before it is parsed: a callback of the parser, which knows the depth, makes its time grow with the square of a list.
bool is_too_deep(const std::string& text) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string && c == '\\') {
      ++i;
    } else if (c == '"') {
      in_string = !in_string;
    } else if (!in_string && (c == '[' || c == '{')) {
      if (++depth > kMaxDepth) return true;
    } else if (!in_string && (c == ']' || c == '}')) {
      --depth;
    }
  }
  return false;
}

// A state has integers only. Another process can write any number, and the conversion of a large one to an integer is
// undefined. `json` is not deep.
bool has_other_numbers(const Json& json) {
  return json.is_number_float() || (json.is_structured() && std::any_of(json.begin(), json.end(), has_other_numbers));
}

Connection parse_connection(const Json& json) {
  const Json& local = json.at("local");
  const auto text = [&](const char* name) { return json.at(name).is_null() ? "" : json.at(name).get<std::string>(); };
  Connection connection;
  json.at("number").get_to(connection.number);
  connection.sends = json.at("direction") == "send";
  json.at("device").get_to(connection.device);
  json.at("peer_host").get_to(connection.peer_host);
  json.at("peer_pid").get_to(connection.peer_pid);
  json.at("state").get_to(connection.state);
  json.at("lanes").get_to(connection.lanes);
  json.at("lanes_down").get_to(connection.lanes_down);
  connection.error = text("error");
  connection.stall_cause = text("stall_cause");
  local.at("messages").get_to(connection.messages);
  local.at("bytes").get_to(connection.bytes);
  local.at("outstanding").get_to(connection.outstanding);
  local.at("no_progress_ms").get_to(connection.no_progress_ms);
  if (connection.sends) {
    local.at("send_refused").get_to(connection.send_refused);
    local.at("cts_ready").get_to(connection.cts_ready);
    local.at("tested").get_to(connection.tested);
  } else {
    local.at("flushes").get_to(connection.flushes);
  }
  if (const auto latencies = json.find("latency"); latencies != json.end() && !latencies->is_null()) {
    for (const auto& [name, buckets] : latencies->items()) {
      for (const Json& bucket : buckets) connection.latencies[name][bucket.at(0)] += bucket.at(1).get<std::uint64_t>();
    }
  }
  return connection;
}

RmaQueue parse_rma_queue(const Json& json) {
  const Json& completed = json.at("completed");
  RmaQueue queue;
  json.at("context").get_to(queue.context);
  json.at("peer").get_to(queue.peer);
  json.at("peer_host").get_to(queue.peer_host);
  completed.at("puts").get_to(queue.completed.puts);
  completed.at("signals").get_to(queue.completed.signals);
  completed.at("gets").get_to(queue.completed.gets);
  completed.at("flushes").get_to(queue.completed.flushes);
  completed.at("put_bytes").get_to(queue.completed.put_bytes);
  completed.at("get_bytes").get_to(queue.completed.get_bytes);
  json.at("outstanding").get_to(queue.outstanding);
  json.at("no_progress_ms").get_to(queue.no_progress_ms);
  json.at("stalled").get_to(queue.stalled);
  return queue;
}

RmaSet parse_rma_set(const Json& json) {
  RmaSet set;
  json.at("number").get_to(set.number);
  json.at("rank").get_to(set.rank);
  json.at("ranks").get_to(set.ranks);
  json.at("device").get_to(set.device);
  json.at("failed").get_to(set.failed);
  if (!json.at("error").is_null()) json.at("error").get_to(set.error);
  for (const Json& queue : json.at("queues")) set.queues.push_back(parse_rma_queue(queue));
  return set;
}

}  // namespace

std::uint64_t quantile_ns(const LatencyBuckets& buckets, double part) {
  double all = 0;
  for (const auto& [below_ns, count] : buckets) all += static_cast<double>(count);
  double so_far = 0;
  for (const auto& [below_ns, count] : buckets) {
    so_far += static_cast<double>(count);
    if (so_far >= part * all) return below_ns;
  }
  return 0;
}

std::vector<std::string> default_directories() {
  if (const char* const set = std::getenv("VERBATIM_STATE_DIR"); set != nullptr && *set != '\0') {
    if (std::string_view(set) == kNoStateDirectory) {
      throw std::runtime_error("VERBATIM_STATE_DIR is none. Next: unset it, or name a directory with --dir");
    }
    return {set};
  }
  const std::filesystem::path own = default_state_directory(::geteuid());
  if (::geteuid() != 0) return {own};
  std::map<uid_t, std::string> by_user{{0, own}};
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(own.parent_path(), error)) {
    const std::optional<uid_t> user = user_of_default(entry.path().filename());
    // Anyone can make a directory with the name of another user's.
    if (!user || *user == 0 || why_not_private(entry.path(), *user)) continue;
    by_user[*user] = entry.path();
  }
  std::vector<std::string> directories;
  for (auto& [user, directory] : by_user) directories.push_back(std::move(directory));
  return directories;
}

Process parse_process(const std::string& text) {
  if (is_too_deep(text)) throw std::runtime_error("its state is nested too deeply");
  Json json = Json::parse(text, nullptr, false);
  if (json.is_discarded()) {
    // Names of hosts and programs can be bytes that are not UTF-8.
    std::string ascii = text;
    std::replace_if(
        ascii.begin(), ascii.end(), [](char c) { return static_cast<unsigned char>(c) > 126; }, '?');
    json = Json::parse(ascii);
  }
  if (has_other_numbers(json)) throw std::runtime_error("its state has a number that is not an integer");
  if (json.at("schema") != kSchema) {
    throw std::runtime_error("its state has the schema " + json.at("schema").dump() + ", this program knows " +
                             std::to_string(kSchema));
  }
  Process process;
  json.at("host").get_to(process.host);
  json.at("pid").get_to(process.pid);
  json.at("program").get_to(process.program);
  json.at("time_ns").get_to(process.time_ns);
  for (const Json& connection : json.at("connections")) process.connections.push_back(parse_connection(connection));
  // Processes with a plugin of the same schema that has no RMA have no such field.
  if (const auto rma = json.find("rma"); rma != json.end()) {
    for (const Json& set : *rma) process.rma.push_back(parse_rma_set(set));
  }
  return process;
}

Listing read_processes(const std::vector<std::string>& directories, int timeout_ms) {
  Listing listing;
  std::vector<Reader> readers;
  if (directories.size() > 1) allow_many_descriptors();
  // A user can have many others, in namespaces.
  const std::size_t used = std::min(directories.size(), kMaxDirectories);
  if (used < directories.size()) {
    listing.problems.push_back({directories[used], "there are more than " + std::to_string(kMaxDirectories) +
                                                       " directories; this one and those after it are not read"});
  }
  for (std::size_t i = 0; i < used; ++i) {
    open_directory(directories[i], std::min(kMaxSockets, kMaxOtherSockets / used), readers, listing);
  }
  std::stable_sort(readers.begin(), readers.end(),
                   [](const Reader& a, const Reader& b) { return a.made_ns < b.made_ns; });
  read_all(readers, timeout_ms);
  sort_by_share(readers);
  std::map<uid_t, std::uint64_t> parse_ns;
  std::uint64_t others_ns = 0;
  for (Reader& reader : readers) {
    if (!reader.error.empty()) {
      listing.problems.push_back({reader.path(), reader.error});
      continue;
    }
    if (reader.text.empty()) continue;  // it is ending, or has more readers than it serves at a time
    if (!reader.is_own() && (parse_ns[reader.user] > kMaxUserParseNs || others_ns > kMaxOtherParseNs)) {
      reader.dropped = true;
      continue;
    }
    const std::uint64_t begin = thread_cpu_ns();
    try {
      Process process = parse_process(reader.text);
      process.name = reader.name;
      process.user = reader.user;
      listing.processes.push_back(std::move(process));
    } catch (const std::exception& error) {
      // Its text can be a part of the state.
      listing.problems.push_back({reader.path(), std::string(error.what()).substr(0, kMaxReasonBytes)});
    }
    const std::uint64_t spent = thread_cpu_ns() - begin;
    parse_ns[reader.user] += spent;
    if (!reader.is_own()) others_ns += spent;
    reader.text = {};
  }
  if (std::optional<Problem> problem = problem_of_dropped(readers)) listing.problems.push_back(std::move(*problem));
  std::sort(listing.processes.begin(), listing.processes.end(),
            [](const Process& a, const Process& b) { return a.name < b.name; });
  return listing;
}

}  // namespace verbatim::live
