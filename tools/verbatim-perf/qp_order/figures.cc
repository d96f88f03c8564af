#include "verbatim-perf/qp_order/figures.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <tuple>
#include <utility>

#include "ranks/failure.h"

namespace verbatim::perf::qp_order {
namespace {

template <typename Take>
void for_each_line(const std::string& path, std::size_t skip, Take take) {
  std::ifstream file(path);
  std::size_t number = 0;
  for (std::string line; std::getline(file, line); ++number) {
    if (number < skip) continue;
    try {
      take(nlohmann::json::parse(line));
    } catch (const nlohmann::json::exception& wrong) {
      throw ranks::Failure(path + ":" + std::to_string(number + 1) + ": " + wrong.what());
    }
  }
}

std::vector<double> ranks_of(const std::vector<double>& values) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return values[a] < values[b]; });
  std::vector<double> ranks(values.size());
  for (std::size_t begin = 0; begin < order.size();) {
    std::size_t end = begin;
    while (end < order.size() && values[order[end]] == values[order[begin]]) ++end;
    for (std::size_t i = begin; i < end; ++i) ranks[order[i]] = static_cast<double>(begin + end - 1) / 2;
    begin = end;
  }
  return ranks;
}

double jain_index(const std::map<int, double>& shares) {
  double sum = 0;
  double squares = 0;
  for (const auto& [peer, bytes] : shares) {
    sum += bytes;
    squares += bytes * bytes;
  }
  return squares > 0 ? sum * sum / (static_cast<double>(shares.size()) * squares) : 1;
}

// Jain's index of one sender when the first of its peers has all its bytes.
double jain_at_first_end(const std::vector<Service>& services, int from) {
  std::map<int, std::uint64_t> ends;
  for (const Service& service : services) {
    if (service.from == from) ends[service.to] = std::max(ends[service.to], service.arrival);
  }
  if (ends.empty()) return 1;
  const std::uint64_t first = std::min_element(ends.begin(), ends.end(), [](const auto& a, const auto& b) {
                                return a.second < b.second;
                              })->second;
  std::map<int, double> shares;
  for (const auto& [to, end] : ends) shares[to] = 0;
  for (const Service& service : services) {
    if (service.from == from && service.arrival <= first) shares[service.to] += static_cast<double>(service.bytes);
  }
  return jain_index(shares);
}

// The maximum number of different senders to one receiver whose services begin within one unit of time.
int max_senders(const std::vector<Service>& services, double unit) {
  int max = 0;
  std::map<int, std::vector<const Service*>> by_receiver;
  for (const Service& service : services) by_receiver[service.to].push_back(&service);
  for (auto& [to, all] : by_receiver) {
    std::sort(all.begin(), all.end(), [](const Service* a, const Service* b) { return a->begin < b->begin; });
    for (std::size_t i = 0; i < all.size(); ++i) {
      std::vector<int> senders{all[i]->from};
      for (std::size_t j = i; j-- > 0 && static_cast<double>(all[i]->begin - all[j]->begin) < unit;) {
        if (std::find(senders.begin(), senders.end(), all[j]->from) == senders.end()) senders.push_back(all[j]->from);
      }
      max = std::max(max, static_cast<int>(senders.size()));
    }
  }
  return max;
}

}  // namespace

std::vector<DumpedQp> read_dump(const std::string& path) {
  std::vector<DumpedQp> dump;
  for_each_line(path, 0, [&](const nlohmann::json& line) {
    dump.push_back({.device = line.at("device"),
                    .side = line.at("side"),
                    .self = line.at("self"),
                    .peer = line.at("peer"),
                    .traffic = line.at("traffic"),
                    .connection = line.at("connection"),
                    .index = line.at("index"),
                    .qpn = line.at("qpn"),
                    .block = line.at("block"),
                    .peers = line.at("peers"),
                    .position = line.at("position")});
  });
  return dump;
}

Placement place_by_number(const std::vector<DumpedQp>& dump, const std::map<std::string, int>& ranks) {
  const int n = static_cast<int>(ranks.size());
  std::map<int, std::vector<const DumpedQp*>> by_rank;
  for (const DumpedQp& qp : dump) {
    if (qp.side == "send") by_rank[ranks.at(qp.self)].push_back(&qp);
  }
  Placement placement;
  for (auto& [me, qps] : by_rank) {
    std::sort(qps.begin(), qps.end(), [](const DumpedQp* a, const DumpedQp* b) { return a->qpn < b->qpn; });
    // The key of each QP: connection, index, then the rotation of the peer.
    std::vector<std::tuple<std::uint32_t, std::uint32_t, int>> wanted;
    for (const DumpedQp* qp : qps) {
      wanted.emplace_back(qp->connection, qp->index, (ranks.at(qp->peer) - me - 1 + n) % n);
    }
    auto sorted = wanted;
    std::sort(sorted.begin(), sorted.end());
    placement.qps += qps.size();
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (wanted[i] == sorted[i]) ++placement.exact;
      for (std::size_t j = i + 1; j < wanted.size(); ++j) {
        if (wanted[j] < wanted[i]) ++placement.inversions;
      }
    }
  }
  return placement;
}

OrderFigures figures_of(const std::vector<Service>& services, double unit) {
  OrderFigures figures;
  if (services.empty()) return figures;
  std::uint64_t start = services.front().begin;
  std::map<std::pair<int, int>, std::uint64_t> first;  // arrival of the first service of a sender at a receiver
  for (const Service& service : services) {
    start = std::min(start, service.begin);
    const auto [known, is_new] = first.try_emplace({service.from, service.to}, service.arrival);
    known->second = std::min(known->second, service.arrival);
  }
  for (const auto& [pair, arrival] : first) {
    const double time = std::max(0.0, static_cast<double>(arrival - start) / unit - 1);
    figures.first_max = std::max(figures.first_max, time);
    figures.first_mean += time / static_cast<double>(first.size());
  }
  std::map<int, bool> senders;
  for (const Service& service : services) senders[service.from] = true;
  for (const auto& [from, sends] : senders) figures.jain = std::min(figures.jain, jain_at_first_end(services, from));
  figures.senders = max_senders(services, unit);
  return figures;
}

double rank_correlation(const std::vector<double>& a, const std::vector<double>& b) {
  const std::vector<double> x = ranks_of(a);
  const std::vector<double> y = ranks_of(b);
  const double mean = (static_cast<double>(x.size()) - 1) / 2;
  double together = 0;
  double x_spread = 0;
  double y_spread = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    together += (x[i] - mean) * (y[i] - mean);
    x_spread += (x[i] - mean) * (x[i] - mean);
    y_spread += (y[i] - mean) * (y[i] - mean);
  }
  return x_spread > 0 && y_spread > 0 ? together / std::sqrt(x_spread * y_spread) : 0;
}

std::vector<Quantum> read_trace(const std::string& path, std::size_t skip) {
  std::vector<Quantum> trace;
  for_each_line(path, skip, [&](const nlohmann::json& line) {
    const std::string to = line.at("to");
    trace.push_back({.ns = line.at("ns"),
                     .qpn = line.at("qpn"),
                     .bytes = line.at("bytes"),
                     .arrival_ns = line.at("arrival_ns"),
                     .to_device = std::stoi(to.substr(to.find('.') + 1))});
  });
  return trace;
}

std::size_t count_lines(const std::string& path) {
  std::ifstream file(path);
  return static_cast<std::size_t>(std::count(std::istreambuf_iterator<char>(file), {}, '\n'));
}

}  // namespace verbatim::perf::qp_order
