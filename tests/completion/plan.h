// What goes over a connection: groups of all sizes whose tags and sends are permuted, and bytes that only the message
// of that number has. The same seed makes the same plan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace verbatim::completion {

constexpr std::size_t kMostBytes = std::size_t{300} << 10;  // of a message: beyond the size from which messages stripe

struct Member {
  std::uint64_t number = 0;  // of the message, on all connections together
  int tag = 0;
  std::size_t capacity = 0;
  std::size_t bytes = 0;  // that are sent, at most the capacity
};

struct Group {
  std::vector<Member> members;
  std::vector<std::size_t> send_order;
  bool optional = false;  // one member, whose receive is posted without completion
};

struct PlanOptions {
  std::uint64_t messages = 1'000'000;
  std::uint64_t first_number = 0;
  std::uint64_t seed = 1;
  std::size_t max_members = 8;
  std::uint64_t large_every = 1000;  // one of so many messages has up to kMostBytes
  bool optional = false;             // half of the receives alone
};

class Plan {
 public:
  explicit Plan(const PlanOptions& options);

  bool is_over() const { return number_ == end_; }
  Group next();
  // 0 <= answer < sides, sides > 0.
  std::uint64_t draw(std::uint64_t sides) { return dice_() % sides; }

 private:
  Member next_member();

  const PlanOptions options_;
  std::uint64_t number_;
  const std::uint64_t end_;
  std::mt19937_64 dice_;
};

void write_content(std::byte* data, std::size_t bytes, std::uint64_t number);
bool has_content(const std::byte* data, std::size_t bytes, std::uint64_t number);

}  // namespace verbatim::completion
