#include "verbatim-eplb/compare.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "ranks/json.h"
#include "ranks/progress_bar.h"
#include "verbatim-eplb/report.h"

namespace verbatim::eplb {
namespace {

using ranks::ExitStatus;
using ranks::Failure;
using ranks::Json;

class Directory {
 public:
  Directory() {
    std::string pattern = std::filesystem::temp_directory_path() / "verbatim-eplb-compare-XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) throw Failure("mkdtemp: " + std::string(std::strerror(errno)));
    path_ = pattern;
  }
  ~Directory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  std::string file(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

std::vector<std::string> entries(const std::string& list) {
  std::vector<std::string> all;
  std::istringstream in(list);
  for (std::string one; std::getline(in, one, ',');) {
    if (!one.empty()) all.push_back(one);
  }
  if (all.empty()) throw Failure("--compare names nothing", ExitStatus::kUsage);
  return all;
}

std::string short_name(const std::string& subject) {
  return std::filesystem::path(subject).filename();
}

// The arguments without those that each run gets of its own.
std::vector<std::string> arguments_of_a_run(int argc, char** argv) {
  const std::vector<std::string> ours{"--compare", "--turns", "--json", "--plugin", "--warmup"};
  std::vector<std::string> kept;
  for (int i = 0; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto is_ours = [&argument](const std::string& name) { return argument.starts_with(name + "="); };
    if (std::find(ours.begin(), ours.end(), argument) != ours.end()) {
      ++i;
    } else if (std::none_of(ours.begin(), ours.end(), is_ours)) {
      kept.push_back(argument);
    }
  }
  return kept;
}

// NCCL's own transports are told from a plugin's by name; the IB one must find softverbs' devices as InfiniBand ports
// and as many QPs as Verbatim has.
void choose_network(const std::string& network) {
  const bool own = network == "IB" || network == "Socket";
  ::setenv("NCCL_NET", network.c_str(), 1);
  std::string plugin = network;
  for (char& c : plugin) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  ::setenv("NCCL_NET_PLUGIN", own ? "none" : plugin.c_str(), 1);
  ::setenv("SOFTVERBS_LINK_LAYER", "ib", 0);
  ::setenv("NCCL_IB_QPS_PER_CONNECTION", "1", 0);
}

void run_once(const Options& options, std::vector<std::string> arguments, const std::string& subject,
              const Directory& directory) {
  arguments.push_back("--json=" + directory.file("run.json"));
  arguments.push_back("--warmup=" + std::to_string(options.warmup));
  if (options.over == Over::kPlugin) arguments.push_back("--plugin=" + subject);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const std::string log = directory.file("run.log");
  const pid_t child = ::fork();
  if (child < 0) throw Failure("fork: " + std::string(std::strerror(errno)));
  if (child == 0) {
    const int out = ::open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    ::dup2(out, STDOUT_FILENO);
    ::dup2(out, STDERR_FILENO);
    if (options.over == Over::kNccl) choose_network(subject);
    ::execv("/proc/self/exe", argv.data());
    ::_exit(static_cast<int>(ExitStatus::kFailed));
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
  const std::ifstream in(log);
  std::ostringstream text;
  text << in.rdbuf();
  throw Failure(subject + " failed:\n" + text.str(),
                WIFEXITED(status) ? static_cast<ExitStatus>(WEXITSTATUS(status)) : ExitStatus::kFailed);
}

struct Turns {
  std::vector<double> iteration_us;
  std::vector<double> p50_us;
  std::vector<double> p99_us;
  std::vector<double> gb_s;
  std::string stats;
  Json last;
};

double median(const std::vector<double>& values) {
  return percentile(values, 0.5);
}

void take(Turns& turns, const std::string& file) {
  turns.last = Json::parse(std::ifstream(file));
  turns.iteration_us.push_back(turns.last["iteration_us"]);
  turns.p50_us.push_back(turns.last["layer_time_us"]["p50"]);
  turns.p99_us.push_back(turns.last["layer_time_us"]["p99"]);
  turns.gb_s.push_back(turns.last["gb_s"]);
  turns.stats = turns.last["by_rank"][0]["stats"];
}

// How many times as fast as `other` the first is: the median of the ratios within one turn.
double ratio(const Turns& first, const Turns& other) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < first.iteration_us.size(); ++i) {
    ratios.push_back(other.iteration_us[i] / first.iteration_us[i]);
  }
  return median(ratios);
}

}  // namespace

ExitStatus run_compare(const Options& options, int argc, char** argv) {
  const std::vector<std::string> subjects = entries(options.compare);
  const std::vector<std::string> arguments = arguments_of_a_run(argc, argv);
  const Directory directory;
  std::map<std::string, Turns> all;
  ranks::ProgressBar bar(true);
  for (int turn = 0; turn < options.turns; ++turn) {
    for (std::size_t i = 0; i < subjects.size(); ++i) {
      const double done = static_cast<double>(i) / static_cast<double>(subjects.size()) + turn;
      bar.draw(done / options.turns, "turn " + std::to_string(turn + 1) + ", " + short_name(subjects[i]));
      run_once(options, arguments, subjects[i], directory);
      take(all[subjects[i]], directory.file("run.json"));
    }
  }
  bar.clear();
  const Turns& first = all.at(subjects.front());
  std::printf("# %s, %s, %d ranks, medians of %d turns; last column: how many times as fast as it the first is\n",
              mode_name(options.mode), options.policy.c_str(), options.job.size(), options.turns);
  std::printf("%-28s %14s %14s %14s %10s %10s %8s\n", "# over", "all layers ms", "layer p50 us", "layer p99 us", "GB/s",
              "counters", "ratio");
  Json json = Json::array();
  for (const std::string& subject : subjects) {
    const Turns& turns = all.at(subject);
    std::printf("%-28s %14.2f %14.1f %14.1f %10.3f %10s %8.2f\n", short_name(subject).c_str(),
                median(turns.iteration_us) / 1000, median(turns.p50_us), median(turns.p99_us), median(turns.gb_s),
                turns.stats.c_str(), ratio(first, turns));
    json.push_back({{"over", subject},
                    {"iteration_us", turns.iteration_us},
                    {"layer_p50_us", turns.p50_us},
                    {"layer_p99_us", turns.p99_us},
                    {"gb_s", turns.gb_s},
                    {"ratio", ratio(first, turns)},
                    {"last_run", turns.last}});
  }
  if (!options.json.empty()) ranks::write_json(json, options.json);
  return ExitStatus::kOk;
}

}  // namespace verbatim::eplb
