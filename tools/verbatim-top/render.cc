#include "verbatim-top/render.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>

namespace verbatim::top {
namespace {

using Json = nlohmann::ordered_json;
using Style = Line::Style;
using live::ConnectionView;
using live::ProcessView;
using live::RmaQueueView;
using live::RmaSetView;

// Names of hosts and programs come from other processes, and go to a terminal.
std::string printable(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

// "1.23 G"
std::string short_number(double value) {
  constexpr const char* kUnits[] = {"", " k", " M", " G", " T", " P"};
  std::size_t unit = 0;
  for (; value >= 1000 && unit + 1 < std::size(kUnits); ++unit) value /= 1000;
  char text[32];
  std::snprintf(text, sizeof text,
                unit == 0 && value == static_cast<double>(static_cast<int>(value)) ? "%.0f%s" : "%.3g%s", value,
                kUnits[unit]);
  return text;
}

std::string count(std::size_t number, const char* what) {
  return std::to_string(number) + " " + what + (number == 1 ? "" : std::string(what).ends_with("s") ? "es" : "s");
}

std::string padded(const std::string& text, std::size_t width, bool right = false) {
  const std::string space(text.size() < width ? width - text.size() : 0, ' ');
  return (right ? space + text : text + space) + " ";
}

// The larger, the further up. Negative: no sum, but an order.
double weight(const ConnectionView& connection, Sort sort) {
  const live::Rates rates = connection.rates.value_or(live::Rates{});
  switch (sort) {
    case Sort::kBytes:
      return rates.bytes_s;
    case Sort::kMessages:
      return rates.messages_s;
    case Sort::kOutstanding:
      return static_cast<double>(connection.now.outstanding);
    case Sort::kWaiting:
      return static_cast<double>(connection.now.no_progress_ms);
    case Sort::kPid:
      break;
  }
  return -static_cast<double>(connection.now.number);
}

double bytes_of(const live::RmaRates& rates) {
  return rates.put_bytes_s + rates.get_bytes_s;
}

double messages_of(const live::RmaRates& rates) {
  return rates.puts_s + rates.gets_s;
}

double weight(const RmaQueueView& queue, Sort sort) {
  const live::RmaRates rates = queue.rates.value_or(live::RmaRates{});
  switch (sort) {
    case Sort::kBytes:
      return bytes_of(rates);
    case Sort::kMessages:
      return messages_of(rates);
    case Sort::kOutstanding:
      return static_cast<double>(queue.now.outstanding);
    case Sort::kWaiting:
      return static_cast<double>(queue.now.no_progress_ms);
    case Sort::kPid:
      break;
  }
  return 0;  // the order of the state
}

double weight(const RmaSetView& set, Sort sort);

template <typename Member>
double weight_of_all(const std::vector<Member>& members, Sort sort) {
  double sum = 0;
  for (const Member& member : members) {
    const double own = weight(member, sort);
    sum = sort == Sort::kWaiting ? std::max(sum, own) : sum + own;
  }
  return sum;
}

double weight(const RmaSetView& set, Sort sort) {
  return sort == Sort::kPid ? -static_cast<double>(set.now.number) : weight_of_all(set.queues, sort);
}

double weight(const ProcessView& process, Sort sort) {
  if (sort == Sort::kPid) return -static_cast<double>(process.now.pid);
  const double connections = weight_of_all(process.connections, sort);
  const double rma = weight_of_all(process.rma, sort);
  return sort == Sort::kWaiting ? std::max(connections, rma) : connections + rma;
}

std::string waits_text(const ConnectionView& connection) {
  const live::Connection& now = connection.now;
  if (!now.error.empty()) return now.error;
  std::string text;
  if (connection.waits == live::WaitsFor::kNetwork && live::no_lane_works(now)) {
    text = "no lane works";
  } else if (!now.stall_cause.empty()) {
    return now.stall_cause;
  } else if (connection.waits == live::WaitsFor::kPeer) {
    text = "peer " + now.peer_host + ":" + std::to_string(now.peer_pid);
  } else if (connection.waits != live::WaitsFor::kNothing) {
    text = live::name_of(connection.waits);
  }
  if (now.no_progress_ms < 1000 || text.empty()) return text;
  return text + " for " + std::to_string(now.no_progress_ms / 1000) + " s";
}

std::string columns(const std::string& pid, const std::string& what, const std::string& peer, const std::string& device,
                    const std::string& bytes, const std::string& messages, const std::string& outstanding,
                    const std::string& lanes, const std::string& retries, const std::string& latency,
                    const std::string& rest) {
  return padded(pid, 8, true) + padded(what, 15) + padded(peer, 24) + padded(device, 16) + padded(bytes, 8, true) +
         padded(messages, 8, true) + padded(outstanding, 5, true) + padded(lanes, 5, true) + padded(retries, 7, true) +
         padded(latency, 15, true) + rest;
}

// The median and the 99th percentile: of sends from isend to completion, of receives from CTS to data.
std::string latency_text(const ConnectionView& connection) {
  const auto found = connection.latencies.find(connection.now.sends ? "isend_to_completion" : "cts_to_data");
  if (found == connection.latencies.end()) return "-";
  const auto microseconds = [&](double part) {
    return short_number(static_cast<double>(live::quantile_ns(found->second, part)) / 1000);
  };
  return microseconds(0.5) + "/" + microseconds(0.99);
}

Line connection_line(const ConnectionView& connection) {
  const live::Connection& now = connection.now;
  const auto rate = [&](double live::Rates::*member) {
    return connection.rates ? short_number((*connection.rates).*member) : "-";
  };
  std::string lanes = std::to_string(now.lanes);
  if (now.lanes_down != 0) lanes = std::to_string(now.lanes - std::min(now.lanes, now.lanes_down)) + "/" + lanes;
  std::string rest = waits_text(connection);
  if (now.state != "open") rest = now.state + (rest.empty() ? "" : ": " + rest);
  const bool alarm = connection.stalled || now.state == "failed" || now.lanes_down != 0;
  return {printable(columns("", now.sends ? "  sends to" : "  receives from",
                            now.peer_host + ":" + std::to_string(now.peer_pid), now.device, rate(&live::Rates::bytes_s),
                            rate(&live::Rates::messages_s), std::to_string(now.outstanding), lanes,
                            rate(&live::Rates::retries_s), latency_text(connection), rest)),
          alarm ? Style::kAlarm : Style::kPlain};
}

std::string rma_waits_text(const RmaSetView& set, const RmaQueueView& queue) {
  if (set.now.failed) return "failed";
  std::string text = queue.stalled ? "stalled" : "";
  if (queue.now.no_progress_ms < 1000) return text;
  return text + (text.empty() ? "" : ", ") + "nothing completed for " +
         std::to_string(queue.now.no_progress_ms / 1000) + " s";
}

std::string rma_columns(const RmaSetView& set, const std::string& context, const std::string& peer,
                        const std::string& bytes, const std::string& messages, const std::string& outstanding,
                        const std::string& rest) {
  return printable(columns("", "  RMA " + std::to_string(set.now.number) + context,
                           "rank " + std::to_string(set.now.rank) + peer, set.now.device, bytes, messages, outstanding,
                           "-", "-", "-", rest));
}

void add_rma(const RmaSetView& set, std::vector<Line>& lines) {
  // Once for all queues, of which a set may have none.
  if (set.now.failed) {
    lines.push_back(
        {rma_columns(set, "", " of " + std::to_string(set.now.ranks), "-", "-", "-", "failed: " + set.now.error),
         Style::kAlarm});
  }
  for (const RmaQueueView& queue : set.queues) {
    const auto rate = [&](double (*value)(const live::RmaRates&)) {
      return queue.rates ? short_number(value(*queue.rates)) : "-";
    };
    lines.push_back({rma_columns(set, " ctx " + std::to_string(queue.now.context),
                                 " -> " + std::to_string(queue.now.peer) + " " + queue.now.peer_host, rate(bytes_of),
                                 rate(messages_of), std::to_string(queue.now.outstanding), rma_waits_text(set, queue)),
                     set.now.failed || queue.stalled ? Style::kAlarm : Style::kPlain});
  }
}

Line process_line(const ProcessView& process) {
  std::size_t stalled = 0;
  std::size_t failed = 0;
  std::uint64_t outstanding = 0;
  live::RmaRates rma;
  for (const RmaSetView& set : process.rma) {
    if (set.now.failed) ++failed;
    for (const RmaQueueView& queue : set.queues) {
      if (queue.stalled) ++stalled;
      outstanding += queue.now.outstanding;
      const live::RmaRates rates = queue.rates.value_or(live::RmaRates{});
      rma.put_bytes_s += rates.put_bytes_s;
      rma.get_bytes_s += rates.get_bytes_s;
    }
  }
  for (const ConnectionView& connection : process.connections) {
    if (connection.stalled) ++stalled;
    outstanding += connection.now.outstanding;
  }
  std::string rest = "sends " + short_number(process.sent.bytes_s) + "B/s " + short_number(process.sent.messages_s) +
                     " msg/s, receives " + short_number(process.received.bytes_s) + "B/s " +
                     short_number(process.received.messages_s) + " msg/s, " +
                     count(process.connections.size(), "connection") + ", " + std::to_string(outstanding) +
                     " outstanding";
  if (stalled != 0) rest += ", " + std::to_string(stalled) + " stalled";
  if (!process.rma.empty()) {
    rest += ", RMA puts " + short_number(rma.put_bytes_s) + "B/s, gets " + short_number(rma.get_bytes_s) + "B/s";
  }
  if (failed != 0) rest += ", RMA failed";
  return {printable(padded(std::to_string(process.now.pid), 8, true) + padded(process.now.program, 15) + rest),
          stalled != 0 || failed != 0 ? Style::kAlarm : Style::kPlain};
}

// Counters that are not 0.
void add_ports(const live::View& view, std::vector<Line>& lines) {
  for (const live::PortView& port : view.ports) {
    std::string text;
    for (const auto& [name, value] : port.counters) {
      if (value == 0) continue;
      text += (text.empty() ? "" : ", ") + name + " " + std::to_string(value);
      if (const auto growth = port.growth_s.find(name); growth != port.growth_s.end()) {
        text += " (+" + short_number(growth->second) + "/s)";
      }
    }
    if (text.empty()) continue;
    lines.push_back(
        {printable("port " + port.port + ": " + text), port.growth_s.empty() ? Style::kPlain : Style::kAlarm});
  }
}

std::string process_text(const std::string& host, std::int64_t pid) {
  return "process " + std::to_string(pid) + " on " + host;
}

Line culprit_line(const live::Culprit& culprit) {
  std::string text = process_text(culprit.host, culprit.pid);
  if (culprit.what != live::WaitsFor::kPeer) {
    if (!culprit.device.empty()) text += " (" + culprit.device + ")";
    if (culprit.peer_pid) text += " and " + process_text(culprit.peer_host, *culprit.peer_pid);
    text = std::string("the ") + live::name_of(culprit.what) + (culprit.peer_pid ? " between " : " of ") + text;
  }
  text = "look first at " + text + ": " + count(culprit.waiting, "process") +
         (culprit.waiting == 1 ? " waits" : " wait") + " for it";
  if (culprit.carried_nothing) {
    text += "; it has sent and received nothing yet, and may itself wait for a connection that is being made";
  }
  return {printable(text), Style::kAlarm};
}

Json text_or_null(const std::string& text) {
  return text.empty() ? Json(nullptr) : Json(text);
}

Json culprit_json(const live::Culprit& culprit) {
  return {{"what", culprit.what == live::WaitsFor::kPeer ? "process" : live::name_of(culprit.what)},
          {"host", culprit.host},
          {"pid", culprit.pid},
          {"device", text_or_null(culprit.device)},
          {"peer_host", text_or_null(culprit.peer_host)},
          {"peer_pid", culprit.peer_pid ? Json(*culprit.peer_pid) : Json(nullptr)},
          {"waiting", culprit.waiting}};
}

Json rates_json(const live::Rates& rates) {
  return {{"bytes_s", rates.bytes_s}, {"messages_s", rates.messages_s}};
}

// Microseconds; null: not measured.
Json latencies_json(const live::Latencies& latencies) {
  if (latencies.empty()) return nullptr;
  Json json = Json::object();
  for (const auto& [name, buckets] : latencies) {
    std::uint64_t count = 0;
    for (const auto& [below_ns, members] : buckets) count += members;
    const auto microseconds = [&members = buckets](double part) {
      return static_cast<double>(live::quantile_ns(members, part)) / 1000;
    };
    json[name] = {{"count", count}, {"p50", microseconds(0.5)}, {"p99", microseconds(0.99)}};
  }
  return json;
}

Json connection_json(const ConnectionView& connection) {
  const live::Connection& now = connection.now;
  const auto rate = [&](double live::Rates::*member) {
    return connection.rates ? Json((*connection.rates).*member) : Json(nullptr);
  };
  return {{"number", now.number},
          {"direction", now.sends ? "send" : "recv"},
          {"device", now.device},
          {"peer_host", now.peer_host},
          {"peer_pid", now.peer_pid},
          {"state", now.state},
          {"error", text_or_null(now.error)},
          {"bytes", now.bytes},
          {"messages", now.messages},
          {"bytes_s", rate(&live::Rates::bytes_s)},
          {"messages_s", rate(&live::Rates::messages_s)},
          {"retries_s", rate(&live::Rates::retries_s)},
          {"latency_us", latencies_json(connection.latencies)},
          {"outstanding", now.outstanding},
          {"lanes", now.lanes},
          {"lanes_down", now.lanes_down},
          {"waits_for", live::name_of(connection.waits)},
          {"no_progress_ms", now.no_progress_ms},
          {"stalled", connection.stalled},
          {"stall_cause", text_or_null(now.stall_cause)}};
}

Json rma_queue_json(const RmaQueueView& queue) {
  const auto rate = [&](double live::RmaRates::*member) {
    return queue.rates ? Json((*queue.rates).*member) : Json(nullptr);
  };
  const live::RmaCounts& completed = queue.now.completed;
  return {{"context", queue.now.context},
          {"peer", queue.now.peer},
          {"peer_host", queue.now.peer_host},
          {"puts", completed.puts},
          {"signals", completed.signals},
          {"gets", completed.gets},
          {"flushes", completed.flushes},
          {"put_bytes", completed.put_bytes},
          {"get_bytes", completed.get_bytes},
          {"puts_s", rate(&live::RmaRates::puts_s)},
          {"signals_s", rate(&live::RmaRates::signals_s)},
          {"gets_s", rate(&live::RmaRates::gets_s)},
          {"put_bytes_s", rate(&live::RmaRates::put_bytes_s)},
          {"get_bytes_s", rate(&live::RmaRates::get_bytes_s)},
          {"outstanding", queue.now.outstanding},
          {"no_progress_ms", queue.now.no_progress_ms},
          {"stalled", queue.stalled}};
}

Json rma_json(const RmaSetView& set) {
  Json queues = Json::array();
  for (const RmaQueueView& queue : set.queues) queues.push_back(rma_queue_json(queue));
  return {{"number", set.now.number},   {"rank", set.now.rank},     {"ranks", set.now.ranks},
          {"device", set.now.device},   {"failed", set.now.failed}, {"error", text_or_null(set.now.error)},
          {"queues", std::move(queues)}};
}

}  // namespace

void sort_view(live::View& view, Sort sort) {
  const auto before = [&](const auto& a, const auto& b) { return weight(a, sort) > weight(b, sort); };
  std::stable_sort(view.processes.begin(), view.processes.end(), before);
  for (ProcessView& process : view.processes) {
    std::stable_sort(process.connections.begin(), process.connections.end(), before);
    std::stable_sort(process.rma.begin(), process.rma.end(), before);
    for (RmaSetView& set : process.rma) std::stable_sort(set.queues.begin(), set.queues.end(), before);
  }
}

std::vector<Line> to_lines(const live::View& view, bool connections) {
  std::size_t all = 0;
  live::Rates sent;
  live::Rates received;
  for (const ProcessView& process : view.processes) {
    all += process.connections.size();
    sent.bytes_s += process.sent.bytes_s;
    received.bytes_s += process.received.bytes_s;
  }
  std::vector<Line> lines{{count(view.processes.size(), "process") + ", " + count(all, "connection") + ", sent " +
                               short_number(sent.bytes_s) + "B/s, received " + short_number(received.bytes_s) + "B/s",
                           Style::kPlain}};
  for (const live::Problem& problem : view.problems) {
    lines.push_back({printable("not shown: " + problem.path + ": " + problem.why), Style::kAlarm});
  }
  for (const live::Culprit& culprit : view.culprits) lines.push_back(culprit_line(culprit));
  add_ports(view, lines);
  lines.push_back({columns("PID", "PROGRAM", "PEER", "DEVICE", "B/s", "MSG/s", "OUT", "LANES", "RETRY/s", "P50/P99 us",
                           "WAITS FOR"),
                   Style::kHead});
  for (const ProcessView& process : view.processes) {
    lines.push_back(process_line(process));
    if (!connections) continue;
    for (const ConnectionView& connection : process.connections) lines.push_back(connection_line(connection));
    for (const RmaSetView& set : process.rma) add_rma(set, lines);
  }
  return lines;
}

Json to_json(const live::View& view) {
  Json json{{"schema", 2},
            {"processes", Json::array()},
            {"ports", Json::array()},
            {"look_first_at", Json::array()},
            {"problems", Json::array()}};
  for (const ProcessView& process : view.processes) {
    Json connections = Json::array();
    for (const ConnectionView& connection : process.connections) connections.push_back(connection_json(connection));
    Json rma = Json::array();
    for (const RmaSetView& set : process.rma) rma.push_back(rma_json(set));
    json["processes"].push_back({{"process", process.now.name},
                                 {"user", process.now.user},
                                 {"host", process.now.host},
                                 {"pid", process.now.pid},
                                 {"program", process.now.program},
                                 {"sent", rates_json(process.sent)},
                                 {"received", rates_json(process.received)},
                                 {"connections", std::move(connections)},
                                 {"rma", std::move(rma)}});
  }
  for (const live::PortView& port : view.ports) {
    json["ports"].push_back({{"port", port.port}, {"counters", port.counters}, {"growth_s", port.growth_s}});
  }
  for (const live::Culprit& culprit : view.culprits) json["look_first_at"].push_back(culprit_json(culprit));
  for (const live::Problem& problem : view.problems) {
    json["problems"].push_back({{"path", problem.path}, {"why", problem.why}});
  }
  return json;
}

}  // namespace verbatim::top
