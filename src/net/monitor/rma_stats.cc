#include "net/monitor/rma_stats.h"

#include "base/json.h"

namespace verbatim {
namespace {

std::string count_fields(const RmaCounts& counts) {
  return json_field("puts", counts.puts) + "," + json_field("signals", counts.signals) + "," +
         json_field("gets", counts.gets) + "," + json_field("flushes", counts.flushes);
}

std::string byte_fields(std::uint64_t put_bytes, std::uint64_t get_bytes) {
  return json_field("put_bytes", put_bytes) + "," + json_field("get_bytes", get_bytes);
}

std::string queue_json(const RmaQueueStats& queue) {
  return json_object(
      {json_field("context", queue.context), json_field("peer", queue.peer), json_field("peer_host", queue.peer_host),
       json_field("lane", queue.lane), json_field("lanes", queue.lanes), json_field("qp", queue.qp),
       json_field("peer_qp", queue.peer_qp), json_nested("posted", json_object({count_fields(queue.posted)})),
       json_nested("completed",
                   json_object({count_fields(queue.completed), byte_fields(queue.put_bytes, queue.get_bytes)})),
       json_field("outstanding", queue.outstanding), json_field("no_progress_ms", queue.no_progress_ms),
       json_flag("stalled", queue.stalled)});
}

}  // namespace

std::string rma_json(const RmaStats& stats) {
  std::vector<std::string> queues;
  queues.reserve(stats.queues.size());
  for (const RmaQueueStats& queue : stats.queues) queues.push_back(queue_json(queue));
  return json_object(
      {json_field("number", stats.number), json_field("rank", stats.rank), json_field("ranks", stats.ranks),
       json_field("contexts", stats.contexts), json_field("qps", stats.qps), json_field("device", stats.device),
       json_flag("failed", stats.failed), json_nested("error", stats.error.empty() ? "null" : json_text(stats.error)),
       json_nested("queues", json_list(queues))});
}

std::string rma_total_json(std::span<const RmaStats> all) {
  RmaCounts sum;
  std::uint64_t put_bytes = 0;
  std::uint64_t get_bytes = 0;
  for (const RmaStats& stats : all) {
    for (const RmaQueueStats& queue : stats.queues) {
      sum.puts += queue.completed.puts;
      sum.signals += queue.completed.signals;
      sum.gets += queue.completed.gets;
      sum.flushes += queue.completed.flushes;
      put_bytes += queue.put_bytes;
      get_bytes += queue.get_bytes;
    }
  }
  return json_object({count_fields(sum), byte_fields(put_bytes, get_bytes)});
}

}  // namespace verbatim
