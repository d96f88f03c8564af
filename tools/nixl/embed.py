#!/usr/bin/env python3
"""embed.py OUTPUT FILE...: a C++ source with the text of the files, for programs.h."""

import pathlib
import sys

output, *files = map(pathlib.Path, sys.argv[1:])
entries = "".join(f'    {{"{file.name}", R"python({file.read_text(encoding="utf-8")})python"}},\n' for file in files)
output.write_text(
    '#include "nixl/programs.h"\n\nnamespace verbatim::nixl {\n\n'
    f"const std::vector<ProgramFile> kProgramFiles{{\n{entries}}};\n\n"
    "}  // namespace verbatim::nixl\n",
    encoding="utf-8",
)
