// What an NCCL in this environment would do before it calls a plugin's init: read its configuration files, and choose
// a plugin.
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace verbatim::info {

// Puts the variables of NCCL's configuration files that are not set into the environment, as NCCL does before it opens
// a plugin: of the file in NCCL_CONF_FILE, else of ~/.nccl.conf, then of /etc/nccl.conf. Returns the file of each.
std::map<std::string, std::string> read_configuration_files();

// Opens what NCCL_NET_PLUGIN names by NCCL's rules, and libnccl.so.2, where there is one on the library path.
nlohmann::ordered_json nccl_json();

}  // namespace verbatim::info
