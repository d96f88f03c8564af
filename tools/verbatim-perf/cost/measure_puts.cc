#include <algorithm>
#include <climits>
#include <memory>
#include <utility>

#include "ranks/loaded_plugin.h"
#include "ranks/plugin_log.h"
#include "verbatim-perf/cost/cells.h"
#include "verbatim-perf/cost/collection.h"
#include "verbatim-perf/cost/counters.h"
#include "verbatim-perf/cost/measure.h"
#include "verbatim-perf/cost/measured_connection.h"
#include "verbatim-perf/cost/measured_puts.h"

namespace verbatim::perf::cost {
namespace {

constexpr int kEmptyTests = 1000;
constexpr std::size_t kMostPutBytes = std::size_t{4} << 20;  // that are copied under callgrind in one measurement
constexpr int kFewestPuts = 32;

void run(MeasuredPuts& puts, const std::string& kind, std::size_t bytes, int times) {
  if (kind == kPut) puts.put(bytes, times);
  if (kind == kPutSignal) puts.put_signal(bytes, times);
  if (kind == kPutBurst) puts.put_bursts(bytes, times);
}

void measure_put_instructions(const CostOptions& options, MeasuredPuts& puts) {
  require_callgrind();
  for (const std::size_t bytes : options.sizes) {
    const auto fitting =
        static_cast<int>(std::min<std::size_t>(kMostPutBytes / std::max<std::size_t>(bytes, 1), INT_MAX));
    const int count = std::clamp(fitting, kFewestPuts, put_count(options));
    for (const std::string kind : kPutKinds) {
      run(puts, kind, bytes, kFewestPuts);
      counted([&] { run(puts, kind, bytes, count / MeasuredPuts::kBurst * MeasuredPuts::kBurst); });
      dump(kind + " " + std::to_string(bytes), count / MeasuredPuts::kBurst * MeasuredPuts::kBurst);
    }
    puts.check(bytes);
  }
  if (!puts.start_get()) return;
  puts.test_incomplete(1);
  counted([&] { puts.test_incomplete(kEmptyTests); });
  dump(kTestIncomplete, kEmptyTests);
}

Json count_verbs(const CostOptions& options, MeasuredPuts& puts) {
  Json cells = Json::array();
  for (const std::size_t bytes : options.sizes) {
    Json cell{{"bytes", bytes}};
    for (const std::string kind : kPutKinds) {
      run(puts, kind, bytes, kFewestPuts);
      const Reading before = read_counters();
      run(puts, kind, bytes, put_count(options));
      cell[kind] = difference(before, read_counters());
    }
    puts.check(bytes);
    cells.push_back(cell);
  }
  return cells;
}

// The RMA table knows the devices that the net table has merged. nullptr: none are merged.
std::unique_ptr<PluginUnderTest> merge_devices(const CostOptions& options) {
  if (options.merge == 1) return nullptr;
  netapi::Opened opened = netapi::open_plugin(options.plugins.front());
  if (opened.plugin == nullptr) throw ranks::Failure(opened.error);
  return std::make_unique<PluginUnderTest>(std::move(opened.plugin), options.merge);
}

}  // namespace

int put_count(const CostOptions& options) {
  return std::max(options.messages / MeasuredPuts::kBurst * MeasuredPuts::kBurst, kFewestPuts);
}

ranks::ExitStatus measure_puts(const CostOptions& options) {
  ranks::keep_plugin_log(0, options.plugin_log);
  netapi::OpenedRma opened = netapi::open_rma_plugin(options.plugins.front());
  if (opened.plugin == nullptr) {
    write_result(options, {{"error", opened.error}});
    return ranks::ExitStatus::kOk;
  }
  Json result{{"name", opened.plugin->name()},
              {"api_version", opened.plugin->api_version()},
              {"object", object_of(opened.plugin->table())}};
  try {
    const std::unique_ptr<PluginUnderTest> merged = merge_devices(options);
    MeasuredPuts puts(std::move(opened.plugin), *std::max_element(options.sizes.begin(), options.sizes.end()));
    if (options.part == kPutInstructionsPart) {
      measure_put_instructions(options, puts);
    } else {
      result["cells"] = count_verbs(options, puts);
    }
  } catch (const ranks::Failure& failure) {
    throw ranks::Failure(failure.what() + ranks::plugin_warnings(), failure.status);
  }
  write_result(options, result);
  return ranks::ExitStatus::kOk;
}

}  // namespace verbatim::perf::cost
