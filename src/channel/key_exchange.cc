#include "channel/key_exchange.h"

namespace verbatim {
namespace {

// 0.5 MiB. A peer that knows a secret can send a new key with each hello.
constexpr std::size_t kMaxSharedKeys = 4096;

}  // namespace

std::optional<wire::Key> KeyExchange::session_key(const wire::Key& hellos, const wire::PublicKey& peers,
                                                  const wire::Mac& hello, const wire::Mac& reply) {
  std::optional<wire::Key> shared;
  {
    const MutexLock lock(mutex_);
    if (const auto known = shared_.find(peers); known != shared_.end()) shared = known->second;
  }
  if (!shared) {
    shared = wire::shared_key(own_, peers);
    if (!shared) return std::nullopt;
    const MutexLock lock(mutex_);
    if (shared_.size() >= kMaxSharedKeys) shared_.clear();
    shared_.emplace(peers, *shared);
  }
  return wire::session_key(hellos, *shared, hello, reply);
}

}  // namespace verbatim
