// Starts the measuring processes, collects their results, prints and writes them.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>

#include "cli/table.h"
#include "ranks/json.h"
#include "ranks/scratch_directory.h"
#include "verbatim-perf/cost/cells.h"
#include "verbatim-perf/cost/measure.h"
#include "verbatim-perf/cost/options.h"
#include "verbatim-perf/cost/part.h"
#include "verbatim-perf/cost/put_cost.h"

namespace verbatim::perf::cost {
namespace {

namespace fs = std::filesystem;

// The measurement of one plugin with one number of QPs.
class Measurement {
 public:
  Measurement(const CostOptions& options, const std::string& plugin, int qps)
      : options_(options), plugin_(plugin), qps_(qps) {}

  Json run() {
    const Json verbs = run_part(kVerbsPart, {});
    Json subject{{"plugin", plugin_},     {"name", verbs["name"]},         {"api_version", verbs["api_version"]},
                 {"qps", qps_},           {"messages", options_.messages}, {"optional", options_.optional},
                 {"room", options_.room}, {"merge", options_.merge},       {"cells", Json::array()}};
    for (const Json& counted : verbs["cells"]) subject["cells"].push_back(per_message(counted));
    if (options_.instructions) add_instructions(subject);
    if (options_.connections > 0) add_connections(subject, verbs);
    return subject;
  }

 private:
  Json run_part(const std::string& part, const std::vector<std::string>& wrapper) const {
    const std::string qps = std::to_string(qps_);
    std::vector<std::string> variables{"VERBATIM_QPS_PER_CONNECTION=" + qps, "NCCL_IB_QPS_PER_CONNECTION=" + qps};
    if (part == kMemoryPart) variables.push_back("LD_PRELOAD=" + counting_allocator());
    return cost::run_part({options_, plugin_, scratch_}, part, variables, wrapper);
  }

  // Looks in the build directory, then in the installation directory.
  static std::string counting_allocator() {
    const fs::path directory = fs::read_symlink("/proc/self/exe").parent_path();
    for (const fs::path& candidate :
         {directory / "cost" / kCountingAllocator, directory / ".." / VERBATIM_PRIVATE_DIR / kCountingAllocator}) {
      if (fs::exists(candidate)) return fs::canonical(candidate).string();
    }
    throw ranks::Failure(std::string(kCountingAllocator) + " was not found next to " + directory.string());
  }

  Json per_message(const Json& counted) const {
    return divided(counted, static_cast<double>(options_.messages) * counted["group"].get<double>());
  }

  void add_instructions(Json& subject) const {
    const std::string dumps_prefix = (scratch_ / "dump").string();
    const Json counted = run_part(kInstructionsPart, callgrind(dumps_prefix));
    const std::map<std::string, Instructions> dumps = read_dumps(dumps_prefix, counted["object"].get<std::string>());
    const auto figures_of = [&](const std::string& label) {
      const auto found = dumps.find(label);
      if (found == dumps.end()) throw ranks::Failure("callgrind wrote no figures for '" + label + "'");
      return json_of(found->second);
    };
    for (Json& cell : subject["cells"]) {
      const std::string which = " " + cell["bytes"].dump() + " " + cell["group"].dump();
      cell["instructions"] = figures_of(kWholeCell + which);
      for (const char* call : {"irecv", "isend", "test_send", "test_recv"}) {
        cell["instructions_by_call"][call] = figures_of(call + which);
      }
    }
    subject["instructions_test_incomplete"] = figures_of(kTestIncomplete);
    subject["instructions_send_without_receive"] = figures_of(kSendWithoutReceive);
    subject["instructions_connect"] = figures_of(kConnect);
  }

  void add_connections(Json& subject, const Json& verbs) const {
    const double connections = options_.connections;
    subject["connections"] = options_.connections;
    subject["connections_per_s"] = connections / verbs["setup_s"].get<double>();
    subject["bytes_per_connection"] = run_part(kMemoryPart, {})["plugin_bytes"].get<double>() / connections;
    for (const auto& [kind, created] : verbs["objects"].items()) {
      subject["objects_per_connection"][kind] = created.get<double>() / connections;
    }
  }

