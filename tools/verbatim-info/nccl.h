// Which net plugin an NCCL in this environment would load, and over which of its tables.
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace verbatim::info {

// Opens what NCCL_NET_PLUGIN names by NCCL's rules, and libnccl.so.2, where there is one on the library path.
nlohmann::ordered_json nccl_json();

}  // namespace verbatim::info
