// Fuzzes what verbatim-top and verbatim-exporter read from the state socket of another process, which may be of another
// user: the state of a process with connections and RMA, of which the input changes values and bytes. A state is read,
// or refused with a reason. What is shown is printable, metrics are unique and limited in number, and counters of a
// process do not fall.
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "fuzz.h"
#include "live/process.h"
#include "live/rates.h"
#include "verbatim-exporter/metrics.h"
#include "verbatim-top/render.h"

namespace {

using namespace verbatim;
using fuzz::require;
using Json = nlohmann::json;

constexpr std::size_t kMaxEdits = 16;
constexpr std::size_t kMaxLine = 600;  // a few labels of at most 64 characters
constexpr std::size_t kMaxSeries = 2000;
constexpr const char* kNested = "@nested@";

// As the plugin writes it, see plugin/STATE.md.
Json valid_state() {
  return Json::parse(R"({"schema":2,"host":"a","pid":7,"program":"train","time_ns":1000000000,"connections":[
    {"number":1,"direction":"send","device":"mlx5_0:1+mlx5_1:1","path":"","peer_host":"b","peer_pid":8,"qps":2,
     "lanes":2,"lanes_down":1,"state":"open","error":null,"stall_cause":null,
     "local":{"messages":5,"bytes":900,"outstanding":2,"send_refused":true,"cts_ready":false,"tested":true,
              "failed":false,"qp_state":"RTS","no_progress_ms":6000},"peer":null,
     "latency":{"isend_to_completion":[[1000,3],[2000,1]],"cts_wait":[[500,2]]}},
    {"number":2,"direction":"recv","device":"mlx5_0:1","path":"","peer_host":"b","peer_pid":8,"qps":1,
     "lanes":1,"lanes_down":0,"state":"failed","error":"e","stall_cause":"c",
     "local":{"messages":4,"bytes":90,"outstanding":1,"flushes":1,"tested":true,"failed":true,"qp_state":"ERR",
              "no_progress_ms":10},"peer":null,"latency":null}],
    "rma":[{"number":1,"rank":0,"ranks":2,"device":"mlx5_0:1","failed":false,"error":null,
     "queues":[{"context":0,"peer":1,"peer_host":"b","completed":{"puts":1,"signals":2,"gets":3,"flushes":4,
     "put_bytes":5,"get_bytes":6},"outstanding":1,"no_progress_ms":3000,"stalled":false}]}]})");
}

std::string text(fuzz::Input& input) {
  const std::span<const std::uint8_t> bytes = input.take(input.get<std::uint8_t>() % 80);
  return {bytes.begin(), bytes.end()};
}

void collect(Json& node, std::vector<Json*>& nodes) {
  nodes.push_back(&node);
  if (!node.is_structured()) return;
  for (Json& child : node) collect(child, nodes);
}