  static constexpr const char* kCountingAllocator = "libverbatim-counting-allocator.so";

  const CostOptions& options_;
  const std::string& plugin_;
  const int qps_;
  const ranks::Scratch scratch_{"cost"};
};

void print_cells(const Json& cells, bool instructions) {
  std::vector<cli::Column> columns{{"size(B)", 10}, {"group", 6}};
  if (instructions) {
    columns.push_back({"plugin", 8, 1});
    for (const char* title : {"irecv", "isend", "tests", "libc", "verbs"}) columns.push_back({title, 7, 1});
  }
  columns.insert(
      columns.end(),
      {{"post_send", 9, 3}, {"send_wr", 8, 3}, {"post_recv", 9, 3}, {"recv_wr", 8, 3}, {"wc", 6, 3}, {"empty", 6, 3}});
  const cli::Table table(columns);
  table.print_titles(stdout);
  for (const Json& cell : cells) {
    std::vector<cli::Cell> row{cell["bytes"].get<std::size_t>(), cell["group"].get<int>()};
    if (instructions) {
      const Json& all = cell["instructions"];
      const Json& call = cell["instructions_by_call"];
      row.insert(row.end(), {number(all, "plugin"), number(call["irecv"], "plugin"), number(call["isend"], "plugin"),
                             number(call["test_send"], "plugin") + number(call["test_recv"], "plugin"),
                             number(all, "libc"), number(all, "verbs")});
    }
    for (const char* key : {"post_send", "send_requests", "post_recv", "recv_requests", "completions", "empty_polls"}) {
      row.emplace_back(number(cell, key));
    }
    table.print_row(stdout, row);
  }
}

void print_subject(const Json& subject) {
  std::printf("# %s (net plugin v%d, %s), %d QP(s) per connection%s; figures per message, both ends together\n",
              subject["name"].get<std::string>().c_str(), subject["api_version"].get<int>(),
              subject["plugin"].get<std::string>().c_str(), subject["qps"].get<int>(),
              subject["optional"].get<bool>() ? ", single receives with optional completion" : "");
  const bool instructions = subject.contains("instructions_connect");
  print_cells(subject["cells"], instructions);
  if (instructions) {
    std::printf(
        "# instructions of the plugin, libc: a test without completion %.1f, %.1f; an isend without receive %.1f, "
        "%.1f; a "
        "connection %.0f, %.0f\n",
        number(subject["instructions_test_incomplete"], "plugin"),
        number(subject["instructions_test_incomplete"], "libc"),
        number(subject["instructions_send_without_receive"], "plugin"),
        number(subject["instructions_send_without_receive"], "libc"), number(subject["instructions_connect"], "plugin"),
        number(subject["instructions_connect"], "libc"));
  }
  if (subject.contains("connections")) {
    const Json& objects = subject["objects_per_connection"];
    std::printf(
        "# %d connections: each %.0f bytes of the plugin, %.1f QP, %.1f CQ, %.1f MR; %.0f connections per second\n",
        subject["connections"].get<int>(), number(subject, "bytes_per_connection"), number(objects, "qp"),
        number(objects, "cq"), number(objects, "mr"), number(subject, "connections_per_s"));
  }
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

ranks::ExitStatus run_cost(const CostOptions& options) {
  if (!options.part.empty()) return measure(options);
  Json all = Json::array();
  Json puts = Json::array();
  for (const std::string& plugin : options.plugins) {
    for (std::size_t i = 0; options.messages_of_net && i < options.qps.size(); ++i) {
      all.push_back(Measurement(options, plugin, options.qps[i]).run());
      print_subject(all.back());
    }
    if (!options.puts) continue;
    const std::optional<Json> measured = measure_put_cost(options, plugin);
    if (!measured) continue;
    puts.push_back(*measured);
    print_put_cost(*measured);
  }
  if (options.json.empty()) return ranks::ExitStatus::kOk;
  std::ofstream file(options.json);
  file << Json{{"schema", ranks::kJsonSchema}, {"subjects", all}, {"puts", puts}}.dump(1) << '\n';
  if (!file.flush()) throw ranks::Failure("cannot write " + options.json);
  return ranks::ExitStatus::kOk;
}

}  // namespace verbatim::perf::cost
