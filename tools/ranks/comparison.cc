#include "ranks/comparison.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "ranks/progress_bar.h"
#include "ranks/scratch_directory.h"

namespace verbatim::ranks {
namespace {

// The command line without the excluded options.
std::vector<std::string> arguments_of_a_run(const ExcludedOptions& excluded, int argc, char** argv) {
  const auto has = [](const std::vector<std::string>& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  std::vector<std::string> kept;
  for (int i = 0; i < argc; ++i) {
    const std::string argument = argv[i];
    if (has(excluded.options, argument)) {
      ++i;  // its value
    } else if (!has(excluded.flags, argument) && !has(excluded.options, argument.substr(0, argument.find('=')))) {
      kept.push_back(argument);
    }
  }
  return kept;
}

// Splits "A,B,C". Throws Failure for an empty list.
std::vector<std::string> names_in(const std::string& list) {
  std::vector<std::string> all;
  std::istringstream in(list);
  for (std::string one; std::getline(in, one, ',');) {
    if (!one.empty()) all.push_back(one);
  }
  if (all.empty()) throw Failure("--compare needs at least one name", ExitStatus::kUsage);
  return all;
}

// Runs this program once. Returns its exit status; throws Failure, with its output, when it failed.
ExitStatus run_once(std::vector<std::string> arguments, const Variant& variant, const Scratch& directory) {
  arguments.insert(arguments.end(), variant.arguments.begin(), variant.arguments.end());
  arguments.push_back("--json=" + (directory / "run.json").string());
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const std::string log = (directory / "run.log").string();
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) throw Failure("fork: " + std::string(std::strerror(errno)));
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // the run ends when the comparison's process ends
    if (::getppid() != parent) ::_exit(static_cast<int>(ExitStatus::kFailed));
    const int out = ::open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    ::dup2(out, STDOUT_FILENO);
    ::dup2(out, STDERR_FILENO);
    for (const auto& [name, value] : variant.environment) ::setenv(name.c_str(), value.c_str(), 1);
    ::execv("/proc/self/exe", argv.data());
    ::_exit(static_cast<int>(ExitStatus::kFailed));
  }
  int wait_status = 0;
  while (::waitpid(child, &wait_status, 0) < 0 && errno == EINTR) {
  }
  const auto status = WIFEXITED(wait_status) ? static_cast<ExitStatus>(WEXITSTATUS(wait_status)) : ExitStatus::kFailed;
  if (status != ExitStatus::kWrong && !is_failure(static_cast<int>(status))) return status;
  const std::ifstream in(log);
  std::ostringstream text;
  text << in.rdbuf();
  throw Failure(variant.name + " failed:\n" + text.str(), status);
}

}  // namespace

Variant over_plugin(const std::string& path) {
  return {std::filesystem::path(path).filename(), {"--plugin=" + path}, {}};
}

// NCCL selects its own transports and those of plugins by name. NCCL's IB transport must find softverbs' devices as
// InfiniBand ports, and must use as many QPs per connection as Verbatim.
Variant over_network(const std::string& name) {
  const bool own = name == "IB" || name == "Socket";
  std::string plugin = name;
  for (char& c : plugin) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  Variant variant{name, {}, {{"NCCL_NET", name}, {"NCCL_NET_PLUGIN", own ? "none" : plugin}}};
  for (const auto& [variable, value] :
       {std::pair("SOFTVERBS_LINK_LAYER", "ib"), std::pair("NCCL_IB_QPS_PER_CONNECTION", "1")}) {
    if (std::getenv(variable) == nullptr) variant.environment.emplace_back(variable, value);
  }
  return variant;
}

RoundReports run_rounds(const std::vector<Variant>& variants, int rounds, const ExcludedOptions& excluded, int argc,
                        char** argv) {
  const std::vector<std::string> arguments = arguments_of_a_run(excluded, argc, argv);
  const Scratch directory("rounds");
  RoundReports reports{std::vector<std::vector<Json>>(variants.size())};
  ProgressBar bar(true);
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < variants.size(); ++i) {
      const double done = static_cast<double>(i) / static_cast<double>(variants.size()) + round;
      bar.draw(done / rounds, "round " + std::to_string(round + 1) + ", " + variants[i].name);
      reports.status = std::max(reports.status, run_once(arguments, variants[i], directory));
      reports.by_variant[i].push_back(Json::parse(std::ifstream((directory / "run.json").string())));
    }
  }
  bar.clear();
  return reports;
}

Comparison run_comparison(const std::string& list, Variant (*over)(const std::string&), std::size_t warmup, int rounds,
                          int argc, char** argv) {
  Comparison all{names_in(list), {}, {}};
  for (const std::string& name : all.names) {
    all.variants.push_back(over(name));
    all.variants.back().arguments.push_back("--warmup=" + std::to_string(warmup));
  }
  const ExcludedOptions excluded{{"--compare", "--rounds", "--json", "--plugin", "--warmup"}, {}};
  all.reports = run_rounds(all.variants, rounds, excluded, argc, argv);
  return all;
}

std::vector<double> values_at(const std::vector<Json>& reports, const std::string& pointer) {
  std::vector<double> values;
  for (const Json& report : reports) values.push_back(report.at(Json::json_pointer(pointer)));
  return values;
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double median_ratio(const std::vector<double>& above, const std::vector<double>& below) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < above.size(); ++i) {
    if (below[i] > 0) ratios.push_back(above[i] / below[i]);
  }
  return median(std::move(ratios));
}

}  // namespace verbatim::ranks
