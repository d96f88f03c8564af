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

// Adds --pages.
inline void add_pages_option(CLI::App& app, Pages& pages) {
  app.add_option_function<std::string>(
         "--pages", [&pages](const std::string& name) { pages = name == "small" ? Pages::kSmall : Pages::kHuge; },
         "of host memory: huge (2 MiB, where the kernel has them) or small (4 KiB)")
      ->check(CLI::IsMember({pages_name(Pages::kHuge), pages_name(Pages::kSmall)}))
      ->default_str(pages_name(pages));
}

}  // namespace verbatim::memory
