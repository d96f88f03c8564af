#include "simulation/shrink.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <utility>
#include <vector>

namespace simulation {
namespace {

// A run with less is another one: what has failed may only need another order of the threads.
constexpr std::uint64_t kOrders = 8;

// While it exists, what this process and its children write to stderr goes to memory.
class CapturedErrors {
 public:
  CapturedErrors() {
    std::fflush(stderr);
    if (before_ < 0 || memory_ < 0 || ::dup2(memory_, STDERR_FILENO) < 0) std::abort();
  }
  ~CapturedErrors() {
    std::fflush(stderr);
    ::dup2(before_, STDERR_FILENO);
    ::close(before_);
    ::close(memory_);
  }
  CapturedErrors(const CapturedErrors&) = delete;
  CapturedErrors& operator=(const CapturedErrors&) = delete;

  std::string text() const {
    std::fflush(stderr);
    std::string text;
    std::array<char, 4096> piece;
    for (ssize_t bytes = 0;
         (bytes = ::pread(memory_, piece.data(), piece.size(), static_cast<off_t>(text.size()))) > 0;)
      text.append(piece.data(), static_cast<std::size_t>(bytes));
    return text;
  }

 private:
  const int before_ = ::dup(STDERR_FILENO);
  const int memory_ = ::memfd_create("stderr", MFD_CLOEXEC);
};

// Empty: the line does not say why the run has failed.
std::string kind_of_line(std::string_view line) {
  // What each thread does, lines of softverbs, and a line that each failure has.
  if (line.starts_with(' ') || line.starts_with("softverbs: ")) return "";
  if (line.find(": the job of process ") != std::string_view::npos) return "";
  if (line.starts_with("seed ")) line.remove_prefix(std::min(line.find(": ") + 2, line.size()));
  for (const char* const whose : {" (process ", " (rank ", " (receiver ", " (sender "}) {
    if (line.ends_with(')')) line = line.substr(0, line.rfind(whose));
  }
  std::string kind;
  for (const char each : line) {
    const bool is_digit = std::isdigit(static_cast<unsigned char>(each)) != 0;
    if (!is_digit) kind += each;
    if (is_digit && !kind.ends_with('#')) kind += '#';
  }
  return kind;
}

std::vector<std::string> kinds_of(std::string_view text) {
  std::vector<std::string> kinds;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    if (std::string kind = kind_of_line(text.substr(0, end)); !kind.empty()) kinds.push_back(std::move(kind));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return kinds;
}

class Shrinker {
 public:
  Shrinker(const Choice& failing, const std::function<Tried(const Choice&)>& run)
      : run_(run), best_{failing, run(failing), 1}, kind_(kind_of_failure(best_.tried.text)) {}

  std::optional<Shorter> shrink() {
    if (best_.tried.result.passed) return std::nullopt;
    best_.choice.faults = ChosenFaults{job().faults.kinds, best_.choice.faults.value_or(ChosenFaults{}).events};
    const Job& first = job();
    if (first.devices != kDevices.front()) best_.choice.devices = first.devices;
    if (first.has_optional) best_.choice.has_optional = true;
    if (best_.choice.devices) take_with([](Choice& choice) { choice.devices.reset(); });
    if (best_.choice.has_optional) take_with([](Choice& choice) { choice.has_optional.reset(); });
    for (bool goes_on = true; goes_on;) {
      goes_on = leave_out_faults();
      goes_on = leave_out_parts() || goes_on;
      goes_on = leave_out_processes() || goes_on;
      goes_on = leave_out_operations() || goes_on;
    }
    return best_;
  }

 private:
  const Job& job() const { return best_.tried.job; }

  // Keeps the choice, with one of some orders, if its run fails in the same way.
  bool take(Choice choice) {
    for (std::uint64_t i = 0; i < kOrders; ++i) {
      choice.order = best_.choice.order + i;
      Tried tried = run_(choice);
      ++best_.runs;
      const std::vector<std::string> kinds = kinds_of(tried.text);
      if (tried.result.passed || (!kind_.empty() && std::find(kinds.begin(), kinds.end(), kind_) == kinds.end()))
        continue;
      best_.choice = std::move(choice);
      best_.tried = std::move(tried);
      return true;
    }
    return false;
  }

