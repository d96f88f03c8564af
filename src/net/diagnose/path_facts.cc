#include "net/diagnose/path_facts.h"

#include <cinttypes>
#include <cstdio>
#include <string_view>

#include "base/clock.h"
#include "verbs/gid.h"

namespace verbatim {
namespace {

constexpr std::uint64_t kTimeoutUnitNs = 4096;

unsigned bytes_of(ibv_mtu mtu) {
  return 128U << static_cast<unsigned>(mtu);
}

std::string perftest(const PathEnd& end, bool roce, unsigned mtu) {
  std::string command = "ib_write_bw -d " + end.device + " -i " + std::to_string(end.port);
  if (roce) command += " -x " + std::to_string(end.gid_index);
  return command + " -m " + std::to_string(mtu);
}

std::string describe_end(const PathEnd& end) {
  char text[320];
  std::snprintf(text, sizeof text, "%s%s%s:%u GID %u %s QP %u", end.host.c_str(), end.host.empty() ? "" : " ",
                end.device.c_str(), end.port, end.gid_index, to_string(end.gid).c_str(), end.qp);
  return text;
}

}  // namespace

std::string quoted(const std::string& command) {
  return "'" + command + "'";
}

std::string to_duration(std::uint64_t ns) {
  constexpr std::uint64_t kMinute = 60;
  constexpr std::uint64_t kHour = 60 * kMinute;
  constexpr std::uint64_t kDay = 24 * kHour;
  const std::uint64_t seconds = ns / kNanosecondsPerSecond;
  char text[64];
  if (seconds >= kDay) {
    std::snprintf(text, sizeof text, "%" PRIu64 " d %" PRIu64 " h", seconds / kDay, seconds % kDay / kHour);
  } else if (seconds >= kHour) {
    std::snprintf(text, sizeof text, "%" PRIu64 " h %" PRIu64 " min", seconds / kHour, seconds % kHour / kMinute);
  } else if (seconds >= kMinute) {
    std::snprintf(text, sizeof text, "%" PRIu64 " min %" PRIu64 " s", seconds / kMinute, seconds % kMinute);
  } else if (seconds != 0) {
    std::snprintf(text, sizeof text, "%.3g s", static_cast<double>(ns) / static_cast<double>(kNanosecondsPerSecond));
  } else {
    std::snprintf(text, sizeof text, "%.3g ms",
                  static_cast<double>(ns) / static_cast<double>(kNanosecondsPerMillisecond));
  }
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
  text.append(" to ").append(describe_end(*facts.remote));
  char settings[160];
  std::snprintf(settings, sizeof settings, ", MTU %u", bytes_of(facts.mtu));
  text += settings;
  if (facts.local.mtu != facts.remote->mtu) {
    std::snprintf(settings, sizeof settings, " (local %u, peer %u)", bytes_of(facts.local.mtu),
                  bytes_of(facts.remote->mtu));
    text += settings;
  }
  std::snprintf(settings, sizeof settings, ", TC %u, SL %u", facts.traffic_class, facts.service_level);
  return text + settings;
}

std::string describe_path_history(const PathFacts& facts) {
  if (facts.age_ns == 0) return "";
  const std::uint64_t timeout_ns = kTimeoutUnitNs << facts.timeout;
  char history[224];
  std::snprintf(history, sizeof history,
                ", timeout %s, %u retries (%s in all), %s old, carried %" PRIu64 " messages, %" PRIu64 " bytes",
                to_duration(timeout_ns).c_str(), facts.retries, to_duration(timeout_ns * (facts.retries + 1)).c_str(),
                to_duration(facts.age_ns).c_str(), facts.completed_counts.messages, facts.completed_counts.bytes);
  return history;
}

std::string perftest_commands(const PathFacts& facts) {
  if (!facts.remote) return quoted(perftest(facts.local, facts.roce, bytes_of(facts.mtu)));
  return quoted(perftest(*facts.remote, facts.roce, bytes_of(facts.mtu))) + " on " + facts.remote->host + ", then " +
         quoted(perftest(facts.local, facts.roce, bytes_of(facts.mtu)) + " " + facts.remote->host) + " on " +
         facts.local.host;
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
