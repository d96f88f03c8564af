#include "verbatim-model/model.h"

#include <algorithm>
#include <vector>

namespace verbatim::model {
namespace {

// First in, first out, of senders.
class Port {
 public:
  void push(std::uint16_t sender) { waiting_.push_back(sender); }
  bool empty() const { return head_ == waiting_.size(); }
  std::size_t size() const { return waiting_.size() - head_; }
  std::uint16_t pop() {
    const std::uint16_t sender = waiting_[head_++];
    if (2 * head_ > waiting_.size() + kSlack) {
      waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(head_));
      head_ = 0;
    }
    return sender;
  }

 private:
  static constexpr std::size_t kSlack = 64;
  std::vector<std::uint16_t> waiting_;
  std::size_t head_ = 0;
};

// The receiver of a PE's i-th QP.
unsigned receiver(const Shape& shape, const Order& order, unsigned pe, std::uint64_t i) {
  const unsigned others = shape.pes - 1;
  const auto place = static_cast<unsigned>(order.interleaved ? i % others : i / shape.qps);
  if (order.rotated) return (pe + 1 + place) % shape.pes;
  return place < pe ? place : place + 1;
}

double jain(const std::uint32_t* taken, const Shape& shape, unsigned pe) {
  double sum = 0;
  double squares = 0;
  for (unsigned to = 0; to < shape.pes; ++to) {
    if (to == pe) continue;
    sum += taken[to];
    squares += static_cast<double>(taken[to]) * taken[to];
  }
  return sum * sum / (static_cast<double>(shape.pes - 1) * squares);
}

// Of one PE: how far its QPs are from interleaved and rotated. The same for all PEs but where PE 0 comes first.
std::uint64_t inversions(const Shape& shape, const Order& order, unsigned pe) {
  const unsigned others = shape.pes - 1;
  const std::uint64_t qps = std::uint64_t{others} * shape.qps;
  std::vector<std::uint32_t> below(qps + 1, 0);  // a Fenwick tree over places
  std::uint64_t found = 0;
  for (std::uint64_t i = 0; i < qps; ++i) {
    const std::uint64_t k = order.interleaved ? i / others : i % shape.qps;
    const unsigned rotation = (receiver(shape, order, pe, i) + shape.pes - pe - 1) % shape.pes;
    const std::uint64_t place = k * others + rotation;
    std::uint64_t before = 0;
    for (std::uint64_t at = place + 1; at > 0; at &= at - 1) before += below[at];
    found += i - before;
    for (std::uint64_t at = place + 1; at <= qps; at += at & (~at + 1)) ++below[at];
  }
  return found;
}

}  // namespace

Figures simulate(const Shape& shape, const Order& order) {
  const unsigned n = shape.pes;
  const std::uint64_t slots = std::uint64_t{n - 1} * shape.qps * shape.quanta;  // in which a PE sends
  const std::uint64_t total = slots * n;
  const std::uint64_t all_of_peer = std::uint64_t{shape.qps} * shape.quanta;
  std::vector<Port> ports(n);
  std::vector<std::uint32_t> taken(std::size_t{n} * n, 0);  // quanta by sender and receiver
  std::vector<bool> finished(n, false);                     // one peer of this sender has everything
  std::vector<unsigned> arrivals(n);
  Figures figures;
  double first_sum = 0;
  std::uint64_t slot = 0;
  for (std::uint64_t got = 0; got < total; ++slot) {
    if (slot < slots) {
      std::fill(arrivals.begin(), arrivals.end(), 0U);
      const std::uint64_t qp = slot % (std::uint64_t{n - 1} * shape.qps);
      for (unsigned pe = 0; pe < n; ++pe) {
        const unsigned to = receiver(shape, order, pe, qp);
        ports[to].push(static_cast<std::uint16_t>(pe));
        figures.senders = std::max(figures.senders, ++arrivals[to]);
      }
    }
    std::vector<unsigned> first_finished;
    for (unsigned to = 0; to < n; ++to) {
      Port& port = ports[to];
      figures.deepest = std::max(figures.deepest, port.size());
      if (port.empty()) continue;
      const std::uint16_t from = port.pop();
      ++got;
      const std::uint32_t now = ++taken[std::size_t{from} * n + to];
      if (now == 1) {
        first_sum += static_cast<double>(slot);
        figures.first_max = std::max(figures.first_max, slot);
      }
      if (now == all_of_peer && !finished[from]) {
        finished[from] = true;
        first_finished.push_back(from);
      }
    }
    for (const unsigned from : first_finished) {
      figures.jain = std::min(figures.jain, jain(&taken[std::size_t{from} * n], shape, from));
    }
  }
  figures.efficiency = static_cast<double>(slots) / static_cast<double>(slot);
  figures.first_mean = first_sum / (static_cast<double>(n) * (n - 1));
  for (unsigned pe = 0; pe < n; ++pe) figures.inversions += inversions(shape, order, pe);
  return figures;
}

}  // namespace verbatim::model
