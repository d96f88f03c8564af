#include "verbatim-eplb/rows.h"

#include <cstdio>
#include <utility>

#include "memory/content.h"

namespace verbatim::eplb {
namespace {

constexpr std::size_t kAlignment = 64;

std::size_t round_up(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}

}  // namespace

Damage compare(Memory& memory, const std::byte* from, std::size_t bytes, const workload::Content& content,
               const std::string& what) {
  const workload::Mismatch found = memory::verify(memory, content, from, bytes);
  Damage damage{found.wrong, {}};
  if (found.wrong > 0) {
    char text[96];
    std::snprintf(text, sizeof text, ", offset %zu: %02x instead of %02x", static_cast<std::size_t>(found.first_offset),
                  found.got, found.expected);
    damage.first = what + text;
  }
  return damage;
}

workload::Pattern guard_content(std::uint64_t place) {
  return {0x6775617264, place};
}

Rows::Rows(Memory& memory, std::string name, const ExpertLayout& expert, std::size_t rows)
    : memory_(memory), name_(std::move(name)), expert_(expert), rows_(rows) {
  for (const Tensor& tensor : expert_.tensors) {
    const std::size_t stride = round_up(tensor.bytes, kAlignment) + kGuardBytes;
    bytes_ += kGuardBytes;
    regions_.push_back({bytes_, stride});
    bytes_ += rows_ * stride;
  }
  base_ = memory_.allocate(bytes_);
}

// There is a guard before the first row of each tensor, and one from the end of each row to the start of the next.
void Rows::for_each_guard(
    const std::function<void(std::size_t offset, std::size_t bytes, const std::string& what)>& act) const {
  for (std::size_t t = 0; t < regions_.size(); ++t) {
    const Region& region = regions_[t];
    const std::string tensor = name_ + ", tensor " + expert_.tensors[t].name;
    act(region.begin - kGuardBytes, kGuardBytes, tensor + ", guard before row 0");
    for (std::size_t row = 0; row < rows_; ++row) {
      const std::size_t end = region.begin + row * region.stride + expert_.tensors[t].bytes;
      act(end, region.stride - expert_.tensors[t].bytes, tensor + ", guard after row " + std::to_string(row));
    }
  }
}

std::size_t Rows::guard_bytes() const {
  std::size_t sum = 0;
  for_each_guard([&sum](std::size_t, std::size_t bytes, const std::string&) { sum += bytes; });
  return sum;
}

void Rows::write_guards() {
  for_each_guard([this](std::size_t offset, std::size_t bytes, const std::string&) {
    memory::fill(memory_, guard_content(offset), base_ + offset, bytes);
  });
}

Damage Rows::check_guards() const {
  Damage damage;
  for_each_guard([&](std::size_t offset, std::size_t bytes, const std::string& what) {
    damage.add(compare(memory_, base_ + offset, bytes, guard_content(offset), what));
  });
  return damage;
}

void Rows::damage_guard(std::size_t tensor, std::size_t row) {
  std::byte* const guard = at(tensor, row) + expert_.tensors[tensor].bytes;
  std::byte byte{};
  memory_.download(&byte, guard, 1);
  byte = ~byte;
  memory_.upload(guard, &byte, 1);
}

PackedBuffer::PackedBuffer(Memory& memory, std::string name, std::size_t expert_bytes, std::size_t slots)
    : memory_(memory),
      name_(std::move(name)),
      expert_bytes_(expert_bytes),
      slots_(slots),
      base_(memory.allocate(expert_bytes * slots + 2 * kGuardBytes)) {}

void PackedBuffer::write_guards() {
  memory::fill(memory_, guard_content(0), base_, kGuardBytes);
  memory::fill(memory_, guard_content(1), base_ + kGuardBytes + data_bytes(), kGuardBytes);
}

Damage PackedBuffer::check_guards() const {
  Damage damage = compare(memory_, base_, kGuardBytes, guard_content(0), name_ + ", guard before");
  damage.add(
      compare(memory_, base_ + kGuardBytes + data_bytes(), kGuardBytes, guard_content(1), name_ + ", guard after"));
  return damage;
}

}  // namespace verbatim::eplb
