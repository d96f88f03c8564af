// The rows of experts in memory, tensor by tensor as in a framework, with guards between the rows; and a packed buffer
// of whole experts with guards at its ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "memory/memory.h"
#include "ranks/connections.h"
#include "workload/content.h"
#include "workload/eplb/expert.h"

namespace verbatim::eplb {

using memory::Memory;

// The number of wrong bytes found by a check, and a description of the first.
struct Damage {
  std::uint64_t bytes = 0;
  std::string first;

  void add(const Damage& other) {
    if (bytes == 0) first = other.first;
    bytes += other.bytes;
  }
};

constexpr std::size_t kGuardBytes = 64;

// Finds what differs from the content. `what` names the place in the description.
Damage compare(Memory& memory, const std::byte* at, std::size_t bytes, const workload::Content& content,
               const std::string& what);

// The content of a guard. It depends on the guard's place.
workload::Pattern guard_content(std::uint64_t place);

class Rows {
 public:
  Rows(Memory& memory, std::string name, const ExpertLayout& expert, std::size_t rows);

  std::byte* at(std::size_t tensor, std::size_t row) const {
    return base_ + regions_[tensor].begin + row * regions_[tensor].stride;
  }
  std::size_t rows() const { return rows_; }
  const std::string& name() const { return name_; }
  ranks::Piece piece() const { return {base_, bytes_}; }
  std::size_t guard_bytes() const;

  void write_guards();
  Damage check_guards() const;
  // Changes one byte of the guard behind a row.
  void damage_guard(std::size_t tensor, std::size_t row);

 private:
  struct Region {       // the rows of one tensor
    std::size_t begin;  // offset of row 0
    std::size_t stride;
  };
  void for_each_guard(
      const std::function<void(std::size_t offset, std::size_t bytes, const std::string& what)>& act) const;

  Memory& memory_;
  const std::string name_;
  const ExpertLayout expert_;
  const std::size_t rows_;
  std::vector<Region> regions_;
  std::size_t bytes_ = 0;
  std::byte* base_ = nullptr;
};

class PackedBuffer {
 public:
  PackedBuffer(Memory& memory, std::string name, std::size_t expert_bytes, std::size_t slots);

  std::byte* slot(std::size_t index) const { return base_ + kGuardBytes + index * expert_bytes_; }
  std::size_t data_bytes() const { return expert_bytes_ * slots_; }
  ranks::Piece piece() const { return {base_, data_bytes() + 2 * kGuardBytes}; }

  void write_guards();
  Damage check_guards() const;

 private:
  Memory& memory_;
  const std::string name_;
  const std::size_t expert_bytes_;
  const std::size_t slots_;
  std::byte* const base_;
};

}  // namespace verbatim::eplb
