#include "net/diagnose/failure.h"

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <iterator>
#include <string_view>

#include "base/clock.h"
#include "verbs/gid.h"

namespace verbatim {
namespace {

constexpr std::uint64_t kTimeoutUnitNs = 4096;

unsigned bytes_of(ibv_mtu mtu) {
  return 128U << static_cast<unsigned>(mtu);
}

std::string name_of(const PathEnd& end) {
  return end.device + ":" + std::to_string(end.port);
}

std::string quoted(const std::string& command) {
  return "'" + command + "'";
}

// "10.0.0.1", "2001:db8::1": as the system's tools take it.
std::string ip_of(const ibv_gid& gid) {
  constexpr std::string_view kMapped = "::ffff:";
  const std::string text = to_string(gid);
  return text.starts_with(kMapped) ? text.substr(kMapped.size()) : text;
}

// Where the peer is, in words.
std::string peer_host(const PathFacts& facts) {
  return facts.remote ? facts.remote->host : "the peer's host";
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

std::string describe_age(const PathFacts& facts) {
  return facts.completed_counts.messages != 0 ? "worked for " + to_duration(facts.age_ns) : "never worked";
}

// Why nothing can leave the local port now; empty when it can.
std::string describe_port_problem(const PathFacts& facts) {
  const std::string name = name_of(facts.local);
  if (facts.link.down) {
    return "the link of " + name + " here is down, for " + to_duration(facts.link.outage_ns) + " now";
  }
  if (facts.port_errno == 0 && facts.port_state != IBV_PORT_ACTIVE) return "the link of " + name + " here is down";
  if (!facts.gid_removed) return "";
  return "GID " + std::to_string(facts.local.gid_index) + " of " + name + " here is no longer " +
         to_string(facts.local.gid);
}

// Empty when the link was never down.
std::string describe_link_flaps(const PathFacts& facts) {
  const LinkRecord& link = facts.link;
  if (link.downs == 0) return "";
  return "link flap: that of " + name_of(facts.local) + " here went down " +
         (link.downs == 1 ? "once since" : std::to_string(link.downs) + " times since") + ", last for " +
         to_duration(link.outage_ns);
}

// What the local port says about lost packets; empty when that is nothing.
std::string describe_link_problem(const PathFacts& facts) {
  const std::string now = describe_port_problem(facts);
  return now.empty() ? describe_link_flaps(facts) : now;
}

std::string kernel_log(const std::string& device) {
  return quoted("dmesg | grep " + device);
}

Diagnosis diagnose_lost_packets(const PathFacts& facts) {
  const std::string link = describe_link_problem(facts);
  const std::string peer = peer_host(facts);
  const std::string peer_device = facts.remote ? facts.remote->device : "its device";
  if (facts.completed_counts.messages != 0) {
    Diagnosis diagnosis;
    diagnosis.cause = describe_age(facts) + ": " +
                      (link.empty() ? "loss, or a link flap or a dead host at the other end" : link) +
                      ", longer than all retries";
    diagnosis.next = kernel_log(facts.local.device) + " here, " + kernel_log(peer_device) + " on " + peer +
                     "; VERBATIM_TIMEOUT waits longer";
    return diagnosis;
  }
  Diagnosis diagnosis;
  diagnosis.cause =
      "never worked: reachability, " + (!link.empty() ? link
                                        : facts.completed_counts.peer_responded
                                            ? "though packets of the peer arrive here: a path that is open one "
                                              "way only, or a switch with a smaller MTU"
                                            : "the two NICs cannot talk to each other: GID, subnet, VLAN, "
                                              "firewall or rail");
  diagnosis.next = perftest_commands(facts);
  return diagnosis;
}

std::string hex(std::uintptr_t address) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%" PRIxPTR, address);
  return text;
}

Diagnosis diagnose_local_protection(const PathFacts& facts) {
  if (!facts.buffer) {
    return {"the plugin's own memory, not the application's: this device or its driver failed",
            kernel_log(facts.local.device)};
  }
  const std::string outlive = "check that buffers outlive their operations";
  const RefusedBuffer& buffer = *facts.buffer;
  const std::string bytes = std::to_string(buffer.bytes) + " bytes";
  if (!buffer.region) {
    return {"the application's buffer was deregistered while in use: " + bytes + " at " + hex(buffer.address) +
                " are in no registration",
            outlive};
  }
  const MrRegion& region = *buffer.region;
  const std::string place = ": " + bytes + " of " + memory_name(region.type) + " at " + hex(buffer.address) +
                            " in a registration of " + std::to_string(region.bytes) + " bytes at " + hex(region.start);
  if (region.type == MemoryType::kHost) {
    return {"the application's buffer was freed or unmapped while in use" + place, outlive};
  }
  return {"the application's buffer is behind an IOMMU or PCIe ACS, or was freed while in use" + place,
          quoted("lspci -vvv | grep ACSCtl") + " must show no SrcValid+, the kernel needs iommu=pt; " + outlive};
}

Diagnosis diagnose_device_failure(const PathFacts& facts) {
  return {
      "this device or its driver failed, not the path to the peer",
      kernel_log(facts.local.device) + "; take it out by VERBATIM_HCA=^" + facts.local.device + " until it is well"};
}

// The kernel's soft-RoCE ends a queue pair at the first packet that its network stack does not take.
Diagnosis diagnose_refused_work(const PathFacts& facts) {
  const std::string port = describe_port_problem(facts);
  if (!port.empty()) {
    return {describe_age(facts) + ": " + port + ", and its driver does not retry",
            quoted("ip address") + " and " + kernel_log(facts.local.device) + " here"};
  }
  const std::string flap = describe_link_flaps(facts);
  return {"this device or its driver refuses what worked before" + (flap.empty() ? "" : "; " + flap),
          kernel_log(facts.local.device)};
}

Diagnosis diagnose_remote_access(const PathFacts& facts) {
  return {
      "the peer's NIC refuses the address or its key: the peer's application has freed or deregistered the buffer "
      "that it announced, or has ended",
      "look at " + peer_host(facts) + " first: its log says what failed there before"};
}

Diagnosis diagnose_peer_failed_first(const PathFacts& facts) {
  return {"the peer went first: " +
              (facts.peer_report.empty() ? "its process ended or has closed the connection" : facts.peer_report),
          "look at " + peer_host(facts) + " first: its log says why"};
}

bool can_follow_peer_failure(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_WR_FLUSH_ERR:
    case IBV_WC_BAD_RESP_ERR:
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_REM_OP_ERR:
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RNR_RETRY_EXC_ERR:
    case IBV_WC_REM_ABORT_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR:
      return true;
    default:
      return false;
  }
}

}  // namespace

