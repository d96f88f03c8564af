#include "verbatim-exporter/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

namespace verbatim::exporter {
namespace {

using Labels = std::vector<std::pair<std::string, std::string>>;

// Device sets of a process that have series of their own; the others are summed as "other".
constexpr std::size_t kMaxDeviceSets = 32;
// Sets and peers of a process that have series of their own; the others are summed as "other".
constexpr std::size_t kMaxRmaPeers = 32;
constexpr std::size_t kMaxLabelBytes = 64;
// What one user can add to the text of a scrape. The processes of a host with 64 of them have about half of it.
constexpr std::size_t kMaxLinesOfUser = std::size_t{1} << 16;
// A process can name others in each scrape.
constexpr std::size_t kMaxLatencyNames = 8;
constexpr std::size_t kMaxLatencyBuckets = 1024;

// Text of another process: short, and printable ASCII.
std::string label_text(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text.substr(0, kMaxLabelBytes);
}

// Of a label's value. In a help text a quotation mark is not escaped; ours have none.
void append_escaped(std::string& text, std::string_view value) {
  for (const char c : value) {
    if (c == '\\' || c == '"') text += '\\';
    text += c == '\n' ? std::string_view("\\n") : std::string_view(&c, 1);
  }
}

// Upper bounds of a latency in seconds: powers of two from a microsecond to a second.
constexpr int kLatencyBounds = 21;

// The text of a scrape: the format of Prometheus, version 0.0.4. The lines of a family are together, whatever the order
// in which they are added.
class Families {
 public:
  // The buckets of the process are finer. Each member counts with the upper end of its bucket.
  void histogram(const char* name, const char* help, const Labels& labels, const live::LatencyBuckets& buckets) {
    std::string& lines = lines_of(name, "histogram", help);
    auto next = buckets.begin();
    double bound = 1e-6;
    double sum = 0;
    std::uint64_t count = 0;
    Labels with_bound = labels;
    with_bound.emplace_back("le", "");
    for (int i = 0; i <= kLatencyBounds; ++i, bound *= 2) {
      if (i == kLatencyBounds) bound = std::numeric_limits<double>::infinity();
      for (; next != buckets.end() && static_cast<double>(next->first) / 1e9 <= bound; ++next) {
        count += next->second;
        sum += static_cast<double>(next->first) / 1e9 * static_cast<double>(next->second);
      }
      with_bound.back().second = i == kLatencyBounds ? "+Inf" : fmt::to_string(bound);
      add(lines, name, "_bucket", with_bound, count);
    }
    add(lines, name, "_sum", labels, sum);
    add(lines, name, "_count", labels, count);
  }
  void gauge(const char* name, const char* help, const Labels& labels, double value) {
    add(lines_of(name, "gauge", help), name, "", labels, value);
  }
  void gauge(const char* name, const char* help, const Labels& labels, std::uint64_t value) {
    add(lines_of(name, "gauge", help), name, "", labels, value);
  }
  void counter(const char* name, const char* help, const Labels& labels, std::uint64_t value) {
    add(lines_of(name, "counter", help), name, "", labels, value);
  }
  std::string take() {
    std::string text;
    for (std::string& family : all_) text += std::exchange(family, {});
    return text;
  }
  std::size_t lines() const { return lines_; }  // of series, so far

 private:
  std::string& lines_of(const char* name, const char* type, const char* help) {
    const auto [found, is_new] = index_.try_emplace(name, all_.size());
    if (is_new) all_.push_back(fmt::format("# HELP {0} {1}\n# TYPE {0} {2}\n", name, help, type));
    return all_[found->second];
  }
  // An integer has all its digits, another number as many as tell it from its neighbours.
  template <typename Number>
  void add(std::string& lines, const char* name, const char* suffix, const Labels& labels, Number value) {
    lines += name;
    lines += suffix;
    for (const auto& label : labels) {
      lines += &label == &labels.front() ? '{' : ',';
      lines += label.first;
      lines += "=\"";
      append_escaped(lines, label.second);
      lines += '"';
    }
    if (!labels.empty()) lines += '}';
    lines += ' ';
    lines += fmt::to_string(value);
    lines += '\n';
    ++lines_;
  }

