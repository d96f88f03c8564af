#include "net/transfer/lanes.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace verbatim {
namespace {

constexpr std::uint32_t kMostTurns = 8;  // of a QP: as many as the fastest lane has for one of the slowest
constexpr unsigned kLineShift = 7;       // messages are divided in lines of 128 bytes
constexpr std::uint64_t kMaxLines = std::uint64_t{1} << 29;  // longer messages are divided like one of 64 GiB
constexpr std::uint64_t kLeastPart = 16;                     // a stripe has at least this part of the QP's share

std::uint32_t declared_mbps(const QpLane& lane, std::span<const std::uint32_t> speeds,
                            std::span<const std::uint32_t> remote_speeds) {
  return std::min(speeds[lane.device], remote_speeds[lane.remote_device]);
}

}  // namespace

std::vector<std::uint32_t> qp_shares(std::span<const QpLane> qps, std::span<const std::uint32_t> speeds_mbps,
                                     std::span<const std::uint32_t> remote_speeds_mbps) {
  std::uint32_t fastest = 0;
  for (const QpLane& qp : qps) fastest = std::max(fastest, declared_mbps(qp, speeds_mbps, remote_speeds_mbps));
  const auto is_standby = [&](const QpLane& qp) {
    return std::uint64_t{kStandbyFactor} * declared_mbps(qp, speeds_mbps, remote_speeds_mbps) < fastest;
  };
  std::vector<double> left(speeds_mbps.begin(), speeds_mbps.end());  // of each port
  std::vector<double> remote_left(remote_speeds_mbps.begin(), remote_speeds_mbps.end());
  std::vector<std::size_t> users(left.size());  // QPs that have no speed yet
  std::vector<std::size_t> remote_users(remote_left.size());
  std::vector<std::size_t> open;
  for (std::size_t i = 0; i < qps.size(); ++i) {
    if (is_standby(qps[i])) continue;
    open.push_back(i);
    ++users[qps[i].device];
    ++remote_users[qps[i].remote_device];
  }
  // The QP that its ports limit most gets what they can give it; the others divide what it leaves.
  std::vector<double> speeds(qps.size());
  const auto possible = [&](std::size_t i) {
    return std::min(left[qps[i].device] / static_cast<double>(users[qps[i].device]),
                    remote_left[qps[i].remote_device] / static_cast<double>(remote_users[qps[i].remote_device]));
  };
  while (!open.empty()) {
    const auto most_limited = std::min_element(open.begin(), open.end(),
                                               [&](std::size_t a, std::size_t b) { return possible(a) < possible(b); });
    const QpLane& qp = qps[*most_limited];
    const double speed = speeds[*most_limited] = possible(*most_limited);
    left[qp.device] -= speed;
    remote_left[qp.remote_device] -= speed;
    --users[qp.device];
    --remote_users[qp.remote_device];
    open.erase(most_limited);
  }
  const double largest = *std::max_element(speeds.begin(), speeds.end());
  std::vector<std::uint32_t> shares;
  for (const double speed : speeds) {
    const auto share = largest == 0 ? kLargestShare : static_cast<std::uint32_t>(speed / largest * kLargestShare);
    shares.push_back(speed == 0 && largest != 0 ? 0 : std::max(share, 1U));
  }
  return shares;
}

std::size_t fastest_qp(std::span<const std::uint32_t> shares) {
  return static_cast<std::size_t>(std::max_element(shares.begin(), shares.end()) - shares.begin());
}

std::vector<std::uint8_t> qp_turns(std::span<const std::uint32_t> shares) {
  std::vector<std::uint32_t> wanted;
  std::uint32_t divisor = 0;
  for (const std::uint32_t share : shares) {
    const std::uint32_t turns = (share * kMostTurns + kLargestShare / 2) / kLargestShare;
    wanted.push_back(share == 0 ? 0 : std::max(turns, 1U));
    divisor = std::gcd(divisor, wanted.back());
  }
  const auto length = std::accumulate(wanted.begin(), wanted.end(), 0U) / divisor;
  // Each step adds the wanted turns to every QP's credit; the QP with the largest credit pays a whole round for its
  // turn. So the turns of a QP are spread evenly over the round.
  std::vector<std::int64_t> credit(shares.size(), 0);
  std::vector<std::uint8_t> turns;
  while (turns.size() < length) {
    for (std::size_t i = 0; i < wanted.size(); ++i) credit[i] += wanted[i] / divisor;
    const auto next = std::max_element(credit.begin(), credit.end());
    *next -= length;
    turns.push_back(static_cast<std::uint8_t>(next - credit.begin()));
  }
  return turns;
}

