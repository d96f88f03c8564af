#include "net/diagnose/diagnosis.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <span>

#include "base/socket.h"
#include "verbs/gid.h"

namespace verbatim {
namespace {

// "mlx5_0 on node1", "mlx5_0:1 on node1".
std::string device_name(const PathEnd& end) {
  return end.device + " on " + end.host;
}
std::string port_name(const PathEnd& end) {
  return end.device + ":" + std::to_string(end.port) + " on " + end.host;
}

// "mlx5_0:1 on node1 has GID 3 ::ffff:10.0.0.1 (RoCE v2)".
std::string gid_name(const PathEnd& end) {
  const GidEntry entry{end.gid_index, end.gid, end.roce_version};
  return port_name(end) + " has GID " + to_string(std::span(&entry, 1));
}

std::string peer_host(const PathFacts& facts) {
  return facts.remote ? facts.remote->host : "the peer's host";
}

std::string peer_kernel_log(const PathFacts& facts) {
  return facts.remote ? kernel_log_command(*facts.remote) : "'dmesg' on the peer's host";
}

std::string look_at(const std::string& peer, const std::string& reason) {
  return "look at " + peer + " first: " + reason;
}

std::string compare_versions_and_mtu(const PathFacts& facts) {
  return "compare versions and MTU on " + facts.local.host + " and " + peer_host(facts);
}

std::string describe_age(const PathFacts& facts) {
  return facts.completed_counts.messages != 0 ? "worked for " + to_duration(facts.age_ns) : "never worked";
}

// Why the local port can send nothing now; empty when it can.
std::string describe_port_problem(const PathFacts& facts) {
  const std::string name = port_name(facts.local);
  if (facts.link.down) {
    return "the link of " + name + " is down, for " + to_duration(facts.link.outage_ns) + " now";
  }
  if (facts.port_errno == 0 && facts.port_state != IBV_PORT_ACTIVE) return "the link of " + name + " is down";
  if (!facts.gid_removed) return "";
  return "GID " + std::to_string(facts.local.gid_index) + " of " + name + " is no longer " + to_string(facts.local.gid);
}

// Empty when the link was never down.
std::string describe_link_flaps(const PathFacts& facts) {
  const LinkRecord& link = facts.link;
  if (link.downs == 0) return "";
  return "the link of " + port_name(facts.local) + " has been down " +
         (link.downs == 1 ? "once" : std::to_string(link.downs) + " times") + " (link flap), the last time for " +
         to_duration(link.outage_ns);
}

Diagnosis diagnose_lost_packets(const PathFacts& facts) {
  std::string link = describe_port_problem(facts);
  if (link.empty()) link = describe_link_flaps(facts);
  const std::string peer = peer_host(facts);
  if (facts.completed_counts.messages != 0) {
    return {
        describe_age(facts) + ": " +
            (link.empty() ? "packets to " + peer + " are lost, or its link or host is down" : link) +
            ", longer than all retries",
        kernel_log_command(facts.local) + ", " + peer_kernel_log(facts) + "; a larger VERBATIM_TIMEOUT waits longer"};
  }
  if (link.empty()) {
    link = facts.completed_counts.peer_responded
               ? "packets from " + peer +
                     " arrive, packets to it are lost: the path is open in one direction only, or " +
                     "a switch has a smaller MTU"
               : "the two NICs cannot reach each other: GID, subnet, VLAN, firewall or rail";
  }
  return {"never worked: " + link, perftest_commands(facts)};
}

std::string hex(std::uintptr_t address) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%" PRIxPTR, address);
  return text;
}

Diagnosis diagnose_local_protection(const PathFacts& facts) {
  if (!facts.buffer) {
    return {
        "the memory is the plugin's own, not the application's: " + device_name(facts.local) + " or its driver failed",
        kernel_log_command(facts.local)};
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
  const std::string where = ": " + bytes + " of " + memory_name(region.type) + " at " + hex(buffer.address) +
                            " in a registration of " + std::to_string(region.bytes) + " bytes at " + hex(region.start);
  if (region.type == MemoryType::kHost) {
    return {"the application's buffer was freed or unmapped while in use" + where, outlive};
  }
  return {"the application's buffer is behind an IOMMU or PCIe ACS, or was freed while in use" + where,
          quoted("lspci -vvv | grep ACSCtl") + " must show no SrcValid+, the kernel needs iommu=pt; " + outlive};
}

Diagnosis diagnose_device_failure(const PathFacts& facts) {
  return {
      device_name(facts.local) + " or its driver failed, not the path to the peer",
      kernel_log_command(facts.local) + "; exclude it with VERBATIM_HCA=^" + facts.local.device + " until it works"};
}

// The kernel's soft-RoCE ends a queue pair at the first packet that its network stack refuses.
Diagnosis diagnose_refused_work(const PathFacts& facts) {
  const std::string port = describe_port_problem(facts);
  if (!port.empty()) {
    return {describe_age(facts) + ": " + port + ", and its driver does not retry",
            quoted("ip address") + " and " + kernel_log_command(facts.local)};
  }
  const std::string flap = describe_link_flaps(facts);
  return {device_name(facts.local) + " or its driver refuses work that it accepted before" +
              (flap.empty() ? "" : "; " + flap),
          kernel_log_command(facts.local)};
}

Diagnosis diagnose_peer_failed_first(const PathFacts& facts) {
  const std::string peer = peer_host(facts);
  return {facts.peer_report.empty() ? "the process on " + peer + " ended or closed the connection first"
                                    : "the peer failed first: " + facts.peer_report,
          look_at(peer, "its log says why")};
}

bool can_follow_peer_failure(ibv_wc_status status) {
  constexpr ibv_wc_status kStatuses[] = {IBV_WC_WR_FLUSH_ERR,      IBV_WC_BAD_RESP_ERR,  IBV_WC_REM_INV_REQ_ERR,
                                         IBV_WC_REM_ACCESS_ERR,    IBV_WC_REM_OP_ERR,    IBV_WC_RETRY_EXC_ERR,
                                         IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_REM_ABORT_ERR, IBV_WC_RESP_TIMEOUT_ERR};
  return std::find(std::begin(kStatuses), std::end(kStatuses), status) != std::end(kStatuses);
}

}  // namespace

bool is_without_answer(ibv_wc_status status, const PathFacts& facts) {
  return (status == IBV_WC_RETRY_EXC_ERR || status == IBV_WC_RESP_TIMEOUT_ERR) && facts.port_errno == 0 &&
         describe_port_problem(facts).empty();
}

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
  constexpr const char* kNames[] = {"IBV_EVENT_CQ_ERR", "IBV_EVENT_QP_FATAL", "IBV_EVENT_QP_REQ_ERR",
                                    "IBV_EVENT_QP_ACCESS_ERR"};
  static_assert(std::size(kNames) == IBV_EVENT_QP_ACCESS_ERR + 1);
  if (type == IBV_EVENT_DEVICE_FATAL) return "IBV_EVENT_DEVICE_FATAL";
  const auto index = static_cast<std::size_t>(type);
  return index < std::size(kNames) ? kNames[index] : "event";
}

