#include "plan.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace verbatim::completion {
namespace {

constexpr std::uint64_t kMediumBytes = 4096;
constexpr std::uint64_t kSmallBytes = 256;
constexpr std::uint64_t kTags = 1'000'000;

std::uint64_t word(std::uint64_t number, std::size_t index) {
  const std::uint64_t mixed = (number + 1) * 0x9e3779b97f4a7c15 + index * 0xd1b54a32d192ed03;
  return mixed ^ mixed >> 29;
}

}  // namespace

Plan::Plan(const PlanOptions& options)
    : options_(options),
      number_(options.first_number),
      end_(options.first_number + options.messages),
      random_(options.seed) {}

Group Plan::next() {
  Group group;
  group.members.resize(std::min<std::uint64_t>(1 + draw(options_.max_members), end_ - number_));
  group.optional = options_.optional && group.members.size() == 1 && draw(2) == 0;
  const auto first_tag = static_cast<int>(draw(kTags));
  for (std::size_t i = 0; i < group.members.size(); ++i) {
    Member& member = group.members[i];
    member = next_member();
    member.tag = first_tag + static_cast<int>(i);
    if (group.optional) member.bytes = member.capacity;
  }
  // Permutes the tags of the members; the order of the sends is permuted independently below.
  for (std::size_t i = group.members.size(); i > 1; --i) {
    std::swap(group.members[i - 1].tag, group.members[draw(i)].tag);
  }
  group.send_order.resize(group.members.size());
  std::iota(group.send_order.begin(), group.send_order.end(), std::size_t{0});
  if (draw(2) == 0) std::shuffle(group.send_order.begin(), group.send_order.end(), random_);
  return group;
}

Member Plan::next_member() {
  Member member;
  member.number = number_++;
  if (draw(options_.large_every) == 0) {
    member.capacity = kMediumBytes + draw(kMaxBytes - kMediumBytes + 1);
  } else if (draw(32) != 0) {
    member.capacity = 1 + draw(draw(8) == 0 ? kMediumBytes : kSmallBytes);
  }
  switch (draw(6)) {
    case 0:
      member.bytes = 0;
      break;
    case 1:
    case 2:
      member.bytes = draw(member.capacity + 1);
      break;
    default:
      member.bytes = member.capacity;
      break;
  }
  return member;
}

void write_content(std::byte* data, std::size_t bytes, std::uint64_t number) {
  const std::size_t words = bytes / sizeof(std::uint64_t);
  for (std::size_t i = 0; i < words; ++i) {
    const std::uint64_t value = word(number, i);
    std::memcpy(data + i * sizeof value, &value, sizeof value);
  }
  const std::uint64_t last = word(number, words);
  std::memcpy(data + words * sizeof last, &last, bytes % sizeof last);
}

bool has_content(const std::byte* data, std::size_t bytes, std::uint64_t number) {
  const std::size_t words = bytes / sizeof(std::uint64_t);
  std::uint64_t different = 0;
  for (std::size_t i = 0; i < words; ++i) {
    std::uint64_t value;
    std::memcpy(&value, data + i * sizeof value, sizeof value);
    different |= value ^ word(number, i);
  }
  const std::uint64_t last = word(number, words);
  return different == 0 && std::memcmp(data + words * sizeof last, &last, bytes % sizeof last) == 0;
}

}  // namespace verbatim::completion
