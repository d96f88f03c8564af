#include "net/context/stats.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "base/json.h"

namespace verbatim {
namespace {

void add(TransferCounts& sum, const TransferCounts& transfer_counts) {
  sum.messages += transfer_counts.messages;
  sum.bytes += transfer_counts.bytes;
  sum.optional += transfer_counts.optional;
  for (std::size_t i = 0; i < sum.groups.size(); ++i) sum.groups[i] += transfer_counts.groups[i];
}

std::string count_fields(const TransferCounts& transfer_counts, bool sends) {
  std::string out = json_field("messages", transfer_counts.messages) + "," + json_field("bytes", transfer_counts.bytes);
  if (sends) return out;
  out += "," + json_field("optional", transfer_counts.optional) + ",\"receives_by_members\":[";
  for (std::size_t i = 0; i < transfer_counts.groups.size(); ++i) {
    out += (i != 0 ? "," : "") + std::to_string(transfer_counts.groups[i]);
  }
  return out + "]";
}

std::string total(std::span<const ConnectionStats> connections, bool sends) {
  TransferCounts sum;
  std::uint64_t count = 0;
  for (const ConnectionStats& connection : connections) {
    if (connection.sends != sends) continue;
    ++count;
    add(sum, connection.transfer_counts);
  }
  return "{" + json_field("connections", count) + "," + count_fields(sum, sends) + "}";
}

}  // namespace

std::string stats_json(const std::string& host, std::span<const ConnectionStats> connections) {
  std::string out = "{\"version\":1,\"host\":" + json_text(host) + "," +
                    json_field("pid", static_cast<std::uint64_t>(::getpid())) +
                    ",\n\"totals\":{\"send\":" + total(connections, true) + ",\n\"recv\":" + total(connections, false) +
                    "},\n\"connections\":[";
  const char* separator = "\n";
  for (const ConnectionStats& connection : connections) {
    char process[2 * sizeof connection.peer_process + 1];
    std::snprintf(process, sizeof process, "%016llx", static_cast<unsigned long long>(connection.peer_process));
    out += separator;
    out += std::string("{\"direction\":") + (connection.sends ? "\"send\"" : "\"recv\"") +
           ",\"device\":" + json_text(connection.device) + ",\"peer\":" + json_text(connection.peer_host) +
           ",\"peer_process\":" + json_text(process) + "," + json_field("qps", connection.qps) +
           ",\"completion\":" + (connection.atomic ? "\"atomic\"" : "\"imm\"") + "," +
           count_fields(connection.transfer_counts, connection.sends) + "}";
    separator = ",\n";
  }
  return out + "\n]}\n";
}

std::string stats_path(const std::string& path, const std::string& host) {
  std::string out;
  for (std::size_t i = 0; i < path.size(); ++i) {
    const std::string two = path.substr(i, 2);
    if (two == "%p") {
      out += std::to_string(::getpid());
      ++i;
    } else if (two == "%h") {
      out += host;
      ++i;
    } else {
      out += path[i];
    }
  }
  return out;
}

namespace {

Status write_and_rename(const std::string& unfinished, const std::string& path, const std::string& json) {
  std::FILE* file = std::fopen(unfinished.c_str(), "we");
  if (file == nullptr) return system_error("open", errno);
  const bool written = std::fwrite(json.data(), 1, json.size(), file) == json.size();
  const int write_errno = errno;
  if (std::fclose(file) != 0) return system_error("close", errno);
  if (!written) return system_error("write", write_errno);
  if (std::rename(unfinished.c_str(), path.c_str()) != 0) return system_error("rename", errno);
  return {};
}

}  // namespace

Status write_stats(const std::string& path, const std::string& json) {
  const std::string unfinished = path + "." + std::to_string(::getpid()) + ".new";
  const Status written = write_and_rename(unfinished, path, json);
  if (!written) ::unlink(unfinished.c_str());
  return written;
}

}  // namespace verbatim