const char* wc_status_name(ibv_wc_status status) {
  constexpr const char* kNames[] = {
      "IBV_WC_SUCCESS",          "IBV_WC_LOC_LEN_ERR",       "IBV_WC_LOC_QP_OP_ERR",     "IBV_WC_LOC_EEC_OP_ERR",
      "IBV_WC_LOC_PROT_ERR",     "IBV_WC_WR_FLUSH_ERR",      "IBV_WC_MW_BIND_ERR",       "IBV_WC_BAD_RESP_ERR",
      "IBV_WC_LOC_ACCESS_ERR",   "IBV_WC_REM_INV_REQ_ERR",   "IBV_WC_REM_ACCESS_ERR",    "IBV_WC_REM_OP_ERR",
      "IBV_WC_RETRY_EXC_ERR",    "IBV_WC_RNR_RETRY_EXC_ERR", "IBV_WC_LOC_RDD_VIOL_ERR",  "IBV_WC_REM_INV_RD_REQ_ERR",
      "IBV_WC_REM_ABORT_ERR",    "IBV_WC_INV_EECN_ERR",      "IBV_WC_INV_EEC_STATE_ERR", "IBV_WC_FATAL_ERR",
      "IBV_WC_RESP_TIMEOUT_ERR", "IBV_WC_GENERAL_ERR"};
  static_assert(std::size(kNames) == IBV_WC_GENERAL_ERR + 1);
  const auto index = static_cast<std::size_t>(status);
  return index < std::size(kNames) ? kNames[index] : "status";
}