Diagnosis diagnose_port(const PathFacts& facts) {
  return {describe_port_problem(facts), kernel_log_command(facts.local) + ", then its cable and its switch"};
}

Diagnosis diagnose(ibv_wc_status status, const PathFacts& facts) {
  if (facts.port_errno != 0) return diagnose_device_failure(facts);
  // While the local port cannot send, the peer may time out first: its report is then a consequence.
  const bool cut_off = status == IBV_WC_RETRY_EXC_ERR && !describe_port_problem(facts).empty();
  if (!cut_off && (facts.peer_disconnected || !facts.peer_report.empty()) && can_follow_peer_failure(status)) {
    return diagnose_peer_failed_first(facts);
  }
  const std::string& local = facts.local.host;
  const std::string peer = peer_host(facts);
  switch (status) {
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR: {
      Diagnosis lost = diagnose_lost_packets(facts);
      if (facts.channel_errno != 0) {
        lost.why += std::string("; the side channel had ended before: ") + std::strerror(facts.channel_errno);
      }
      return lost;
    }
    case IBV_WC_WR_FLUSH_ERR:
      return {"this is a consequence: the queue pair was in the error state already, and " + local +
                  " has no record of the cause",
              "look for an earlier line in the log of " + local + ", then on " + peer};
    case IBV_WC_LOC_PROT_ERR:
      return diagnose_local_protection(facts);
    case IBV_WC_LOC_ACCESS_ERR:
      return {"a message from " + peer + " does not fit the memory registered on " + local,
              compare_versions_and_mtu(facts)};
    case IBV_WC_LOC_LEN_ERR:
      return {"a message is longer than its receive, or than " + device_name(facts.local) +
                  " accepts: MTU or versions differ",
              compare_versions_and_mtu(facts)};
    case IBV_WC_REM_INV_REQ_ERR:
      return {"the NIC of " + peer +
                  " finds the request invalid: the MTU differs, its queue pair forbids the access, or the length is "
                  "wrong",
              "compare versions and " + quoted("ibv_devinfo -v") + " (active_mtu, max_msg_sz) on both hosts; on " +
                  peer + " look for an async event"};
    case IBV_WC_REM_ACCESS_ERR:
      return {
          "the NIC of " + peer +
              " refuses the address or its key: the memory was freed or deregistered there, or the process has ended",
          look_at(peer, "its log says what failed before")};
    case IBV_WC_REM_OP_ERR:
      return {"the NIC of " + peer + " could not complete the request",
              look_at(peer, "its log and " + peer_kernel_log(facts))};
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return {peer + " had no receive posted for longer than all retries", look_at(peer, "its process may be stopped")};
    case IBV_WC_BAD_RESP_ERR:
      return {"a response of the NIC of " + peer +
                  " fits no request: it belongs to another connection, or the firmware is at fault",
              "compare firmware and versions on both hosts; " + kernel_log_command(facts.local)};
    case IBV_WC_FATAL_ERR:
      return diagnose_device_failure(facts);
    default:
      return diagnose_refused_work(facts);
  }
}

