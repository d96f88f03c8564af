#include "verbatim-kv/request_batches.h"

#include <map>
#include <utility>

namespace verbatim::kv {
namespace {

// The blocks that a batch uses, by family, side and index on that side.
class BlockBudget {
 public:
  explicit BlockBudget(const Layout& layout) : layout_(&layout) {}

  bool reserve(const Request& request) {
    auto used = used_;
    for (std::size_t family = 0; family < layout_->reports.size(); ++family) {
      const FamilyReport& report = layout_->reports[family];
      const std::uint32_t tokens = report.geometry.block_tokens;
      const std::size_t blocks = request.blocks(tokens) - request.hit_blocks(tokens);
      if ((used[{family, false, request.prefill}] += blocks) > report.blocks[0]) return false;
      if ((used[{family, true, request.engine}] += blocks) > report.blocks[1] - layout_->reserved[family]) return false;
    }
    used_ = std::move(used);
    return true;
  }

 private:
  struct RankKey {
    std::size_t family;
    bool decode;
    std::uint32_t index;
    auto operator<=>(const RankKey&) const = default;
  };
  const Layout* layout_;
  std::map<RankKey, std::size_t> used_;
};

}  // namespace

std::vector<RequestBatch> make_batches(const Options& options, const std::vector<Request>& requests,
                                       const Layout& layout) {
  const std::size_t most = options.concurrency * static_cast<std::size_t>(options.engines());
  std::vector<RequestBatch> batches;
  BlockBudget budget(layout);
  for (const Request& request : requests) {
    const bool warmed_up = !batches.empty() && options.is_timed(request) && !options.is_timed(*batches.back().front());
    if (batches.empty() || warmed_up || batches.back().size() == most || !budget.reserve(request)) {
      batches.emplace_back();
      budget = BlockBudget(layout);
      budget.reserve(request);
    }
    batches.back().push_back(&request);
  }
  return batches;
}

}  // namespace verbatim::kv
