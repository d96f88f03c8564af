#include "verbs/port_history.h"

#include <dirent.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace verbatim {
namespace {

constexpr std::uint64_t kRecentNs = kNanosecondsPerSecond;

// Counters that indicate failures, in the order in which describe_changes lists them. All others follow by name.
constexpr std::string_view kRelevantCounters[] = {"local_ack_timeout_err",
                                                  "retry_exceeded_err",
                                                  "link_downed",
                                                  "packet_seq_err",
                                                  "out_of_sequence",
                                                  "implied_nak_seq_err",
                                                  "rnr_nak_retry_err",
                                                  "retry_rnr_exceeded_err",
                                                  "out_of_buffer",
                                                  "req_remote_access_errors",
                                                  "resp_remote_access_errors",
                                                  "resp_local_length_error",
                                                  "np_cnp_sent",
                                                  "rp_cnp_handled",
                                                  "port_rcv_errors",
                                                  "port_xmit_discards"};

// True for counters that grow with the amount of traffic even if nothing fails.
bool is_traffic(std::string_view name) {
  const auto has = [&](std::string_view part) { return name.find(part) != std::string_view::npos; };
  for (const std::string_view part : {"lifespan", "_data", "_packets", "_pkts", "_bytes", "_requests", "_wait",
                                      "rdma_sends", "rdma_recvs", "ack_deferred", "active_"}) {
    if (!has(part)) continue;
    // Counters of congestion marks, duplicates, drops and errors have such names too, but they indicate problems.
    return !has("ecn") && !has("discard") && !has("duplicate") && !has("drop") && !has("err");
  }
  return false;
}

void read_directory(const std::string& path, PortCounters& counters) {
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(path.c_str()), ::closedir);
  if (directory == nullptr) return;
  while (const dirent* entry = ::readdir(directory.get())) {
    if (entry->d_name[0] == '.' || is_traffic(entry->d_name)) continue;
    std::uint64_t value = 0;
    const std::string name = path + "/" + entry->d_name;
    const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(name.c_str(), "re"), std::fclose);  // e: O_CLOEXEC
    if (file != nullptr && std::fscanf(file.get(), "%" SCNu64, &value) == 1) counters.emplace(entry->d_name, value);
  }
}

std::ptrdiff_t rank(const std::string& name) {
  return std::find(std::begin(kRelevantCounters), std::end(kRelevantCounters), name) - std::begin(kRelevantCounters);
}

}  // namespace

PortCounters read_port_counters(const std::string& sysfs_path, std::uint8_t port_num) {
  PortCounters counters;
  if (sysfs_path.empty()) return counters;
  const std::string port = sysfs_path + "/ports/" + std::to_string(port_num);
  read_directory(port + "/hw_counters", counters);
  read_directory(port + "/counters", counters);
  return counters;
}

std::string describe_changes(const PortCounters& before, const PortCounters& now, std::size_t max) {
  std::vector<std::pair<std::string, std::uint64_t>> changes;
  for (const auto& [name, value] : now) {
    const auto known = before.find(name);
    if (known != before.end() && value > known->second) changes.emplace_back(name, value - known->second);
  }
  std::stable_sort(changes.begin(), changes.end(),
                   [](const auto& a, const auto& b) { return rank(a.first) < rank(b.first); });
  std::string text;
  for (std::size_t i = 0; i < std::min(changes.size(), max); ++i) {
    text.append(i == 0 ? "" : ", ").append(changes[i].first).append(" +").append(std::to_string(changes[i].second));
  }
  if (changes.size() > max) text.append(" and ").append(std::to_string(changes.size() - max)).append(" more");
  return text;
}

bool PortHistory::link_down(std::uint8_t port_num, std::uint64_t now_ns) {
  const MutexLock lock(mutex_);
  PortRecord& port = ports_[port_num];
  if (port.downs != 0 && port.outages[(port.downs - 1) % kOutages].end_ns == 0) return false;
  port.outages[port.downs++ % kOutages] = {now_ns, 0};
  return true;
}

std::uint64_t PortHistory::link_up(std::uint8_t port_num, std::uint64_t now_ns) {
  const MutexLock lock(mutex_);
  const auto port = ports_.find(port_num);
  if (port == ports_.end() || port->second.downs == 0) return 0;
  Outage& last = port->second.outages[(port->second.downs - 1) % kOutages];
  if (last.end_ns != 0) return 0;
  last.end_ns = now_ns;
  return now_ns - last.begin_ns;
}

LinkRecord PortHistory::link_since(std::uint8_t port_num, std::uint64_t since_ns, std::uint64_t now_ns) const {
  LinkRecord record;
  const MutexLock lock(mutex_);
  const auto found = ports_.find(port_num);
  if (found == ports_.end() || found->second.downs == 0) return record;
  const PortRecord& port = found->second;
  const Outage& last = port.outages[(port.downs - 1) % kOutages];
  record.down = last.end_ns == 0;
  for (std::size_t i = 0; i < std::min<std::size_t>(port.downs, kOutages); ++i) {
    const Outage& outage = port.outages[i];
    if (outage.end_ns == 0 || outage.end_ns >= since_ns) ++record.downs;
  }
  if (since_ns == 0) record.downs = port.downs;  // outages that are no longer kept count too
  if (record.downs == 0) return record;
  record.changed_ns = record.down ? last.begin_ns : last.end_ns;
  record.outage_ns = (record.down ? now_ns : last.end_ns) - last.begin_ns;
  return record;
}

std::shared_ptr<const PortCounters> PortHistory::recent_counters(std::uint8_t port_num) {
  const std::uint64_t now = monotonic_ns();
  {
    const MutexLock lock(mutex_);
    const PortRecord& port = ports_[port_num];
    if (port.counters != nullptr && now - port.counters_ns < kRecentNs) return port.counters;
  }
  auto fresh = std::make_shared<const PortCounters>(counters(port_num));
  const MutexLock lock(mutex_);
  PortRecord& port = ports_[port_num];
  port.counters = fresh;
  port.counters_ns = now;
  return fresh;
}

}  // namespace verbatim
