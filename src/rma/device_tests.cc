#include "rma/device_tests.h"

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
constexpr std::uint64_t kId = 1;
constexpr int kSends = 3;
// A SEND to a QP in ERR gets no answer: 70 ms, and up to four times as long on hardware.
constexpr std::uint8_t kTimeout = 12;
constexpr std::uint8_t kRetries = 3;
constexpr unsigned kPauseUs = 100;
constexpr unsigned kPausesOfARequest = 10'000;
// After the move to ERR a device may still execute a packet (rxe).
constexpr unsigned kPausesInErr = 100;

// A SEND of 0 bytes.
Status post_empty_send(ibv_qp* qp) {
  ibv_send_wr request = {};
  request.wr_id = kId;
  request.opcode = IBV_WR_SEND;
  request.send_flags = IBV_SEND_SIGNALED;
  return check_errno("ibv_post_send", post_send(qp, request));
}

// The status of the request that is outstanding, when it ends in this time.
std::optional<ibv_wc_status> await(ibv_cq* cq, unsigned pauses) {
  while (pauses > 0) {
    ibv_wc completion{};
    if (ibv_poll_cq(cq, 1, &completion) > 0) {
      if (completion.wr_id == kId) return completion.status;
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
    if (const Status posted = post_empty_send(from); !posted) return posted.error();
    if (await(from->send_cq, kPausesOfARequest) != IBV_WC_SUCCESS) return Error{ErrorKind::kSystem, EIO, "SEND"};
    if (executed == 2) {
      if (const Status moved = to_error(to, device); !moved) return moved.error();
      static_cast<void>(await(from->send_cq, kPausesInErr));  // none is outstanding
      if (const Status posted = post_empty_send(from); !posted) return posted.error();
      const bool was_executed = await(from->send_cq, kPausesOfARequest) == IBV_WC_SUCCESS;
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

// Its addresses may have moved. `config` gets the short timeouts of these tests.
Result<Port> prepare(const Port& port, Config& config) {
  config.timeout = kTimeout;
  config.retry_count = kRetries;
  return refresh_port(port, config, LogLevel::kInfo);
}

Result<UniqueCq> make_cq(const Device& device, int entries) {
  const Verbs& verbs = device.verbs();
  return adopt("ibv_create_cq", verbs.create_cq(device.context(), entries, nullptr, nullptr, 0), verbs.destroy_cq);
}

Result<std::string> test_device(const Port& known, Config config) {
  const Result<Port> now = prepare(known, config);
  if (!now) return now.error();
  const Port& port = *now;
  const Result<UniqueCq> cq = make_cq(*port.device, 2 * kSends);
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

// Compares the word with a number that it hardly ever has, and writes the same number then: nothing changes. nullopt:
// no completion has come.
Result<std::optional<ibv_wc_status>> try_atomic(const RcQp& qp, std::uint64_t word, std::uint32_t rkey,
                                                const ControlMemory& read) {
  constexpr std::uint64_t kUnusual = 0x5ee7'7a31'c0de'9b1d;
  ibv_sge segment{reinterpret_cast<std::uintptr_t>(read.data()), sizeof(std::uint64_t), read.lkey(0)};
  ibv_send_wr work = {};
  work.wr_id = kId;
  work.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
  work.send_flags = IBV_SEND_SIGNALED;
  work.sg_list = &segment;
  work.num_sge = 1;
  work.wr.atomic = {.remote_addr = word, .compare_add = kUnusual, .swap = kUnusual, .rkey = rkey};
  const Status posted = check_errno("ibv_post_send", post_send(qp.qp.get(), work));
  if (!posted) return posted.error();
  return await(qp.qp->send_cq, kPausesOfARequest);
}

// How an atomic on the word ends, by a QP that is connected to itself. Before it one on memory of the host, with the
// same QP, tells whether the port works. `word` 0: only that.
Result<std::optional<ibv_wc_status>> ask_for_atomic(const Port& known, std::uint64_t word, std::uint32_t rkey,
                                                    Config config) {
  const Result<Port> now = prepare(known, config);
  if (!now) return now.error();
  const Port* const port = &*now;
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  const Result<ControlMemory> host = ControlMemory::create(std::span(&port, 1), 2 * kWord, MrOrdering::kAtomic);
  if (!host) return host.error();
  const Result<UniqueCq> cq = make_cq(*port->device, 1);
  if (!cq) return cq.error();
  const Result<RcQp> qp = make_qp(*port, cq->get(), {.send_wr = 1, .recv_wr = 1}, config);
  if (!qp) return qp.error();
  const Result<ConnectedQp> connected =
      connect_qp(qp->qp.get(), *port, to_oneself(*port, qp->qp.get(), kFirstPsn, config), config);
  if (!connected) return connected.error();
  const auto in_host = reinterpret_cast<std::uintptr_t>(host->data()) + kWord;
  const Result<std::optional<ibv_wc_status>> works = try_atomic(*qp, in_host, host->rkey(0), *host);
  if (!works) return works.error();
  if (*works != IBV_WC_SUCCESS) return Error{ErrorKind::kSystem, EIO, "an atomic on memory of the host"};
  return word != 0 ? try_atomic(*qp, word, rkey, *host) : works;
}

}  // namespace

Status check_atomics(std::span<const Port* const> ports, const MrRequest& request, const MemoryHandle& memory,
                     const Config& config, std::uint32_t& working) {
  const auto begin = reinterpret_cast<std::uintptr_t>(request.address);
  const std::uintptr_t word = (begin + sizeof(std::uint64_t) - 1) / sizeof(std::uint64_t) * sizeof(std::uint64_t);
  if (word + sizeof(std::uint64_t) > begin + request.bytes) return {};  // it has none
  for (std::size_t i = 0; i < ports.size(); ++i) {
    if ((working >> i & 1) != 0) continue;
    const Port& port = *ports[i];
    const Result<std::optional<ibv_wc_status>> ended = ask_for_atomic(port, word, memory.rkey[i], config);
    if (ended && *ended == IBV_WC_SUCCESS) working |= 1U << i;
    // The port may have been lost meanwhile.
    if (!ended || *ended == IBV_WC_SUCCESS || !ask_for_atomic(port, 0, 0, config)) continue;
    VERBATIM_WARN(
        "RMA: %s executes no atomics on memory of a GPU, which signals need: one ended with %s, and one on memory of "
        "the host was executed. Next: see with 'lspci -vvv' whether all PCIe switches between NIC and GPU route "
        "atomics "
        "(AtomicOpsCap, AtomicOpsCtl), and look for another driver or firmware; VERBATIM_RMA=0 does without RMA",
        port.name.c_str(), *ended ? port.device->verbs().wc_status_str(**ended) : "no completion");
    return Error{ErrorKind::kSystem, EOPNOTSUPP, "atomics on memory of a GPU", true};
  }
  return {};
}

ExecutedReport executed_report(const Port& port, const Config& config) {
  std::atomic<ExecutedReport>& known = port.device->executed_report();
  if (known != ExecutedReport::kNotKnown) return known;
  const Result<std::string> missing = test_device(port, config);
  if (!missing) {
    VERBATIM_INFO("RMA: %s could not be tested: %s", port.name.c_str(), to_string(missing.error()).c_str());
    return ExecutedReport::kNotKnown;
  }
  const ExecutedReport found = missing->empty() ? ExecutedReport::kRight : ExecutedReport::kWrong;
  if (known.exchange(found) != found && found == ExecutedReport::kWrong) {
    VERBATIM_WARN(
        "RMA: %s %s: new contexts on it use one port, and a communicator fails when its port does. Next: look for "
        "another driver",
        port.device->name().c_str(), missing->c_str());
  }
  return found;
}

}  // namespace verbatim::rma
