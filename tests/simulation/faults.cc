#include "simulation/faults.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <new>

#include "simulation/job_parts.h"

namespace simulation {
namespace {

struct Lines {
  std::vector<const char*> allowed;  // parts of warnings
  std::vector<const char*> causes;   // parts of those that may name it as the cause of a call that fails
};

const Lines& lines_of(Fault fault) {
  static const std::array<Lines, kFaultNames.size()> all = {{
      {{}, {}},
      {{}, {}},
      {{": the link is down (port error); ", ": the link is up again after ", ": its lanes to ", "lane "},
       {"the link of softverbs", ": its link is down", "transport retry counter exceeded",
        " reported: ", " has come back within ", " has failed at rank "}},
  }};
  return all[static_cast<std::size_t>(fault)];
}

bool has_any(std::string_view line, const std::vector<const char*>& parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [line](const char* part) { return line.find(part) != std::string_view::npos; });
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
  return "loss rate=0.0" + std::to_string(1 + draw.below(25));
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

// One to three outages; in one run of eight a link does not return.
void draw_outages(Draw& draw, const JobPorts& job, Faults& faults) {
  const std::vector<std::size_t>& ports = job.ports;
  constexpr Time kMargin = 2;  // a QP gives up a little earlier or later
  std::set<std::pair<std::size_t, std::size_t>> long_ones;
  std::size_t short_ones = 0;
  for (std::size_t left = draw.one_in(2) ? 1 : 2 + draw.below(2); left > 0; --left) {
    const std::size_t process = draw.below(ports.size());
    const std::size_t port = draw.below(ports[process]);
    const bool returns = !draw.one_in(8);
    const Time length = draw_time(draw, 100 * kMicrosecond, 5 * kSecond);
    std::string clause = "link-down device=" + std::to_string(port) +
                         " at=" + in_us(draw_time(draw, 100 * kMicrosecond, 300 * kMillisecond));
    if (returns) clause += " for=" + in_us(length);
    add(faults.clauses[process], clause);
    if (!returns || length > retry_time(faults.timeout) / kMargin) {
      long_ones.insert({process, port});
    } else {
      ++short_ones;
    }
    if (!returns) faults.reconnect_s = 1 + static_cast<unsigned>(draw.below(10));
  }
  const bool goes_on = long_ones.empty() || (long_ones.size() == 1 && short_ones == 0 && job.have_lanes &&
                                             ports[long_ones.begin()->first] > 1);
  faults.may_end_job = faults.may_end_job || !goes_on;
}

FaultSet draw_set(Draw& draw) {
  FaultSet drawn;
  if (draw.one_in(4)) return drawn;
  drawn.insert(static_cast<Fault>(draw.below(kFaultNames.size())));
  for (std::size_t i = 0; i < kFaultNames.size(); ++i) {
    if (draw.one_in(6)) drawn.insert(static_cast<Fault>(i));
  }
  return drawn;
}

struct SharedCounts {
  std::array<std::atomic<std::uint64_t>, kFaultNames.size()> happened{};
  std::atomic<std::uint64_t> failed_processes{0};
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

std::optional<FaultSet> parse_faults(std::string_view list) {
  FaultSet found;
  if (list == "none") return found;
  while (true) {
    const std::size_t comma = list.find(',');
    const auto* const name = std::find(kFaultNames.begin(), kFaultNames.end(), list.substr(0, comma));
    if (name == kFaultNames.end()) return std::nullopt;
    found.insert(static_cast<Fault>(name - kFaultNames.begin()));
    if (comma == std::string_view::npos) return found;
    list.remove_prefix(comma + 1);
  }
}

Faults draw_faults(std::uint64_t seed, const JobPorts& job, const std::optional<FaultSet>& list) {
  Draw draw(seed ^ 0x5eed'fa17);  // the job is the same without faults
  const FaultSet drawn = draw_set(draw);
  Faults faults{.kinds = list.value_or(drawn), .clauses = std::vector<std::string>(job.ports.size())};
  if (faults.kinds.empty()) return faults;
  faults.timeout = 12 + static_cast<unsigned>(draw.below(6));
  for (std::string& clauses : faults.clauses) {
    if (faults.kinds.contains(Fault::kLoss)) add(clauses, draw_loss(draw));
    if (faults.kinds.contains(Fault::kLate)) add(clauses, draw_lateness(draw));
  }
  if (faults.kinds.contains(Fault::kPort)) draw_outages(draw, job, faults);
  return faults;
}

bool Faults::allow(std::string_view line) const {
  return explain(line) || std::any_of(kinds.begin(), kinds.end(),
                                      [line](Fault fault) { return has_any(line, lines_of(fault).allowed); });
}

bool Faults::explain(std::string_view line) const {
  return may_end_job &&
         std::any_of(kinds.begin(), kinds.end(), [line](Fault fault) { return has_any(line, lines_of(fault).causes); });
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
}

FaultCounts fault_counts() {
  FaultCounts counts;
  for (std::size_t i = 0; i < counts.happened.size(); ++i) counts.happened[i] = shared_counts().happened[i];
  counts.failed_processes = shared_counts().failed_processes;
  return counts;
}

void count_faults_in(std::string_view line) {
  if (line.find(": the link is down (port error)") != std::string_view::npos)
    ++shared_counts().happened[static_cast<std::size_t>(Fault::kPort)];
}

void count_failed_process() {
  ++shared_counts().failed_processes;
}

}  // namespace simulation