// Changes one value, or repeats an element.
void edit(fuzz::Input& input, Json& state) {
  std::vector<Json*> nodes;
  collect(state, nodes);
  Json& node = *nodes[input.get<std::uint16_t>() % nodes.size()];
  const auto how = input.get<std::uint8_t>();
  switch (how % 12) {
    case 0:
      node = nullptr;
      return;
    case 1:
      node = -1;
      return;
    case 2:
      node = ~std::uint64_t{0} >> (how / 12);
      return;
    case 3:
      node = 1e300;
      return;
    case 4:
      node = text(input);
      return;
    case 5:
      node = how % 24 < 12 ? Json::array() : Json::object();
      return;
    case 6:
      node = Json(*nodes[input.get<std::uint16_t>() % nodes.size()]);
      return;
    case 7:
      node = kNested;
      return;
    case 8:
      node = how % 24 < 12;
      return;
    case 9:
      node = input.get<std::uint16_t>();
      return;
    case 10:  // more elements
      if (!node.is_structured() || node.empty() || nodes.size() > 1'000) return;
      for (unsigned i = 0; i < 3U + how / 12; ++i) {
        Json copy = *node.begin();
        if (copy.is_object() && copy.contains("number")) copy["number"] = 100 + i;
        if (copy.is_object() && copy.contains("device")) copy["device"] = "mlx5_" + std::to_string(i) + ":1";
        if (node.is_array())
          node.push_back(std::move(copy));
        else
          node[text(input) + std::to_string(i)] = std::move(copy);
      }
      return;
    default:
      if (node.is_object() && !node.empty()) node.erase(node.begin());
      if (node.is_array() && !node.empty()) node.erase(node.size() - 1);
  }
}

std::string changed(fuzz::Input& input, Json& state) {
  const auto flags = input.get<std::uint8_t>();
  for (std::size_t i = flags % kMaxEdits; i > 0; --i) edit(input, state);
  std::string all = state.dump(-1, ' ', false, Json::error_handler_t::replace);
  const std::string nested = "\"" + std::string(kNested) + "\"";
  if (const std::size_t at = all.find(nested); at != std::string::npos) {
    const std::size_t depth = std::size_t{1} << input.get<std::uint8_t>() % 16;
    all.replace(at, nested.size(), std::string(depth, '[') + std::string(depth, ']'));
  }
  for (int i = flags >> 4 & 3; i > 0; --i) {
    all[input.get<std::uint16_t>() % all.size()] = static_cast<char>(input.get<std::uint8_t>());
  }
  if ((flags & 64) != 0) all.resize(input.get<std::uint16_t>() % (all.size() + 1));
  return all;
}

// The process that is read: everyone who connects to its socket gets the state.
class StateServer {
 public:
  StateServer() {
    std::string name = (std::filesystem::temp_directory_path() / "verbatim-fuzz-").string() + std::string(6, 'X');
    require(::mkdtemp(name.data()) != nullptr, "a directory is made");
    directory_ = name;
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    (directory_ + "/1-0a1b2c3d").copy(address.sun_path, sizeof address.sun_path - 1);
    listener_ = UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    require(::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
                ::listen(listener_.get(), 16) == 0,
            "the state socket listens");
    thread_ = std::thread([this] { serve(); });
  }
  ~StateServer() {
    ::shutdown(listener_.get(), SHUT_RDWR);
    thread_.join();
    std::filesystem::remove_all(directory_);
  }
  StateServer(const StateServer&) = delete;
  StateServer& operator=(const StateServer&) = delete;

  const std::string& directory() const { return directory_; }
  void set(std::string state) {
    const std::lock_guard lock(mutex_);
    state_ = std::move(state);
  }

 private:
  void serve() {
    while (true) {
      const UniqueFd reader(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!reader) return;
      const std::lock_guard lock(mutex_);
      for (std::size_t at = 0; at < state_.size();) {
        const ssize_t count = ::send(reader.get(), state_.data() + at, state_.size() - at, MSG_NOSIGNAL);
        if (count <= 0) break;
        at += static_cast<std::size_t>(count);
      }
    }
  }

  std::string directory_;
  UniqueFd listener_;
  std::mutex mutex_;
  std::string state_;
  std::thread thread_;
};

bool printable(const std::string& line) {
  return std::ranges::all_of(line, [](char c) { return c >= ' ' && c <= '~'; });
}

// By name and labels.
using Counters = std::map<std::string, double>;

// Every line is a comment or NAME{LABEL="TEXT",...} NUMBER.
Counters check_metrics(const std::string& text) {
  Counters counters;
  std::set<std::string> keys;
  std::set<std::string> counter_names;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    require(printable(line) && line.size() <= kMaxLine, "a line is short and printable");
    std::istringstream words(line);
    std::string hash, keyword, name, type;
    if (line.starts_with('#')) {
      words >> hash >> keyword >> name >> type;
      if (keyword == "TYPE" && type == "counter") counter_names.insert(name);
      continue;
    }
    const std::size_t space = line.rfind(' ');
    const std::string key = line.substr(0, space);
    require(keys.insert(key).second, "no two metrics have the same labels");
    const double value = std::stod(line.substr(space + 1));
    if (counter_names.contains(key.substr(0, key.find('{')))) counters[key] = value;
    require(std::isfinite(value), "a value is a number");
  }
  const auto is_bucket = [](const std::string& key) { return key.find("_bucket{") != std::string::npos; };
  const auto buckets = static_cast<std::size_t>(std::ranges::count_if(keys, is_bucket));
  require(keys.size() - buckets <= kMaxSeries, "the number of metrics is limited");
  return counters;
}

void show(live::Sampler& sampler) {
  live::View view = sampler.sample();
  for (const top::Sort sort : {top::Sort::kBytes, top::Sort::kWaiting}) top::sort_view(view, sort);
  for (const top::Line& line : top::to_lines(view, true)) require(printable(line.text), "a line is printable");
  const std::string dumped = top::to_json(view).dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  require(Json::accept(dumped), "what is printed as JSON is JSON");
}

void test_samples(fuzz::Input& input) {
  static StateServer server;
  const auto begin = std::chrono::steady_clock::now();
  const live::Sampler::Options options{.directories = {server.directory()}, .timeout_ms = 20'000, .sysfs = "/none"};
  exporter::Metrics metrics(options, 4);
  live::Sampler sampler(options);
  Json state = valid_state();
  Counters before;
  for (int i = 0; i < 2; ++i) {
    server.set(changed(input, state));
    Counters now = check_metrics(metrics.collect());
    for (const auto& [key, value] : before) {
      const auto found = now.find(key);
      require(found == now.end() || found->second >= value || std::fabs(value) > 1e15, "a counter does not fall");
    }
    before = std::move(now);
    show(sampler);
    if (state.is_object() && state.contains("time_ns")) state["time_ns"] = 3'000'000'000 + input.get<std::uint16_t>();
  }
  require(std::chrono::steady_clock::now() - begin < std::chrono::seconds(50), "the samples end");
}

void test_text(const std::string& state) {
  try {
    const live::Process process = live::parse_process(state);
    for (const live::Connection& connection : process.connections) {
      for (const auto& [name, buckets] : connection.latencies) static_cast<void>(live::quantile_ns(buckets, 0.5));
      for (const std::string& port : live::split_ports(connection.device)) {
        require(port.find('+') == std::string::npos, "a port is one part of a device");
      }
    }
  } catch (const std::exception& error) {
    require(error.what()[0] != '\0', "a state is refused with a reason");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  fuzz::Input input({data + 1, size - 1});
  if (data[0] % 4 == 0) {
    test_text({reinterpret_cast<const char*>(data + 1), size - 1});
  } else if (data[0] % 4 == 1) {
    Json state = valid_state();
    test_text(changed(input, state));
  } else {
    test_samples(input);
  }
  return 0;
}
