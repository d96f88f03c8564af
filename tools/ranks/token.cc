#include "ranks/token.h"

#include <cstdio>
#include <cstdlib>
#include <span>

#include "base/random.h"
#include "ranks/failure.h"

namespace verbatim::ranks {
namespace {

constexpr std::size_t kMinTokenBytes = 16;

}  // namespace

std::uint64_t hash_of(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

std::uint64_t random_number() {
  std::uint64_t number = 0;
  if (!fill_random(std::as_writable_bytes(std::span(&number, 1)))) throw Failure("the kernel has no random numbers");
  return number;
}

std::string random_token() {
  char text[4 * sizeof(std::uint64_t) + 1];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(random_number()),
                static_cast<unsigned long long>(random_number()));
  return text;
}

std::optional<std::uint64_t> take_token(const std::string& start) {
  const char* const value = std::getenv(kTokenVariable);
  const std::string text = value == nullptr ? "" : value;
  ::unsetenv(kTokenVariable);
  if (text.empty()) return std::nullopt;
  if (text.size() < kMinTokenBytes) {
    throw Failure(std::string(kTokenVariable) +
                      " has fewer than 16 characters, so that it can be guessed. Next: export " + kTokenVariable +
                      "=$(cat /proc/sys/kernel/random/uuid), the same for all ranks",
                  ExitStatus::kUsage);
  }
  return hash_of(start.empty() ? text : text + '\0' + start);
}

}  // namespace verbatim::ranks
