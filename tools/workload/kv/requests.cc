#include "workload/kv/requests.h"

#include <algorithm>
#include <cmath>
#include <istream>
#include <random>
#include <sstream>
#include <stdexcept>

namespace verbatim::kv {
namespace {

void assign_ranks(Request& request, std::size_t index, const RequestSettings& settings) {
  request.id = static_cast<std::uint32_t>(index);
  request.prefill = static_cast<std::uint32_t>(index % settings.prefills);
  request.engine = static_cast<std::uint32_t>(index / settings.prefills % settings.engines);
}

}  // namespace

std::size_t Request::blocks(std::uint32_t block_tokens) const {
  return (std::size_t{tokens} + block_tokens - 1) / block_tokens;
}

std::size_t Request::hit_blocks(std::uint32_t block_tokens) const {
  const std::size_t all = blocks(block_tokens);
  return std::min(all - 1, static_cast<std::size_t>(hit * static_cast<double>(all)));
}

std::vector<Request> generate_requests(const RequestSettings& settings) {
  std::mt19937_64 random(settings.seed);
  std::lognormal_distribution<double> tokens(std::log(settings.median_tokens), settings.sigma);
  std::vector<Request> requests(settings.count);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const double wanted = settings.sigma > 0 ? tokens(random) : settings.median_tokens;
    requests[i].tokens = static_cast<std::uint32_t>(std::clamp(std::round(wanted), 1.0, 1.0 * settings.max_tokens));
    requests[i].hit = settings.hit;
    assign_ranks(requests[i], i, settings);
  }
  return requests;
}

std::vector<Request> read_requests(std::istream& in, const std::string& name, const RequestSettings& settings) {
  std::vector<Request> requests;
  std::string line;
  for (std::size_t number = 1; std::getline(in, line); ++number) {
    line.resize(std::min(line.size(), line.find('#')));
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    std::istringstream words(line);
    std::int64_t tokens = 0;
    std::string rest;
    Request request{.hit = settings.hit};
    const auto reject = [&](const std::string& why) {
      throw std::invalid_argument(
          std::string(name).append(":").append(std::to_string(number)).append(": ").append(why));
    };
    if (!(words >> tokens)) reject("not 'TOKENS [HIT]': '" + line + "'");
    if (tokens < 1 || tokens > settings.max_tokens) {
      reject(std::to_string(tokens) + " tokens; the range is 1 to " + std::to_string(settings.max_tokens));
    }
    if (!(words >> std::ws).eof() && !(words >> request.hit)) reject("not 'TOKENS [HIT]': '" + line + "'");
    if (!(request.hit >= 0 && request.hit <= 1)) reject("the prefix hit must be a fraction from 0 to 1");
    if (words.clear(), words >> rest) reject("'" + rest + "' follows 'TOKENS [HIT]'");
    request.tokens = static_cast<std::uint32_t>(tokens);
    assign_ranks(request, requests.size(), settings);
    requests.push_back(request);
  }
  return requests;
}

}  // namespace verbatim::kv
