// The plan of the messages of a connection: groups of all sizes with permuted tags and sends. The content of a message
// depends on its number only. The same seed gives the same plan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace verbatim::completion {

constexpr std::size_t kMaxBytes = std::size_t{300} << 10;  // of a message: large enough to be striped

struct Member {
  std::uint64_t number = 0;  // of the message, counted over all connections
  int tag = 0;
  std::size_t capacity = 0;
  std::size_t bytes = 0;  // size of the send, at most `capacity`
};

struct Group {
  std::vector<Member> members;
  std::vector<std::size_t> send_order;
  bool optional = false;  // one member with optional completion
};

struct PlanOptions {
  std::uint64_t messages = 1'000'000;
  std::uint64_t first_number = 0;
  std::uint64_t seed = 1;
  std::size_t max_members = 8;
  std::uint64_t large_every = 1000;  // one of this many messages has up to kMaxBytes
  bool optional = false;             // half of the receives of one member have optional completion
};

class Plan {
 public:
  explicit Plan(const PlanOptions& options);

  bool is_over() const { return number_ == end_; }
  Group next();
  // A random number from 0 to limit - 1; limit > 0.
  std::uint64_t draw(std::uint64_t limit) { return random_() % limit; }

 private:
  Member next_member();

  const PlanOptions options_;
  std::uint64_t number_;
  const std::uint64_t end_;
  std::mt19937_64 random_;
};

void write_content(std::byte* data, std::size_t bytes, std::uint64_t number);
bool has_content(const std::byte* data, std::size_t bytes, std::uint64_t number);

}  // namespace verbatim::completion
