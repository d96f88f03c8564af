// The requests of a run: which prefill rank sends which prompt to which decode engine, and which part of the prompt the
// engine already has. Every rank makes the same list from the same settings.
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
  double hit = 0;             // fraction of the prompt that the decode side already has
  std::uint32_t prefill = 0;  // index of the prefill rank
  std::uint32_t engine = 0;   // index of the decode engine, which consists of as many ranks as the TP ratio

  std::size_t blocks(std::uint32_t block_tokens) const;
  // Blocks at the beginning that are not sent. The last block is always sent, because its last token is always computed
  // anew.
  std::size_t hit_blocks(std::uint32_t block_tokens) const;
};

struct RequestSettings {
  std::size_t count = 0;
  double median_tokens = 0;
  double sigma = 0;  // standard deviation of the logarithm
  std::uint32_t max_tokens = 0;
  double hit = 0;
  std::uint32_t prefills = 1;
  std::uint32_t engines = 1;
  std::uint64_t seed = 0;
};

// Prompt lengths follow a lognormal distribution, limited to 1 to max_tokens. Requests go round robin over prefill
// ranks and engines, so that every pair of them is used.
std::vector<Request> generate_requests(const RequestSettings& settings);

// Reads one request per line: "TOKENS" or "TOKENS HIT"; '#' starts a comment. `settings` supplies a missing HIT and the
// ranks; its count and distribution are not used. Throws std::invalid_argument that names the line.
std::vector<Request> read_requests(std::istream& in, const std::string& name, const RequestSettings& settings);

}  // namespace verbatim::kv
