#include "rma/executed_report.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "base/log.h"
#include "net/transfer/endpoint_block.h"
#include "verbs/errors.h"
#include "verbs/qp.h"

namespace verbatim::rma {
namespace {

constexpr std::uint32_t kFirstPsn = 0x5a17;  // not 0, which some drivers report in ERR
constexpr std::uint64_t kSendId = 1;
constexpr int kSends = 3;
// A SEND to a QP in ERR gets no answer: 70 ms, and up to four times as long on hardware.
constexpr std::uint8_t kTimeout = 12;
constexpr std::uint8_t kRetries = 3;
constexpr unsigned kPauseUs = 100;
constexpr unsigned kPausesOfASend = 10'000;
// After the move to ERR a device may still execute a packet (rxe).
constexpr unsigned kPausesInErr = 100;

// A SEND of 0 bytes.
Status post_send(ibv_qp* qp) {
  ibv_send_wr request = {};
  request.wr_id = kSendId;
  request.opcode = IBV_WR_SEND;
  request.send_flags = IBV_SEND_SIGNALED;
  ibv_send_wr* refused = nullptr;
  return check_errno("ibv_post_send", ibv_post_send(qp, &request, &refused));
}

// The status of the SEND that is outstanding, when it ends in this time.
std::optional<ibv_wc_status> await_send(ibv_cq* cq, unsigned pauses) {
  while (pauses > 0) {
    ibv_wc completion{};
    if (ibv_poll_cq(cq, 1, &completion) > 0) {
      if (completion.wr_id == kSendId) return completion.status;
      continue;
    }
    ::usleep(kPauseUs);
    --pauses;
  }
  return std::nullopt;
}

// Two SENDs are executed, and a third one finds the target in ERR. In between the target is asked, for a driver that
// remembers its answer. Returns what the device does not do, "" where it does all.
Result<std::string> ask(ibv_qp* from, ibv_qp* to, const Port& port, const Config& config) {
  const Device& device = *port.device;
  for (const std::uint32_t executed : {1U, 2U}) {
    if (const Status posted = post_send(from); !posted) return posted.error();
    if (await_send(from->send_cq, kPausesOfASend) != IBV_WC_SUCCESS) return Error{ErrorKind::kSystem, EIO, "SEND"};
    if (executed == 2) {
      if (const Status moved = to_error(to, device); !moved) return moved.error();
      static_cast<void>(await_send(from->send_cq, kPausesInErr));  // none is outstanding
      if (const Status posted = post_send(from); !posted) return posted.error();
      const bool was_executed = await_send(from->send_cq, kPausesOfASend) == IBV_WC_SUCCESS;
      if (was_executed) return Error{ErrorKind::kSystem, EBUSY, "SEND to a QP in ERR"};
    }
    const Result<std::uint32_t> psn = expected_psn(to, device);
    if (!psn) return psn.error();
    if (*psn == kFirstPsn + executed) continue;
    return std::string("does not say what a QP ") + (executed == 2 ? "in the error state " : "") +
           "has executed (rq_psn of ibv_query_qp is " + std::to_string(*psn) + ", not " +
           std::to_string(kFirstPsn + executed) + ")";
  }
  const Status again = make_again(to, port, config);
  return again ? "" : std::string("refuses a QP that was reset (") + std::strerror(again.error().sys_errno) + ")";
}

Result<std::string> test_device(const Port& known, Config config) {
  const Result<Port> now = refresh_port(known, config, LogLevel::kInfo);  // its addresses may have moved
  if (!now) return now.error();
  const Port& port = *now;
  const Device& device = *port.device;
  const Verbs& verbs = device.verbs();
  config.timeout = kTimeout;
  config.retry_count = kRetries;
  const Result<UniqueCq> cq =
      adopt("ibv_create_cq", verbs.create_cq(device.context(), 2 * kSends, nullptr, nullptr, 0), verbs.destroy_cq);
  if (!cq) return cq.error();
  const Result<RcQp> sender = make_qp(port, cq->get(), {.send_wr = kSends, .recv_wr = 1}, config);
  if (!sender) return sender.error();
  const Result<RcQp> target = make_qp(port, cq->get(), {.send_wr = 1, .recv_wr = kSends}, config);
  if (!target) return target.error();
  ibv_qp* const from = sender->qp.get();
  ibv_qp* const to = target->qp.get();
  for (const auto& [own, other] : {std::pair(from, to), std::pair(to, from)}) {
    const Result<ConnectedQp> connected = connect_qp(own, port, to_oneself(port, other, kFirstPsn, config), config);
    if (!connected) return connected.error();
  }
  for (int i = 0; i < kSends; ++i) {
    ibv_recv_wr receive = {};
    ibv_recv_wr* refused = nullptr;
    const Status posted = check_errno("ibv_post_recv", ibv_post_recv(to, &receive, &refused));
    if (!posted) return posted.error();
  }
  return ask(from, to, port, config);
}

}  // namespace

ExecutedReport executed_report(const Port& port, const Config& config) {
  std::atomic<ExecutedReport>& known = port.device->executed_report();
  if (known != ExecutedReport::kNotKnown) return known;
  const Result<std::string> missing = test_device(port, config);
  if (!missing) return ExecutedReport::kNotKnown;
  const ExecutedReport found = missing->empty() ? ExecutedReport::kRight : ExecutedReport::kWrong;
  if (known.exchange(found) != found && found == ExecutedReport::kWrong) {
    VERBATIM_WARN(
        "RMA: %s %s: its contexts use one port, and the communicator fails when that does. Next: look for another "
        "driver",
        port.device->name().c_str(), missing->c_str());
  }
  return found;
}

}  // namespace verbatim::rma
