#include "simulation/faults.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <iterator>
#include <new>
#include <system_error>
#include <utility>

#include "simulation/job_parts.h"
#include "simulation/memory.h"

namespace simulation {
namespace {

struct Lines {
  std::vector<const char*> allowed;      // parts of warnings
  std::vector<const char*> causes;       // parts of those that may name it as the cause of a call that fails
  std::vector<const char*> of_all = {};  // of memory: such parts also in a process to which none was refused
};

// Refused memory explains no line of another process.
bool can_be_named(Fault fault) {
  return fault != Fault::kMemory || has_refused_memory();
}

// When one end has failed, the others say so, or find that it has ended its connections, or that it does not listen.
const std::vector<const char*>& consequences() {
  static const std::vector<const char*> all = {" reported: ",
                                               " reported that ",
                                               " has failed at rank ",
                                               " because it failed at ",
                                               " its application closed it with outstanding operations",
                                               " closed a connection that has outstanding operations",
                                               " still puts to it",
                                               " that NCCL destroys have not completed after ",
                                               ": the memory was freed or deregistered there, or the process has ended",
                                               " ended or closed the connection first",
                                               "the peer closed the connection",
                                               " has ended its connection: ",
                                               " ranks have not ",  // connected, or made a collective call
                                               "Connection refused",
                                               "the peer refused the connection: ",
                                               ", and its host acknowledges nothing",
                                               ", repeated until the deadline (VERBATIM_CONNECT_TIMEOUT_S)"};
  return all;
}

const std::vector<const char*>& lines_of_lanes() {
  static const std::vector<const char*> all = {
      ": its lanes to ",
      " is down, the connection goes on over ",
      " is down, the connection waits for up to ",
      " is back after ",
      "; lane ",  // is used until the one that has failed works again
      "; no other lane works, so operations wait for one, ",
  };
  return all;
}

const Lines& lines_of(Fault fault) {
  std::vector<const char*> of_lanes = lines_of_lanes();
  of_lanes.insert(of_lanes.end(), {": the link is down (port error); ", ": the link is up again after "});
  std::vector<const char*> of_gids = of_lanes;
  of_gids.emplace_back(" (GID table change); ");
  // A GID has gone that was read: the device refuses it, or nothing arrives. Or a link-local one was all that was left.
  static const std::vector<const char*> of_addresses = {
      "ibv_modify_qp to RTR: Invalid argument",
      " for flushes of GPU memory failed with Invalid argument",
      " is no longer ::ffff:",
      ": never worked: the link of ",
      ": never worked: the two NICs cannot reach each other: GID, ",
      "one end has an IPv4 GID, the other an IPv6 GID",
      "one end uses RoCE v1, the other RoCE v2",
      ": its link is down",
      " does not exist any more, and the port has no other usable GID",
      ", set by VERBATIM_GID_INDEX, is empty or does not exist; ",
      " does not say which signals it has executed ",  // its port could not be tested
  };
  // The other end of a connection that is made may have given it up: then its QPs are gone.
  static const std::vector<const char*> of_tcp = {"the side channel with the peer ", "no message from the peer ",
                                                  "stalled for ", " is down, the connection goes on over "};
  constexpr const char* kNoAgreement = ", and no side channel to agree about it could be made ";
  // RMA waits 34 s for it, and VERBATIM_KEEPALIVE_S may be longer.
  constexpr const char* kNoAnswer = " the peer has not said what it has executed there";
  static const std::array<Lines, kFaultNames.size()> all = {{
      {{}, {}},
      {{}, {}},
      {of_lanes,
       {"the link of softverbs", ": its link is down", ": its test has failed", "transport retry counter exceeded",
        " has come back within ", " no other one has worked: "}},
      // The last message of an end may be lost with the TCP connection.
      {of_tcp,
       {"Connection reset by peer", kNoAgreement,
        " ended without closing a connection that has outstanding operations"}},
      {of_tcp, {"Connection timed out", kNoAgreement, kNoAnswer, "has sent nothing for "}},
      {{}, {}},
      // The peer cannot say why nothing arrives there.
      {of_tcp,
       {"Connection timed out", "Connection reset by peer", kNoAgreement, kNoAnswer, "has sent nothing for ",
        ": never worked: the two NICs cannot reach each other: GID, "}},
      {{"the side channel with the peer ", " is down, the connection "}, {"Connection reset by peer"}},
      {{"the side channel with the peer ", " refuses a QP that was reset "}, {}},
      {{}, {}},
      {{"no memory to leave a lane of RMA at rank ", ": no memory for a lane to ",
        "there is no memory for the QPs of a lane that is down", "no memory to describe the stall with "},
       {"out of memory", "Cannot allocate memory", "there is no memory to say how",
        "there is no memory to go on without the lane that failed"},
       {" ended without closing a connection that has outstanding operations"}},
      // A listen of NCCL stays after an abort, so the peer connects to it and waits.
      {{}, {"its application makes no calls for this connection"}},
      {of_gids, of_addresses},
      {{}, {}},  // those of one process
      {{}, {}},  // likewise
  }};
  return all[static_cast<std::size_t>(fault)];
}

template <typename Part>
bool has_any(std::string_view line, const std::vector<Part>& parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [line](const Part& part) { return line.find(part) != std::string_view::npos; });
}

// Whether this process is the one that is meant, or the line names it.
bool is_of(std::string_view line, std::size_t process) {
  if (process >= kMostProcesses) return false;
  return own_process() == process ||
         line.find("(pid " + std::to_string(id_of_process(process))) != std::string_view::npos;
}

// A time in between: its magnitude first, so that short ones are as frequent as long ones.
Time draw_time(Draw& draw, Time least, Time most) {
  const auto doublings = static_cast<std::size_t>(std::bit_width(most / least));
  const Time begin = least << draw.below(doublings);
  return std::min(begin + draw.below(begin), most);
}

std::string in_us(Time time) {
  return std::to_string(time / kMicrosecond) + "us";
}

// With seven retries no message is lost as often as a QP tries it.
std::string draw_loss(Draw& draw) {
  constexpr std::size_t kMostPerMille = 25;
  const std::size_t per_mille = 1 + draw.below(kMostPerMille);
  return (per_mille < 10 ? "loss rate=0.00" : "loss rate=0.0") + std::to_string(per_mille);
}

// Not as late as the timeout, so that nothing is sent twice.
std::string draw_lateness(Draw& draw) {
  return "delay by=" + in_us(draw_time(draw, kMicrosecond, 4 * kMillisecond)) +
         " jitter=" + in_us(draw_time(draw, kMicrosecond, 8 * kMillisecond)) +
         " nth=" + std::to_string(1 + draw.below(200)) + " count=" + std::to_string(1 + draw.below(100));
}

// After this time a QP gives up.
Time retry_time(unsigned timeout) {
  constexpr unsigned kAttempts = 8;
  return Time{4096} * kAttempts << timeout;
}

void add(std::string& clauses, const std::string& clause) {
  clauses += (clauses.empty() ? "" : "; ") + clause;
}

// Those of one fault. All are drawn, so that each is the same without the others.
class Events {
 public:
  Events(Fault fault, const FaultEvents& chosen, std::size_t& drawn) : drawn_(drawn) {
    if (const auto found = chosen.find(fault); found != chosen.end()) chosen_ = &found->second;
  }
  // Whether the one that is drawn next happens.
  bool takes_next() { return ++drawn_ != 0 && (chosen_ == nullptr || chosen_->contains(drawn_)); }

