#include "softverbs/host/stats.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/json.h"

namespace verbatim::softverbs {
namespace {

void add(WorkStats& sum, const QpCounters& counters) {
  for (std::size_t opcode = 0; opcode < sum.sends.size(); ++opcode) {
    sum.sends[opcode] += counters.sends.requests[opcode].get();
  }
  sum.receives += counters.receives.requests.get();
  sum.posts += counters.sends.posts.get();
  sum.completes += counters.sends.completes.get();
  sum.receive_posts += counters.receives.posts.get();
  sum.bytes += counters.sends.bytes.get();
  sum.inline_bytes += counters.sends.inline_bytes.get();
  sum.completions += counters.send_completions.get() + counters.receive_completions.get();
}

void add(ProcessStats& sum, const CqCounters& counters) {
  sum.polls += counters.polls.get() + counters.empty_polls.get();
  sum.empty_polls += counters.empty_polls.get();
}

void add(ProcessStats& sum, const ReceiveCounters& counters) {
  sum.work.receives += counters.requests.get();
  sum.srq_posts += counters.posts.get();
}

// A program's name can be cut within a character of UTF-8, and bytes that are not UTF-8 are no JSON.
std::string printable(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '_');
  return text;
}

using Fields = std::vector<std::string>;

void add_nonzero(Fields& calls, const char* name, std::uint64_t count) {
  if (count != 0) calls.push_back(json_field(name, count));
}

void add_work(Fields& fields, const WorkStats& work, std::uint64_t doorbells) {
  Fields requests;
  for (std::size_t opcode = 0; opcode < work.sends.size(); ++opcode) {
    requests.push_back(json_field(kSendOpcodeNames[opcode], work.sends[opcode]));
  }
  requests.push_back(json_field("recv", work.receives));
  fields.insert(fields.end(), {json_nested("work_requests", json_object(requests)), json_field("doorbells", doorbells),
                               json_field("bytes", work.bytes), json_field("inline_bytes", work.inline_bytes),
                               json_field("completions", work.completions)});
}

std::string to_json(const QpStats& qp) {
  Fields fields{json_field("qpn", qp.qpn), json_field("device", qp.device), json_field("dest_qpn", qp.dest_qpn)};
  if (qp.path) fields.push_back(json_field("path", *qp.path));
  if (qp.udp_source_port != 0) fields.push_back(json_field("udp_source_port", qp.udp_source_port));
  Fields calls;
  add_nonzero(calls, "ibv_modify_qp", qp.modifies);
  add_nonzero(calls, "ibv_query_qp", qp.queries);
  add_nonzero(calls, "ibv_post_send", qp.work.posts);
  add_nonzero(calls, "ibv_wr_complete", qp.work.completes);
  add_nonzero(calls, "ibv_post_recv", qp.work.receive_posts);
  fields.insert(fields.end(), {json_field("type", type_name(qp.type)), json_field("state", state_name(qp.state)),
                               json_flag("alive", qp.is_alive), json_nested("calls", json_object(calls))});
  add_work(fields, qp.work, qp.work.doorbells());
  return json_object(fields);
}

}  // namespace

std::uint64_t WorkStats::send_requests() const {
  return std::accumulate(sends.begin(), sends.end(), std::uint64_t{0});
}

std::uint64_t ProcessStats::total_calls() const {
  return std::accumulate(calls.begin(), calls.end(), doorbells() + polls);
}

