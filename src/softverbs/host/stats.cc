#include "softverbs/host/stats.h"

#include <algorithm>
#include <cstring>
#include <numeric>

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

// Formats one JSON object; nested objects have deeper indentation.
class JsonObject {
 public:
  explicit JsonObject(std::size_t level) : level_(level) {}

  void add(const std::string& key, std::uint64_t value) { add_text(key, std::to_string(value)); }
  void add(const std::string& key, const JsonObject& value) { add_text(key, value.text()); }
  void add_string(const std::string& key, const std::string& value) { add_text(key, quoted(value)); }
  void add_text(const std::string& key, const std::string& value) {
    members_ += (members_.empty() ? "\n" : ",\n") + indent(level_ + 1) + quoted(key) + ": " + value;
  }
  std::string text() const { return members_.empty() ? "{}" : "{" + members_ + "\n" + indent(level_) + "}"; }

  static std::string indent(std::size_t level) { return std::string(2 * level, ' '); }

 private:
  // Other characters, which a program's name may contain, become '_'.
  static std::string quoted(const std::string& text) {
    std::string result = "\"";
    for (const char c : text) {
      const bool plain = c >= ' ' && c <= '~' && c != '"' && c != '\\';
      result += plain ? c : '_';
    }
    return result + "\"";
  }

  const std::size_t level_;
  std::string members_;
};

void add_nonzero(JsonObject& calls, const char* name, std::uint64_t count) {
  if (count != 0) calls.add(name, count);
}

void describe(JsonObject& object, const WorkStats& work, std::uint64_t doorbells, std::size_t level) {
  JsonObject requests(level + 1);
  for (std::size_t opcode = 0; opcode < work.sends.size(); ++opcode) {
    requests.add(kSendOpcodeNames[opcode], work.sends[opcode]);
  }
  requests.add("recv", work.receives);
  object.add("work_requests", requests);
  object.add("doorbells", doorbells);
  object.add("bytes", work.bytes);
  object.add("inline_bytes", work.inline_bytes);
  object.add("completions", work.completions);
}

std::string describe(const QpStats& qp, std::size_t level) {
  JsonObject object(level);
  object.add("qpn", qp.qpn);
  object.add("device", qp.device);
  object.add("dest_qpn", qp.dest_qpn);
  if (qp.path) object.add("path", *qp.path);
  if (qp.udp_source_port != 0) object.add("udp_source_port", qp.udp_source_port);
  object.add_string("type", type_name(qp.type));
  object.add_string("state", state_name(qp.state));
  object.add_text("alive", qp.is_alive ? "true" : "false");
  JsonObject calls(level + 1);
  add_nonzero(calls, "ibv_modify_qp", qp.modifies);
  add_nonzero(calls, "ibv_query_qp", qp.queries);
  add_nonzero(calls, "ibv_post_send", qp.work.posts);
  add_nonzero(calls, "ibv_wr_complete", qp.work.completes);
  add_nonzero(calls, "ibv_post_recv", qp.work.receive_posts);
  object.add("calls", calls);
  describe(object, qp.work, qp.work.doorbells(), level);
  return object.text();
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
  JsonObject object(0);
  object.add("schema", kStatsSchema);
  object.add("pid", static_cast<std::uint64_t>(stats.pid));
  object.add_string("program", stats.program);
  JsonObject calls(1);
  for (std::size_t verb = 0; verb < stats.calls.size(); ++verb) add_nonzero(calls, kVerbNames[verb], stats.calls[verb]);
  add_nonzero(calls, "ibv_post_send", stats.work.posts);
  add_nonzero(calls, "ibv_wr_complete", stats.work.completes);
  add_nonzero(calls, "ibv_post_recv", stats.work.receive_posts);
  add_nonzero(calls, "ibv_post_srq_recv", stats.srq_posts);
  add_nonzero(calls, "ibv_poll_cq", stats.polls);
  object.add("calls", calls);
  describe(object, stats.work, stats.doorbells(), 0);
  object.add("polls", stats.polls);
  object.add("empty_polls", stats.empty_polls);
  std::string engines;
  for (const std::uint64_t requests : stats.engine_requests) {
    engines += (engines.empty() ? "" : ", ") + std::to_string(requests);
  }
  object.add_text("engine_requests", "[" + engines + "]");
  JsonObject objects(1);
  for (std::size_t kind = 0; kind < stats.objects.size(); ++kind) {
    JsonObject counts(2);
    counts.add("created", stats.objects[kind].created);
    counts.add("alive", stats.objects[kind].alive);
    objects.add(kObjectNames[kind], counts);
  }
  object.add("objects", objects);
  std::string qps;
  for (const QpStats& qp : stats.qps) {
    qps += (qps.empty() ? "\n" : ",\n") + JsonObject::indent(2) + describe(qp, 2);
  }
  object.add_text("qps", qps.empty() ? "[]" : "[" + qps + "\n" + JsonObject::indent(1) + "]");
  return object.text();
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
