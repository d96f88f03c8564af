// Why a connection failed, as far as this end can know, and what to do next. Pure functions of what is known. The texts
// name hosts and devices, so that they mean the same at both ends of the connection.
#pragma once

#include <infiniband/verbs.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/result.h"
#include "channel/dial.h"
#include "net/diagnose/path_facts.h"
#include "wire/handle.h"

namespace verbatim {

struct Diagnosis {
  std::string why;   // empty: what failed says it
  std::string next;  // what to do or run; empty: nothing is known
};

// What a failed completion means.
Diagnosis diagnose(ibv_wc_status status, const PathFacts& facts);
// Whether a completion with this status means that the peer's NIC has not answered, although this end could send.
bool is_without_answer(ibv_wc_status status, const PathFacts& facts);
// What an event that ends a queue pair, a completion queue or a device means.
Diagnosis diagnose(ibv_event_type type, const PathFacts& facts);

// The same for failures that neither a completion nor an event reports.
Diagnosis diagnose_size_mismatch(const PathFacts& facts);        // the applications of both ends use different sizes
Diagnosis diagnose_port(const PathFacts& facts);                 // without `why` while the local port can send
Diagnosis diagnose_corrupt_peer(const PathFacts& facts);         // the peer did what no peer of this version does
Diagnosis diagnose_contradicting_calls(const PathFacts& facts);  // this application did what the interface forbids

// The limit of queue pairs of a device, for all processes, 0 when not known; and how many this process holds on it.
struct QpUsage {
  int limit = 0;
  std::size_t in_use = 0;
};

// A connection, or the queue pair of its flushes, that could not be made. `facts` may be nullptr. Empty when the error
// says all.
Diagnosis diagnose_setup(const Error& error, const PathFacts* facts, const QpUsage& usage = {});

// "the peer node2 (pid 4711) has sent nothing for 225.0 s (VERBATIM_KEEPALIVE_S): its host answers, ...".
std::string no_message(const std::string& peer, std::uint64_t unheard_ns, bool host_acknowledges);

// A handshake that ended because of `peer`, "node2 (pid 4711)". `no_reply`: nothing was received from it.
Diagnosis diagnose_handshake(const Error& error, const std::string& peer, bool no_reply = false);

// A dial to `peer`, whose listen has `handle`. `interface`: the chosen one and its address.
Diagnosis diagnose_dial(const Dial& dial, const Error& error, const std::string& peer, const wire::Handle& handle,
                        const std::string& interface);

// The work of a failed completion, from the comm's own records: the completion itself does not say.
struct FailedWork {
  const char* operation_text = "";     // "sending"
  std::optional<std::uint64_t> bytes;  // of payload
  bool loopback = false;               // from the device to itself
  bool probe = false;                  // asks whether the peer's NIC answers
  std::optional<RefusedBuffer> buffer = std::nullopt;
};

// "sending 64 bytes failed with transport retry counter exceeded (IBV_WC_RETRY_EXC_ERR 12, vendor error 129)".
// `flushed`: work requests that were flushed after it. `status_text` is the library's.
std::string describe_completion(const ibv_wc& completion, const char* status_text, const FailedWork& work,
                                std::uint64_t flushed);

// "IBV_WC_RETRY_EXC_ERR"
const char* wc_status_name(ibv_wc_status status);
const char* event_name(ibv_event_type type);
// Whether the event says that a QP has gone to ERR.
constexpr bool is_qp_event(ibv_event_type type) {
  return type == IBV_EVENT_QP_FATAL || type == IBV_EVENT_QP_REQ_ERR || type == IBV_EVENT_QP_ACCESS_ERR;
}

}  // namespace verbatim