ProcessStats read_stats(const Segment& segment) {
  const ProcessCounters& counters = segment.counters;
  ProcessStats stats;
  stats.pid = segment.pid;
  stats.program = std::string(segment.program, ::strnlen(segment.program, sizeof segment.program));
  for (std::size_t verb = 0; verb < stats.calls.size(); ++verb) stats.calls[verb] = counters.calls[verb].get();
  const auto table_end = [&](ObjectKind kind) { return counters.of(kind).table_end.load(std::memory_order_acquire); };
  add(stats.work, counters.destroyed_qps);
  for (std::uint32_t index = 0; index < table_end(ObjectKind::kQp); ++index) {
    if (segment.qps[index].qpn.load(std::memory_order_acquire) == 0) continue;
    add(stats.work, segment.qps[index].counters);
    stats.qps.push_back(read_qp_stats(segment, index));
  }
  add(stats, counters.destroyed_srqs);
  for (std::uint32_t index = 0; index < table_end(ObjectKind::kSrq); ++index) {
    if (segment.srqs[index].alive.load(std::memory_order_acquire) != 0) add(stats, segment.srqs[index].counters);
  }
  add(stats, counters.destroyed_cqs);
  for (std::uint32_t index = 0; index < table_end(ObjectKind::kCq); ++index) {
    if (segment.cqs[index].alive.load(std::memory_order_acquire) != 0) add(stats, segment.cqs[index].counters);
  }
  for (std::size_t kind = 0; kind < stats.objects.size(); ++kind) {
    stats.objects[kind] = {counters.objects[kind].created.get(), counters.objects[kind].alive.get()};
  }
  const std::uint32_t threads = std::min(segment.engine_threads.load(std::memory_order_relaxed), kMaxEngines);
  for (std::uint32_t thread = 0; thread < threads; ++thread) {
    stats.engine_requests.push_back(segment.engines[thread].requests.get());
  }
  return stats;
}

QpStats read_qp_stats(const Segment& segment, std::uint32_t index) {
  const SharedQp& qp = segment.qps[index];
  QpStats stats;
  stats.qpn = qp.qpn.load(std::memory_order_acquire);
  stats.device = qp.device;
  stats.dest_qpn = qp.dest_qpn;
  if (const std::uint32_t path = qp.path; path != 0) stats.path = path - 1;
  stats.udp_source_port = qp.udp_source_port;
  stats.type = static_cast<ibv_qp_type>(qp.type);
  stats.state = static_cast<ibv_qp_state>(qp.state.load(std::memory_order_relaxed));
  add(stats.work, qp.counters);
  stats.modifies = qp.counters.modifies.get();
  stats.queries = qp.counters.queries.get();
  return stats;
}

const char* type_name(ibv_qp_type type) {
  return type == IBV_QPT_UD ? "UD" : type == IBV_QPT_UC ? "UC" : "RC";
}

const char* state_name(ibv_qp_state state) {
  constexpr std::array kNames{"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};
  return static_cast<std::size_t>(state) < kNames.size() ? kNames[state] : "?";
}

std::string to_json(const ProcessStats& stats) {
  Fields calls;
  for (std::size_t verb = 0; verb < stats.calls.size(); ++verb) add_nonzero(calls, kVerbNames[verb], stats.calls[verb]);
  add_nonzero(calls, "ibv_post_send", stats.work.posts);
  add_nonzero(calls, "ibv_wr_complete", stats.work.completes);
  add_nonzero(calls, "ibv_post_recv", stats.work.receive_posts);
  add_nonzero(calls, "ibv_post_srq_recv", stats.srq_posts);
  add_nonzero(calls, "ibv_poll_cq", stats.polls);
  Fields fields{json_field("schema", kStatsSchema), json_field("pid", static_cast<std::uint64_t>(stats.pid)),
                json_field("program", printable(stats.program)), json_nested("calls", json_object(calls))};
  add_work(fields, stats.work, stats.doorbells());
  Fields engines;
  for (const std::uint64_t requests : stats.engine_requests) engines.push_back(std::to_string(requests));
  Fields objects;
  for (std::size_t kind = 0; kind < stats.objects.size(); ++kind) {
    objects.push_back(json_nested(kObjectNames[kind], json_object({json_field("created", stats.objects[kind].created),
                                                                   json_field("alive", stats.objects[kind].alive)})));
  }
  Fields qps;
  for (const QpStats& qp : stats.qps) qps.push_back("\n" + to_json(qp));
  fields.insert(fields.end(), {json_field("polls", stats.polls), json_field("empty_polls", stats.empty_polls),
                               json_nested("engine_requests", json_list(engines)),
                               json_nested("objects", json_object(objects)), json_nested("qps", json_list(qps))});
  return json_object(fields);
}

std::string stats_file_name(const std::string& pattern, pid_t pid) {
  std::string name = pattern;
  const std::string number = std::to_string(pid);
  for (std::size_t at = name.find("%p"); at != std::string::npos; at = name.find("%p", at + number.size())) {
    name.replace(at, 2, number);
  }
  return name;
}

}  // namespace verbatim::softverbs