 private:
  const std::set<std::size_t>* chosen_ = nullptr;
  std::size_t& drawn_;
};

// Of the link of a port.
struct Outage {
  std::size_t process = 0;
  std::size_t port = 0;
  Time begin = 0;
  Time end = kNever;
};

Time after(Time end, Time duration) {
  return end == kNever ? kNever : end + duration;
}

// Whether all ports of a process that has several are down together when one of these begins.
bool leave_no_port(const std::vector<Outage>& outages, const std::vector<std::size_t>& ports) {
  constexpr Time kUntilItIsSeen = 20 * kMillisecond;  // that a link is back
  return std::any_of(outages.begin(), outages.end(), [&](const Outage& last) {
    std::set<std::size_t> down;
    for (const Outage& each : outages) {
      if (each.process == last.process && each.begin <= last.begin && last.begin <= after(each.end, kUntilItIsSeen)) {
        down.insert(each.port);
      }
    }
    return down.size() > 1 && down.size() == ports[last.process];
  });
}

// From the end of an outage until its lanes carry data again.
Time return_time(unsigned timeout) {
  return kSecond + retry_time(timeout);
}

// Whether while one lasts that is long enough for a lane to fail, and until its lanes are back, all other ports work.
bool leave_a_lane(const std::vector<Outage>& outages, const JobPorts& job, const Faults& faults) {
  const unsigned timeout = faults.timeout;
  const bool have_lanes = job.have_lanes && !faults.kinds.contains(Fault::kGid);
  constexpr Time kMargin = 2;  // a QP gives up a little earlier or later
  return std::all_of(outages.begin(), outages.end(), [&](const Outage& lost) {
    if (lost.end - lost.begin <= retry_time(timeout) / kMargin) return true;
    const Time end = after(lost.end, return_time(timeout));
    return have_lanes && job.ports[lost.process] > 1 &&
           std::none_of(outages.begin(), outages.end(), [&](const Outage& other) {
             const bool is_another = other.process != lost.process || other.port != lost.port;
             return is_another && other.begin <= end && after(other.end, return_time(timeout)) >= lost.begin;
           });
  });
}

void add_outage(const Outage& outage, std::vector<Outage>& outages, Faults& faults) {
  std::string clause = "link-down device=" + std::to_string(outage.port) + " at=" + in_us(outage.begin);
  if (outage.end != kNever) clause += " for=" + in_us(outage.end - outage.begin);
  add(faults.clauses[outage.process], clause);
  outages.push_back(outage);
}

// In half of the runs a port of a process loses its link for longer than a QP tries, and then, when its lanes may be
// back or a little later, one does again, up to twice; the last one may not return. What the job exchanges goes on
// after each of them.
void draw_returns(Draw& draw, const JobPorts& job, Events& events, std::vector<Outage>& outages, Faults& faults) {
  const bool happens = draw.one_in(2);
  std::size_t process = draw.below(job.ports.size());
  const std::size_t other = draw.below(job.ports.size());
  if (job.ports[other] > job.ports[process]) process = other;
  const std::size_t rounds = 2 + draw.below(2);
  constexpr unsigned kMostTimeout = 14;  // so that the run is short
  const unsigned timeout = std::min(faults.timeout, kMostTimeout);
  Time at = 0;
  for (const Outage& each : outages) at = each.end == kNever ? at : std::max(at, each.end);
  for (std::size_t i = 0; i < rounds; ++i) {
    const Time begin = at + draw_time(draw, 100 * kMicrosecond, 100 * kMillisecond);
    const Time length = retry_time(timeout) + draw_time(draw, kMillisecond, 2 * kSecond);
    const bool returns = i + 1 < rounds || draw.one_in(2);
    const Outage outage{process, draw.below(job.ports[process]), begin, returns ? begin + length : kNever};
    const bool is_early = draw.one_in(4);  // the lanes are not back yet
    const Time rest = is_early ? draw_time(draw, kMillisecond, kSecond)
                               : return_time(timeout) + draw_time(draw, 10 * kMillisecond, 2 * kSecond);
    const auto reconnect_s = 2 + static_cast<unsigned>(draw.below(9));
    at = begin + length + rest;
    if (!happens || !events.takes_next()) continue;
    add_outage(outage, outages, faults);
    faults.timeout = timeout;
    faults.pauses.push_back(begin);
    if (returns) faults.pauses.push_back(at);
    if (!returns) faults.reconnect_s = std::max(faults.reconnect_s, reconnect_s);
  }
}

// One to three outages; in one run of eight a link does not return.
void draw_outages(Draw& draw, const JobPorts& job, Events& events, Faults& faults) {
  const std::vector<std::size_t>& ports = job.ports;
  std::vector<Outage> outages;
  for (std::size_t left = draw.one_in(2) ? 1 : 2 + draw.below(2); left > 0; --left) {
    const std::size_t process = draw.below(ports.size());
    const std::size_t port = draw.below(ports[process]);
    const bool returns = !draw.one_in(8);
    const Time length = draw_time(draw, 100 * kMicrosecond, 5 * kSecond);
    const Time begin = draw_time(draw, 100 * kMicrosecond, 300 * kMillisecond);
    const auto reconnect_s = returns ? 0U : 1 + static_cast<unsigned>(draw.below(10));
    if (!events.takes_next()) continue;
    add_outage({process, port, begin, returns ? begin + length : kNever}, outages, faults);
    if (!returns) faults.reconnect_s = reconnect_s;
  }
  draw_returns(draw, job, events, outages, faults);
  faults.may_end_job = faults.may_end_job || !leave_a_lane(outages, job, faults);
  faults.may_end_contexts = leave_no_port(outages, ports);
}

// One to three times a port loses the addresses of its interface, which its GIDs 2 and 3 are, for up to 5 s, or gets
// another one in their place. In half of the cases its link goes down instead, shorter than a QP tries: then they come
// back at other indices. In half of the runs the job goes on when lanes may have come back.
void draw_gid_changes(Draw& draw, const JobPorts& job, Events& events, Faults& faults) {
  constexpr std::size_t kEntries = 6;  // of addresses, from 2 on
  std::set<std::pair<std::size_t, std::size_t>> changed;
  faults.names_gid = draw.one_in(2);  // then there is only that address, at any index
  const bool waits = draw.one_in(2);
  Time last = 0;
  for (std::size_t left = 1 + draw.below(3); left > 0; --left) {
    const std::size_t process = draw.below(job.ports.size());
    const std::size_t port = draw.below(job.ports[process]);
    const bool has_outage = draw.one_in(2);
    const Time begin = draw_time(draw, 100 * kMicrosecond, 300 * kMillisecond);
    const Time outage = draw_time(draw, 100 * kMicrosecond, retry_time(faults.timeout) / 4);
    const Time absence = draw.one_in(3) ? 0 : draw_time(draw, kMillisecond, 5 * kSecond);
    const std::size_t index = 2 + draw.below(kEntries);
    const bool is_another = draw.one_in(3) && !faults.names_gid;
    const std::string address = (is_another ? "10.78." : "10.77.") + std::to_string(port) + ".1";
    last = std::max(last, begin + (has_outage ? outage : absence));
    const std::string device = "device=" + std::to_string(port);
    std::string& clauses = faults.clauses[process];
    // The clauses name the indices of the begin, so a port changes once.
    const bool is_first = changed.insert({process, port}).second;
    if (!events.takes_next() || !is_first) continue;
    if (has_outage) {
      faults.renumbers_gids = true;
      add(clauses, "link-down " + device + " at=" + in_us(begin) + " for=" + in_us(outage));
      continue;
    }
    for (const unsigned old : {2U, 3U}) {
      add(clauses, "gid " + device + " index=" + std::to_string(old) + " address=none at=" + in_us(begin));
    }
    for (const unsigned version : {1U, 2U}) {
      const std::size_t next = 2 + (index - 3 + version) % kEntries;
      std::string clause = "gid " + device + " index=" + std::to_string(next);
      clause.append(" address=").append(address).append(" type=rocev").append(std::to_string(version));
      add(clauses, clause.append(" at=").append(in_us(begin + absence)));
    }
  }
  if (waits) faults.pauses.push_back(last + draw_time(draw, 200 * kMillisecond, 4 * kSecond));
}

// Connections are counted in the order in which they are made.
TcpFaults::Break draw_break(Draw& draw, bool resets) {
  constexpr std::size_t kConnections = 8;
  return {
      .number = 1 + draw.below(kConnections), .after = draw_time(draw, 10 * kMicrosecond, kSecond), .resets = resets};
}

// Shorter than VERBATIM_CONNECT_TIMEOUT_S.
TcpFaults::Outage draw_tcp_outage(Draw& draw, const Faults& faults, bool refuses) {
  constexpr Time kLongest = 20 * kSecond;
  const Time begin = draw.one_in(3) ? 0 : draw_time(draw, 10 * kMicrosecond, 300 * kMillisecond);
  const bool ends = refuses || !draw.one_in(4);
  return {.process = draw.below(faults.clauses.size()),
          .interface = draw.below(kInterfaces),
          .begin = begin,
          .end = ends ? begin + draw_time(draw, kMillisecond, kLongest) : kNever,
          .refuses = refuses};
}

void draw_breaks(Draw& draw, std::size_t count, bool resets, Events& events, Faults& faults) {
  for (std::size_t i = 0; i < count; ++i) {
    const TcpFaults::Break drawn = draw_break(draw, resets);
    if (events.takes_next()) faults.tcp.add(drawn);
  }
  faults.may_end_setup = true;
  faults.keepalive_s = 4 + static_cast<unsigned>(draw.below(40));
  // Ranks wait for each other for so long at most, until one knows that it has to make the connection again.
  constexpr unsigned kSoon = 15;
  const bool is_soon = resets || faults.keepalive_s < kSoon;
  // A new connection may be refused, or cut for longer than it is waited for.
  const bool can_be_made = !faults.kinds.contains(Fault::kRefused) && !faults.kinds.contains(Fault::kCut);
  if (!is_soon || !can_be_made) faults.may_end_puts = true;
}

void draw_cut(Draw& draw, Faults& faults) {
  // A listener waits for so long until the first bytes of a connection come.
  constexpr Time kLongestInSetup = 2 * kSecond;
  const TcpFaults::Outage outage = draw_tcp_outage(draw, faults, false);
  faults.tcp.add(outage);
  if (outage.end - outage.begin > kLongestInSetup) faults.may_end_setup = true;
  if (outage.end != kNever) return;
  faults.may_end_puts = true;
  faults.keepalive_s = 4 + static_cast<unsigned>(draw.below(40));
}

// Mostly one process, at any of the steps of a usual run.
void draw_deaths(Draw& draw, Events& events, Faults& faults) {
  constexpr std::uint64_t kFirstStep = 64;
  constexpr std::uint64_t kLastStep = 200'000;
  for (std::size_t left = draw.one_in(4) ? 2 : 1; left > 0; --left) {
    const std::uint64_t step = draw_time(draw, kFirstStep, kLastStep);
    const std::size_t process = draw.below(faults.clauses.size());
    if (events.takes_next()) faults.dies_at.at(process) = step;
  }
}

void draw_verb(Draw& draw, Faults& faults) {
  // Without those that find the devices: they only make a device that does not exist.
  constexpr std::pair<const char*, int> kVerbs[] = {
      {"ibv_create_cq", ENOMEM},     {"ibv_create_qp", ENOMEM}, {"ibv_modify_qp", EINVAL},
      {"ibv_modify_qp", ETIMEDOUT},  {"ibv_reg_mr", ENOMEM},    {"ibv_reg_mr_iova2", ENOMEM},
      {"ibv_reg_dmabuf_mr", ENOMEM}, {"ibv_query_qp", EIO},     {"ibv_post_send", ENOMEM},
      {"ibv_post_recv", ENOMEM},     {"ibv_poll_cq", EIO},
  };
  constexpr std::uint64_t kLastCall = 64;
  const auto& [name, error] = kVerbs[draw.below(std::size(kVerbs))];
  faults.verb = {.name = name,
                 .process = draw.below(faults.clauses.size()),
                 .nth = static_cast<long>(draw_time(draw, 1, kLastCall)),
                 .error = error};
  faults.may_end_job = true;
}

void draw_memory(Draw& draw, Faults& faults) {
  constexpr std::uint64_t kLastCall = 8192;
  faults.memory = {.process = draw.below(faults.clauses.size()),
                   .nth = static_cast<long>(draw_time(draw, 1, kLastCall))};
  faults.may_end_job = true;
}

// Mostly one process, at any time of the set-up or of the exchange.
void draw_aborts(Draw& draw, Events& events, Faults& faults) {
  for (std::size_t left = draw.one_in(4) ? 2 : 1; left > 0; --left) {
    Faults::Abort drawn;
    if (draw.one_in(3)) {
      drawn.at = draw_time(draw, 10 * kMicrosecond, 300 * kMillisecond);
    } else {
      drawn.after = 1 + draw.below(64);
    }
    const std::size_t process = draw.below(faults.clauses.size());
    if (events.takes_next()) faults.aborts.at(process) = drawn;
  }
}

std::string draw_hang(Draw& draw) {
  constexpr const char* kVerbs[] = {"create_cq",  "create_qp",    "modify_qp",     "query_qp", "destroy_qp",
                                    "query_port", "reg_mr_iova2", "reg_dmabuf_mr", "dereg_mr"};
  return std::string("slow verb=") + kVerbs[draw.below(std::size(kVerbs))] +
         " by=" + in_us(draw_time(draw, kMillisecond, 10 * kSecond)) +
         " nth=" + std::to_string(draw_time(draw, 1, 64)) + " count=1";
}

// One of the first messages or receives of a process, or one of its devices after some messages.
void draw_qp(Draw& draw, const JobPorts& job, Faults& faults) {
  constexpr const char* kOperations[] = {"", "op=write", "op=write_imm", "op=read", "op=fetch_add"};
  // Not those of a network.
  constexpr const char* kStatuses[] = {"LOC_QP_OP_ERR",     "LOC_PROT_ERR",   "BAD_RESP_ERR",
                                       "REM_INV_REQ_ERR",   "REM_ACCESS_ERR", "REM_OP_ERR",
                                       "RNR_RETRY_EXC_ERR", "FATAL_ERR",      "GENERAL_ERR"};
  const std::size_t process = draw.below(job.ports.size());
  const std::size_t kind = draw.below(8);
  const std::string operation = kOperations[draw.below(std::size(kOperations))];
  const std::string status = kStatuses[draw.below(std::size(kStatuses))];
  const std::string device = std::to_string(draw.below(job.ports[process]));
  const std::string number = std::to_string(draw_time(draw, 1, 256));
  std::string& clauses = faults.clauses[process];
  if (kind == 1) {
    return add(clauses, "rnr " + operation + " nth=" + number + " times=" + std::to_string(1 + draw.below(6)));
  }
  faults.qp.process = process;
  if (kind == 0) {
    add(clauses, "device-fatal device=" + device + " after=" + number);
    faults.qp.causes = {"softverbs" + device + ": the device has failed (",
                        "softverbs" + device + " on simulated or its driver failed", "Input/output error",
                        " does not say which signals it has executed "};
  } else if (kind == 2) {
    add(clauses, "drop-completion " + (draw.one_in(2) ? "op=recv" : operation) + " nth=" + number);
    faults.stall_fail_s = 60;  // longer than all else that is waited for
    faults.qp.causes = {" (VERBATIM_STALL_FAIL_S)", " the peer has not said what it has executed there"};
  } else if (kind == 3) {
    add(clauses, "complete op=recv nth=" + number + " status=LOC_LEN_ERR");
    faults.qp.causes = {"(IBV_WC_LOC_LEN_ERR "};
    faults.qp.at_sender = "(IBV_WC_REM_INV_REQ_ERR ";
  } else {
    add(clauses, "complete " + operation + " nth=" + number + " status=" + status);
    faults.qp.causes = {"(IBV_WC_" + status + " "};
  }
}

// Alone with other limits of the plugin, which else would pass while something else lasts.
void draw_idle(Draw& draw, Faults& faults) {
  const Time begin = draw_time(draw, 10 * kMicrosecond, 300 * kMillisecond);
  faults.idle = {.process = draw.below(faults.clauses.size()),
                 .begin = begin,
                 .end = begin + draw_time(draw, kSecond, 20 * kSecond)};
  if (faults.kinds.size() != 1) return;
  faults.stall_warn_s = 1 + static_cast<unsigned>(draw.below(20));
  faults.keepalive_s = 1 + static_cast<unsigned>(draw.below(20));
}

void draw_fault(Draw& draw, Fault fault, const JobPorts& job, Events& events, Faults& faults) {
  constexpr bool kResets = true;
  constexpr bool kRefuses = true;
  switch (fault) {
    case Fault::kLoss:
      for (std::string& clauses : faults.clauses) {
        const std::string clause = draw_loss(draw);
        if (events.takes_next()) add(clauses, clause);
      }
      break;
    case Fault::kLate:
      for (std::string& clauses : faults.clauses) {
        const std::string clause = draw_lateness(draw);
        if (events.takes_next()) add(clauses, clause);
      }
      break;
    case Fault::kPort:
      draw_outages(draw, job, events, faults);
      break;
    case Fault::kReset:
      draw_breaks(draw, 1 + draw.below(3), kResets, events, faults);
      break;
    case Fault::kUnanswered:
      draw_breaks(draw, 1, !kResets, events, faults);
      break;
    case Fault::kRefused:
      if (events.takes_next()) faults.tcp.add(draw_tcp_outage(draw, faults, kRefuses));
      break;
    case Fault::kCut:
      if (events.takes_next()) draw_cut(draw, faults);
      break;
    case Fault::kDeath:
      draw_deaths(draw, events, faults);
      break;
    case Fault::kVerb:
      if (events.takes_next()) draw_verb(draw, faults);
      break;
    case Fault::kHang:
      if (events.takes_next()) add(faults.clauses.at(draw.below(faults.clauses.size())), draw_hang(draw));
      break;
    case Fault::kMemory:
      if (events.takes_next()) draw_memory(draw, faults);
      break;
    case Fault::kAbort:
      draw_aborts(draw, events, faults);
      break;
    case Fault::kGid:
      draw_gid_changes(draw, job, events, faults);
      break;
    case Fault::kQp:
      if (events.takes_next()) draw_qp(draw, job, faults);
      break;
    case Fault::kIdle:
      if (events.takes_next()) draw_idle(draw, faults);
      break;
  }
}

FaultSet draw_set(Draw& draw, std::uint64_t seed, bool has_optional) {
  FaultSet drawn;
  if (draw.one_in(4)) return drawn;
  constexpr auto kBeforeGid = static_cast<std::size_t>(Fault::kGid);
  drawn.insert(static_cast<Fault>(draw.below(kBeforeGid)));
  for (std::size_t i = 0; i < kBeforeGid; ++i) {
    if (draw.one_in(8)) drawn.insert(static_cast<Fault>(i));
  }
  // From numbers of their own: the seeds without them are what they were before there were these faults.
  if (Draw(seed ^ 0x61d).one_in(6)) drawn.insert(Fault::kGid);
  if (Draw(seed ^ 0x9b).one_in(8)) drawn.insert(Fault::kQp);
  Draw idle(seed ^ 0x1d1e);
  if (idle.one_in(6)) {
    if (idle.one_in(2)) drawn.clear();
    drawn.insert(Fault::kIdle);
  }
  // What a receiver has announced without a call to follow must come again over another lane.
  if (has_optional && Draw(seed ^ 0x0b72).one_in(2)) drawn.insert(Fault::kPort);
  return drawn;
}

struct SharedCounts {
  std::array<std::atomic<std::uint64_t>, kFaultNames.size()> happened{};
  std::atomic<std::uint64_t> failed_processes{0};
  // By process.
  std::array<std::atomic<bool>, kMostProcessesThatDie> has_failed_call{};
  std::array<std::atomic<bool>, kMostProcessesThatDie> closes_early{};
  std::array<std::atomic<std::uint64_t>, kMostProcessesThatDie> done{};
  std::array<std::atomic<bool>, kMostProcessesThatDie> ends_at_once{};
};

SharedCounts& shared_counts() {
  static SharedCounts* const counts = [] {
    void* const memory = mmap(nullptr, sizeof(SharedCounts), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    return new (memory) SharedCounts{};
  }();
  return *counts;
}

}  // namespace

std::optional<ChosenFaults> parse_faults(std::string_view list) {
  ChosenFaults chosen;
  if (list == "none") return chosen;
  // What comes before the next of these separators, which is left out, too.
  const auto take = [](std::string_view& text, char separator) {
    const std::size_t end = std::min(text.find(separator), text.size());
    const std::string_view taken = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    return taken;
  };
  if (list.ends_with(',')) return std::nullopt;
  do {
    std::string_view one = take(list, ',');
    const auto* const name = std::find(kFaultNames.begin(), kFaultNames.end(), take(one, '/'));
    if (name == kFaultNames.end()) return std::nullopt;
    const auto fault = static_cast<Fault>(name - kFaultNames.begin());
    chosen.kinds.insert(fault);
    while (!one.empty()) {
      const std::string_view digits = take(one, '/');
      std::size_t number = 0;
      const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
      if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
      chosen.events[fault].insert(number);
    }
  } while (!list.empty());
  return chosen;
}

std::string describe(const ChosenFaults& faults) {
  std::string text;
  for (const Fault fault : faults.kinds) {
    text.append(text.empty() ? "" : ",").append(kFaultNames[static_cast<std::size_t>(fault)]);
    const auto events = faults.events.find(fault);
    if (events == faults.events.end()) continue;
    for (const std::size_t number : events->second) text.append("/").append(std::to_string(number));
  }
  return text.empty() ? "none" : text;
}

Faults draw_faults(std::uint64_t seed, const JobPorts& job, const std::optional<ChosenFaults>& list) {
  Draw chooser(seed ^ 0x5eed'fa17);  // the job is the same without faults
  Faults faults;
  const ChosenFaults chosen = list.value_or(ChosenFaults{.kinds = draw_set(chooser, seed, job.has_optional)});
  faults.kinds = chosen.kinds;
  faults.clauses.resize(job.ports.size());
  if (faults.kinds.empty()) return faults;
  faults.timeout = 12 + static_cast<unsigned>(seed % 6);
  for (const Fault fault : faults.kinds) {
    Draw draw(seed ^ (static_cast<std::uint64_t>(fault) + 1) << 32);  // a fault is the same without others
    Events events(fault, chosen.events, faults.events[fault]);
    draw_fault(draw, fault, job, events, faults);
  }
  std::sort(faults.pauses.begin(), faults.pauses.end());
  const bool has_tcp_faults = faults.tcp.break_count + faults.tcp.outage_count != 0;
  if (has_tcp_faults) faults.tcp.interfaces = 1 + chooser.below(kInterfaces);
  // Without TCP the ends cannot agree about a lane.
  const bool loses_lanes = faults.kinds.contains(Fault::kPort) || faults.kinds.contains(Fault::kGid);
  if (faults.may_end_setup && loses_lanes) faults.may_end_job = true;
  // The ends give each other addresses that may go before the first message.
  if (faults.kinds.contains(Fault::kGid)) {
    faults.may_end_setup = true;
    // All lanes to its rank fail with the address, and RMA does not wait where it has no other one.
    const bool has_only_port = std::find(job.ports.begin(), job.ports.end(), 1U) != job.ports.end();
    faults.may_end_puts = faults.may_end_puts || has_only_port;
  }
  return faults;
}

void leave_out(Faults& faults, std::size_t processes) {
  faults.clauses.resize(processes);
  std::fill(faults.dies_at.begin() + static_cast<std::ptrdiff_t>(processes), faults.dies_at.end(), 0);
  std::fill(faults.aborts.begin() + static_cast<std::ptrdiff_t>(processes), faults.aborts.end(), Faults::Abort{});
  if (faults.verb.process >= processes) faults.verb = {};
  if (faults.qp.process >= processes) {
    faults.qp = {};
    faults.stall_fail_s = 0;
  }
  if (faults.idle.process >= processes) faults.idle = {};
  if (faults.memory.process >= processes) faults.memory = {};
}

// An end that has failed or aborted cannot tell the others over a TCP connection over which nothing arrives.
bool Faults::may_be_unheard() const {
  return kinds.contains(Fault::kUnanswered) || kinds.contains(Fault::kCut);
}

bool Faults::has_unheard() const {
  const auto& failed = shared_counts().has_failed_call;
  bool has_failed = false;  // another process
  for (std::size_t i = 0; i < failed.size(); ++i) has_failed = has_failed || (i != own_process() && failed[i]);
  return may_be_unheard() && (has_failed || has_lost_any());
}

bool Faults::names_failed_qp(std::string_view line) const {
  if (qp.at_sender != nullptr && line.find(qp.at_sender) != std::string_view::npos) return true;
  return is_of(line, qp.process) && has_any(line, qp.causes);
}

bool Faults::allow(std::string_view line) const {
  // Other processes see of a device that has failed that it answers nothing.
  const bool is_unanswered = line.find("transport retry counter exceeded") != std::string_view::npos;
  const bool may_lose_lanes = !qp.causes.empty() && (is_of(line, qp.process) || is_unanswered);
  if (may_lose_lanes && has_any(line, lines_of_lanes())) return true;
  if (is_of(line, idle.process) && line.find("stalled for ") != std::string_view::npos) return true;
  if (has_unheard() && line.find(" is down, the connection waits for up to ") != std::string_view::npos) return true;
  return explain(line) || std::any_of(kinds.begin(), kinds.end(), [line](Fault fault) {
           return can_be_named(fault) && has_any(line, lines_of(fault).allowed);
         });
}

Time Faults::begin_of(std::size_t number, std::size_t count) const {
  std::size_t part = 0;
  while (part < pauses.size() && number >= (part + 1) * count / (pauses.size() + 1)) ++part;
  return part == 0 ? 0 : pauses[part - 1];
}

void Faults::wait_while_idle() const {
  if (own_process() != idle.process || now() < idle.begin || now() >= idle.end) return;
  count_fault(Fault::kIdle);
  ::usleep(static_cast<useconds_t>((idle.end - now()) / kMicrosecond));
}

bool Faults::has_aborted(std::size_t process) const {
  if (process >= aborts.size()) return false;
  const Abort& abort = aborts[process];
  return (abort.at != 0 && abort.at <= now()) || (abort.after != 0 && abort.after <= shared_counts().done[process]);
}

bool Faults::has_aborted_any() const {
  for (std::size_t process = 0; process < aborts.size(); ++process) {
    if (has_aborted(process)) return true;
  }
  return false;
}

bool Faults::has_lost_any() const {
  for (std::size_t process = 0; process < dies_at.size(); ++process) {
    if (has_lost(process)) return true;
  }
  return false;
}

bool Faults::has_left(std::size_t process) const {
  return has_closed_early(process) || (may_be_unheard() && shared_counts().has_failed_call[process]);
}

// Each link returns long before VERBATIM_RECONNECT_S has passed, and nothing else keeps its lanes from being made
// again.
bool Faults::must_lanes_return() const {
  const auto keeps_lanes = [this](Fault fault) {
    return fault <= Fault::kPort || fault == Fault::kIdle || (fault == Fault::kQp && qp.causes.empty());
  };
  return reconnect_s == 0 && std::all_of(kinds.begin(), kinds.end(), keeps_lanes);
}

bool Faults::explain(std::string_view line) const {
  const bool is_unanswered = line.find("transport retry counter exceeded") != std::string_view::npos;
  for (std::size_t process = 0; process < dies_at.size(); ++process) {
    const bool has_left_qps = has_left(process) || (process == qp.process && !qp.causes.empty());
    if (!has_lost(process) && !(is_unanswered && has_left_qps)) continue;
    if (line.find("(pid " + std::to_string(id_of_process(process))) != std::string_view::npos) return true;
  }
  if (may_leave_no_port() && line.find(": port is DOWN") != std::string_view::npos) return true;
  if (verb.name != nullptr && line.find(verb.name) != std::string_view::npos) return true;
  if (names_failed_qp(line)) return true;
  const bool may_end = may_end_job || may_end_setup || may_end_puts || may_end_contexts || !qp.causes.empty();
  if (!may_end && !has_lost_any()) return false;
  const bool is_wait_for_lane = line.find(" has come back within ") != std::string_view::npos;
  if (is_wait_for_lane && must_lanes_return()) return false;
  if (is_wait_for_lane && has_unheard()) return true;
  return has_any(line, consequences()) || std::any_of(kinds.begin(), kinds.end(), [line](Fault fault) {
           const Lines& lines = lines_of(fault);
           return has_any(line, lines.of_all) || (can_be_named(fault) && has_any(line, lines.causes));
         });
}

std::string FaultCounts::describe(const FaultSet& kinds) const {
  if (kinds.empty()) return " none";
  std::string text;
  for (const Fault fault : kinds) {
    const auto index = static_cast<std::size_t>(fault);
    text.append(text.empty() ? " " : ", ").append(kFaultNames[index]);
    if (happened[index] != 0) text.append(" ").append(std::to_string(happened[index]));
  }
  if (failed_processes != 0) text.append(", failed calls in processes: ").append(std::to_string(failed_processes));
  return text;
}

void reset_fault_counts() {
  SharedCounts& counts = shared_counts();
  for (std::atomic<std::uint64_t>& count : counts.happened) count = 0;
  counts.failed_processes = 0;
  for (std::atomic<bool>& failed : counts.has_failed_call) failed = false;
  for (std::atomic<bool>& closes : counts.closes_early) closes = false;
  for (std::atomic<std::uint64_t>& done : counts.done) done = 0;
  for (std::atomic<bool>& ends : counts.ends_at_once) ends = false;
}

FaultCounts fault_counts() {
  FaultCounts counts;
  for (std::size_t i = 0; i < counts.happened.size(); ++i) counts.happened[i] = shared_counts().happened[i];
  counts.failed_processes = shared_counts().failed_processes;
  return counts;
}

void count_fault(Fault fault) {
  ++shared_counts().happened[static_cast<std::size_t>(fault)];
}

void count_faults_in(std::string_view line) {
  if (line.find(": the link is down (port error)") != std::string_view::npos) count_fault(Fault::kPort);
  if (has_any<const char*>(line, {" (GID table change); ", ": the GID table has changed, "})) count_fault(Fault::kGid);
  if (line.find(" (VERBATIM_CLOSE_TIMEOUT_MS); they are given up") != std::string_view::npos) note_early_close();
}

void count_done() {
  if (own_process() < kMostProcessesThatDie) ++shared_counts().done[own_process()];
}

void note_failed_call() {
  shared_counts().has_failed_call[own_process()] = true;
}

void note_early_close() {
  shared_counts().closes_early[own_process()] = true;
}

bool has_closed_early(std::size_t process) {
  return shared_counts().closes_early[process];
}

void note_end_at_once() {
  shared_counts().ends_at_once[own_process()] = true;
}

bool ends_at_once(std::size_t process) {
  return shared_counts().ends_at_once[process];
}

void count_failed_process() {
  ++shared_counts().failed_processes;
}

}  // namespace simulation
