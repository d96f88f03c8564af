// A registration of the same buffer by all ranks, with the address and key of every rank's part. RMA calls name memory
// by it and by an offset from its start.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "net/transfer/memory.h"

namespace verbatim::rma {

// One rank's part.
struct RankMemory {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  std::uint32_t rkey = 0;

  bool contains(std::uint64_t offset, std::uint64_t size) const {
    std::uint64_t end = 0;
    return !__builtin_add_overflow(offset, size, &end) && end <= bytes;
  }
};

// Immutable after the registration: the data path reads it.
struct Memory : Registrations<Memory>::Entry {
  std::uint32_t lkey = 0;
  std::uint32_t rank_count = 0;  // of `ranks`
  bool device_memory = false;
  RankMemory own;
  std::vector<RankMemory> ranks;  // by rank
  // By rank and port; `rkey` of a rank is that of its first port. Lane k uses port k, modulo the number of ports.
  std::vector<std::vector<std::uint32_t>> rkeys;
  std::vector<std::uint32_t> lkeys;  // by port
  std::unique_ptr<MemoryHandle> registration;

  std::uint32_t lkey_of(std::uint32_t lane) const { return lkeys[lane % lkeys.size()]; }
  std::uint32_t rkey_of(std::uint32_t rank, std::uint32_t lane) const { return rkeys[rank][lane % rkeys[rank].size()]; }
};

}  // namespace verbatim::rma
