// The keys of this process (wire/authentication.h). X25519 takes some 40 us, and two processes may have hundreds of
// connections: what it makes of the own and a peer's key is kept. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "wire/authentication.h"

namespace verbatim {

class KeyExchange {
 public:
  // `psk`: as in wire::hello_key().
  KeyExchange(const wire::KeyPair& own, std::span<const std::uint8_t> psk) : own_(own), psk_(psk.begin(), psk.end()) {}

  // For the hellos of this process.
  const wire::PublicKey& sent() const { return own_.sent; }
  // For the MACs of hellos, to this process and from it.
  wire::Key hello_key(const wire::Secret& secret) const { return wire::hello_key(secret, psk_); }
  // As wire::session_key(). `peers`: from the peer's hello, whose MAC is right. nullopt: as wire::shared_key().
  std::optional<wire::Key> session_key(const wire::Key& hellos, const wire::PublicKey& peers, const wire::Mac& hello,
                                       const wire::Mac& reply) VERBATIM_EXCLUDES(mutex_);
  // Of how many peers the result of X25519 is kept.
  std::size_t kept() const VERBATIM_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    return shared_.size();
  }

 private:
  const wire::KeyPair own_;
  const std::vector<std::uint8_t> psk_;
  mutable Mutex mutex_;
  std::map<wire::PublicKey, wire::Key> shared_ VERBATIM_GUARDED_BY(mutex_);  // by the peer's key
};

}  // namespace verbatim
