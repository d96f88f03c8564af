#include "net/diagnose/path_facts.h"

#include <cstdio>
#include <iterator>
#include <string_view>

#include "base/clock.h"
#include "verbs/gid.h"

namespace verbatim {
namespace {

constexpr std::uint64_t kTimeoutUnitNs = 4096;

std::string bytes_of(ibv_mtu mtu) {
  return std::to_string(128U << static_cast<unsigned>(mtu));
}

std::string perftest(const PathFacts& facts, const PathEnd& end) {
  return "ib_write_bw -d " + end.device + " -i " + std::to_string(end.port) +
         (facts.roce ? " -x " + std::to_string(end.gid_index) : "") + " -m " + bytes_of(facts.mtu);
}

std::string describe_end(const PathEnd& end) {
  return end.host + (end.host.empty() ? "" : " ") + end.device + ":" + std::to_string(end.port) + " GID " +
         std::to_string(end.gid_index) + " " + to_string(end.gid) + " QP " + std::to_string(end.qp);
}

}  // namespace

std::string quoted(const std::string& command) {
  return "'" + command + "'";
}

std::string to_duration(std::uint64_t ns) {
  struct Unit {
    std::uint64_t seconds;
    const char* name;
  };
  constexpr Unit kUnits[] = {{86400, " d"}, {3600, " h"}, {60, " min"}, {1, " s"}};
  const std::uint64_t seconds = ns / kNanosecondsPerSecond;
  for (std::size_t i = 0; i + 1 < std::size(kUnits); ++i) {
    if (seconds < kUnits[i].seconds) continue;
    return std::to_string(seconds / kUnits[i].seconds) + kUnits[i].name + " " +
           std::to_string(seconds % kUnits[i].seconds / kUnits[i + 1].seconds) + kUnits[i + 1].name;
  }
  const std::uint64_t unit_ns = seconds != 0 ? kNanosecondsPerSecond : kNanosecondsPerMillisecond;
  char text[32];
  std::snprintf(text, sizeof text, "%.3g %s", static_cast<double>(ns) / static_cast<double>(unit_ns),
                seconds != 0 ? "s" : "ms");
  return text;
}

std::string to_seconds(std::uint64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(ns) / static_cast<double>(kNanosecondsPerSecond));
  return text;
}

std::string describe_path(const PathFacts& facts) {
  std::string text = describe_end(facts.local);
  if (!facts.remote) return text;
  text += " to " + describe_end(*facts.remote) + ", MTU " + bytes_of(facts.mtu);
  if (facts.local.mtu != facts.remote->mtu) {
    text += " (local " + bytes_of(facts.local.mtu) + ", peer " + bytes_of(facts.remote->mtu) + ")";
  }
  return text + ", TC " + std::to_string(facts.traffic_class) + ", SL " + std::to_string(facts.service_level);
}

std::string describe_path_history(const PathFacts& facts) {
  if (facts.age_ns == 0) return "";
  const std::uint64_t timeout_ns = kTimeoutUnitNs << facts.timeout;
  return ", timeout " + to_duration(timeout_ns) + ", " + std::to_string(facts.retries) + " retries (" +
         to_duration(timeout_ns * (facts.retries + 1)) + " in all), " + to_duration(facts.age_ns) + " old, carried " +
         std::to_string(facts.completed_counts.messages) + " messages, " +
         std::to_string(facts.completed_counts.bytes) + " bytes";
}

std::string perftest_commands(const PathFacts& facts) {
  if (!facts.remote) return quoted(perftest(facts, facts.local));
  return quoted(perftest(facts, *facts.remote)) + " on " + facts.remote->host + ", then " +
         quoted(perftest(facts, facts.local) + " " + facts.remote->host) + " on " + facts.local.host;
}

std::string ip_of(const ibv_gid& gid) {
  constexpr std::string_view kMapped = "::ffff:";
  const std::string text = to_string(gid);
  return text.starts_with(kMapped) ? text.substr(kMapped.size()) : text;
}

std::string kernel_log_command(const PathEnd& end) {
  return quoted("dmesg | grep " + end.device) + " on " + end.host;
}

}  // namespace verbatim