const char* event_name(ibv_event_type type) {
  switch (type) {
    case IBV_EVENT_CQ_ERR:
      return "IBV_EVENT_CQ_ERR";
    case IBV_EVENT_QP_FATAL:
      return "IBV_EVENT_QP_FATAL";
    case IBV_EVENT_QP_REQ_ERR:
      return "IBV_EVENT_QP_REQ_ERR";
    case IBV_EVENT_QP_ACCESS_ERR:
      return "IBV_EVENT_QP_ACCESS_ERR";
    case IBV_EVENT_DEVICE_FATAL:
      return "IBV_EVENT_DEVICE_FATAL";
    default:
      return "event";
  }
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

Diagnosis diagnose(ibv_wc_status status, const PathFacts& facts) {
  if (facts.port_errno != 0) return diagnose_device_failure(facts);
  // A peer that heard nothing more from here may be the first to say so.
  const bool cut_off = status == IBV_WC_RETRY_EXC_ERR && !describe_port_problem(facts).empty();
  if (!cut_off && (facts.peer_disconnected || !facts.peer_report.empty()) && can_follow_peer_failure(status)) {
    return diagnose_peer_failed_first(facts);
  }
  const std::string peer = peer_host(facts);
  switch (status) {
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR:
      return diagnose_lost_packets(facts);
    case IBV_WC_WR_FLUSH_ERR:
      return {"a consequence, not the cause: the queue pair was in the error state already, and nothing here says why",
              "look for an earlier line of this host's log, then on " + peer};
    case IBV_WC_LOC_PROT_ERR:
      return diagnose_local_protection(facts);
    case IBV_WC_LOC_ACCESS_ERR:
      return {"a message of the peer does not fit what is registered here", "compare versions and MTU on both hosts"};
    case IBV_WC_LOC_LEN_ERR:
      return {"a message longer than its receive, or than this device takes: MTU, or versions that differ",
              "compare versions and MTU on both hosts"};
    case IBV_WC_REM_INV_REQ_ERR:
      return {"the peer's NIC finds the request invalid: MTU that differs, access flags of its queue pair, or a length",
              "compare versions and " + quoted("ibv_devinfo -v") + " (active_mtu, max_msg_sz) on both hosts; on " +
                  peer + " look for an async event"};
    case IBV_WC_REM_ACCESS_ERR:
      return diagnose_remote_access(facts);
    case IBV_WC_REM_OP_ERR:
      return {"the peer's NIC could not finish the request, for a reason of its own",
              "look at " + peer + " first: its log and " +
                  kernel_log(facts.remote ? facts.remote->device : facts.local.device) + " there"};
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return {"the peer had no receive posted, for longer than all retries",
              "look at " + peer + " first: its process may be stopped"};
    case IBV_WC_BAD_RESP_ERR:
      return {"an answer of the peer's NIC that fits no request: another connection's, or firmware",
              "compare firmware and versions on both hosts; " + kernel_log(facts.local.device)};
    case IBV_WC_FATAL_ERR:
      return diagnose_device_failure(facts);
    default:
      return diagnose_refused_work(facts);
  }
}

Diagnosis diagnose(ibv_event_type type, const PathFacts& facts) {
  switch (type) {
    case IBV_EVENT_QP_ACCESS_ERR:
      return {"a message of the peer with a wrong key or range, or of another MTU, was refused here",
              "look at the line of " + peer_host(facts) + "; compare versions and MTU on both hosts"};
    case IBV_EVENT_QP_REQ_ERR:
      return {"a request of the peer was invalid: access flags, MTU or length",
              "look at the line of " + peer_host(facts) + "; compare versions and MTU on both hosts"};
    default:
      return diagnose_device_failure(facts);
  }
}

Diagnosis diagnose_size_mismatch(const PathFacts& facts) {
  return {"the ranks call different sizes",
          "compare count, type and environment (NCCL_ALGO, NCCL_PROTO, NCCL_BUFFSIZE...) of the ranks on " +
              facts.local.host + " and " + peer_host(facts)};
}

Diagnosis diagnose_corrupt_peer(const PathFacts& facts) {
  return {
      "no sound peer of this version does that: another version of the plugin, or something wrote over its memory "
      "or this one's",
      "compare the versions of the plugin on " + facts.local.host + " and " + peer_host(facts) +
          ", then the application's last changes"};
}

Diagnosis diagnose_contradicting_calls(const PathFacts&) {
  return {"the application's own calls contradict each other, nothing is wrong with the path",
          "report this line and the versions of NCCL (NCCL_DEBUG=VERSION) and of the plugin"};
}

std::string describe_completion(const ibv_wc& completion, const char* status_text, const FailedWork& work,
                                std::uint64_t flushed) {
  char bytes[40] = "";
  if (work.bytes) std::snprintf(bytes, sizeof bytes, " %" PRIu64 " bytes", *work.bytes);
  char more[64] = "";
  if (flushed != 0) std::snprintf(more, sizeof more, "; %" PRIu64 " more flushed", flushed);
  char text[256];
  std::snprintf(text, sizeof text, "%s%s failed with %s (%s %d, vendor error %u%s)", work.operation_text, bytes,
                status_text, wc_status_name(completion.status), completion.status, completion.vendor_err, more);
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
    std::snprintf(settings, sizeof settings, " (%u here, %u there)", bytes_of(facts.local.mtu),
                  bytes_of(facts.remote->mtu));
    text += settings;
  }
  std::snprintf(settings, sizeof settings, ", TC %u, SL %u", facts.traffic_class, facts.service_level);
  return text + settings;
}

std::string describe_failure(const std::string& what, const Diagnosis& diagnosis, const PathFacts& facts) {
  std::string text = what;
  if (!diagnosis.cause.empty()) text.append(": ").append(diagnosis.cause);
  text.append(kNextStep).append(diagnosis.next).append(". Path: ").append(describe_path(facts));
  if (facts.age_ns != 0) {
    const std::uint64_t timeout_ns = kTimeoutUnitNs << facts.timeout;
    char history[224];
    std::snprintf(history, sizeof history,
                  ", timeout %s, %u retries (%s in all), %s old, carried %" PRIu64 " messages, %" PRIu64 " bytes",
                  to_duration(timeout_ns).c_str(), facts.retries, to_duration(timeout_ns * (facts.retries + 1)).c_str(),
                  to_duration(facts.age_ns).c_str(), facts.completed_counts.messages, facts.completed_counts.bytes);
    text += history;
  }
  if (!facts.counters.empty()) text += "; since then " + facts.counters;
  return text;
}

