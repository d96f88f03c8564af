// The ibv_modify_qp calls of this process, also those that fail, while an object of the class is there. The plugin's
// verbs library is counted_verbs; only one object at a time.
#pragma once

#include <dlfcn.h>
#include <infiniband/verbs.h>

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "support/counted_verbs/counted_verbs.h"

namespace verbatim::test {

// Of the counting library, which stays open, as the plugin keeps it.
inline VerbsCounters& verbs_counters() {
  static void* const library = ::dlopen(std::getenv("VERBATIM_VERBS_LIBRARY"), RTLD_NOW | RTLD_LOCAL);
  void* const found = library == nullptr ? nullptr : ::dlsym(library, kCountersSymbol);
  if (found == nullptr) throw std::runtime_error("VERBATIM_VERBS_LIBRARY is not the counting verbs library");
  return *static_cast<VerbsCounters*>(found);
}

class Modifications {
 public:
  Modifications() {
    {
      const std::lock_guard lock(calls().mutex);
      calls().made.clear();
    }
    verbs_counters().modify = [](const ibv_qp_attr& attributes, int mask) {
      const std::lock_guard lock(calls().mutex);
      calls().made.emplace_back(attributes, mask);
    };
  }
  ~Modifications() { verbs_counters().modify = nullptr; }
  Modifications(const Modifications&) = delete;
  Modifications& operator=(const Modifications&) = delete;

  // The PSNs of the first packets that QPs expect, and of those that they send.
  std::set<std::uint32_t> expected_psns() const { return numbers(IBV_QP_RQ_PSN, &ibv_qp_attr::rq_psn); }
  std::set<std::uint32_t> first_psns() const { return numbers(IBV_QP_SQ_PSN, &ibv_qp_attr::sq_psn); }
  // The attributes of the calls that set all of `mask`.
  std::vector<ibv_qp_attr> that_set(int mask) const {
    const std::lock_guard lock(calls().mutex);
    std::vector<ibv_qp_attr> found;
    for (const auto& [attributes, set] : calls().made) {
      if ((set & mask) == mask) found.push_back(attributes);
    }
    return found;
  }

 private:
  std::set<std::uint32_t> numbers(int mask, std::uint32_t ibv_qp_attr::*field) const {
    std::set<std::uint32_t> found;
    for (const ibv_qp_attr& attributes : that_set(mask)) found.insert(attributes.*field);
    return found;
  }

  // Longer than any object: a call of another thread may be under way when one ends.
  struct Calls {
    std::mutex mutex;
    std::vector<std::pair<ibv_qp_attr, int>> made;
  };
  static Calls& calls() {
    static Calls* const all = new Calls;
    return *all;
  }
};

}  // namespace verbatim::test