  // `change` takes something out of the choice.
  template <typename Change>
  bool take_with(Change change) {
    Choice choice = best_.choice;
    change(choice);
    return take(std::move(choice));
  }

  bool leave_out_faults() {
    bool taken = false;
    const FaultSet kinds = best_.choice.faults->kinds;
    if (kinds.size() > 1 && take_with([](Choice& choice) { choice.faults = ChosenFaults{}; })) return true;
    for (const Fault fault : kinds) {
      const bool is_left_out = take_with([fault](Choice& choice) {
        choice.faults->kinds.erase(fault);
        choice.faults->events.erase(fault);
      });
      taken = is_left_out || (kinds.contains(fault) && leave_out_events(fault)) || taken;
    }
    return taken;
  }

  bool leave_out_events(Fault fault) {
    bool taken = false;
    std::set<std::size_t> chosen;
    for (std::size_t number = 1; number <= job().faults.events.at(fault); ++number) chosen.insert(number);
    const FaultEvents& before = best_.choice.faults->events;
    if (const auto found = before.find(fault); found != before.end()) chosen = found->second;
    for (const std::size_t number : std::set(chosen)) {
      if (chosen.size() < 2) break;
      std::set<std::size_t> fewer = chosen;
      fewer.erase(number);
      if (!take_with([&](Choice& choice) { choice.faults->events[fault] = fewer; })) continue;
      chosen = fewer;
      taken = true;
    }
    return taken;
  }

  bool leave_out_parts() {
    std::set<std::size_t> parts;
    for (const ConnectionPlan& plan : job().connections) parts.insert(plan.number);
    if (job().puts.ranks != 0) parts.insert(kPutsPart);
    if (parts.size() < 2) return false;
    for (const std::size_t part : parts) {
      if (take_with([part](Choice& choice) { choice.parts = std::set{part}; })) return true;
    }
    bool taken = false;
    for (const std::size_t part : std::set(parts)) {
      std::set<std::size_t> fewer = parts;
      fewer.erase(part);
      if (parts.size() < 3 || !take_with([&](Choice& choice) { choice.parts = fewer; })) continue;
      parts = fewer;
      taken = true;
    }
    return taken;
  }

  bool leave_out_processes() {
    for (std::size_t processes = 1; processes < job().processes; ++processes) {
      if (take_with([processes](Choice& choice) { choice.processes = processes; })) return true;
    }
    return false;
  }

  bool leave_out_operations() {
    std::size_t most = 0;
    for (const ConnectionPlan& plan : job().connections) most = std::max(most, plan.groups.size());
    for (const Operation& operation : job().puts.operations) most = std::max(most, operation.number);
    for (std::size_t operations = 1; operations < std::min(most, best_.choice.operations); operations *= 2) {
      if (take_with([operations](Choice& choice) { choice.operations = operations; })) return true;
    }
    return false;
  }

  const std::function<Tried(const Choice&)>& run_;
  Shorter best_;
  const std::string kind_;
};

}  // namespace

Tried try_run(const Choice& choice, const std::string& plugin) {
  const CapturedErrors errors;
  Tried tried;
  tried.job = draw_job(choice, plugin);
  tried.result = run(plan_of(tried.job, choice.seed), tried.job.processes,
                     [&](std::size_t process) { return run_job(tried.job, process); });
  tried.text = errors.text();
  return tried;
}

std::string kind_of_failure(std::string_view text) {
  const std::vector<std::string> kinds = kinds_of(text);
  return kinds.empty() ? "" : kinds.front();
}

std::optional<Shorter> shrink(const Choice& failing, const std::function<Tried(const Choice&)>& run) {
  return Shrinker(failing, run).shrink();
}

}  // namespace simulation
