// Moves data with NIXL: starts a Python that has it (on PyPI: nixl-cu12) with a program that is part of this tool.
#pragma once

#include <string>

#include "ranks/failure.h"
#include "ranks/json.h"

namespace verbatim::nixl {

// The name of the entry of --compare that means NIXL.
constexpr const char* kName = "nixl";

struct Python {
  std::string path = "python3";  // a path, or a name that is looked up in PATH
  int timeout_s = 300;
};

// The version, for example "NIXL 1.5.1". Throws Failure, with what to do, when this Python has no NIXL.
std::string version(const Python& python);

// Runs the module `program` (nixl_kv, nixl_eplb), which starts a process for each rank of the plan. Returns what it
// reports. Throws Failure.
ranks::Json run(const Python& python, const std::string& program, const ranks::Json& plan);

// NIXL's UCX uses the ports of softverbs as InfiniBand ports: on RoCE it looks for a route of the kernel to their
// addresses. The setting for processes that are compared with it; nothing is changed when the user has set it.
constexpr const char* kLinkLayer = "SOFTVERBS_LINK_LAYER";
constexpr const char* kInfiniBand = "ib";

}  // namespace verbatim::nixl