  std::map<std::string, std::size_t> index_;
  std::vector<std::string> all_;
  std::size_t lines_ = 0;
};

void add_latencies(const live::Latencies& added, live::Latencies& totals) {
  for (const auto& [name, buckets] : added) {
    if (!totals.contains(name) && totals.size() >= kMaxLatencyNames) continue;
    live::LatencyBuckets& total = totals[name];
    for (const auto& [below_ns, members] : buckets) {
      if (total.contains(below_ns) || total.size() < kMaxLatencyBuckets) total[below_ns] += members;
    }
  }
}

// The processes that have series: as many of each user as of the others, if there are too many. In the order of names.
std::vector<live::ProcessView> choose(std::vector<live::ProcessView> all, std::size_t max) {
  if (all.size() <= max) return all;
  std::map<uid_t, std::size_t> earlier;  // processes of the user
  std::vector<std::pair<std::size_t, std::size_t>> turns;
  for (std::size_t i = 0; i < all.size(); ++i) turns.emplace_back(earlier[all[i].now.user]++, i);
  std::sort(turns.begin(), turns.end());
  turns.resize(max);
  std::sort(turns.begin(), turns.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  std::vector<live::ProcessView> chosen;
  for (const auto& [turn, i] : turns) chosen.push_back(std::move(all[i]));
  return chosen;
}

// The state of the connections of a series.
struct Sums {
  std::uint64_t connections = 0, outstanding = 0, lanes = 0, lanes_down = 0, stalled = 0, failed = 0, waiting = 0;
  std::uint64_t no_progress_ms = 0;

  void add(const live::ConnectionView& connection) {
    const live::Connection& now = connection.now;
    ++connections;
    outstanding += now.outstanding;
    lanes += now.lanes;
    lanes_down += now.lanes_down;
    if (connection.stalled) ++stalled;
    if (now.state == "failed") ++failed;
    if (connection.waits == live::WaitsFor::kPeer) ++waiting;
    no_progress_ms = std::max(no_progress_ms, now.no_progress_ms);
  }
};

template <typename Key, typename Value>
Value& series_of(std::map<Key, Value>& all, const std::string& device, bool sends) {
  const Key key{label_text(device), sends};
  const bool own = all.contains(key) || all.size() < kMaxDeviceSets;
  return own ? all[key] : all[Key{"other", sends}];
}

void add_sums(Families& families, const Labels& labels, const Sums& sums) {
  families.gauge("verbatim_connections", "Connections.", labels, sums.connections);
  families.gauge("verbatim_outstanding", "Work requests not completed, or receives that have not arrived.", labels,
                 sums.outstanding);
  families.gauge("verbatim_lanes", "Lanes of the connections.", labels, sums.lanes);
  families.gauge("verbatim_lanes_down", "Lanes that do not work.", labels, sums.lanes_down);
  families.gauge("verbatim_connections_stalled", "Connections without progress although something is outstanding.",
                 labels, sums.stalled);
  families.gauge("verbatim_connections_failed", "Connections that have failed.", labels, sums.failed);
  families.gauge("verbatim_connections_waiting_for_peer", "Connections that wait for the application of the peer.",
                 labels, sums.waiting);
  families.gauge("verbatim_no_progress_seconds", "The longest time without progress of a connection.", labels,
                 static_cast<double>(sums.no_progress_ms) / 1000);
}

constexpr std::uint64_t live::RmaCounts::*kRmaCounts[] = {&live::RmaCounts::puts,      &live::RmaCounts::signals,
                                                          &live::RmaCounts::gets,      &live::RmaCounts::flushes,
                                                          &live::RmaCounts::put_bytes, &live::RmaCounts::get_bytes};

// The state of the RMA queues of a series.
struct RmaSums {
  std::uint64_t outstanding = 0, stalled = 0, no_progress_ms = 0;

  void add(const live::RmaQueueView& queue) {
    outstanding += queue.now.outstanding;
    if (queue.stalled) ++stalled;
    no_progress_ms = std::max(no_progress_ms, queue.now.no_progress_ms);
  }
};

void add_rma_series(Families& families, const Labels& labels, const live::RmaCounts& counts, const RmaSums& sums) {
  families.counter("verbatim_rma_puts_total", "Puts that have completed, with a signal or without.", labels,
                   counts.puts);
  families.counter("verbatim_rma_signals_total", "Signals that have completed, with a put or without.", labels,
                   counts.signals);
  families.counter("verbatim_rma_gets_total", "Gets that have completed.", labels, counts.gets);
  families.counter("verbatim_rma_flushes_total", "Flushes of GPU memory that have completed.", labels, counts.flushes);
  families.counter("verbatim_rma_put_bytes_total", "Bytes of the puts.", labels, counts.put_bytes);
  families.counter("verbatim_rma_get_bytes_total", "Bytes of the gets.", labels, counts.get_bytes);
  families.gauge("verbatim_rma_outstanding", "RMA operations that have not completed.", labels, sums.outstanding);
  families.gauge("verbatim_rma_contexts_stalled", "Contexts without progress although something is outstanding.",
                 labels, sums.stalled);
  families.gauge("verbatim_rma_no_progress_seconds", "The longest time without progress of a context.", labels,
                 static_cast<double>(sums.no_progress_ms) / 1000);
}

void count_rma(RmaKnown& known, const live::ProcessView& process) {
  std::map<RmaKnown::Key, RmaKnown::Carried> now;
  for (const live::RmaSetView& set : process.rma) {
    for (const live::RmaQueueView& queue : set.queues) {
      RmaKnown::Carried& carried = now[{set.now.number, queue.now.peer}];
      for (const auto count : kRmaCounts) carried.counts.*count += queue.now.completed.*count;
    }
  }
  std::size_t own = 0;
  for (auto& [key, carried] : now) {
    const auto before = known.carried.find(key);
    carried.own_series = before != known.carried.end() && before->second.own_series;
    if (carried.own_series) ++own;
  }
  for (auto& [key, carried] : now) {
    if (carried.own_series) continue;
    const auto before = known.carried.find(key);
    if (before == known.carried.end() && own < kMaxRmaPeers) {
      carried.own_series = true;
      ++own;
      continue;
    }
    if (!known.others) known.others.emplace();
    for (const auto count : kRmaCounts) {
      const std::uint64_t earlier = before != known.carried.end() ? before->second.counts.*count : 0;
      (*known.others).*count += carried.counts.*count - std::min(earlier, carried.counts.*count);
    }
  }
  known.carried = std::move(now);
}

// `labels`: of the process.
void add_rma(Families& families, const Labels& labels, const RmaKnown& known, const live::ProcessView& process) {
  struct Peer {
    std::string host;
    RmaSums sums = {};
  };
  const auto with = [&](const Labels& more) {
    Labels all = labels;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  std::uint64_t failed = 0;
  RmaSums others;
  for (const live::RmaSetView& set : process.rma) {
    if (set.now.failed) ++failed;
    std::map<std::uint64_t, Peer> peers;  // those with series of their own
    for (const live::RmaQueueView& queue : set.queues) {
      const bool own = known.carried.at({set.now.number, queue.now.peer}).own_series;
      (own ? peers.try_emplace(queue.now.peer, Peer{queue.now.peer_host}).first->second.sums : others).add(queue);
    }
    for (const auto& [peer, state] : peers) {
      const Labels with_peer = with({{"device", label_text(set.now.device)},
                                     {"set", std::to_string(set.now.number)},
                                     {"rank", std::to_string(set.now.rank)},
                                     {"peer", std::to_string(peer)},
                                     {"peer_host", label_text(state.host)}});
      add_rma_series(families, with_peer, known.carried.at({set.now.number, peer}).counts, state.sums);
    }
  }
  if (known.others) {
    const Labels with_other =
        with({{"device", "other"}, {"set", "other"}, {"rank", "other"}, {"peer", "other"}, {"peer_host", "other"}});
    add_rma_series(families, with_other, *known.others, others);
  }
  families.gauge("verbatim_rma_sets", "Sets of RMA contexts.", labels, process.rma.size());
  families.gauge("verbatim_rma_sets_failed", "Sets of RMA contexts whose communicator has failed.", labels, failed);
}

}  // namespace

void Metrics::count(Known& known, const live::ProcessView& process) {
  std::map<std::uint64_t, Carried> now;
  for (const live::ConnectionView& view : process.connections) {
    const live::Connection& connection = view.now;
    const auto found = known.connections.find(connection.number);
    const Carried before = found != known.connections.end() ? found->second : Carried{};
    Totals& totals = series_of(known.totals, connection.device, connection.sends);
    totals.bytes += connection.bytes - std::min(before.bytes, connection.bytes);
    totals.messages += connection.messages - before.messages;  // modulo 2^32
    add_latencies(live::latencies_since(before.latencies, connection.latencies), totals.latencies);
    now[connection.number] = {connection.bytes, connection.messages, connection.latencies};
  }
  known.connections = std::move(now);
}

std::string Metrics::collect() {
  live::View view;
  Families families;
  try {
    view = sampler_.sample();
  } catch (const std::exception&) {  // the directory has gone: no process is found
    families.gauge("verbatim_up", "1: the processes can be listed.", {}, std::uint64_t{0});
    return families.take();
  }
  families.gauge("verbatim_up", "1: the processes can be listed.", {}, std::uint64_t{1});
  families.gauge("verbatim_processes", "Processes that use Verbatim.", {}, view.processes.size());
  families.gauge("verbatim_unreadable", "State sockets that cannot be read, and directories that are not used.", {},
                 view.problems.size());
  const std::size_t found = view.processes.size();
  std::map<live::ProcessId, Known> known = std::exchange(known_, {});
  std::map<uid_t, std::size_t> lines_of_users;
  std::size_t shown = 0;
  for (const live::ProcessView& process : choose(std::move(view.processes), max_processes_)) {
    std::size_t& lines_of_user = lines_of_users[process.now.user];
    if (lines_of_user > kMaxLinesOfUser) continue;
    ++shown;
    const std::size_t lines_before = families.lines();
    Known& own = known_[process.now.id()] = std::move(known[process.now.id()]);
    count(own, process);
    std::map<SeriesKey, Sums> sums;
    for (const live::ConnectionView& connection : process.connections) {
      series_of(sums, connection.now.device, connection.now.sends).add(connection);
    }
    const auto labels = [&](const SeriesKey& series) {
      return Labels{{"process", process.now.name},
                    {"user", std::to_string(process.now.user)},
                    {"program", label_text(process.now.program)},
                    {"device", series.first},
                    {"direction", series.second ? "send" : "recv"}};
    };
    for (const auto& [series, sum] : sums) add_sums(families, labels(series), sum);
    for (const auto& [series, totals] : own.totals) {
      families.counter("verbatim_bytes_total", "Bytes of messages that were sent or received.", labels(series),
                       totals.bytes);
      families.counter("verbatim_messages_total", "Messages that were sent, or receives that were posted.",
                       labels(series), totals.messages);
      for (const auto& [name, buckets] : totals.latencies) {
        Labels with_name = labels(series);
        with_name.emplace_back("latency", label_text(name));
        families.histogram("verbatim_latency_seconds", "Latencies of messages, with VERBATIM_LATENCY=1.", with_name,
                           buckets);
      }
    }
    if (!process.rma.empty() || own.rma.others) {  // it uses RMA
      count_rma(own.rma, process);
      add_rma(families,
              {{"process", process.now.name},
               {"user", std::to_string(process.now.user)},
               {"program", label_text(process.now.program)}},
              own.rma, process);
    }
    lines_of_user += families.lines() - lines_before;
  }
  families.gauge("verbatim_processes_not_shown", "Processes without series, because there are too many.", {},
                 found - shown);
  for (const live::PortView& port : view.ports) {
    for (const auto& [counter, value] : port.counters) {
      families.counter("verbatim_port_counter_total",
                       "The kernel's counters of the ports that the processes use, without those of traffic.",
                       {{"port", label_text(port.port)}, {"counter", label_text(counter)}}, value);
    }
  }
  return families.take();
}

}  // namespace verbatim::exporter
