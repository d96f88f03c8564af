// A connection of merged devices with itself, of which lanes fail and come back, and messages of every kind over it.
// Connections run in child processes, because a process reads its faults once.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "child_lines.h"
#include "connected_comms.h"

namespace verbatim {

inline std::string in_child(const std::string& faults, const std::function<void()>& body,
                            const test::Variables& more = {}) {
  test::Variables variables = with_faults(faults);
  variables.emplace_back("VERBATIM_RECONNECT_S", "60");
  variables.insert(variables.end(), more.begin(), more.end());
  return test::check_in_child(variables, body);
}

// A connection of a merged device with itself, and messages of every kind.
class Traffic {
 public:
  // The numbers of devices that are merged at the sending and at the receiving end, and the sender's first one.
  explicit Traffic(int from = 2, int to = 0, int first_from = 0) {
    const auto merged = [](int count, int first) {
      std::vector<int> members;
      for (int i = first; i < first + count; ++i) members.push_back(i);
      const Result<std::size_t> device = merge_devices(members.data(), count, 8);
      EXPECT_TRUE(device);
      return device ? *device : 0;
    };
    link.connect(merged(from, first_from), merged(to == 0 ? from : to, 0));
    for (std::size_t i = 0; i < kSlots; ++i) slots_.push_back(std::make_unique<Buffers<>>(link, kBytes));
  }

  // Some messages of each kind at once; all of them arrive.
  void round() {
    ++round_;
    std::vector<Request*> receives;
    std::vector<Request*> sends;
    for (std::size_t slot = 0; slot < kSlots; ++slot) {
      Buffers<>& buffers = *slots_[slot];
      std::ranges::copy(pattern(kBytes, round_ * 100 + slot), buffers.source.begin());  // where it is registered
      std::fill(buffers.target.begin(), buffers.target.end(), std::uint8_t{0});
      receives.push_back(link.posted([&] { return receive(slot); }));
    }
    for (std::size_t slot = 0; slot < kSlots; ++slot) {
      std::size_t offset = 0;
      for (std::size_t member = 0; member < sizes(slot).size(); ++member) {
        const std::size_t bytes = sizes(slot)[member];
        const void* const data = slots_[slot]->source.data() + offset;
        const MemoryKeys& memory = *slots_[slot]->send_memory;
        sends.push_back(link.posted([&] { return link.isend(data, bytes, static_cast<int>(member), memory); }));
        offset += kMemberBytes;
      }
    }
    for (Request* const request : sends) ASSERT_TRUE(finished(request)) << "round " << round_;
    for (std::size_t slot = 0; slot < kSlots; ++slot) {
      ASSERT_TRUE(link.wait(receives[slot])) << "round " << round_ << ", slot " << slot;
      const std::array<int, wire::kMaxGroup> reported = link.is_completed(receives[slot]);
      std::vector<std::uint8_t> expected(kBytes);
      std::size_t offset = 0;
      for (std::size_t member = 0; member < sizes(slot).size(); ++member) {
        const std::size_t bytes = sizes(slot)[member];
        const auto source = slots_[slot]->source.begin() + static_cast<std::ptrdiff_t>(offset);
        std::copy_n(source, bytes, expected.begin() + static_cast<std::ptrdiff_t>(offset));
        if (!is_optional(slot)) {
          EXPECT_EQ(static_cast<std::size_t>(reported[member]), bytes);
        }
        offset += kMemberBytes;
      }
      if (is_optional(slot)) {  // as NCCL, the application looks at the bytes until all have come
        EXPECT_TRUE(ConnectedComms::eventually([&] { return test::shows(slots_[slot]->target, expected); }))
            << "wrong bytes in round " << round_ << ", slot " << slot;
      } else {
        EXPECT_EQ(slots_[slot]->target, expected) << "wrong bytes in round " << round_ << ", slot " << slot;
      }
    }
  }
  void rounds(int count) {
    for (int i = 0; i < count && !::testing::Test::HasFailure(); ++i) round();
    EXPECT_EQ(link.send().error(), nullptr);
    EXPECT_EQ(link.recv().error(), nullptr);
  }

  // Sends until an end fails.
  bool fails() {
    return is_reached([&] { return link.failed(); });
  }

  // Messages until something is so.
  bool is_reached(const std::function<bool()>& condition) {
    Buffers<>& buffers = *slots_[0];
    return ConnectedComms::eventually([&] {
      if (!link.failed()) buffers.irecv(100);
      if (!link.failed()) buffers.isend(100);
      link.progress();
      return condition();
    });
  }

  ConnectedComms link;

 private:
  static constexpr std::size_t kMemberBytes = 160'000;
  static constexpr std::size_t kBytes = 4 * kMemberBytes;

  static bool is_optional(std::size_t slot) { return slot == 3 || slot == 6; }
  // Of the members. The buffers of grouped ones have kMemberBytes, others the size of the whole slot.
  static const std::vector<std::size_t>& sizes(std::size_t slot) {
    static const std::vector<std::size_t> of_slot[] = {{100},
                                                       {4 * kMemberBytes},
                                                       {0},
                                                       {3000},
                                                       {kMemberBytes, 10, kMemberBytes, 0},
                                                       {300'001},
                                                       {4 * kMemberBytes},
                                                       {1000, 2000, 3000}};
    return of_slot[slot];
  }
  static constexpr std::size_t kSlots = 8;

  Request* receive(std::size_t slot) {
    std::vector<RecvBuffer> buffers;
    const std::size_t members = sizes(slot).size();
    for (std::size_t member = 0; member < members; ++member) {
      buffers.push_back({slots_[slot]->target.data() + member * kMemberBytes, members == 1 ? kBytes : kMemberBytes,
                         static_cast<int>(member), slots_[slot]->recv_memory.get()});
    }
    return link.irecv(buffers, is_optional(slot));
  }
  bool finished(Request* request) {
    if (request == nullptr || !link.wait(request)) return false;
    link.is_completed(request);
    return true;
  }

  std::vector<std::unique_ptr<Buffers<>>> slots_;
  std::uint64_t round_ = 0;
};

// A fault begins with each message if FAILOVER_EVERY=1, otherwise with every tenth.
inline int step() {
  const char* const every = std::getenv("FAILOVER_EVERY");
  return every != nullptr ? std::atoi(every) : 10;
}

// For sweeps that repeat another one in another mode: half as many points, or all.
inline int wide_step() {
  return step() == 1 ? 1 : 2 * step();
}

inline const test::Variables kAtomics = {{"VERBATIM_COMPLETION", "atomic"}, {"SOFTVERBS_ATOMICS", "glob"}};
inline const test::Variables kFourDevices = {{"SOFTVERBS_DEVICES", "4"}};

inline std::string from_message(const std::string& clause, int message) {
  return clause + " count=all times=all nth=" + std::to_string(message);
}

}  // namespace verbatim