Diagnosis diagnose(ibv_event_type type, const PathFacts& facts) {
  const std::string peer = peer_host(facts);
  const std::string next = "look at the log of " + peer + "; " + compare_versions_and_mtu(facts);
  switch (type) {
    case IBV_EVENT_QP_ACCESS_ERR:
      return {device_name(facts.local) + " refused a message from " + peer + " with a wrong key, range or MTU", next};
    case IBV_EVENT_QP_REQ_ERR:
      return {"a request from " + peer + " is invalid: access flags, MTU or length", next};
    default:
      return diagnose_device_failure(facts);
  }
}

Diagnosis diagnose_size_mismatch(const PathFacts& facts) {
  return {"the ranks use different message sizes",
          "compare count, type and environment (NCCL_ALGO, NCCL_PROTO, NCCL_BUFFSIZE...) of the ranks on " +
              facts.local.host + " and " + peer_host(facts)};
}

Diagnosis diagnose_corrupt_peer(const PathFacts& facts) {
  const std::string hosts = facts.local.host + " and " + peer_host(facts);
  return {"no peer of this version does that: the versions of the plugin on " + hosts +
              " differ, or memory of the plugin was overwritten",
          "compare the versions of the plugin on " + hosts + ", then check the application's last changes"};
}

Diagnosis diagnose_contradicting_calls(const PathFacts& facts) {
  return {"the calls of the application on " + facts.local.host + " contradict each other, the path is not the cause",
          "report this line and the versions of NCCL (NCCL_DEBUG=VERSION) and of the plugin"};
}

Diagnosis diagnose_setup(const Error& error, const PathFacts* facts, const QpUsage& usage) {
  const bool is_local =
      error.step == SetupStep::kCreateQueue || (error.step == SetupStep::kModifyQp && facts == nullptr);
  if (is_local && error.sys_errno == ETIMEDOUT) {
    return {"the device is slow, or hangs in a call for another connection",
            quoted("dmesg") + " shows what its driver reports; a larger VERBATIM_CONNECT_TIMEOUT_S waits longer"};
  }
  if (error.step == SetupStep::kCreateQueue) {
    if (error.sys_errno != ENOMEM && error.sys_errno != ENOSPC) return {};
    const std::string limit = usage.limit > 0 ? " (" + std::to_string(usage.limit) +
                                                    " queue pairs for all processes, this process holds " +
                                                    std::to_string(usage.in_use) + ")"
                                              : "";
    return {"a limit is reached: QPs of the device" + limit + ", its CQs, or locked memory",
            "fewer NCCL channels, VERBATIM_QPS_PER_CONNECTION=1, 'ulimit -l unlimited'; 'rdma resource show' counts "
            "what all processes hold"};
  }
  if (facts != nullptr && facts->remote && error.step == SetupStep::kMatchGids) {
    return {gid_name(facts->local) + ", " + gid_name(*facts->remote),
            "choose entries of the same type on both hosts: " + quoted("show_gids") +
                " lists them, VERBATIM_GID_INDEX, VERBATIM_ROCE_VERSION, VERBATIM_ADDR_FAMILY and VERBATIM_ADDR_RANGE "
                "choose"};
  }
  if (facts == nullptr || error.step != SetupStep::kModifyQp) return {};
  const std::string index = std::to_string(facts->local.gid_index);
  switch (error.sys_errno) {
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH: {
      const std::string address = facts->remote ? ip_of(facts->remote->gid) : "ADDRESS";
      return {error.sys_errno == ENETUNREACH
                  ? "there is no route from this NIC's address to the peer's: another rail or subnet"
                  : "the peer's address does not resolve (route, ARP or ND): another rail, subnet or VLAN",
              quoted("ip route get " + address + " from " + ip_of(facts->local.gid)) + " and " +
                  quoted("ip neigh show " + address) + " on " + facts->local.host + ", then " +
                  perftest_commands(*facts)};
    }
    case ENODEV:
    case ENOENT:
      return {
          "GID " + index + " of " + port_name(facts->local) + " is empty or its address was removed after it was read",
          quoted("show_gids " + facts->local.device) +
              " lists the GIDs; VERBATIM_GID_INDEX=auto chooses anew for each connection"};
    case EINVAL:
      return {"the device refuses an attribute: GID " + index +
                  ", an MTU above the port's, or VERBATIM_SL, VERBATIM_TC or VERBATIM_PKEY out of its range",
              quoted("show_gids " + facts->local.device) + " and " +
                  quoted("ibv_devinfo -v -d " + facts->local.device) + " on both hosts"};
    default:
      return {};
  }
}

