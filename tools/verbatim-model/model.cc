#include "verbatim-model/model.h"

#include <algorithm>
#include <vector>

namespace verbatim::model {
namespace {

// The queue of a receiving port: the senders of the quanta, in order of arrival.
class Port {
 public:
  void push(std::uint16_t sender) { queue_.push_back(sender); }
  bool empty() const { return head_ == queue_.size(); }
  std::size_t size() const { return queue_.size() - head_; }
  std::uint16_t pop() {
    const std::uint16_t sender = queue_[head_++];
    if (2 * head_ > queue_.size() + kSlack) {
      queue_.erase(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(head_));
      head_ = 0;
    }
    return sender;
  }

 private:
  static constexpr std::size_t kSlack = 64;
  std::vector<std::uint16_t> queue_;
  std::size_t head_ = 0;
};

// Received quanta by sender and distance from sender to receiver. In most slots the distance is the same for all
// senders, so the entries that a slot changes are close together in memory.
class ReceivedQuanta {
 public:
  explicit ReceivedQuanta(unsigned pes) : pes_(pes), quanta_(std::size_t{pes} * pes, 0) {}
  std::uint32_t& operator()(unsigned from, unsigned to) {
    const unsigned distance = to >= from ? to - from : to + pes_ - from;
    return quanta_[std::size_t{distance} * pes_ + from];
  }

 private:
  const unsigned pes_;
  std::vector<std::uint32_t> quanta_;
};

double jain(ReceivedQuanta& received, const Shape& shape, unsigned pe) {
  double sum = 0;
  double squares = 0;
  for (unsigned to = 0; to < shape.pes; ++to) {
    const double share = to != pe ? received(pe, to) : 0;
    sum += share;
    squares += share * share;
  }
  return sum * sum / (static_cast<double>(shape.pes - 1) * squares);
}

// The sum over all PEs. Not interleaved: QP k of a peer comes before the lower QPs of all later peers. Not rotated: the
// PEs below the own one come first, but belong after the others.
std::uint64_t inversions(const Shape& shape, const Order& order) {
  const std::uint64_t others = shape.pes - 1;
  const std::uint64_t pairs_of_peers = others * (others - 1) / 2;
  const std::uint64_t pairs_of_qps = std::uint64_t{shape.qps} * (shape.qps - 1) / 2;
  std::uint64_t found = order.interleaved ? 0 : pairs_of_peers * pairs_of_qps * shape.pes;
  for (std::uint64_t pe = 0; !order.rotated && pe < shape.pes; ++pe) found += shape.qps * pe * (others - pe);
  return found;
}

}  // namespace

Figures simulate(const Shape& shape, const Order& order) {
  const unsigned n = shape.pes;
  const std::uint64_t slots = std::uint64_t{n - 1} * shape.qps * shape.quanta;  // in which each PE sends
  const std::uint64_t total = slots * n;
  const std::uint64_t all_of_peer = std::uint64_t{shape.qps} * shape.quanta;
  std::vector<Port> ports(n);
  ReceivedQuanta received(n);
  std::vector<bool> finished(n, false);  // one peer of this sender has all its quanta
  std::vector<unsigned> arrivals(n);
  Figures figures;
  double first_sum = 0;
  std::uint64_t slot = 0;
  for (std::uint64_t got = 0; got < total; ++slot) {
    if (slot < slots) {
      std::fill(arrivals.begin(), arrivals.end(), 0U);
      const std::uint64_t qp = slot % (std::uint64_t{n - 1} * shape.qps);
      const auto place = static_cast<unsigned>(order.interleaved ? qp % (n - 1) : qp / shape.qps);
      for (unsigned pe = 0; pe < n; ++pe) {
        unsigned to = place < pe ? place : place + 1;
        if (order.rotated) to = pe + 1 + place < n ? pe + 1 + place : pe + 1 + place - n;
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
      const std::uint32_t now = ++received(from, to);
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
      figures.jain = std::min(figures.jain, jain(received, shape, from));
    }
  }
  figures.efficiency = static_cast<double>(slots) / static_cast<double>(slot);
  figures.first_mean = first_sum / (static_cast<double>(n) * (n - 1));
  figures.inversions = inversions(shape, order);
  return figures;
}

}  // namespace verbatim::model
