#include "verbatim-info/pair_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <utility>

#include "cli/table.h"
#include "ranks/statistics.h"
#include "verbatim-info/report.h"

namespace verbatim::info {
namespace {

// Worse than the median of the links with the same declared speed by this factor.
constexpr double kSlowBandwidth = 2;
constexpr double kSlowLatency = 4;
constexpr std::size_t kMaxRows = 20;

using Place = std::pair<int, int>;  // host, port

enum class Grade { kRight, kSlow, kFailed };

struct Graded {
  const PairLink* link;
  Grade grade = Grade::kRight;
  double of_median = 1;  // bandwidth over the median
};

class Judge {
 public:
  explicit Judge(const PairReport& report) : report_(report) {
    std::map<unsigned, std::vector<double>> bandwidths;
    std::map<unsigned, std::vector<double>> latencies;
    for (const PairLink& link : report.links) {
      if (!link.error.empty()) continue;
      bandwidths[speed(link)].push_back(link.gb_s);
      latencies[speed(link)].push_back(link.latency_us);
    }
    for (const PairLink& link : report.links) {
      Graded graded{&link};
      if (!link.error.empty()) {
        graded.grade = Grade::kFailed;
        graded.of_median = 0;
      } else {
        const double bandwidth = ranks::percentile(bandwidths[speed(link)], 0.5);
        const double latency = ranks::percentile(latencies[speed(link)], 0.5);
        graded.of_median = bandwidth > 0 ? link.gb_s / bandwidth : 1;
        const bool slow = link.gb_s * kSlowBandwidth < bandwidth || link.latency_us > kSlowLatency * latency;
        if (slow) graded.grade = Grade::kSlow;
      }
      links_.push_back(graded);
    }
  }

  const std::vector<Graded>& links() const { return links_; }

  std::vector<std::string> findings() const {
    std::vector<std::string> lines;
    for (const PairHost& host : report_.hosts) {
      if (!host.ports.empty()) continue;
      lines.push_back(
          fmt::format("{} has no usable port: {}. Next: run verbatim-info there", host.name, host.why_no_port));
    }
    add_ports_and_links(Grade::kFailed, lines);
    add_ports_and_links(Grade::kSlow, lines);
    add_differing_ports(lines);
    return lines;
  }

  std::string name(Place place) const {
    const PairHost& host = report_.hosts[static_cast<std::size_t>(place.first)];
    return host.name + " " + host.ports[static_cast<std::size_t>(place.second)].name;
  }

 private:
  const PairPort& port(Place place) const {
    return report_.hosts[static_cast<std::size_t>(place.first)].ports[static_cast<std::size_t>(place.second)];
  }
  static Place source(const PairLink& link) { return {link.from, link.from_port}; }
  static Place target(const PairLink& link) { return {link.to, link.to_port}; }
  // The most that both ends declare.
  unsigned speed(const PairLink& link) const {
    return std::min(port(source(link)).speed_mbps, port(target(link)).speed_mbps);
  }

  struct Count {
    std::set<Place> all;  // the ports at the other ends
    std::set<Place> bad;
    const PairLink* first = nullptr;
  };

  // A port that is bad with most others is the cause of its links: they are not listed one by one.
  void add_ports_and_links(Grade grade, std::vector<std::string>& lines) const {
    std::vector<Graded> left = links_;
    for (;;) {
      std::map<Place, Count> counts;
      for (const Graded& graded : left) {
        for (const auto& [own, other] : {std::pair(source(*graded.link), target(*graded.link)),
                                         std::pair(target(*graded.link), source(*graded.link))}) {
          Count& count = counts[own];
          count.all.insert(other);
          if (graded.grade != grade) continue;
          count.bad.insert(other);
          if (count.first == nullptr || count.first->error.starts_with(kNotTried)) count.first = graded.link;
        }
      }
      const auto worst =
          std::ranges::max_element(counts, {}, [](const auto& entry) { return entry.second.bad.size(); });
      if (worst == counts.end() || worst->second.bad.size() < 2 ||
          2 * worst->second.bad.size() <= worst->second.all.size()) {
        break;
      }
      lines.push_back(about_port(grade, worst->first, worst->second));
      std::erase_if(left, [&](const Graded& graded) {
        return source(*graded.link) == worst->first || target(*graded.link) == worst->first;
      });
    }
    std::set<std::pair<Place, Place>> listed;  // both directions are one line
    for (const Graded& graded : left) {
      if (graded.grade != grade) continue;
      const auto ends = std::minmax(source(*graded.link), target(*graded.link));
      if (listed.insert(std::pair(ends.first, ends.second)).second) lines.push_back(about_link(grade, *graded.link));
    }
  }

  std::string about_port(Grade grade, Place place, const Count& count) const {
    const std::string links =
        fmt::format("{}: the links to {} of {} ports", name(place), count.bad.size(), count.all.size());
    if (grade == Grade::kSlow) {
      return links +
             " are slow. Next: look at the cable, the switch port, the PCI slot and the error counters of this port";
    }
    const PairLink& example = *count.first;
    const std::string differs = difference(port(source(example)), port(target(example)));
    return fmt::format("{} fail, for example: {}. Next: {}", links, cause(example),
                       differs.empty() ? "look at the cable and the switch port of this port" : differs);
  }

