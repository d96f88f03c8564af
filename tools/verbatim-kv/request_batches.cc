#include "verbatim-kv/request_batches.h"

#include <map>
#include <utility>

namespace verbatim::kv {
namespace {

// Blocks that a wave takes, by family, side and index on that side.
class BlockBudget {
 public:
  explicit BlockBudget(const Layout& layout) : layout_(&layout) {}

  bool take(const Request& request) {
    auto taken = taken_;
    for (std::size_t family = 0; family < layout_->reports.size(); ++family) {
      const FamilyReport& report = layout_->reports[family];
      const std::uint32_t tokens = report.geometry.block_tokens;
      const std::size_t blocks = request.blocks(tokens) - request.hit_blocks(tokens);
      if ((taken[{family, false, request.prefill}] += blocks) > report.blocks[0]) return false;
      if ((taken[{family, true, request.engine}] += blocks) > report.blocks[1] - layout_->reserved[family])
        return false;
    }
    taken_ = std::move(taken);
    return true;
  }

 private:
  struct MessagePosition {
    std::size_t family;
    bool decode;
    std::uint32_t index;
    auto operator<=>(const MessagePosition&) const = default;
  };
  const Layout* layout_;
  std::map<MessagePosition, std::size_t> taken_;
};

}  // namespace

std::vector<RequestBatch> make_batches(const Options& options, const std::vector<Request>& requests,
                                       const Layout& layout) {
  const std::size_t most = options.concurrency * static_cast<std::size_t>(options.engines());
  std::vector<RequestBatch> batches;
  BlockBudget budget(layout);
  for (const Request& request : requests) {
    const bool warmed_up = !batches.empty() && options.is_timed(request) && !options.is_timed(*batches.back().front());
    if (batches.empty() || warmed_up || batches.back().size() == most || !budget.take(request)) {
      batches.emplace_back();
      budget = BlockBudget(layout);
      budget.take(request);
    }
    batches.back().push_back(&request);
  }
  return batches;
}

}  // namespace verbatim::kv
