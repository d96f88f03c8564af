#include "net/transfer/latencies.h"

namespace verbatim {

LatencyStats SendLatencies::read() const {
  return {{"isend_to_completion", buckets(sends_.counts(), TickScale())}};
}

void ReceiveLatencies::count_wait(std::uint32_t index, std::uint64_t ticks) {
  waited_.add(ticks);
  with_wait_.add(ticks + waits_[index]);
  waits_[index] = 0;
}

// Usually no receive waits: then both distributions are the same. No bucket becomes less from one reading to the next.
LatencyStats ReceiveLatencies::read() const {
  const TickScale scale;
  const LatencyHistogram::Counts waited = waited_.counts();
  const LatencyHistogram::Counts with_wait = with_wait_.counts();
  LatencyHistogram::Counts from_post = receives_.counts();
  LatencyHistogram::Counts from_irecv = from_post;
  for (std::size_t i = 0; i < from_irecv.size(); ++i) {
    from_irecv[i] += with_wait[i];
    from_post[i] += waited[i];
  }
  return {{"irecv_to_arrival", buckets(from_irecv, scale)}, {"cts_to_data", buckets(from_post, scale)}};
}

}  // namespace verbatim
