// softverbs fault: sends fault clauses to the running processes.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <memory>
#include <sstream>

#include "base/clock.h"
#include "softverbs-control/subcommand.h"
#include "softverbs/host/doorbell.h"
#include "softverbs/host/fault_script.h"

namespace verbatim::control {
namespace {

struct FaultOptions {
  std::string clauses;
  pid_t pid = 0;
  double wait_seconds = 5;
};

constexpr useconds_t kPauseUs = 1000;

std::string read_clauses(const std::string& given) {
  if (!given.starts_with('@')) return given;
  std::ifstream file(given.substr(1));
  std::ostringstream text;
  if (!file || !(text << file.rdbuf()))
    throw Failure(given.substr(1) + " cannot be read or is empty", ExitStatus::kUsage);
  return text.str();
}

// One sender at a time: retries until the sender before this one has ended.
std::uint32_t send(ProcessDirectory& directory, const std::string& clauses, softverbs::Incarnation target,
                   std::uint64_t deadline_ns) {
  for (;;) {
    const Result<std::uint32_t> sequence = directory.registry().send_fault_command(clauses, target);
    if (sequence) return *sequence;
    if (sequence.error().sys_errno != EBUSY || monotonic_ns() >= deadline_ns) {
      throw Failure("the clauses cannot be sent: " + to_string(sequence.error()));
    }
    ::usleep(kPauseUs);
  }
}

ExitStatus run(ProcessDirectory& directory, const FaultOptions& options) {
  const std::string clauses = read_clauses(options.clauses);
  const std::variant<softverbs::FaultScript, std::string> parsed = softverbs::parse_faults(clauses);
  if (const auto* refused = std::get_if<std::string>(&parsed)) throw Failure(*refused, ExitStatus::kUsage);
  const std::uint64_t deadline_ns = monotonic_ns() + static_cast<std::uint64_t>(options.wait_seconds * 1e9);
  std::vector<TargetProcess> targets =
      directory.processes(options.pid != 0 ? std::vector{options.pid} : std::vector<pid_t>{});
  if (targets.empty()) throw Failure("no process holds a softverbs device in this namespace");
  if (options.pid != 0 && targets.size() > 1) {
    throw Failure("several processes of this namespace have pid " + std::to_string(options.pid) +
                  ", in different PID namespaces");
  }
  const std::uint32_t sequence =
      send(directory, clauses, options.pid != 0 ? targets.front().incarnation() : 0, deadline_ns);
  for (const TargetProcess& target : targets) softverbs::request_service(target.segment());
  const auto has_applied = [&](const TargetProcess& target) {
    return directory.registry().has_applied_fault_command(target.slot(), sequence) ||
           !directory.registry().is_alive(target.slot(), target.incarnation());
  };
  const std::size_t count = targets.size();
  for (;;) {
    std::erase_if(targets, has_applied);
    if (targets.empty() || monotonic_ns() >= deadline_ns) break;
    ::usleep(kPauseUs);
  }
  for (const TargetProcess& target : targets) {
    std::fprintf(stderr,
                 "softverbs: process %d (%s) has not applied the clauses: it is stopped, or it has the inline engine, "
                 "which applies them at its next verb\n",
                 target.pid(), target.program());
  }
  std::printf("applied by %zu of %zu processes\n", count - targets.size(), count);
  return targets.empty() ? ExitStatus::kOk : ExitStatus::kWrong;
}

}  // namespace

Action declare_fault(CLI::App& arguments) {
  auto options = std::make_shared<FaultOptions>();
  arguments.add_option("clauses", options->clauses, "as in SOFTVERBS_FAULTS; @FILE reads them from a file")->required();
  arguments.add_option("--pid", options->pid, "only this process");
  arguments.add_option("--wait", options->wait_seconds, "seconds until all processes must have applied the clauses")
      ->capture_default_str();
  arguments.footer(
      "Adds the clauses to those that are active; \"clear\" removes and undoes all of them. Processes that start "
      "later\n"
      "do not get the clauses. Times are relative to the moment when a process applies its clauses. Examples:\n"
      "  softverbs fault 'link-down device=0 for=500ms'\n"
      "  softverbs fault 'clear; loss rate=0.01'");
  return [options](ProcessDirectory& directory) { return run(directory, *options); };
}

}  // namespace verbatim::control
