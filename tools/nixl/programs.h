// The Python files of this directory. embed.py makes the list when the tools are built.
#pragma once

#include <vector>

namespace verbatim::nixl {

struct ProgramFile {
  const char* name;
  const char* text;
};
extern const std::vector<ProgramFile> kProgramFiles;

}  // namespace verbatim::nixl
