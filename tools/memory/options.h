// The command-line options that name the memory.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "memory/memory.h"

namespace verbatim::memory {

// Adds --memory and --cuda.
inline void add_memory_options(CLI::App& app, Kind& kind, std::string& cuda) {
  app.add_option_function<std::string>(
         "--memory", [&kind](const std::string& name) { kind = name == "cuda" ? Kind::kCuda : Kind::kHost; },
         "over a plugin's table: memory that is sent from and received into; cuda: of the GPU with the rank's number, "
         "modulo the number of GPUs")
      ->check(CLI::IsMember({kind_name(Kind::kHost), kind_name(Kind::kCuda)}))
      ->default_str(kind_name(kind));
  app.add_option("--cuda", cuda, "CUDA's driver library, passed to dlopen")->type_name("PATH")->capture_default_str();
}

}  // namespace verbatim::memory
