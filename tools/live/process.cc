#include "live/process.h"

#include <dirent.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>

#include "base/clock.h"
#include "base/state_directory.h"
#include "base/unique_fd.h"

namespace verbatim::live {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kSchema = 2;
constexpr std::size_t kMaxStateBytes = std::size_t{64} << 20;
constexpr std::size_t kMaxProcesses = 4096;  // of a directory

// One state that is being read.
struct Reader {
  std::string directory;
  std::string name;
  uid_t user = 0;
  UniqueFd socket = {};
  std::string text = {};
  std::string error = {};  // empty: none
  bool done = false;

  std::string path() const { return directory + "/" + name; }
  void end(const std::string& why) {
    error = why;
    done = true;
  }
};

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
    if (reader.text.size() > kMaxStateBytes) return reader.end("its state has no end");
  }
}

void read_all(std::vector<Reader>& readers, int timeout_ms) {
  const std::uint64_t deadline = monotonic_ns() + static_cast<std::uint64_t>(timeout_ms) * kNanosecondsPerMillisecond;
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
      if (polled[i].revents != 0) advance(*open[i]);
    }
  }
  for (Reader& reader : readers) {
    if (!reader.done) reader.end("it does not answer: the process is stopped, or its monitor thread waits");
  }
}

void open_directory(const std::string& directory, std::vector<Reader>& readers, Listing& listing) {
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
  if (user == ::geteuid()) remove_dead_sockets(directory);
  std::size_t count = 0;
  while (const dirent* entry = ::readdir(list.get())) {
    if (!is_state_socket_name(entry->d_name)) continue;
    if (++count > kMaxProcesses) {
      listing.problems.push_back({directory, "it has more than " + std::to_string(kMaxProcesses) + " sockets"});
      return;
    }
    if (std::optional<Reader> reader = connect_to(directory, entry->d_name, user)) {
      readers.push_back(std::move(*reader));
    }
  }
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
  std::vector<std::string> directories{own};
  if (::geteuid() != 0) return directories;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(own.parent_path(), error)) {
    const std::optional<uid_t> user = user_of_default(entry.path().filename());
    // Anyone can make a directory with the name of another user's.
    if (user && entry.path() != own && !why_not_private(entry.path(), *user)) directories.push_back(entry.path());
  }
  return directories;
}

Process parse_process(const std::string& text) {
  Json json = Json::parse(text, nullptr, false);
  if (json.is_discarded()) {
    // Names of hosts and programs can be bytes that are not UTF-8.
    std::string ascii = text;
    std::replace_if(
        ascii.begin(), ascii.end(), [](char c) { return static_cast<unsigned char>(c) > 126; }, '?');
    json = Json::parse(ascii);
  }
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
  for (const std::string& directory : directories) open_directory(directory, readers, listing);
  read_all(readers, timeout_ms);
  for (const Reader& reader : readers) {
    if (!reader.error.empty()) {
      listing.problems.push_back({reader.path(), reader.error});
      continue;
    }
    if (reader.text.empty()) continue;  // it is ending, or has more readers than it serves at a time
    try {
      Process process = parse_process(reader.text);
      process.name = reader.name;
      process.user = reader.user;
      listing.processes.push_back(std::move(process));
    } catch (const std::exception& error) {
      listing.problems.push_back({reader.path(), error.what()});
    }
  }
  std::sort(listing.processes.begin(), listing.processes.end(),
            [](const Process& a, const Process& b) { return a.name < b.name; });
  return listing;
}

}  // namespace verbatim::live
