// The requests of a run: whose prompt goes from which prefill rank to which decode engine, and how much of it is not
// there yet. Every rank makes the same list from the same settings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace verbatim::kv {

struct Request {
  std::uint32_t id = 0;
  std::uint32_t tokens = 0;
  double hit = 0;             // fraction of the prompt that the decode side has already
  std::uint32_t prefill = 0;  // index of the prefill rank
  std::uint32_t engine = 0;   // index of the decode engine, which is as many ranks as the TP ratio says

  std::size_t blocks(std::uint32_t block_tokens) const;
  // Blocks at the beginning that are not sent; the last one always is, as its last token is always computed anew.
  std::size_t hit_blocks(std::uint32_t block_tokens) const;
};

struct RequestSettings {
  std::size_t count = 0;
  double median_tokens = 0;
  double sigma = 0;  // of the logarithm
  std::uint32_t max_tokens = 0;
  double hit = 0;
  std::uint32_t prefills = 1;
  std::uint32_t engines = 1;
  std::uint64_t seed = 0;
};

// Prompt lengths from a lognormal distribution, cut at 1 and max_tokens. Prefill ranks and engines take turns, so that
// every pair of them meets.
std::vector<Request> generate_requests(const RequestSettings& settings);

// One request a line: "TOKENS" or "TOKENS HIT"; '#' begins a comment. `settings` gives what a line leaves out; its
// count and distribution do not matter. Throws std::invalid_argument that names the line.
std::vector<Request> read_requests(std::istream& in, const std::string& name, const RequestSettings& settings);

}  // namespace verbatim::kv
