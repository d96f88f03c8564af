#include "ranks/scratch_directory.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "ranks/failure.h"

namespace verbatim::ranks {

namespace fs = std::filesystem;

Scratch::Scratch(const std::string& name) {
  std::string pattern = (fs::temp_directory_path() / ("verbatim-" + name + "-")).string() + std::string(6, 'X');
  if (::mkdtemp(pattern.data()) == nullptr) throw Failure("mkdtemp: " + std::string(std::strerror(errno)));
  path_ = pattern;
}

Scratch::~Scratch() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

}  // namespace verbatim::ranks
