#include "live/rates.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <utility>

#include "base/clock.h"
#include "verbs/port_history.h"

namespace verbatim::live {
namespace {

// Counters of packets that were sent again, or asked for again.
constexpr const char* kRetryCounters[] = {"local_ack_timeout_err", "out_of_sequence",     "packet_seq_err",
                                          "rnr_nak_retry_err",     "implied_nak_seq_err", "roce_adp_retrans",
                                          "roce_slow_restart",     "retry_exceeded_err",  "sent_pkts_retry"};

// A process waits when one of its connections has not moved for this long.
constexpr std::uint64_t kWaitMs = 2000;

constexpr std::size_t kMaxPorts = 64;     // that a process can name
constexpr std::size_t kMaxCulprits = 64;  // of a user

using ProcessKey = std::pair<std::string, std::int64_t>;  // host, pid
using Graph = std::map<ProcessKey, std::set<ProcessKey>>;
// A process, the other ends of its connections on which nothing passes (itself: its device does not complete its work),
// and the ports of these connections.
using Obstructed = std::map<ProcessKey, std::map<ProcessKey, std::string>>;

double seconds_between(std::uint64_t before_ns, std::uint64_t now_ns) {
  return static_cast<double>(now_ns - before_ns) / static_cast<double>(kNanosecondsPerSecond);
}

// Directly or through others.
std::set<ProcessKey> waiting_for(std::vector<ProcessKey> open, const Graph& waiters) {
  std::set<ProcessKey> found;
  while (!open.empty()) {
    const ProcessKey next = open.back();
    open.pop_back();
    const auto direct = waiters.find(next);
    if (direct == waiters.end()) continue;
    for (const ProcessKey& waiter : direct->second) {
      if (found.insert(waiter).second) open.push_back(waiter);
    }
  }
  return found;
}

// `ports` are in the order of their names.
double retries_of(const Connection& connection, const std::vector<PortView>& ports) {
  double sum = 0;
  for (const std::string& name : split_ports(connection.device)) {
    const auto port =
        std::lower_bound(ports.begin(), ports.end(), name,
                         [](const PortView& view, const std::string& wanted) { return view.port < wanted; });
    if (port == ports.end() || port->port != name) continue;
    for (const char* counter : kRetryCounters) {
      if (const auto growth = port->growth_s.find(counter); growth != port->growth_s.end()) sum += growth->second;
    }
  }
  return sum;
}

std::optional<std::uint8_t> port_number(const std::string& port) {
  const std::size_t colon = port.rfind(':');
  std::uint8_t number = 0;
  if (colon == std::string::npos || port.find('/') != std::string::npos) return std::nullopt;
  const auto [end, error] = std::from_chars(port.data() + colon + 1, port.data() + port.size(), number);
  return error == std::errc() && end == port.data() + port.size() ? std::optional(number) : std::nullopt;
}

}  // namespace

Latencies latencies_since(const Latencies& before, const Latencies& now) {
  Latencies since;
  for (const auto& [name, buckets] : now) {
    const auto found = before.find(name);
    const LatencyBuckets& earlier = found != before.end() ? found->second : LatencyBuckets{};
    for (const auto& [below_ns, count] : buckets) {
      const auto was = earlier.find(below_ns);
      const std::uint64_t more = was != earlier.end() ? count - std::min(count, was->second) : count;
      if (more != 0) since[name][below_ns] = more;
    }
  }
  return since;
}

const char* name_of(WaitsFor waits) {
  constexpr const char* kNames[] = {"nothing", "peer", "network", "device"};
  return kNames[static_cast<std::size_t>(waits)];
}

bool no_lane_works(const Connection& connection) {
  return connection.lanes != 0 && connection.lanes_down >= connection.lanes;
}

WaitsFor find_wait(const Connection& connection) {
  // As diagnose_stall() in src/net/monitor writes it.
  const std::string& cause = connection.stall_cause;
  if (cause.find(" does not answer: ") != std::string::npos) return WaitsFor::kPeer;
  if (no_lane_works(connection) || cause.starts_with("the network")) return WaitsFor::kNetwork;
  if (cause.starts_with("the device") || cause.starts_with("this host's device")) return WaitsFor::kDevice;
  if (cause.starts_with("this process")) return WaitsFor::kNothing;
  if (cause.starts_with("the peer")) return WaitsFor::kPeer;
  if (connection.flushes != 0) return WaitsFor::kDevice;
  if (connection.outstanding != 0 && connection.sends) {
    // A process that does not test does not learn that its data has been acknowledged.
    return connection.tested ? WaitsFor::kNetwork : WaitsFor::kNothing;
  }
  if (connection.outstanding != 0) return WaitsFor::kPeer;
  return connection.send_refused ? WaitsFor::kPeer : WaitsFor::kNothing;
}

std::vector<std::string> split_ports(const std::string& device) {
  std::vector<std::string> ports;
  for (std::size_t begin = 0; begin < device.size();) {
    const std::size_t end = std::min(device.find('+', begin), device.size());
    ports.push_back(device.substr(begin, end - begin));
    begin = end + 1;
  }
  return ports;
}

namespace {

// Few processes that are ends of all of these connections: where several connections of a process are
// obstructed, the cause is rather at this process.
void add_obstructed(const Obstructed& obstructed, const Graph& waiters, std::size_t max,
                    std::vector<Culprit>& culprits) {
  Graph ends;
  for (const auto& [own, peers] : obstructed) {
    for (const auto& [peer, device] : peers) {
      ends[own].insert(peer);
      ends[peer].insert(own);
    }
  }
  for (; !ends.empty() && max != 0; --max) {
    const auto weight = [&](const auto& end) { return std::pair(end.second.size(), obstructed.contains(end.first)); };
    const auto most =
        std::max_element(ends.begin(), ends.end(), [&](const auto& a, const auto& b) { return weight(a) < weight(b); });
    const auto [process, others] = *most;
    ends.erase(most);
    Culprit culprit{process.first, process.second, 0, WaitsFor::kNetwork};
    if (const auto own = obstructed.find(process); own != obstructed.end())
      culprit.device = own->second.begin()->second;
    if (others.size() == 1 && others.contains(process)) {
      culprit.what = WaitsFor::kDevice;
    } else if (others.size() == 1) {
      culprit.peer_host = others.begin()->first;
      culprit.peer_pid = others.begin()->second;
    }
    std::vector<ProcessKey> both{process};
    for (const ProcessKey& other : others) {
      both.push_back(other);
      const auto end = ends.find(other);
      if (end != ends.end() && end->second.erase(process) != 0 && end->second.empty()) ends.erase(end);
    }
    std::set<ProcessKey> waiting = waiting_for(both, waiters);
    for (const ProcessKey& end : both) {
      if (obstructed.contains(end)) waiting.insert(end);
    }
    culprit.waiting = waiting.size();
    culprits.push_back(std::move(culprit));
  }
}

// What a process says is not checked, so that of one user counts for this user only.
void add_culprits(uid_t user, const std::vector<ProcessView>& processes, std::vector<Culprit>& culprits) {
  Graph waiters;  // by whom they wait for
  std::set<ProcessKey> waiting;
  Obstructed obstructed;
  std::set<ProcessKey> idle;  // nothing has been sent or received
  for (const ProcessView& process : processes) {
    if (process.now.user != user) continue;
    const ProcessKey own{process.now.host, process.now.pid};
    if (std::all_of(process.connections.begin(), process.connections.end(),
                    [](const ConnectionView& connection) { return connection.now.messages == 0; })) {
      idle.insert(own);
    }
    for (const ConnectionView& connection : process.connections) {
      if (connection.waits == WaitsFor::kNothing || connection.now.no_progress_ms < kWaitMs) continue;
      const ProcessKey peer{connection.now.peer_host, connection.now.peer_pid};
      if (connection.waits != WaitsFor::kPeer) {
        obstructed[own][connection.waits == WaitsFor::kDevice ? own : peer] = connection.now.device;
      } else if (peer != own) {
        waiters[peer].insert(own);
        waiting.insert(own);
      }
    }
  }
  std::vector<std::pair<std::size_t, ProcessKey>> ends;
  for (const auto& [process, direct] : waiters) {
    if (!waiting.contains(process) && !obstructed.contains(process)) ends.emplace_back(direct.size(), process);
  }
  std::stable_sort(ends.begin(), ends.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  if (ends.size() > kMaxCulprits) ends.resize(kMaxCulprits);
  for (const auto& [direct, process] : ends) {
    culprits.push_back({.host = process.first,
                        .pid = process.second,
                        .waiting = waiting_for({process}, waiters).size(),
                        .carried_nothing = idle.contains(process)});
    // It can be the reason why what was sent to it is not acknowledged, too.
    for (auto& [own, peers] : obstructed) peers.erase(process);
  }
  std::erase_if(obstructed, [](const auto& one) { return one.second.empty(); });
  add_obstructed(obstructed, waiters, kMaxCulprits - ends.size(), culprits);
}

}  // namespace

std::vector<Culprit> find_culprits(const std::vector<ProcessView>& processes) {
  std::set<uid_t> users;
  for (const ProcessView& process : processes) users.insert(process.now.user);
  std::vector<Culprit> culprits;
  for (const uid_t user : users) add_culprits(user, processes, culprits);
  std::stable_sort(culprits.begin(), culprits.end(),
                   [](const Culprit& a, const Culprit& b) { return a.waiting > b.waiting; });
  return culprits;
}

std::vector<PortView> Sampler::sample_ports(const std::vector<Process>& processes) {
  std::set<std::string> names;
  for (const Process& process : processes) {
    std::size_t count = 0;
    const auto add = [&](const std::string& device) {
      for (std::string& port : split_ports(device)) {
        if (count < kMaxPorts && names.insert(std::move(port)).second) ++count;
      }
    };
    for (const Connection& connection : process.connections) add(connection.device);
    for (const RmaSet& set : process.rma) add(set.device);
  }
  const std::uint64_t now = monotonic_ns();
  const double seconds = seconds_between(counters_ns_, now);
  std::vector<PortView> ports;
  std::map<std::string, Counters> before = std::exchange(counters_before_, {});
  for (const std::string& name : names) {
    const std::optional<std::uint8_t> number = port_number(name);
    if (!number) continue;
    PortView view{name, read_port_counters(options_.sysfs + "/" + name.substr(0, name.rfind(':')), *number), {}};
    if (const auto earlier = before.find(name); earlier != before.end()) {
      for (const auto& [counter, value] : view.counters) {
        const auto was = earlier->second.find(counter);
        if (was == earlier->second.end() || value <= was->second) continue;
        view.growth_s[counter] = static_cast<double>(value - was->second) / seconds;
      }
    }
    counters_before_[name] = view.counters;
    ports.push_back(std::move(view));
  }
  counters_ns_ = now;
  return ports;
}

RmaSetView Sampler::sample_rma(RmaSet set, std::uint64_t time_ns, const Before* before, Before& next) const {
  RmaSetView shown;
  for (RmaQueue& queue : set.queues) {
    const std::tuple key{set.number, queue.context, queue.peer};
    const RmaCounts now = next.rma[key] = queue.completed;
    RmaQueueView one{.now = std::move(queue)};
    if (before != nullptr) {
      // A queue that is new has begun with 0.
      const auto was = before->rma.find(key);
      const RmaCounts earlier = was != before->rma.end() ? was->second : RmaCounts{};
      const auto moved = [&](std::uint64_t RmaCounts::*member) {
        return static_cast<double>(now.*member - std::min(earlier.*member, now.*member));
      };
      const double seconds = seconds_between(before->time_ns, time_ns);
      one.rates = RmaRates{moved(&RmaCounts::put_bytes) / seconds, moved(&RmaCounts::get_bytes) / seconds,
                           moved(&RmaCounts::puts) / seconds, moved(&RmaCounts::signals) / seconds,
                           moved(&RmaCounts::gets) / seconds};
      // The process looks for progress about once a second.
      if (moved(&RmaCounts::puts) + moved(&RmaCounts::signals) + moved(&RmaCounts::gets) + moved(&RmaCounts::flushes) >
          0) {
        one.now.no_progress_ms = 0;
      }
    }
    one.stalled = one.now.stalled || one.now.no_progress_ms >= options_.stall_ms;
    shown.queues.push_back(std::move(one));
  }
  set.queues.clear();
  shown.now = std::move(set);
  return shown;
}

View Sampler::sample() {
  Listing listing =
      read_processes(options_.directories.empty() ? default_directories() : options_.directories, options_.timeout_ms);
  View view;
  view.problems = std::move(listing.problems);
  view.ports = sample_ports(listing.processes);
  std::map<ProcessId, Before> all_before = std::exchange(before_, {});
  for (Process& process : listing.processes) {
    const auto found = all_before.find(process.id());
    const Before* const before = found != all_before.end() ? &found->second : nullptr;
    Before& next = before_[process.id()];
    next.time_ns = process.time_ns;
    ProcessView shown;
    for (Connection& connection : process.connections) {
      ConnectionView one{.now = connection, .waits = find_wait(connection), .latencies = connection.latencies};
      if (before != nullptr && process.time_ns > before->time_ns) {
        // A connection that is new has begun with 0.
        const auto was = before->connections.find(connection.number);
        const Connection earlier = was != before->connections.end() ? was->second : Connection{};
        one.latencies = latencies_since(earlier.latencies, connection.latencies);
        const double seconds = seconds_between(before->time_ns, process.time_ns);
        // The process looks for progress about once a second.
        if (connection.bytes != earlier.bytes || connection.messages != earlier.messages) one.now.no_progress_ms = 0;
        const std::uint64_t bytes = connection.bytes >= earlier.bytes ? connection.bytes - earlier.bytes : 0;
        one.rates = Rates{static_cast<double>(bytes) / seconds,
                          static_cast<double>(connection.messages - earlier.messages) / seconds,
                          retries_of(connection, view.ports)};
        Rates& sum = connection.sends ? shown.sent : shown.received;
        sum.bytes_s += one.rates->bytes_s;
        sum.messages_s += one.rates->messages_s;
      }
      one.stalled = !connection.stall_cause.empty() || one.now.no_progress_ms >= options_.stall_ms;
      next.connections.emplace(connection.number, std::move(connection));
      shown.connections.push_back(std::move(one));
    }
    const bool has_rates = before != nullptr && process.time_ns > before->time_ns;
    for (RmaSet& set : process.rma) {
      shown.rma.push_back(sample_rma(std::move(set), process.time_ns, has_rates ? before : nullptr, next));
    }
    process.connections.clear();
    process.rma.clear();
    shown.now = std::move(process);
    view.processes.push_back(std::move(shown));
  }
  view.culprits = find_culprits(view.processes);
  return view;
}

}  // namespace verbatim::live