std::string explain_setup_error(const Error& error, const PathFacts* facts, const QpUsage& usage) {
  const std::string_view operation = error.operation;
  if (operation == "ibv_create_qp" || operation == "ibv_create_cq") {
    if (error.sys_errno != ENOMEM && error.sys_errno != ENOSPC) return "";
    const std::string limit = usage.limit > 0 ? " (it takes " + std::to_string(usage.limit) +
                                                    " queue pairs of all processes, this one holds " +
                                                    std::to_string(usage.in_use) + ")"
                                              : "";
    return ": the device has no room for another connection" + limit + ", or no memory may be locked" + kNextStep +
           "fewer NCCL channels, VERBATIM_QPS_PER_CONNECTION=1, 'ulimit -l unlimited'; 'rdma resource show' counts "
           "what all processes hold";
  }
  if (facts == nullptr || !operation.starts_with("ibv_modify_qp")) return "";
  const std::string index = std::to_string(facts->local.gid_index);
  Diagnosis diagnosis;
  switch (error.sys_errno) {
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH: {
      const std::string address = facts->remote ? ip_of(facts->remote->gid) : "ADDRESS";
      diagnosis.cause = error.sys_errno == ENETUNREACH
                            ? "there is no route from this NIC's address to the peer's: another rail or subnet"
                            : "the peer's address does not resolve (route, ARP or ND): another rail, subnet or VLAN";
      diagnosis.next = quoted("ip route get " + address + " from " + ip_of(facts->local.gid)) + " and " +
                       quoted("ip neigh show " + address) + " on " + facts->local.host + ", then " +
                       perftest_commands(*facts);
      break;
    }
    case ENODEV:
    case ENOENT:
      diagnosis.cause =
          "GID " + index + " of " + name_of(facts->local) + " is empty or its address has gone since it was read";
      diagnosis.next = quoted("show_gids " + facts->local.device) +
                       " lists what is there; VERBATIM_GID_INDEX=auto chooses anew for each connection";
      break;
    case EINVAL:
      diagnosis.cause = "the device refuses an attribute: GID " + index +
                        ", an MTU above the port's, or VERBATIM_SL, VERBATIM_TC or VERBATIM_PKEY out of its range";
      diagnosis.next = quoted("show_gids " + facts->local.device) + " and " +
                       quoted("ibv_devinfo -v -d " + facts->local.device) + " on both hosts";
      break;
    default:
      return ". Path: " + describe_path(*facts);
  }
  return ": " + diagnosis.cause + kNextStep + diagnosis.next + ". Path: " + describe_path(*facts);
}

std::string explain_handshake_error(const Error& error, const std::string& peer, bool no_reply) {
  if (error.kind != ErrorKind::kRemote) return "";
  const std::string look = kNextStep + ("look at " + peer) + " first: ";
  switch (error.sys_errno) {
    case 0:
    case ECONNRESET:
    case EPIPE:
      return std::string(": the peer went first") +
             (no_reply ? ": its process has ended, or listens no more for this connection" : "") + look +
             "its log says why";
    case EPROTONOSUPPORT:
      return ": one of the NICs speaks InfiniBand, the other Ethernet (RoCE)" +
             (kNextStep + ("VERBATIM_HCA chooses NICs of one kind here and on " + peer));
    case ECONNREFUSED:
      return ": its process has ended or listens no more, or a firewall is in between" + look + "its log says why";
    case ETIMEDOUT:
      return ": its application does nothing for this connection, or its host does not answer" + look +
             "its process may be busy or stopped" +
             (std::string_view(error.operation).starts_with("waiting") ? "; VERBATIM_CONNECT_TIMEOUT_S waits longer"
                                                                       : "");
    case EPROTO:
      return ": what came is of another service, or of another version of the plugin" +
             (kNextStep +
              ("'ss -tnp' there shows whose the port is; compare the versions of the plugin here and on " + peer));
    default:
      return "";
  }
}

std::string perftest_commands(const PathFacts& facts) {
  if (!facts.remote) return quoted(perftest(facts.local, facts.roce, bytes_of(facts.mtu)));
  return quoted(perftest(*facts.remote, facts.roce, bytes_of(facts.mtu))) + " on " + facts.remote->host + ", then " +
         quoted(perftest(facts.local, facts.roce, bytes_of(facts.mtu)) + " " + facts.remote->host) + " on " +
         facts.local.host;
}

}  // namespace verbatim