bool adapt_shares(std::span<QpLoad> loads) {
  constexpr std::uint32_t kSmallestPart = 16;
  constexpr std::uint32_t kTolerance = 8;  // an eighth of a share
  std::uint64_t most = 0;
  for (const QpLoad& load : loads) most = std::max(most, load.carried);
  if (most == 0) return false;
  bool changed = false;
  for (QpLoad& load : loads) {
    const auto carried = static_cast<std::uint32_t>(kLargestShare * std::exchange(load.carried, 0) / most);
    const std::uint32_t difference = carried > load.share ? carried - load.share : load.share - carried;
    if (load.declared == 0 || difference * kTolerance < load.share) continue;
    load.share = std::max((load.share + carried) / 2, (load.declared + kSmallestPart - 1) / kSmallestPart);
    changed = true;
  }
  return changed;
}

std::size_t divide_by_load(std::uint64_t bytes, std::span<const QpLoad> loads, std::span<Stripe> stripes) {
  const std::uint64_t lines = std::clamp<std::uint64_t>(bytes >> kLineShift, 1, kMaxLines);
  const auto outstanding_lines = [&](const Stripe& stripe) {
    return std::uint64_t{loads[stripe.queue].outstanding} << (10 - kLineShift);
  };
  // All QPs that take part finish when each has `total` / `shares` lines for each unit of its share.
  std::size_t count = 0;
  std::uint64_t shares = 0;
  std::uint64_t total = lines;
  for (std::size_t i = 0; i < loads.size(); ++i) {
    if (loads[i].share == 0) continue;
    stripes[count] = {static_cast<std::uint32_t>(i), 0};
    shares += loads[i].share;
    total += outstanding_lines(stripes[count++]);
  }
  for (bool removed = true; removed;) {
    removed = false;
    for (std::size_t i = 0; i < count;) {
      const std::uint64_t share = loads[stripes[i].queue].share;
      const std::uint64_t outstanding = outstanding_lines(stripes[i]);
      if ((outstanding * shares) + (share * lines / kLeastPart) <= share * total) {
        ++i;
        continue;
      }
      shares -= share;
      total -= outstanding;
      stripes[i] = stripes[--count];
      removed = true;
    }
  }
  std::uint64_t end = 0;
  for (Stripe& stripe : stripes.first(count)) {
    stripe.begin = static_cast<std::uint32_t>(end * kWholeMessage / (lines * shares));
    end += loads[stripe.queue].share * total - outstanding_lines(stripe) * shares;
    stripe.end = static_cast<std::uint32_t>(end * kWholeMessage / (lines * shares));
  }
  return count;
}

void Striping::set_shares(std::span<const std::uint32_t> shares) {
  std::vector<QpLoad> loads;
  for (const std::uint32_t share : shares) loads.emplace_back(share);
  for (std::size_t i = 0; i < loads_.size(); ++i) loads[i].outstanding = loads_[i].outstanding;
  loads_ = std::move(loads);
  stripes_.resize(loads_.size());
  idle_stripes_.reserve(loads_.size());  // the data path allocates nothing
  divide_when_idle();
}

void Striping::divide_when_idle() {
  std::uint64_t shares = 0;
  for (const QpLoad& load : loads_) shares += load.share;
  idle_stripes_.clear();
  std::uint64_t end = 0;
  const auto part = [&] { return static_cast<std::uint32_t>(end * kWholeMessage / shares); };
  for (std::size_t i = 0; i < loads_.size(); ++i) {
    if (loads_[i].share == 0) continue;
    const std::uint32_t begin = part();
    end += loads_[i].share;
    idle_stripes_.push_back({static_cast<std::uint32_t>(i), part(), begin});
  }
}

void Striping::forget_measured_shares() {
  idle_messages_ = 0;
  for (QpLoad& load : loads_) load.share = load.declared;
  divide_when_idle();
}

std::span<const Stripe> Striping::divide(std::uint64_t bytes) {
  // One message at a time shows nothing of the QPs, so after some the declared shares apply again.
  constexpr std::uint32_t kIdleMessages = 256;
  constexpr std::uint32_t kBusyMessages = 32;  // the end of the time cuts a stripe of each QP, so there must be many
  if (outstanding_ == 0) {
    was_idle_ = true;
    if (++idle_messages_ == kIdleMessages) forget_measured_shares();
    return idle_stripes_;
  }
  for (QpLoad& load : loads_) {
    const std::uint32_t completed = std::exchange(load.completed, 0);
    if (!was_idle_) load.carried += completed;
  }
  if (!was_idle_ && ++busy_messages_ == kBusyMessages) {
    busy_messages_ = 0;
    if (adapt_shares(loads_)) {
      idle_messages_ = 0;
      divide_when_idle();
    }
  }
  was_idle_ = false;
  return std::span(stripes_).first(divide_by_load(bytes, loads_, stripes_));
}

}  // namespace verbatim
