// Which two hosts test each other in which round: each pair meets once, and in each round every host has at most one
// partner, so the time grows with the number of hosts and not with that of the pairs.
#pragma once

#include <optional>

namespace verbatim::info {

// 0 for fewer than two ranks.
constexpr int pair_rounds(int ranks) {
  return ranks < 2 ? 0 : ranks - 1 + ranks % 2;
}

// Of `rank` in a round from 0 to pair_rounds() - 1. nullopt: it has none, because the number of ranks is odd.
constexpr std::optional<int> pair_partner(int rank, int ranks, int round) {
  // Ranks i and j with i + j = round (modulo the odd number of rounds) meet. The rank that would meet itself meets the
  // last one, or none.
  const int rounds = pair_rounds(ranks);
  const bool has_last = ranks % 2 == 0;
  const int alone = round * ((rounds + 1) / 2) % rounds;  // 2 * alone = round
  if (has_last && rank == ranks - 1) return alone;
  if (rank == alone) return has_last ? std::optional(ranks - 1) : std::nullopt;
  return (round - rank + rounds) % rounds;
}

}  // namespace verbatim::info
