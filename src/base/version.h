// Which Verbatim a file is of. Each value is written in one place: the release in meson.build, the tables in
// plugin/exports.map; the commit is taken from git while building.
#pragma once

#include <string>

namespace verbatim {

extern const char* const kRelease;  // "0.1.0"
extern const char* const kCommit;   // "2ac5201b1f3c", "-dirty" after it if files were changed; "" without a git tree
extern const char* const kTables;   // "ncclNetPlugin v6 v7": what the plugin of the same build exports

// "0.1.0 (commit 2ac5201b1f3c)", or "0.1.0" if the commit is not known.
std::string release_and_commit();

// What `PROGRAM --version` prints, without a newline at its end.
std::string version_text(const std::string& program);

}  // namespace verbatim
