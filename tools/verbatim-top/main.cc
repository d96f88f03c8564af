// verbatim-top: what the processes of this host send and receive with Verbatim, and whom they wait for.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "cli/command_line.h"
#include "live/rates.h"
#include "verbatim-top/render.h"
#include "verbatim-top/screen.h"

namespace {

using namespace verbatim;

constexpr const char* kDescription =
    "Shows the processes of this host that use Verbatim: for each connection bytes and messages per second, what is\n"
    "outstanding, lanes, the kernel's counters of its ports, and whom it waits for; for each RMA context and peer "
    "bytes,\n"
    "puts and gets per second. What is stalled or has failed is red. Root sees the processes of all users, another "
    "user\n"
    "those of its own.";

struct Options {
  live::Sampler::Options sampler;
  bool once = false;
  bool json = false;
  double interval_s = 1;
  double stall_s = static_cast<double>(live::kDefaultStallMs) / 1000;
  top::Sort sort = top::Sort::kBytes;
};

void run_once(live::Sampler& sampler, const Options& options) {
  sampler.sample();
  std::this_thread::sleep_for(std::chrono::duration<double>(options.interval_s));
  live::View view = sampler.sample();
  top::sort_view(view, options.sort);
  std::string text;
  if (options.json) {
    text = top::to_json(view).dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  } else {
    for (const top::Line& line : top::to_lines(view, true)) {
      text += line.style == top::Line::Style::kAlarm ? "! " : "  ";
      text += line.text;
      text.erase(text.find_last_not_of(' ') + 1);
      text += "\n";
    }
  }
  std::fputs(text.c_str(), stdout);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app(kDescription, "verbatim-top");
  CLI::Option* const once =
      app.add_flag("--once", options.once, "print one sample as text and end; ! is before what is red");
  app.add_flag("--json", options.json, "print one JSON object instead of text")->needs(once);
  app.add_option("--interval", options.interval_s, "seconds between two samples, of which the rates are")
      ->check(CLI::Range(0.05, 3600.0))
      ->capture_default_str()
      ->type_name("S");
  const std::map<std::string, top::Sort> sorts{{"bytes", top::Sort::kBytes},
                                               {"messages", top::Sort::kMessages},
                                               {"outstanding", top::Sort::kOutstanding},
                                               {"waiting", top::Sort::kWaiting},
                                               {"pid", top::Sort::kPid}};
  std::string sort = "bytes";
  app.add_option("--sort", sort, "what is first: the most of this, or the lowest PID")
      ->check(CLI::IsMember({"bytes", "messages", "outstanding", "waiting", "pid"}))
      ->capture_default_str();
  app.add_option("--stall", options.stall_s,
                 "a connection, or RMA to a peer, without progress for S seconds counts as stalled")
      ->check(CLI::Range(0.1, 86400.0))
      ->capture_default_str()
      ->type_name("S");
  app.add_option("--dir", options.sampler.directories,
                 "directories of state sockets, instead of VERBATIM_STATE_DIR or the default one")
      ->type_name("DIR");
  if (const auto early = cli::parse(app, argc, argv)) return cli::leave(*early);
  return cli::run_or_report([&] {
    options.sort = sorts.at(sort);
    options.sampler.stall_ms = static_cast<std::uint64_t>(options.stall_s * 1000);
    live::Sampler sampler(options.sampler);
    if (options.once) {
      run_once(sampler, options);
    } else {
      top::run_screen(sampler, static_cast<int>(options.interval_s * 1000), options.sort);
    }
    return cli::ExitStatus::kOk;
  });
}