  std::string about_link(Grade grade, const PairLink& link) const {
    const std::string ends = name(source(link)) + " to " + name(target(link));
    if (grade == Grade::kSlow) {
      return fmt::format("{} is slow: {:.2f} GB/s, {:.1f} us. Next: look at the switches between these two", ends,
                         link.gb_s, link.latency_us);
    }
    const std::string differs = difference(port(source(link)), port(target(link)));
    return fmt::format(
        "{} fails: {}. Next: {}", ends, cause(link),
        differs.empty() ? "look at the switches and routes between these two, and at firewalls" : differs);
  }

  // The plugin's next step is about one end; all links together tell more.
  static std::string cause(const PairLink& link) { return link.error.substr(0, link.error.find(". Next:")); }

  static std::string difference(const PairPort& one, const PairPort& other) {
    if (one.link_layer != other.link_layer) {
      return "pair other ports: one is " + one.link_layer + ", the other " + other.link_layer;
    }
    if (one.gid_type == other.gid_type) return "";
    return "set VERBATIM_GID_INDEX on one side: the GIDs are of the types " + one.gid_type + " and " + other.gid_type;
  }

  // Ports with another MTU, GID type or speed than most ports with the same index: connections work, with the smaller
  // value, or not at all.
  void add_differing_ports(std::vector<std::string>& lines) const {
    using Value = std::string (*)(const PairPort&);
    const std::pair<const char*, Value> properties[] = {
        {"link layer", [](const PairPort& of) { return of.link_layer; }},
        {"GID type", [](const PairPort& of) { return of.gid_type; }},
        {"MTU", [](const PairPort& of) { return of.mtu == 0 ? "" : std::to_string(of.mtu); }},
        {"speed in Mbit/s",
         [](const PairPort& of) { return of.speed_mbps == 0 ? "" : std::to_string(of.speed_mbps); }}};
    std::size_t most_ports = 0;
    for (const PairHost& host : report_.hosts) most_ports = std::max(most_ports, host.ports.size());
    for (std::size_t index = 0; index < most_ports; ++index) {
      for (const auto& [property, value] : properties) {
        std::map<std::string, std::vector<std::size_t>> hosts;
        for (std::size_t host = 0; host < report_.hosts.size(); ++host) {
          const std::vector<PairPort>& ports = report_.hosts[host].ports;
          if (index >= ports.size()) continue;
          if (const std::string own = value(ports[index]); !own.empty()) hosts[own].push_back(host);
        }
        if (hosts.size() < 2) continue;
        const auto usual = std::ranges::max_element(hosts, {}, [](const auto& entry) { return entry.second.size(); });
        for (const auto& [own, with_it] : hosts) {
          if (own == usual->first) continue;
          for (const std::size_t host : with_it) {
            lines.push_back(fmt::format("{} has the {} {}, {} other hosts have {}. Next: set them alike",
                                        name({static_cast<int>(host), static_cast<int>(index)}), property, own,
                                        usual->second.size(), usual->first));
          }
        }
      }
    }
  }

  const PairReport& report_;
  std::vector<Graded> links_;
};

}  // namespace

std::vector<std::string> PairReport::findings() const {
  return Judge(*this).findings();
}

void PairReport::print(std::FILE* out) const {
  const Judge judge(*this);
  for (const std::string& finding : judge.findings()) fmt::print(out, "{}\n", finding);
  std::vector<Graded> bad;
  std::vector<double> bandwidths;
  std::vector<double> latencies;
  for (const Graded& graded : judge.links()) {
    if (graded.grade != Grade::kRight) bad.push_back(graded);
    if (graded.grade == Grade::kFailed) continue;
    bandwidths.push_back(graded.link->gb_s);
    latencies.push_back(graded.link->latency_us);
  }
  std::ranges::stable_sort(bad, {}, &Graded::of_median);
  if (!bad.empty()) {
    const cli::Table table({{"from", -32}, {"to", -32}, {"latency(us)", 12, 1}, {"GB/s", 9, 2}, {"of median", 10, 2}});
    table.print_titles(out);
    for (std::size_t i = 0; i < std::min(bad.size(), kMaxRows); ++i) {
      const PairLink& link = *bad[i].link;
      const std::string from = judge.name({link.from, link.from_port});
      const std::string to = judge.name({link.to, link.to_port});
      if (link.error.empty()) {
        table.print_row(out, {from, to, link.latency_us, link.gb_s, bad[i].of_median});
      } else {
        table.print_row(out, {from, to, "fails", "-", "-"});
      }
    }
    if (bad.size() > kMaxRows) fmt::print(out, "# and {} more: --json has all\n", bad.size() - kMaxRows);
  }
  const std::size_t failed = links.size() - bandwidths.size();
  fmt::print(out,
             "# {} hosts, {} links: {} work, {} fail, {} are slow; median latency {:.1f} us, bandwidth {:.2f} GB/s\n",
             hosts.size(), links.size(), bandwidths.size(), failed, bad.size() - failed,
             ranks::percentile(latencies, 0.5), ranks::percentile(bandwidths, 0.5));
}

nlohmann::ordered_json PairReport::json() const {
  const nlohmann::json all_hosts = hosts;
  const nlohmann::json all_links = links;
  return {{"schema", kSchema}, {"findings", findings()}, {"hosts", all_hosts}, {"links", all_links}};
}

}  // namespace verbatim::info
