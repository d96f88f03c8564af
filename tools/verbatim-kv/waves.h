// Requests that go together when all ranks move at once: as many as may be in flight and as every rank has blocks for.
#pragma once

#include <cstddef>
#include <vector>

#include "traffic/kv/requests.h"
#include "verbatim-kv/layout.h"
#include "verbatim-kv/options.h"

namespace verbatim::kv {

using Wave = std::vector<const Request*>;

// The same on every rank.
std::vector<Wave> make_waves(const Options& options, const std::vector<Request>& requests, const Layout& layout);

}  // namespace verbatim::kv
