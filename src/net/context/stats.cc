#include "net/context/stats.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <climits>
#include <cstdio>
#include <cstring>

#include "base/clock.h"
#include "base/json.h"
#include "base/log.h"
#include "base/unique_fd.h"

namespace verbatim {
namespace {

std::string hexadecimal(std::uint64_t number) {
  char text[2 * sizeof number + 1];
  std::snprintf(text, sizeof text, "%016" PRIx64, number);
  return text;
}

std::string count_fields(const TransferCounts& counts, bool sends) {
  std::string fields = json_field("messages", counts.messages) + "," + json_field("bytes", counts.bytes);
  if (sends) return fields;
  std::string groups;
  for (const std::uint64_t receives : counts.groups) groups += (groups.empty() ? "" : ",") + std::to_string(receives);
  return fields + "," + json_field("optional", counts.optional) + ",\"receives_by_members\":[" + groups + "]";
}

std::string total(std::span<const ConnectionStats> connections, bool sends) {
  TransferCounts sum;
  std::uint64_t number = 0;
  for (const ConnectionStats& connection : connections) {
    if (connection.sends != sends) continue;
    const TransferCounts& counts = connection.transfer_counts;
    ++number;
    sum.messages += counts.messages;
    sum.bytes += counts.bytes;
    sum.optional += counts.optional;
    for (std::size_t i = 0; i < sum.groups.size(); ++i) sum.groups[i] += counts.groups[i];
  }
  return json_object({json_field("connections", number), count_fields(sum, sends)});
}

std::string outages_json(std::span<const LaneOutage> outages) {
  std::string all;
  for (const LaneOutage& outage : outages) {
    const std::string end = outage.end_ns == 0 ? "null" : std::to_string(outage.end_ns / kNanosecondsPerMillisecond);
    all += (all.empty() ? "" : ",") +
           json_object({json_field("lane", outage.lane + 1),  // as in the log
                        json_field("begin_ms", outage.begin_ns / kNanosecondsPerMillisecond), "\"end_ms\":" + end});
  }
  return "\"outages\":[" + all + "]";
}

Status write_and_rename(const std::string& unfinished, const std::string& path, const std::string& json) {
  ::unlink(unfinished.c_str());  // of an earlier process with this ID, or of another user: it is not written to
  UniqueFd file(
      ::open(unfinished.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, S_IRUSR | S_IWUSR));
  if (!file) return system_error("open", errno);
  for (std::size_t done = 0; done < json.size();) {
    const ssize_t count = ::write(file.get(), json.data() + done, json.size() - done);
    if (count < 0) return system_error("write", errno);
    done += static_cast<std::size_t>(count);
  }
  if (::close(file.release()) != 0) return system_error("close", errno);
  if (std::rename(unfinished.c_str(), path.c_str()) != 0) return system_error("rename", errno);
  return {};
}

}  // namespace

std::string stats_json(const std::string& host, std::uint64_t process_id, std::span<const ConnectionStats> connections,
                       std::span<const RmaStats> rma) {
  RmaCounts completed;
  for (const RmaStats& stats : rma) completed.add(stats.completed);
  std::string out =
      "{\"schema\":1," + json_field("host", host) + "," + json_field("pid", static_cast<std::uint64_t>(::getpid())) +
      "," + json_field("process", hexadecimal(process_id)) + ",\n\"totals\":{\"send\":" + total(connections, true) +
      ",\n\"recv\":" + total(connections, false) + ",\n\"rma\":" + completed.json() + "},\n\"connections\":[";
  const char* separator = "\n";
  for (const ConnectionStats& connection : connections) {
    out += separator +
           json_object({json_field("direction", connection.sends ? "send" : "recv"),
                        json_field("device", connection.device), json_field("peer", connection.peer_host),
                        json_field("peer_process", hexadecimal(connection.peer_process)),
                        json_field("qps", connection.qps), json_field("lanes", connection.lanes),
                        json_field("lanes_down", connection.lanes_down), outages_json(connection.outages),
                        json_field("completion", connection.atomic ? "atomic" : "imm"),
                        count_fields(connection.transfer_counts, connection.sends), latency_json(connection.latency)});
    separator = ",\n";
  }
  out += "\n],\n\"rma\":[";
  separator = "\n";
  for (const RmaStats& stats : rma) {
    out += separator + stats.json;
    separator = ",\n";
  }
  return out + "\n]}\n";
}

std::string read_host_name() {
  char name[HOST_NAME_MAX + 1] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "unknown host";
}

std::string expand_path(const std::string& path, const std::string& host) {
  std::string out;
  for (std::size_t i = 0; i < path.size(); ++i) {
    const std::string two = path.substr(i, 2);
    const bool expands = two == "%p" || two == "%h";
    out += !expands ? std::string(1, path[i]) : two == "%p" ? std::to_string(::getpid()) : host;
    if (expands) ++i;
  }
  return out;
}

Status write_stats(const std::string& path, const std::string& json) {
  const std::string unfinished = path + "." + std::to_string(::getpid()) + ".new";
  const Status written = write_and_rename(unfinished, path, json);
  if (!written) ::unlink(unfinished.c_str());
  return written;
}

void warn_of_stats_path(const std::string& path) {
  const std::string directory = path.find('/') != std::string::npos ? path.substr(0, path.rfind('/') + 1) : ".";
  struct stat status = {};
  const bool is_directory = ::lstat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
  if (path.empty() || (!is_directory && ::access(directory.c_str(), W_OK | X_OK) == 0)) return;
  VERBATIM_WARN(
      "writing %s (VERBATIM_STATS) would fail now: %s. Next: name a file in a directory that this process can write",
      path.c_str(), std::strerror(is_directory ? EISDIR : errno));
}

}  // namespace verbatim
