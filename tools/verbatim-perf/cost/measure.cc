#include "verbatim-perf/cost/measure.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <fstream>
#include <vector>

#include "ranks/plugin_log.h"
#include "verbatim-perf/cost/allocations.h"
#include "verbatim-perf/cost/cells.h"
#include "verbatim-perf/cost/collection.h"
#include "verbatim-perf/cost/counters.h"
#include "verbatim-perf/cost/measured_connection.h"

namespace verbatim::perf::cost {
namespace {

constexpr int kUnproductiveCalls = 1000;
constexpr std::size_t kUnproductiveBytes = 4096;
constexpr int kConnectsUnderCallgrind = 8;

// Copying large messages is slow under callgrind and shows nothing about the plugin. A measurement transfers at most
// kMostBytes bytes, but at least kFewestGroups groups, a multiple of the plugin's batch sizes (receives, signalled
// work).
constexpr std::size_t kMostBytes = std::size_t{4} << 20;
constexpr int kFewestGroups = 32;
constexpr int kBatches = kFewestGroups / GroupTransfer::kAhead;

std::string cell_label(const std::string& what, std::size_t bytes, int group) {
  return what + " " + std::to_string(bytes) + " " + std::to_string(group);
}

// Calls `visit(bytes, group)` for every cell whose group size the plugin supports.
template <typename Visit>
void for_each_cell(const CostOptions& options, const PluginUnderTest& subject, Visit visit) {
  for (const std::size_t bytes : options.sizes) {
    for (const int group : options.groups) {
      if (group <= subject.max_recvs()) visit(bytes, group);
    }
  }
}

void finish(GroupTransfer& groups) {
  groups.send();
  groups.finish_sends();
  groups.finish_receives();
  groups.check();
}

void measure_instructions(const CostOptions& options, PluginUnderTest& subject) {
  require_callgrind();
  const ConnectionPair ends = subject.connect();
  for_each_cell(options, subject, [&](std::size_t bytes, int group) {
    const std::size_t group_bytes = std::max<std::size_t>(bytes, 1) * static_cast<std::size_t>(group);
    const int fitting = static_cast<int>(std::min<std::size_t>(kMostBytes / group_bytes, INT_MAX));
    const int count = std::min(options.messages, std::max(kFewestGroups, fitting));
    GroupTransfer groups(subject, ends, bytes, group, options.optional, options.room);
    groups.post_receives();
    groups.run(kFewestGroups);
    counted([&] { groups.run(count); });
    dump(cell_label(kWholeCell, bytes, group), count * group);
    finish(groups);
    struct Call {
      const char* name;
      void (GroupTransfer::*work)();
    };
    constexpr Call kCalls[] = {{"irecv", &GroupTransfer::post_receives},
                               {"isend", &GroupTransfer::send},
                               {"test_send", &GroupTransfer::finish_sends},
                               {"test_recv", &GroupTransfer::finish_receives}};
    for (int batch = 0; batch < kBatches; ++batch) {
      for (const Call& call : kCalls) {
        counted([&] { (groups.*call.work)(); });
        dump(cell_label(call.name, bytes, group), kFewestGroups * group);
      }
    }
  });
  GroupTransfer groups(subject, ends, kUnproductiveBytes, 1);
  groups.send_without_receive(1);
  counted([&] { groups.send_without_receive(kUnproductiveCalls); });
  dump(kSendWithoutReceive, kUnproductiveCalls);
  groups.post_receives();
  groups.test_incomplete(1);
  counted([&] { groups.test_incomplete(kUnproductiveCalls); });
  dump(kTestIncomplete, kUnproductiveCalls);
  finish(groups);
  subject.close(ends);
  std::vector<ConnectionPair> all;
  for (int i = 0; i < kConnectsUnderCallgrind; ++i) counted([&] { all.push_back(subject.connect()); });
  dump(kConnect, kConnectsUnderCallgrind);
  for (const ConnectionPair& connection : all) subject.close(connection);
}

void measure_verbs(const CostOptions& options, PluginUnderTest& subject, Json& result) {
  const ConnectionPair ends = subject.connect();
  for_each_cell(options, subject, [&](std::size_t bytes, int group) {
    GroupTransfer groups(subject, ends, bytes, group, options.optional, options.room);
    groups.post_receives();
    groups.run(options.messages);
    const Reading before = read_counters();
    groups.run(options.messages);
    const Reading after = read_counters();
    finish(groups);
    Json cell{{"bytes", bytes}, {"group", group}};
    cell.update(difference(before, after));
    result["cells"].push_back(cell);
  });
  subject.close(ends);
}

// Creates connections one after the other and sends one message over each.
std::vector<ConnectionPair> connect_and_use(const CostOptions& options, PluginUnderTest& subject) {
  std::vector<ConnectionPair> connections;
  for (int i = 0; i < options.connections; ++i) {
    connections.push_back(subject.connect());
    GroupTransfer groups(subject, connections.back(), 8, 1);
    groups.post_receives();
    finish(groups);
  }
  return connections;
}

void measure_memory(const CostOptions& options, PluginUnderTest& subject, const std::string& object, Json& result) {
  const Allocations allocations(object);
  const std::vector<ConnectionPair> connections = connect_and_use(options, subject);
  result["plugin_bytes"] = allocations.bytes();
  for (const ConnectionPair& connection : connections) subject.close(connection);
}

void measure_setup(const CostOptions& options, PluginUnderTest& subject, Json& result) {
  using Clock = std::chrono::steady_clock;
  const Reading before = read_counters();
  const auto started = Clock::now();
  std::vector<ConnectionPair> connections;
  for (int i = 0; i < options.connections; ++i) connections.push_back(subject.connect());
  result["setup_s"] = std::chrono::duration<double>(Clock::now() - started).count();
  const Reading after = read_counters();
  Json objects = Json::object();
  for (std::size_t i = 0; i < after.objects.size(); ++i) {
    objects[softverbs::kObjectNames[i]] = after.objects[i].created - before.objects[i].created;
  }
  result["objects"] = objects;
  for (const ConnectionPair& connection : connections) subject.close(connection);
}

}  // namespace

std::string object_of(const void* table) {
  Dl_info found{};
  if (::dladdr(table, &found) == 0) throw ranks::Failure("the plugin's table is in no loaded object");
  return found.dli_fname;
}

void write_result(const CostOptions& options, const Json& result) {
  std::ofstream file(options.result);
  file << result.dump(1) << '\n';
  if (!file.flush()) throw ranks::Failure("cannot write " + options.result);
}

ranks::ExitStatus measure(const CostOptions& options) {
  if (options.part == kPutsPart || options.part == kPutInstructionsPart) return measure_puts(options);
  ranks::keep_plugin_log(0, options.plugin_log);
  netapi::Opened opened = netapi::open_plugin(options.plugins.front(), options.api_version);
  if (opened.plugin == nullptr) throw ranks::Failure(opened.error);
  ranks::choose_log_formatting(opened.plugin->name());
  const std::string object = object_of(opened.plugin->table());
  if (options.optional && opened.plugin->api_version() < netapi::kOldestWithOptionalReceives)
    throw ranks::Failure("--optional needs table version 9 or newer", ranks::ExitStatus::kUsage);
  Json result{{"name", opened.plugin->name()}, {"api_version", opened.plugin->api_version()}, {"object", object}};
  try {
    PluginUnderTest subject(std::move(opened.plugin), options.merge);
    result["max_recvs"] = subject.max_recvs();
    if (options.part == kInstructionsPart) {
      measure_instructions(options, subject);
    } else if (options.part == kVerbsPart) {
      result["cells"] = Json::array();
      measure_verbs(options, subject, result);
      measure_setup(options, subject, result);
    } else if (options.part == kMemoryPart) {
      measure_memory(options, subject, object, result);
    } else {
      throw ranks::Failure("unknown --part " + options.part, ranks::ExitStatus::kUsage);
    }
  } catch (const ranks::Failure& failure) {
    throw ranks::Failure(failure.what() + ranks::plugin_warnings(), failure.status);
  }
  write_result(options, result);
  return ranks::ExitStatus::kOk;
}

}  // namespace verbatim::perf::cost
