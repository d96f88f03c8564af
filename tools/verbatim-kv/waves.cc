#include "verbatim-kv/waves.h"

#include <map>
#include <utility>

namespace verbatim::kv {
namespace {

// Blocks that a wave takes, by family, side and index on that side.
class Room {
 public:
  explicit Room(const Layout& layout) : layout_(&layout) {}

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
  struct Place {
    std::size_t family;
    bool decode;
    std::uint32_t index;
    auto operator<=>(const Place&) const = default;
  };
  const Layout* layout_;
  std::map<Place, std::size_t> taken_;
};

}  // namespace

std::vector<Wave> make_waves(const Options& options, const std::vector<Request>& requests, const Layout& layout) {
  const std::size_t most = options.concurrency * static_cast<std::size_t>(options.engines());
  std::vector<Wave> waves;
  Room room(layout);
  for (const Request& request : requests) {
    const bool warmed_up = !waves.empty() && options.is_timed(request) && !options.is_timed(*waves.back().front());
    if (waves.empty() || warmed_up || waves.back().size() == most || !room.take(request)) {
      waves.emplace_back();
      room = Room(layout);
      room.take(request);
    }
    waves.back().push_back(&request);
  }
  return waves;
}

}  // namespace verbatim::kv
