// The secret of a job: who has it is a rank of the job. It is in no argument of a process, because every user of a host
// can read those.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace verbatim::ranks {

inline constexpr const char* kTokenVariable = "VERBATIM_TOKEN";

// FNV-1a, 64 bits: the ranks of a job derive the same number from the same text.
std::uint64_t hash_of(const std::string& text);

// Throws Failure when the kernel has none.
std::uint64_t random_number();

// A text for kTokenVariable that nobody can guess. Throws Failure.
std::string random_token();

// The number of the token in the environment, from which it is removed: neither the plugin nor a program that this one
// starts needs it. Jobs with the same token and another `start` have other numbers. nullopt: the token is not set.
// Throws Failure for one that is too short for a secret.
std::optional<std::uint64_t> take_token(const std::string& start);

}  // namespace verbatim::ranks