std::string no_message(const std::string& peer, std::uint64_t unheard_ns, bool host_acknowledges) {
  return "the peer " + peer + " has sent nothing for " + to_seconds(unheard_ns) + " (VERBATIM_KEEPALIVE_S): " +
         (host_acknowledges ? "its host answers, the process is stopped or hangs"
                            : "its host does not answer, it is down, frozen or cut off");
}

Diagnosis diagnose_handshake(const Error& error, const std::string& peer, bool no_reply) {
  if (error.kind != ErrorKind::kRemote) return {};
  switch (error.sys_errno) {
    case 0:
    case ECONNRESET:
    case EPIPE:
      return {std::string("the peer closed the connection first") +
                  (no_reply ? ": its process has ended, or it does not listen for this connection any more" : ""),
              look_at(peer, "its log says why")};
    case EPROTONOSUPPORT:
      return {"one of the NICs uses InfiniBand, the other Ethernet (RoCE)",
              "VERBATIM_HCA chooses NICs of one kind on this host and on " + peer};
    case ECONNREFUSED:
      return {"its process has ended or does not listen any more, or a firewall blocks the connection",
              look_at(peer, "its log says why")};
    case ETIMEDOUT: {
      const bool waited = error.step == SetupStep::kWaitForPeer;
      return {"its application makes no calls for this connection, or its host does not answer",
              look_at(peer, "its process may be busy or stopped") +
                  (waited ? "; a larger VERBATIM_CONNECT_TIMEOUT_S waits longer" : "")};
    }
    case EPROTO:
      return {"the message belongs to another service, or to another version of the plugin",
              "'ss -tnp' on that host shows whose port it is; compare the versions of the plugin on this host and on " +
                  peer};
    default:
      return {};
  }
}

Diagnosis diagnose_dial(const Dial& dial, const Error& error, const std::string& peer, const wire::Handle& handle,
                        const std::string& interface) {
  if (error.step != SetupStep::kConnectTcp) {
    const std::string& refusal = dial.refusal();
    const bool is_other = handle.version != wire::kProtocolVersion && error.kind == ErrorKind::kRemote;
    if (refusal.empty() && !is_other) return diagnose_handshake(error, peer, !dial.reply().begun());
    return {refusal.empty() ? "its version of the protocol is another one" : refusal,
            is_other ? "run the same release on all hosts" : look_at(peer, "its log says more")};
  }
  if (error.sys_errno == ECONNREFUSED || error.sys_errno == ECONNRESET) return diagnose_handshake(error, peer);
  const std::string host = host_to_string(handle.address);
  const std::string port = std::to_string(ntohs(reinterpret_cast<const sockaddr_in&>(handle.address).sin_port));
  const std::string routes = quoted("ip route get " + host) + " on this host, and look at " + peer +
                             "; VERBATIM_SOCKET_IFNAME on both hosts chooses interfaces that reach each other (here " +
                             interface + ")";
  if (error.sys_errno != ETIMEDOUT) return {"no route leads to this address, or its host is down", routes};
  return {"nothing answers: a firewall drops the packets to TCP port " + port + " of " + host +
              ", or its host is down or has another address",
          "allow TCP between the hosts on all ports (the kernel chooses the port), " +
              quoted("nc -vz " + host + " " + port) + " on this host tries it; " + routes};
}

std::string describe_completion(const ibv_wc& completion, const char* status_text, const FailedWork& work,
                                std::uint64_t flushed) {
  std::string text = work.operation_text;
  if (work.bytes) text += " " + std::to_string(*work.bytes) + " bytes";
  text += std::string(" failed with ") + status_text + " (" + wc_status_name(completion.status) + " " +
          std::to_string(completion.status) + ", vendor error " + std::to_string(completion.vendor_err);
  if (flushed != 0) text += "; " + std::to_string(flushed) + " more flushed";
  return text + ")";
}

}  // namespace verbatim
