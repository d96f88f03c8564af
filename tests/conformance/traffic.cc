#include "traffic.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <utility>

#include "conformance.h"
#include "netapi/log.h"

namespace conformance {
namespace {

constexpr int kUntouched = -0x5a5a5a5b;
constexpr std::size_t kGuardInts = 8;  // after the sizes that test may write
// A stale pointer, because NCCL does not clear its request slots before it uses them again.
constexpr std::uintptr_t kStaleRequest = 0xdead'beef'0000'0100;

std::string describe(const Operation& operation) {
  std::string text = operation.is_send ? "send" : "receive";
  for (const Part& part : operation.parts) {
    text.append(" ").append(std::to_string(part.size)).append("@").append(std::to_string(part.tag));
  }
  text += operation.posted ? ", posted" : ", not posted";
  return text;
}

}  // namespace

Operation& Traffic::send(void* comm, Part part) {
  operations_.push_back(std::make_unique<Operation>(
      Operation{.is_send = true, .comm = comm, .parts = {part}, .preset = kStaleRequest, .sizes = {}}));
  open_.push_back(operations_.back().get());
  return *operations_.back();
}

Operation& Traffic::recv(void* comm, std::vector<Part> parts) {
  operations_.push_back(std::make_unique<Operation>(
      Operation{.comm = comm, .parts = std::move(parts), .preset = kStaleRequest, .sizes = {}}));
  open_.push_back(operations_.back().get());
  return *operations_.back();
}

bool Traffic::post(Operation& operation) {
  void* request = reinterpret_cast<void*>(operation.preset);
  nccl::Result result{};
  if (operation.is_send) {
    const Part& part = operation.parts.front();
    result = plugin_.isend(operation.comm, part.data, part.size, part.tag, part.mhandle, &request);
  } else {
    // The arrays are valid during the call only, as NCCL's arrays.
    std::array<void*, netapi::kMaxGroup> data{};
    std::array<std::size_t, netapi::kMaxGroup> sizes{};
    std::array<int, netapi::kMaxGroup> tags{};
    std::array<void*, netapi::kMaxGroup> mhandles{};
    for (std::size_t i = 0; i < operation.parts.size(); ++i) {
      const Part& part = operation.parts[i];
      data[i] = part.data;
      sizes[i] = part.size;
      tags[i] = part.tag;
      mhandles[i] = part.mhandle;
    }
    result = plugin_.irecv(operation.comm, static_cast<int>(operation.parts.size()), data.data(), sizes.data(),
                           tags.data(), mhandles.data(), &request);
    data.fill(nullptr);
    sizes.fill(0);
    tags.fill(-1);
    mhandles.fill(nullptr);
  }
  if (result != nccl::Result::kSuccess) {
    ADD_FAILURE() << describe(operation) << ": " << netapi::result_name(result);
    return false;
  }
  if (request == nullptr) {
    ++operation.refusals;
    return true;
  }
  if (request == reinterpret_cast<void*>(operation.preset)) {
    ADD_FAILURE() << describe(operation) << ": the request was not written";
    return false;
  }
  operation.request = request;
  operation.posted = true;
  ++posted_;
  return true;
}

bool Traffic::test(Operation& operation) {
  const std::size_t count = operation.parts.size();
  std::vector<int> sizes(count + kGuardInts, kUntouched);
  int done = 0;
  const nccl::Result result = plugin_.test(operation.request, &done, operation.wants_sizes ? sizes.data() : nullptr);
  if (result != nccl::Result::kSuccess) {
    ADD_FAILURE() << describe(operation) << ": test: " << netapi::result_name(result);
    return false;
  }
  if (done == 0) return true;
  operation.done = true;
  if (!operation.wants_sizes) return true;
  const auto guards = sizes.begin() + static_cast<std::ptrdiff_t>(count);
  operation.sizes.assign(sizes.begin(), guards);
  if (std::any_of(guards, sizes.end(), [](int size) { return size != kUntouched; })) {
    ADD_FAILURE() << describe(operation) << ": test wrote after the sizes of its " << count << " members";
    return false;
  }
  return true;
}

bool Traffic::step() {
  std::vector<void*> blocked;  // comms whose next operation got a null request in this pass
  moved_ = false;
  for (Operation* const operation : open_) {
    if (operation->posted) {
      if (!test(*operation)) return false;
    } else if (std::find(blocked.begin(), blocked.end(), operation->comm) == blocked.end()) {
      if (!post(*operation)) return false;
      if (!operation->posted) blocked.push_back(operation->comm);
      moved_ = moved_ || operation->posted;
    }
    moved_ = moved_ || operation->done;
  }
  std::erase_if(open_, [](const Operation* operation) { return operation->done; });
  if (!moved_) rest();
  return true;
}

bool Traffic::run_for(Clock::duration time) {
  const auto end = Clock::now() + time;
  while (Clock::now() < end) {
    if (!step()) return false;
  }
  return true;
}

bool Traffic::run(Clock::duration limit) {
  verbatim::test::Wait wait(limit);
  while (!open_.empty()) {
    if (!step()) return false;
    if (moved_) {
      wait.begin_again();
    } else if (wait.is_over()) {
      ADD_FAILURE() << open_.size() << " operations are open, none was posted or done " << wait.report()
                    << "; the first: " << describe(*open_.front());
      return false;
    }
  }
  return true;
}

}  // namespace conformance
